"""Anybody's LongBench predictions, read from files: which runs a folder holds, and the checked rows of each.

Three layouts are known: LongBench's `<task>.jsonl`; `<model>_<budget>/<task>/<method>.json` of KVCache-Factory (the
folder of one model and budget or the one above it); and our own `<task>/<cell>/records.jsonl`. In the first two a line
is a JSON object with `pred`, `answers`, `all_classes` and `length`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.errors import UserError
from eval.metrics import LONGBENCH, TASKS
from eval.records import RECORDS, read_cell


class Row(NamedTuple):
    """One prediction with its references, and `where` it was read, for messages."""

    prediction: str
    answers: Sequence[str]
    all_classes: Sequence[str] | None
    length: int | None
    where: str


class Run(NamedTuple):
    """The predictions of one model and method, by task in the order of `TASKS`."""

    name: str
    tasks: Mapping[str, Sequence[Row]]


def read_runs(folder: Path) -> Iterator[Run]:
    """The runs of a folder, one in memory at a time.

    Parameters
    ----------
    folder
        In any known layout; another one is another function beside `_longbench` that says which files there
        are.

    Raises
    ------
    UserError
        Where there is no folder or no known file, and for a broken line, with file and line number.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    runs = _longbench(folder) | _kvcache_factory(folder) | _ours(folder)
    if not runs:
        raise UserError(
            f"{folder} holds no predictions: allowed are <task>.jsonl, <task>/<method>.json, "
            f"<model>_<budget>/<task>/<method>.json and <task>/<cell>/{RECORDS}, with the tasks "
            f"{', '.join(LONGBENCH)} and their *_e"
        )
    for name, files in runs.items():
        yield Run(name, {task: _read(files[task], task) for task in TASKS if task in files})


def unknown_files(folder: Path) -> list[str]:
    """Names of the `.jsonl` files that belong to none of the tasks, such as the Chinese ones."""
    return sorted(path.name for path in folder.glob("*.jsonl") if path.stem not in TASKS)


def _longbench(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of LongBench's `pred/<model>/<task>.jsonl`: run → task → path."""
    files = {path.stem: path for path in folder.glob("*.jsonl") if path.stem in TASKS}
    return {folder.resolve().name: files} if files else {}


def _kvcache_factory(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of KVCache-Factory's `<model>_<budget>/<task>/<method>.json`: run → task → path."""
    runs: dict[str, dict[str, Path]] = {}
    for path in [*folder.glob("*/*.json"), *folder.glob("*/*/*.json")]:
        task = path.parent.name
        if task in TASKS and path.name != "metrics.json":  # what its eval.py leaves: the last method's score
            run = path.parent.parent.relative_to(folder) / path.stem
            runs.setdefault(run.as_posix(), {})[task] = path
    return dict(sorted(runs.items()))


def _ours(folder: Path) -> dict[str, dict[str, Path]]:
    """The cells of `results/<model>/longbench-<protocol>`: cell → task → folder."""
    runs: dict[str, dict[str, Path]] = {}
    for path in sorted({found.parent for found in folder.glob("*/*/records*.jsonl")}):
        task, cell = path.parent.name, path.name.rpartition("-")[0]
        if task in TASKS:
            other = runs.setdefault(cell, {}).setdefault(task, path)
            if other != path:
                raise UserError(f"{other} and {path} are both {cell}: move one of them away")
    return runs


def _read(path: Path, task: str) -> list[Row]:
    """All rows of one file, checked."""
    if path.is_dir():
        return _read_ours(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    rows: list[Row] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not a JSON object: {error}") from None
        if problem := _problem(row):
            raise UserError(f"{where}: {problem}")
        sample = row.get("_id")
        if isinstance(sample, str) and line_of.setdefault(sample, number) != number:
            raise UserError(f"{where}: sample {sample} is a duplicate of line {line_of[sample]}")
        rows.append(Row(row["pred"], row["answers"], row.get("all_classes"), row.get("length"), where))
        # Officially the last row's classes are used for all. Here each row has its own, so they must agree.
        if TASKS[task].metric == "classification" and rows[-1].all_classes != rows[0].all_classes:
            raise UserError(f"{where}: all_classes differs from that of the first row")
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def _read_ours(path: Path) -> list[Row]:
    """The rows of a cell's folder; a failed sample is an error, since a score without it would be another score."""
    rows = []
    for sample, record in read_cell(path).items():
        if record["status"] != "ok":
            raise UserError(f"{path}: sample {sample} failed ({record.get('error')}): run its command again")
        meta = record["meta"]
        where = f"{path}, sample {sample}"
        rows.append(Row(record["text"], record["references"], meta["all_classes"], meta["length"], where))
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def _problem(row: Any) -> str | None:
    """What a line lacks to be a row."""
    if not isinstance(row, dict):
        return "not a JSON object"
    if not isinstance(row.get("pred"), str):
        return "pred must be a text"
    if not _are_texts(row.get("answers")) or not row["answers"]:
        return "answers must be a list of at least one text"
    if row.get("all_classes") is not None and not _are_texts(row["all_classes"]):
        return "all_classes must be a list of texts, or null"
    if row.get("length") is not None and type(row["length"]) is not int:
        return "length must be a whole number"
    return None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
