"""Samples × cells: find out what is missing, do it, store each piece as it is finished, show the outcome."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from eval import tasks
from eval.errors import UserError
from eval.figures import needle_heatmap
from eval.records import CellStore, key_of
from eval.samples import Encoded, Sample, Task
from eval.tables import as_text, cell_table
from graphkv.config import RunConfig, parse
from graphkv.engine import Engine
from graphkv.models import ModelConfig, load
from graphkv.provenance import describe_code

# Settings of a task that choose samples or what is drawn; records do not depend on them.
_EXTENT = {"lengths", "depths", "needles", "score", "tasks", "partial", "data", "haystack"}


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
        shared += [asdict(config.prefill), config.name, config.results_dir, config.limit]
        groups.setdefault(key_of({"shared": shared}), []).append(config)
    # Every group is checked before the first one writes anything.
    return sum(run_group(group) for group in [Group.prepare(group) for group in groups.values()])


@lru_cache(maxsize=1)
def _engine(config: ModelConfig) -> Engine:
    return Engine(load(config))


@dataclass(frozen=True)
class Group:
    """Cells that can be cut from the same prefills.

    Attributes
    ----------
    config
        The settings that the cells share (its `cell` is the first one's).
    engine, task, samples
        Model, task, and the samples that are asked for.
    stores
        One store a distinct cell, in the order of the command.
    cells
        The cells' settings, in the same order.
    """

    config: RunConfig
    engine: Engine
    task: Task
    samples: Sequence[Sample]
    stores: list[CellStore]
    cells: list[Any]

    @classmethod
    def prepare(cls, configs: Sequence[RunConfig]) -> Group:
        """Load, check and list everything; nothing is written yet."""
        first = configs[0]
        engine = _engine(first.model)
        loaded = engine.loaded
        family = first.model.known_family
        task = tasks.build(first.task, first.protocol, engine.tokenizer, family, loaded.max_positions)
        samples = list(task.samples[: first.limit])
        model = first.model.label
        root = Path(first.results_dir) / model / task.name
        shared = {
            "model": {
                "name": model,
                "weights": loaded.weights_hash,
                "dtype": first.model.dtype,
                "attention": first.model.attention,
                "device": loaded.device.type,
            },
            "task": {k: v for k, v in first.task.items() if k not in _EXTENT} | {"data_hash": task.data_hash},
            "protocol": first.protocol if task.name == "longbench" else None,
            "decode": first.decode.mode,
            "prefill": asdict(first.prefill),
        }
        distinct = dict.fromkeys(config.cell for config in configs)
        stores = [CellStore(root, cell.label, {**shared, "cell": cell.describe()}) for cell in distinct]
        return cls(first, engine, task, samples, stores, list(distinct))


def run_group(group: Group) -> int:
    """Do what is missing of a group, print its table, draw its figure; returns the number of failed results."""
    with ExitStack() as stack:
        # One order for all processes, so that two commands that share cells cannot wait for each other.
        for store in sorted(group.stores, key=lambda store: store.folder):
            stack.enter_context(store)
        work = [
            (sample, [i for i, store in enumerate(group.stores) if not store.done(sample.id)])
            for sample in group.samples
        ]
        work = [(sample, cells) for sample, cells in work if cells]
        count = f"{len(group.samples)} samples × {len(group.stores)} cells"
        print(
            f"{group.config.model.label} {group.task.name}: {count}, {len(work)} samples to do",
            file=sys.stderr,
        )
        made_by = {**describe_code(), "max_cells": group.config.decode.max_cells}
        for i in {i for _, cells in work for i in cells}:
            group.stores[i].note_run(made_by)
        progress = Progress(len(work))
        for sample, cells in work:
            for i, record in _run_sample(group, sample, cells):
                group.stores[i].append(record)
                if record["status"] == "failed":
                    label = group.cells[i].label
                    print(f"failed: {sample.id}, {label}: {record['error']}", file=sys.stderr)
            progress.step(sample.id)
        report(group)
        wanted = [store.records.get(sample.id, {}) for store in group.stores for sample in group.samples]
    return sum(record.get("status") != "ok" for record in wanted)


def _run_sample(group: Group, sample: Sample, wanted: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records of one sample, as (number of the cell, record); a failure is a record too."""
    config, engine = group.config, group.engine
    try:
        encoded = group.task.encode(sample)
        window = max(group.cells[i].scorer.needs_queries for i in wanted)
        prefill = engine.prefill(encoded.ids, window=window, chunk=config.prefill.chunk)
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
                stop_ids=engine.loaded.stop_ids | set(encoded.stop_ids),
                min_new_tokens=encoded.min_new_tokens,
                mode=config.decode.mode,
            )
        except Exception as error:
            yield from ((i, _failed(sample, error)) for i in batch)
            continue
        for i, cell, answer in zip(batch, cells, answers, strict=True):
            text = engine.text(answer.ids)
            yield (
                i,
                {
                    "sample": sample.id,
                    "task": sample.task,
                    "status": "ok",
                    "text": text,
                    "scores": group.task.score(sample, text),
                    "ids": answer.ids,
                    "finish": answer.finish,
                    **_describe(encoded),
                    "kept": cell.kept_per_layer,
                    "bytes": cell.bytes,
                    "seconds": {"prefill": share, "select": cell.seconds, "decode": answer.seconds},
                    "decode_batch": answer.batch,
                    "meta": dict(sample.meta),
                },
            )


