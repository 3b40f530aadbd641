"""Samples × cells: find out what is missing, do it, store each piece as it is finished, show the outcome."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from eval import table1, table1_render, tasks
from eval.errors import UserError
from eval.figures import needle_heatmap
from eval.records import CellStore, key_of
from eval.samples import Encoded, Sample, Task
from eval.tables import as_text, cell_table
from graphkv.config import CellSettings, RunConfig, parse
from graphkv.engine import Engine
from graphkv.models import ModelConfig, ModelInfo, inspect, load
from graphkv.provenance import describe_code


def main(configs: Sequence[DictConfig]) -> None:
    """Run the cells of one command and end the process with an exit code that tells how it went.

    0: every sample of every cell is finished; 1: some failed; 2: the input was wrong, and nothing was written; 130:
    interrupted.
    """
    try:
        failed = run([parse(config) for config in configs])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped: what was finished is stored; the same command does the rest", file=sys.stderr)
        raise SystemExit(130) from None
    if failed:
        print(f"{failed} results failed; the same command tries them again", file=sys.stderr)
        raise SystemExit(1)


def run(configs: Sequence[RunConfig]) -> int:
    """Run cells; those that share model, task and protocol share each sample's prefill. Returns the failures."""
    groups: dict[str, list[RunConfig]] = {}
    for config in configs:
        shared = [asdict(config.model), config.task, config.protocol, asdict(config.decode)]
        shared += [asdict(config.prefill), config.name, config.results_dir, config.limit, config.partial]
        groups.setdefault(key_of({"shared": shared}), []).append(config)
    prepared = [Group.prepare(group) for group in groups.values()]  # all checked before the first one writes anything
    for group in prepared:
        run_group(group)
    report(prepared)
    return sum(group.unfinished() for group in prepared)


_engines: dict[ModelConfig, Engine] = {}


def engine_for(info: ModelInfo) -> Engine:
    """The engine of a model: the one in memory, or a new one after the old one is dropped."""
    if info.config not in _engines:
        _engines.clear()
        _engines[info.config] = Engine(load(info))
    return _engines[info.config]


@dataclass(frozen=True)
class Group:
    """Cells that can be cut from the same prefills.

    Attributes
    ----------
    config
        The settings that the cells share (its `cell` is the first one's).
    info
        The model; its weights are loaded when there is something to do.
    task
        The task with the samples that are asked for.
    cells
        The distinct cells, in the order of the command.
    stores
        For each cell, the stores of its records by name of the task.
    """

    config: RunConfig
    info: ModelInfo
    task: Task
    cells: list[CellSettings]
    stores: list[dict[str, CellStore]]

    @classmethod
    def prepare(cls, configs: Sequence[RunConfig]) -> Group:
        """Load, check and list everything; nothing is written yet."""
        first = configs[0]
        model, info = first.model, inspect(first.model)
        task = tasks.build(
            first.task,
            first.protocol,
            info.tokenizer,
            family=model.known_family,
            max_positions=info.max_positions,
            stop_ids=info.stop_ids,
            limit=first.limit,
            partial=first.partial,
        )
        shared = {
            "model": {
                "name": model.label,
                "weights": info.weights_hash,
                "dtype": model.dtype,
                "attention": model.attention,
                "device": info.device,
            },
            "decode": {"mode": first.decode.mode, "evict_every": first.decode.evict_every},
            "prefill": asdict(first.prefill),
        }
        root = Path(first.results_dir) / model.label / task.name
        cells = list(dict.fromkeys(config.cell for config in configs))
        stores = [
            {
                name: CellStore(
                    root if name == task.name else root / name,
                    cell.label,
                    {**shared, "task": {"name": name, **identity}, "cell": cell.describe()},
                )
                for name, identity in task.identity.items()
            }
            for cell in cells
        ]
        return cls(first, info, task, cells, stores)

    def store(self, cell: int, sample: Sample) -> CellStore:
        """Where the record of a sample and the cell of that number goes."""
        return self.stores[cell][sample.task]

    def records(self, cell: int) -> dict[str, dict[str, Any]]:
        """Records of a cell by sample id: of the samples that are asked for, and of others done earlier."""
        return {key: record for store in self.stores[cell].values() for key, record in store.records.items()}

    def unfinished(self) -> int:
        """How many results that were asked for are failed or missing."""
        return sum(
            not self.store(cell, sample).done(sample.id)
            for cell in range(len(self.cells))
            for sample in self.task.samples
        )


