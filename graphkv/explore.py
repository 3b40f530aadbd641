"""Show which tokens of a prompt each cell keeps: `python -m graphkv.explore` writes a page that opens in a browser.

    python -m graphkv.explore                                              a needle in the packaged essays, snapkv
    python -m graphkv.explore scorer=snapkv,pyramidkv +graphkv=off,on budget=256         all combinations
    python -m graphkv.explore --cell "scorer=snapkv" --cell "scorer=snapkv +graphkv=on graphkv.rounds=2" budget=256
    python -m graphkv.explore --text notes.txt --question "Who rang the bell?" scorer=h2o budget=0.1
    python -m graphkv.explore model=llama3 task=longbench task.data=hub task.tasks=[hotpotqa] +graphkv=on,off

Settings are those of run.py; a list such as off,on makes a cell of each value. What is shown is what a cell keeps after
the prefill.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from eval import tasks
from eval.errors import UserError
from eval.needles import NEEDLES
from eval.records import key_of
from eval.samples import Sample, Task
from eval.text import TextTask
from graphkv.config import CONF, CellSettings, RunConfig, cell_settings, parse
from graphkv.edges import mean_cosine, unit
from graphkv.engine import Engine
from graphkv.grid import engine_for
from graphkv.measures import Context, answer
from graphkv.models import ModelInfo, inspect
from graphkv.packing import Packer
from graphkv.page import describe_cell, render
from graphkv.pieces import pieces, span
from graphkv.prefill import Prefill
from graphkv.provenance import describe_code
from graphkv.retention import retention

FORMAT = 1  # of the JSON file
LARGEST = 10_000_000  # bytes of a page
_MOST_TOKENS = 65_535  # positions are stored in 16 bits
_EXAMPLE = ["task.lengths=[2000]", "task.depths=[50]"]  # the needle prompt that is shown if none is asked for


@dataclass(frozen=True)
class Prompt:
    """The one prompt of a page.

    Attributes
    ----------
    task, sample
        Where it comes from, and what scores an answer to it.
    question
        What is asked, if that is known.
    mark
        What is marked in the text: a word for it, and the passage itself; None marks nothing.
    """

    task: Task
    sample: Sample
    question: str | None
    mark: tuple[str, str] | None


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exits with 2 and one sentence where the input is wrong."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        page, data = run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{page}\n{data}")


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m graphkv.explore", description=__doc__, formatter_class=formatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of all cells, as for run.py")
    parser.add_argument("--cell", action="append", metavar='"KEY=VALUE …"', help="settings of one cell more; repeat it")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a UTF-8 text; else the task's first sample is shown")
    parser.add_argument("--question", help="asked about the text; without it the model goes on with the text")
    parser.add_argument("--sample", metavar="ID", help="another sample of the task, by its id")
    parser.add_argument("--mark", metavar="TEXT", help="a passage of the prompt that the page marks")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: <results_dir>/explorer/<name>.html")
    return parser


def run(options: argparse.Namespace) -> tuple[Path, Path]:
    """Make the page of a command line and the JSON file beside it; returns their paths."""
    config, cells = settings(options.overrides, options.cell or [], given_text=options.text is not None)
    info = inspect(config.model)
    prompt = _prompt(options, config, info)
    document = explore(engine_for(info), config, cells, prompt)
    page = render(document)
    if len(page) > LARGEST:
        raise UserError(
            f"the page would have {len(page) / 1e6:.1f} MB, more than {LARGEST / 1e6:.0f}: show fewer cells "
            f"(here {len(cells)}) or a shorter prompt (here {len(document['prompt']['texts'])} tokens)"
        )
    out = options.out or Path(config.results_dir) / "explorer" / f"{_name(config, prompt, cells)}.html"
    if out.suffix != ".html":
        raise UserError(f"--out {out} must end in .html: the data goes beside it, into .json")
    data = out.with_suffix(".json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        data.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    return out, data


# What is asked for


def settings(
    overrides: Sequence[str], cells: Sequence[str] = (), given_text: bool = False
) -> tuple[RunConfig, list[CellSettings]]:
    """The configuration that all cells share, and the distinct cells.

    Parameters
    ----------
    overrides
        Hydra overrides of all cells; a list of values means a cell of each, as in a multirun.
    cells
        For each group of cells, overrides in one string, which replace those of the same key.
    given_text
        Whether the prompt is the user's own text instead of a sample of the task.

    Raises
    ------
    UserError
        For whatever Hydra or the configuration refuses, and for cells that differ in more than what they keep.
    """
    common = _override_map(overrides, "the command")
    jobs: list[list[str]] = []
    for number, text in enumerate(cells or [""], 1):
        try:
            own = _override_map(shlex.split(text), f"--cell {text!r}")
        except ValueError as error:
            raise UserError(f"--cell number {number} cannot be read: {error}") from error
        merged = common | own
        if "task" not in merged:
            example = _override_map(_EXAMPLE, "the example")
            merged = example | merged
        jobs += itertools.product(*[_values(override) for override in merged.values()])
    configs = [parse(_composed(job)) for job in jobs]
    first = configs[0]
    for config in configs:
        if replace(config, cell=first.cell) != first:
            raise UserError("the cells of a page share model, prompt and decoding: let --cell change scorer, budget, …")
    if first.decode.evict_every is not None:
        raise UserError("decode.evict_every: a page shows what is kept after the prefill, so leave it out")
    if given_text and "task" in common:
        raise UserError("--text is the prompt: leave out task=…, or leave out --text to see a sample of the task")
    return first, list(dict.fromkeys(config.cell for config in configs))


def _override_map(overrides: Sequence[str], where: str) -> dict[str, Override]:
    """Parsed overrides by key."""
    found: dict[str, Override] = {}
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise UserError(f"{where}: {_sentence(error)}") from error
    for override in parsed:
        if override.key_or_group in found:
            raise UserError(f"{where}: {override.key_or_group} is given twice: keep one, or list values: a,b")
        found[override.key_or_group] = override
    return found


def _values(override: Override) -> list[str]:
    """An override as it stands, or one for each value of its list."""
    if not override.is_sweep_override():
        return [override.input_line]
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: cells need a list of values, such as {override.key_or_group}=1,2")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _composed(overrides: Sequence[str]) -> DictConfig:
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"configuration: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    """The lines of a message in one, without where Hydra looked for files."""
    return " ".join(str(error).partition("Config search path")[0].split())


def _prompt(options: argparse.Namespace, config: RunConfig, info: ModelInfo) -> Prompt:
    if options.text is not None:
        if options.sample is not None:
            raise UserError("--text and --sample name two prompts: keep one")
        limit = config.task["max_new_tokens"]
        task: Task = TextTask(options.text, options.question, info.tokenizer, limit)
        mark = ("marked passage", options.mark) if options.mark else None
        return Prompt(task, task.samples[0], options.question, mark)
    if options.question is not None:
        raise UserError("--question asks about a text: give one with --text FILE")
    task = tasks.build(
        config.task,
        config.protocol,
        info.tokenizer,
        family=config.model.known_family,
        max_positions=info.max_positions,
        stop_ids=info.stop_ids,
        limit=config.limit,
        partial=config.partial,
    )
    if task.measure != "answer":
        raise UserError(f"task={config.task['name']} lets no cell answer: choose needle or longbench, or give a --text")
    sample = next((s for s in task.samples if options.sample in (None, s.id)), None)
    if sample is None:
        known = ", ".join(s.id for s in task.samples[:5])
        raise UserError(f"--sample {options.sample} is not a sample of this task, which has {known}, …")
    needle = NEEDLES.get(sample.meta.get("needle"))
    mark = ("needle", needle.text) if needle else None
    if options.mark:
        mark = ("marked passage", options.mark)
    return Prompt(task, sample, needle.question if needle else sample.meta.get("question"), mark)


# What is found


def explore(engine: Engine, config: RunConfig, cells: Sequence[CellSettings], prompt: Prompt) -> dict[str, Any]:
    """Everything that a page shows, as JSON values; `graphkv.packing` reads its arrays.

    Raises
    ------
    UserError
        If the prompt is too long, or has no passage to mark.
    """
    encoded = prompt.task.encode(prompt.sample)
    if len(encoded.ids) > _MOST_TOKENS:
        raise UserError(f"the prompt has {len(encoded.ids)} tokens; a page shows at most {_MOST_TOKENS}")
    texts = pieces(engine.tokenizer, encoded.ids)
    marks = _marks(texts, prompt.mark)
    needs = reduce(or_, (cell.needs for cell in cells))
    prefill = engine.prefill(encoded.ids, window=0, needs=needs, chunk=config.prefill.chunk)
    if needs.answer:
        limits = (prompt.sample.max_new_tokens, encoded.stop_ids, encoded.min_new_tokens)
        prefill = engine.look_ahead(prefill, *limits)
    reference = cell_settings("full", 1.0)
    cut = [engine.cut(prefill, cell) for cell in [*cells, reference]]
    parts = answer(Context(engine, config, prompt.task, prompt.sample, encoded, prefill), cut)
    pack = Packer()
    shown = [
        describe_cell(cell, retention(prefill, cell), part, pack)
        for cell, part in zip(cut[:-1], parts[:-1], strict=True)
    ]
    view = prefill.layers[0]
    return {
        "title": f"Kept tokens: {prompt.sample.id}, {engine.info.label}",
        "cells": [cell.label for cell in cells],
        "format": FORMAT,
        "model": {
            "name": engine.info.label,
            "layers": len(prefill.layers),
            "kv_heads": view.keys.shape[0],
            "query_heads": view.queries.shape[0],
        },
        "prompt": {"sample": prompt.sample.id, "question": prompt.question, "texts": texts, "marks": marks},
        "full": {"answer": parts[-1]["text"], "scores": parts[-1]["scores"], "similarity": _all_keys(prefill)},
        "retention": shown,
        "arrays": pack.arrays,
        "made_by": {
            **describe_code(),
            "model": {**asdict(config.model), "weights": engine.info.weights_hash},
            "task": dict(config.task) if prompt.task.name != "text" else dict(prompt.sample.meta),
            "protocol": dict(config.protocol) if config.task["name"] == "longbench" else None,
        },
    }


def _marks(texts: Sequence[str], mark: tuple[str, str] | None) -> list[dict[str, Any]]:
    """The tokens of the passage that is marked: [begin, end)."""
    if mark is None:
        return []
    name, passage = mark
    found = span(texts, passage)
    if found is None:
        raise UserError(f"--mark: the prompt does not contain {passage!r}")
    return [{"name": name, "begin": found[0], "end": found[1]}]


def _all_keys(prefill: Prefill) -> list[float | None]:
    """Mean cosine of two different keys of the whole prompt, by layer, the mean over heads."""
    if prefill.n < 2:
        return [None] * len(prefill.layers)
    means = [[float(mean_cosine(head, head)) for head in unit(view.keys)] for view in prefill.layers]
    return [round(sum(heads) / len(heads), 5) for heads in means]


def _name(config: RunConfig, prompt: Prompt, cells: Sequence[CellSettings]) -> str:
    """A file name that two different pages do not share: model, sample, and a hash of prompt and cells."""
    shown = {"cells": [cell.describe() for cell in cells], "prompt": prompt.sample.prompt, "mark": prompt.mark}
    words = re.sub(r"[^A-Za-z0-9._+=-]+", "_", f"{config.model.label}-{prompt.sample.id}")
    return f"{words}-{key_of(shown)[:8]}"


if __name__ == "__main__":
    main()