def _describe(encoded: Encoded) -> dict[str, Any]:
    ids = ",".join(map(str, encoded.ids)).encode()
    return {
        "n_prompt_raw": encoded.n_raw,
        "n_prompt": len(encoded.ids),
        "truncated": encoded.truncated,
        "prompt_sha256": hashlib.sha256(ids).hexdigest(),
    }


def _failed(sample: Sample, error: Exception) -> dict[str, Any]:
    message = f"{type(error).__name__}: {error}"
    return {"sample": sample.id, "task": sample.task, "status": "failed", "error": message}


def report(group: Group) -> None:
    """Print the group's table and, for a needle run, draw its heat map."""
    cells = {cell.label: store.records for cell, store in zip(group.cells, group.stores, strict=True)}
    ids = [sample.id for sample in group.samples]
    score = group.task.main_score
    print(as_text(cell_table(cells, ids, score)))
    finished = any(records.get(sample, {}).get("status") == "ok" for records in cells.values() for sample in ids)
    if group.task.name == "needle" and finished:
        keys = key_of({"cells": [store.key for store in group.stores], "samples": ids, "score": score})
        name = f"{group.config.name}-{group.config.model.label}-{keys[:8]}"
        folder = Path(group.config.results_dir) / "figures"
        folder.mkdir(parents=True, exist_ok=True)
        panels = [(label, _needle_frame(records, group.samples, score)) for label, records in cells.items()]
        caption = (
            f"{group.config.model.label}, {group.config.model.dtype}; {len(ids)} samples a panel; colour: {score}; "
            f"kept/layer: {', '.join(_achieved(records, ids) for records in cells.values())}"
        )
        for path in needle_heatmap(panels, folder / name, score=score, caption=caption):
            print(path)


def _needle_frame(records: Mapping[str, Mapping], samples: Sequence[Sample], score: str) -> pd.DataFrame:
    """Length, depth and score of every sample that was asked for; NaN where there is no result."""
    rows = [
        (sample.meta["length"], sample.meta["depth"], records.get(sample.id, {}).get("scores", {}).get(score))
        for sample in samples
    ]
    return pd.DataFrame(rows, columns=["length", "depth", "score"]).astype({"score": float})


def _achieved(records: Mapping[str, Mapping], ids: Sequence[str]) -> str:
    kept = [sum(r["kept"]) / len(r["kept"]) for r in (records.get(s, {}) for s in ids) if r.get("status") == "ok"]
    return f"{sum(kept) / len(kept):.0f}" if kept else "—"


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