def run_group(group: Group) -> None:
    """Do what is missing of a group and store it piece by piece."""
    stores = [store for by_task in group.stores for store in by_task.values()]
    with ExitStack() as stack:
        # One order for all processes, so that two commands that share cells cannot wait for each other.
        for store in sorted(stores, key=lambda store: store.folder):
            stack.enter_context(store)
        work = [
            (sample, [cell for cell in range(len(group.cells)) if not group.store(cell, sample).done(sample.id)])
            for sample in group.task.samples
        ]
        work = [(sample, cells) for sample, cells in work if cells]
        count = f"{len(group.task.samples)} samples × {len(group.cells)} cells"
        print(f"{group.config.model.label} {group.task.name}: {count}, {len(work)} samples to do", file=sys.stderr)
        made_by = {**describe_code(), "max_cells": group.config.decode.max_cells}
        for store in {id(s): s for s in (group.store(c, sample) for sample, cells in work for c in cells)}.values():
            store.note_run(made_by)
        progress = Progress(len(work))
        for sample, cells in work:
            for cell, record in _run_sample(group, sample, cells):
                group.store(cell, sample).append(record)
                if record["status"] == "failed":
                    print(f"failed: {sample.id}, {group.cells[cell].label}: {record['error']}", file=sys.stderr)
            progress.step(sample.id)


