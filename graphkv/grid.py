"""Samples × cells: find out what is missing, do it, store each piece as it is finished, show the outcome."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from omegaconf import DictConfig

from eval.errors import UserError, without_frames
from eval.samples import Encoded, Sample
from graphkv import memory
from graphkv.config import RunConfig, parse
from graphkv.engine import Cell, Engine
from graphkv.fidelity import fidelity
from graphkv.measures import Context, answer
from graphkv.models import ModelConfig, ModelInfo, load
from graphkv.provenance import check_alike, describe_run
from graphkv.reports import artifact_of, report
from graphkv.studies import Job, jobs_of
from graphkv.work import Group, Shard, groups_of
from scorers import ALL_QUERIES


def main(configs: Sequence[DictConfig]) -> None:
    """Run the cells of one command and end the process with an exit code that tells how it went.

    0: every sample of every cell is finished; 1: some failed; 2: the input was wrong or results cannot be written;
    130: interrupted.
    """
    end(lambda: run([parse(config) for config in configs]))


def end(work: Callable[[], int]) -> None:
    """Do `work`, which returns the number of results that are missing, and turn its outcome into an exit code."""
    try:
        missing = work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped: what was finished is stored; the same command does the rest", file=sys.stderr)
        raise SystemExit(130) from None
    if missing:
        print(f"{missing} results failed or are missing; the same command tries them again", file=sys.stderr)
        raise SystemExit(1)


def run(configs: Sequence[RunConfig], shard: Shard | None = None) -> int:
    """Run cells; those that share model, task and protocol share each sample's prefill.

    Parameters
    ----------
    configs
        One a cell.
    shard
        The part of the samples to do, without tables and figures at the end; None does all and shows them.

    Returns
    -------
    int
        How many of the results that were asked for are failed or missing.
    """
    studies = jobs_of([config for config in configs if config.study is not None])
    groups = prepare([config for config in configs if config.study is None], shard)
    for asked in (*studies, *groups):
        asked.info.check_device()
    for study in studies:
        run_study(study)
    for group in groups:
        if not run_group(group):
            break
    if shard is None:
        report(groups)
    return remaining(groups)


def prepare(configs: Sequence[RunConfig], shard: Shard | None = None) -> list[Group]:
    """The groups of a command, checked; nothing is written yet, and no records are read."""
    if any(config.study is not None for config in configs):
        raise UserError("a study is not cut into shards: leave hydra.launcher.executor=inline")
    groups = groups_of(configs, shard)
    for group in groups:
        artifact_of(group)  # a wrong name is an error before the work, not after it
    return groups


def look(groups: Sequence[Group]) -> int:
    """Read the records that are there; returns how many are failed or missing."""
    for group in groups:
        for store in group.all_stores:
            store.load()
    return remaining(groups)


def show(groups: Sequence[Group]) -> int:
    """Tables and figures of what is stored, without doing anything; returns what is failed or missing."""
    missing = look(groups)
    report(groups)
    return missing


def remaining(groups: Sequence[Group]) -> int:
    """How many results that were asked for are failed or missing, by the records that were read."""
    return sum(len(cells) for group in groups for _, cells in group.missing())


_engines: dict[ModelConfig, Engine] = {}


def engine_for(info: ModelInfo) -> Engine:
    """The engine of a model: the one in memory, or a new one after the old one is dropped."""
    if info.config not in _engines:
        _engines.clear()
        _engines[info.config] = Engine(load(info))
    return _engines[info.config]


def run_study(job: Job) -> None:
    """Do a study, and name its files as they are written."""
    for path in job.study.run(engine_for(job.info), job.configs):
        print(path)


def run_group(group: Group) -> bool:
    """Do what is missing of a group and store it piece by piece; False if it stopped at a failure (`on_error=stop`)."""
    with ExitStack() as stack:
        for store in group.all_stores:
            stack.enter_context(store)
        work = group.missing()
        announce(group)
        if not work:
            return True
        check_alike([group], group.config.force, installed=True)
        made_by = describe_run(group)
        for store in {id(s): s for s in (group.store(c, sample) for sample, cells in work for c in cells)}.values():
            store.note_run(made_by)
        runner, progress = Runner(group, made_by["run"]), Progress(len(work))
        for sample, cells in work:
            for cell, record in runner.records(sample, cells):
                group.store(cell, sample).append(record)
                if record["status"] == "failed":
                    print(f"failed: {sample.id}, {group.cells[cell].label}: {record['error']}", file=sys.stderr)
                    if group.config.on_error == "stop":
                        return False
            progress.step(sample.id)
        print(runner.wall.describe(progress.elapsed), file=sys.stderr)
    return True


def announce(group: Group) -> None:
    """Say how much there is and how much of it is to do, by the records that were read."""
    count = f"{len(group.samples)} samples × {len(group.cells)} cells"
    part = "" if group.shard is None else f" (shard {group.shard[0]} of {group.shard[1]})"
    label = f"{group.config.model.label} {group.task.name}{part}"
    print(f"{label}: {count}, {len(group.missing())} samples to do", file=sys.stderr)


@dataclass
class Wall:
    """Where the time went, in seconds."""

    load: float = 0.0
    prefill: float = 0.0
    select: float = 0.0
    measure: float = 0.0

    def describe(self, total: float) -> str:
        """One line with each part; `total` is the time since the model was loaded."""
        parts = {"prefill": self.prefill, "selection": self.select, "decode": self.measure}
        parts = {"model": self.load, **parts, "other": total - sum(parts.values())}
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())


# What is done with the cells of a sample, by the name that a task gives: a part of a record a cell.
MEASURES: dict[str, Callable[[Context, Sequence[Cell]], list[dict[str, Any]]]] = {
    "answer": answer,
    "fidelity": fidelity,
}


class Runner:
    """Makes the records of a group, one sample at a time.

    Parameters
    ----------
    group
        What is asked for.
    run_id
        Stored with every record: which entry of the manifest's `runs` made it.
    """

    def __init__(self, group: Group, run_id: str) -> None:
        self.group, self.run_id, self.wall = group, run_id, Wall()
        self.max_rows = group.config.decode.max_cells
        begin = time.perf_counter()
        self.engine = engine_for(group.info)
        self.wall.load = time.perf_counter() - begin

    def records(self, sample: Sample, wanted: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Records of one sample, as (number of the cell, record); a failure is a record too."""
        group = self.group
        try:
            context = self._read(sample, wanted)
        except Exception as error:
            # In chunks, all queries of all layers are held until the last one: no help to cells that need them.
            queries = max(group.cells[i].needs.queries for i in wanted)
            large = memory.ran_out(error) and group.config.prefill.chunk is None and queries < ALL_QUERIES
            advice = "; prefill.chunk=2048 reads the prompt in less memory" if large else ""
            yield from ((i, self._failed(sample, error, advice)) for i in wanted)
            return
        self.wall.prefill += context.prefill.seconds
        cells: dict[int, Cell] = {}
        for i in wanted:
            try:
                cells[i] = self.engine.cut(context.prefill, group.cells[i])
                self.wall.select += cells[i].seconds
            except Exception as error:
                yield i, self._failed(sample, error)
        # What keeps the same tokens writes the same answer, as long as nothing is evicted while it is written.
        alike = _alike(cells) if group.config.decode.evict_every is None else {i: [i] for i in cells}
        for batch in self._batches(context, cells, list(alike)):
            begin = time.perf_counter()
            parts = self._measure(context, [cells[i] for i in batch])
            self.wall.measure += time.perf_counter() - begin
            for i, part in zip(batch, parts, strict=True):
                for same in alike[i]:
                    if isinstance(part, Exception):
                        yield same, self._failed(sample, part)
                        continue
                    record = self._finished(context, cells[same], len(wanted), part)
                    record["shared_with"] = None if same == i else group.cells[i].label
                    yield same, record

    def _read(self, sample: Sample, wanted: Sequence[int]) -> Context:
        group, config, engine = self.group, self.group.config, self.engine
        encoded = group.task.encode(sample)
        cells = [group.cells[i] for i in wanted]
        needs = reduce(or_, (cell.needs for cell in cells))
        # What is evicted while the answer is written is scored anew, from all that was recorded.
        known = {"cells": cells} if config.decode.evict_every is None else {"needs": needs}
        prefill = engine.prefill(encoded.ids, window=0, chunk=config.prefill.chunk, **known)
        if needs.answer:
            limits = (sample.max_new_tokens, encoded.stop_ids, encoded.min_new_tokens)
            prefill = engine.look_ahead(prefill, *limits, cuda_graph=config.decode.cuda_graph)
        return Context(engine, config, group.task, sample, encoded, prefill)

    def _batches(self, context: Context, cells: dict[int, Cell], numbers: Sequence[int]) -> list[list[int]]:
        """The cells of a sample in batches that fit into memory."""
        sizes = [memory.row_bytes(context.prefill, cells[i], context.sample.max_new_tokens) for i in numbers]
        room = memory.available(context.prefill.device)
        return [[numbers[i] for i in batch] for batch in memory.batches(sizes, self.max_rows, room)]

    def _measure(self, context: Context, cells: Sequence[Cell]) -> list[dict[str, Any] | Exception]:
        """Parts of the records of cells; in halves where memory runs out, and an exception for what failed."""
        try:
            return list(MEASURES[context.task.measure](context, cells))
        except Exception as error:
            if len(cells) == 1 or not memory.ran_out(error):
                return [without_frames(error)] * len(cells)
        # Outside of the handler, whose traceback holds the tensors of the failed batch.
        if context.prefill.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(cells) // 2
        self.max_rows = len(cells) - half
        print(f"out of memory with {len(cells)} cells: going on with at most {self.max_rows}", file=sys.stderr)
        return self._measure(context, cells[:half]) + self._measure(context, cells[half:])

    def _finished(self, context: Context, cell: Cell, n_cells: int, part: dict[str, Any]) -> dict[str, Any]:
        sample, seconds = context.sample, {"prefill": context.prefill.seconds / n_cells, "select": cell.seconds}
        return {
            "sample": sample.id,
            "task": sample.task,
            "status": "ok",
            **part,
            **_describe(context.encoded),
            "kept": cell.kept_per_layer,
            "kept_per_head": cell.kept_per_head if cell.settings.head_budget == "ada" else None,
            "bytes": cell.bytes,
            "seconds": {**seconds, **part["seconds"]},
            "references": list(sample.references),
            "meta": dict(sample.meta),
            "run": self.run_id,
        }

    def _failed(self, sample: Sample, error: Exception, advice: str = "") -> dict[str, Any]:
        message = f"{type(error).__name__}: {error}{advice}"
        return {"sample": sample.id, "task": sample.task, "status": "failed", "error": message, "run": self.run_id}


def _alike(cells: dict[int, Cell]) -> dict[int, list[int]]:
    """Cells that keep the same tokens: the number of the first of them → the numbers of all."""
    alike: dict[int, list[int]] = {}
    for number, cell in cells.items():
        same = next((first for first in alike if cell.keeps_same(cells[first])), number)
        alike.setdefault(same, []).append(number)
    return alike


def _describe(encoded: Encoded) -> dict[str, Any]:
    ids = ",".join(map(str, encoded.ids)).encode()
    return {
        "n_prompt_raw": encoded.n_raw,
        "n_prompt": len(encoded.ids),
        "truncated": encoded.truncated,
        "notes": dict(encoded.notes),
        "prompt_sha256": hashlib.sha256(ids).hexdigest(),
    }


class Progress:
    """One line a sample on the standard error, with the time that is left."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.begin = total, 0, time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begin

    def step(self, name: str) -> None:
        """Count one sample as finished."""
        self.done += 1
        elapsed = self.elapsed
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