def _run_sample(group: Group, sample: Sample, wanted: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records of one sample, as (number of the cell, record); a failure is a record too."""
    config, engine = group.config, engine_for(group.info)
    try:
        encoded = group.task.encode(sample)
        needs = reduce(or_, (group.cells[i].needs for i in wanted))
        prefill = engine.prefill(encoded.ids, window=0, needs=needs, chunk=config.prefill.chunk)
        if needs.answer:
            limits = (sample.max_new_tokens, encoded.stop_ids, encoded.min_new_tokens)
            prefill = engine.look_ahead(prefill, *limits)
    except Exception as error:
        yield from ((i, _failed(sample, error)) for i in wanted)
        return
    share = prefill.seconds / len(wanted)
    for begin in range(0, len(wanted), config.decode.max_cells):
        batch = wanted[begin : begin + config.decode.max_cells]
        try:
            cells = [engine.cut(prefill, group.cells[i]) for i in batch]
            answers = engine.decode(
                prefill,
                cells,
                max_new_tokens=sample.max_new_tokens,
                stop_ids=encoded.stop_ids,
                min_new_tokens=encoded.min_new_tokens,
                mode=config.decode.mode,
                evict_every=config.decode.evict_every,
                beyond_positions=encoded.notes.get("overflow", 0) > 0,
            )
        except Exception as error:
            yield from ((i, _failed(sample, error)) for i in batch)
            continue
        for i, cell, answer in zip(batch, cells, answers, strict=True):
            text = group.task.text(answer.ids)
            yield (
                i,
                {
                    "sample": sample.id,
                    "task": sample.task,
                    "status": "ok",
                    "text": text,
                    "empty": not text.strip(),
                    "scores": group.task.score(sample, text),
                    "ids": answer.ids,
                    "finish": answer.finish,
                    **_describe(encoded),
                    "kept": cell.kept_per_layer,
                    "kept_per_head": cell.kept_per_head if group.cells[i].head_budget == "ada" else None,
                    "bytes": cell.bytes,
                    "seconds": {"prefill": share, "select": cell.seconds, "decode": answer.seconds},
                    "decode_batch": answer.batch,
                    "references": list(sample.references),
                    "meta": dict(sample.meta),
                },
            )


def _describe(encoded: Encoded) -> dict[str, Any]:
    ids = ",".join(map(str, encoded.ids)).encode()
    return {
        "n_prompt_raw": encoded.n_raw,
        "n_prompt": len(encoded.ids),
        "truncated": encoded.truncated,
        "notes": dict(encoded.notes),
        "prompt_sha256": hashlib.sha256(ids).hexdigest(),
    }


def _failed(sample: Sample, error: Exception) -> dict[str, Any]:
    message = f"{type(error).__name__}: {error}"
    return {"sample": sample.id, "task": sample.task, "status": "failed", "error": message}


def report(groups: Sequence[Group]) -> None:
    """Print the tables of a command and draw its figures."""
    for group in groups:
        if group.config.task["name"] == "needle":
            _report_needle(group)
    # Models share a table; what cannot be compared, such as two protocols, gets a table each.
    comparable: dict[str, list[Group]] = {}
    for group in groups:
        if group.config.task["name"] == "longbench":
            facts = {**group.task.facts, "dtype": group.config.model.dtype, "decode": asdict(group.config.decode)}
            comparable.setdefault(key_of(facts), []).append(group)
    for together in comparable.values():
        _report_longbench(together)


def _report_needle(group: Group) -> None:
    samples, score, model = group.task.samples, group.task.main_score, group.config.model
    cells = {cell.label: group.records(number) for number, cell in enumerate(group.cells)}
    print(as_text(cell_table(cells, [sample.id for sample in samples], score)))
    panels = [(label, _needle_frame(records, samples, score)) for label, records in cells.items()]
    if all(frame["score"].isna().all() for _, frame in panels):
        return
    asked = {"cells": [store.key for by_task in group.stores for store in by_task.values()], "score": score}
    name = f"{group.config.name}-{model.label}-{key_of({**asked, 'samples': [s.id for s in samples]})[:8]}"
    kept = ", ".join(_achieved(records, samples) for records in cells.values())
    caption = (
        f"{model.label}, {model.dtype}; {len(samples)} samples a panel; colour: {score}; "
        f"tokens kept a layer, by panel: {kept}"
    )
    stem = Path(group.config.results_dir) / "figures" / name
    for path in needle_heatmap(panels, stem, score=score, caption=caption):
        print(path)


def _report_longbench(groups: Sequence[Group]) -> None:
    results = [
        table1.ModelResults(
            model=group.config.model.label,
            facts={**group.task.facts, "dtype": group.config.model.dtype},
            samples=[(sample.id, sample.task) for sample in group.task.samples],
            cells=[
                table1.CellResult(cell.label, cell.describe(), group.records(number))
                for number, cell in enumerate(group.cells)
            ],
        )
        for group in groups
    ]
    table = table1.build(results)
    print(table1_render.as_text(table))
    asked = [[store.key for by_task in group.stores for store in by_task.values()] for group in groups]
    models = "+".join(dict.fromkeys(result.model for result in results))
    config = groups[0].config
    name = f"{config.name}-{models}-{key_of({'cells': asked, 'samples': [r.samples for r in results]})[:8]}"
    for path in table1_render.write(table, Path(config.results_dir) / "tables" / name):
        print(path)


def _needle_frame(records: Mapping[str, Mapping], samples: Sequence[Sample], score: str) -> pd.DataFrame:
    """Length, depth and score of every sample that was asked for; NaN where there is no result."""
    rows = [
        (sample.meta["length"], sample.meta["depth"], records.get(sample.id, {}).get("scores", {}).get(score))
        for sample in samples
    ]
    return pd.DataFrame(rows, columns=["length", "depth", "score"]).astype({"score": float})


def _achieved(records: Mapping[str, Mapping], samples: Sequence[Sample]) -> str:
    kept = [mean(records[s.id]["kept"]) for s in samples if records.get(s.id, {}).get("status") == "ok"]
    return f"{mean(kept):.0f}" if kept else "—"


class Progress:
    """One line a sample on the standard error, with the time that is left."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.begin = total, 0, time.monotonic()

    def step(self, name: str) -> None:
        """Count one sample as finished."""
        self.done += 1
        elapsed = time.monotonic() - self.begin
        left = elapsed / self.done * (self.total - self.done)
        width = len(str(self.total))
        print(
            f"[{self.done:{width}}/{self.total}] {name}  {_clock(elapsed)} done, {_clock(left)} left",
            file=sys.stderr,
            flush=True,
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
