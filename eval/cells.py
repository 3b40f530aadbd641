"""Cells on disk as they are: what a folder holds, and everything in it that a run would not have written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eval.errors import UserError
from eval.records import MANIFEST, SCHEMA, UnknownSchema, key_of, parse_record, read_manifest, record_files


@dataclass
class CellFolder:
    """What was read of a cell's folder; nothing in it was changed.

    Attributes
    ----------
    path
        The folder.
    schema
        Of the manifest; None where there is none that can be read.
    identity
        What the records depend on, beside the sample; None where it is absent, damaged or of an unknown schema.
    runs
        What produced records, by the name that these give.
    records
        Records by sample id, the successful one where a failed one was tried again; some may be among the problems.
    torn
        Whether a file ends in the middle of a line, as that of a process does which was killed while writing.
    problems
        One sentence for each thing that is wrong, with its place.
    warnings
        The same for what the next run puts right.
    size
        Bytes of all files.
    changed
        When manifest or records were last changed, in seconds since the epoch; 0 without them.
    """

    path: Path
    schema: Any = None
    identity: dict[str, Any] | None = None
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    torn: bool = False
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    size: int = 0
    changed: float = 0.0

    @property
    def finished(self) -> int:
        """Number of finished samples."""
        return sum(record["status"] == "ok" for record in self.records.values())

    @property
    def failed(self) -> int:
        """Number of samples that failed and have not succeeded since."""
        return len(self.records) - self.finished

    @property
    def facts(self) -> dict[str, Any]:
        """What tells cells apart, for people; a text each, `budget` a number, None for what is not known."""
        identity = self.identity or {}
        scorer, graph = look(identity, "cell.scorer.name"), look(identity, "cell.graphkv")
        label, _, short = self.path.name.rpartition("-")
        return {
            "model": look(identity, "model.name"),
            "dtype": look(identity, "model.dtype"),
            "task": look(identity, "task.name"),
            "protocol": look(identity, "task.protocol.name"),
            "scorer": scorer,
            "budget": look(identity, "cell.budget"),
            "graphkv": None if scorer is None else "on" if graph else "off",
            "cell": label or self.path.name,
            "key": short,
        }


def look(values: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name, None where there is none."""
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def read_folder(path: Path) -> CellFolder:
    """Read a cell's folder and check everything in it; problems are collected, never raised."""
    cell = CellFolder(path)
    _read_manifest(cell)
    files, seen = record_files(path), _Seen()
    if cell.schema in (None, SCHEMA):  # the records of another one are not understood
        for file in files:
            try:
                _read_records(cell, file, seen)
            except OSError as error:
                cell.problems.append(f"{file} cannot be read: {error.strerror}")
    if not (path / MANIFEST).exists():
        if cell.records or cell.problems:
            cell.problems.append(f"{path} has records but no {MANIFEST}: what they depend on is not known")
        else:
            cell.warnings.append(f"{path} is empty: a run was stopped before its first sample")
    for file in path.glob("*"):
        with suppress(FileNotFoundError):  # another process replaced it meanwhile
            stat = file.stat()
            cell.size += stat.st_size
            if file.name == MANIFEST or file in files:
                cell.changed = max(cell.changed, stat.st_mtime)
    return cell


def _read_manifest(cell: CellFolder) -> None:
    path = cell.path / MANIFEST
    if not path.exists():
        return
    try:
        manifest = read_manifest(path)
    except UnknownSchema as error:
        cell.schema = error.schema
        cell.problems.append(str(error))
        return
    except UserError as error:
        cell.problems.append(str(error))
        return
    except OSError as error:
        cell.problems.append(f"{path} cannot be read: {error.strerror}")
        return
    cell.schema, cell.identity = manifest["identity"]["schema"], manifest["identity"]
    key = key_of(cell.identity)
    if manifest.get("key") != key:
        cell.problems.append(f"{path}: key is not the hash of the identity, which is {key}: one of them was changed")
    if not cell.path.name.endswith(f"-{key[:12]}"):
        cell.problems.append(f"{path}: the name of its folder does not end with -{key[:12]}, as its identity says")
    cell.problems += [f"{path}: identity.{problem}" for problem in _problems(cell.identity, _IDENTITY)]
    for number, run in enumerate(manifest["runs"]):
        problems = list(_problems(run, _RUN))
        cell.problems += [f"{path}: runs[{number}].{problem}" for problem in problems]
        if not problems:
            cell.runs[run["run"]] = run


@dataclass
class _Seen:
    """What earlier records of a cell say: where a sample was finished, and how many layers the model has."""

    finished: dict[str, str] = field(default_factory=dict)
    layers: int | None = None


def _read_records(cell: CellFolder, path: Path, seen: _Seen) -> None:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            place = f"{path}:{number}"
            if not line.endswith(b"\n"):
                cell.torn = True
                cell.warnings.append(f"{place} is torn: a process was killed while writing; its sample is done again")
                return
            try:
                record = parse_record(line)
            except ValueError as error:
                cell.problems.append(f"{place} is not a record ({error})")
                continue
            cell.problems += [f"{place}: {problem}" for problem in _record_problems(cell, record, seen)]
            sample = record["sample"]
            if record["status"] == "ok" and sample in seen.finished:
                cell.problems.append(f"{place}: sample {sample} was finished before, at {seen.finished[sample]}")
            elif record["status"] == "ok":
                seen.finished[sample] = place
            if sample not in seen.finished or seen.finished[sample] == place:
                cell.records[sample] = record


def _record_problems(cell: CellFolder, record: Mapping[str, Any], seen: _Seen) -> list[str]:
    """What is wrong with a record of a cell."""
    status, task, run = record["status"], record.get("task"), record.get("run")
    of_status = _FINISHED if status == "ok" else _FAILED if status == "failed" else {}
    found = [*_problems(record, _RECORD), *_problems(record, of_status)]
    if status == "ok" and not found:
        seen.layers = seen.layers or len(record["kept"])
        if max(record["kept"]) > record["n_prompt"]:
            found.append(f"kept has {max(record['kept'])} tokens, but the prompt {record['n_prompt']}")
        if len(record["kept"]) != seen.layers:
            found.append(f"kept has {len(record['kept'])} layers, but that of an earlier record {seen.layers}")
    if cell.identity is not None:
        of_cell = look(cell.identity, "task.name")
        if isinstance(task, str) and task != of_cell:
            found.append(f"task is {task!r}, but its cell's is {of_cell!r}")
        if isinstance(run, str) and run not in cell.runs:
            found.append(f"run {run!r} is not in the manifest's runs")
    try:
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        found.append(f"holds what no run writes ({error})")
    return found


def _problems(values: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> Iterator[str]:
    """A sentence for each field, at a dotted name, that is absent or not of its kind."""
    for name, kind in kinds.items():
        value = look(values, name)
        if not kind.fits(value):
            yield f"{name} is missing" if value is None else f"{name} must be {kind.words}, not {_short(value)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# What is expected -----------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What a field's value must be, in words and as a check."""

    words: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


_TEXT = _Kind("a text", lambda v: isinstance(v, str) and v != "")
_ANY_TEXT = _Kind("a text, which may be empty", lambda v: isinstance(v, str))
_MAYBE_TEXT = _Kind("a text, or null", lambda v: v is None or isinstance(v, str))
_WHOLE = _Kind("a whole number, 0 or more", _is_whole)
_COUNT = _Kind("a whole number, 1 or more", lambda v: _is_whole(v, 1))
_AMOUNT = _Kind("a number above 0", lambda v: _is_number(v) and v > 0)
_SECONDS = _Kind("a number of seconds, 0 or more", lambda v: _is_number(v) and v >= 0)

_IDENTITY: Mapping[str, _Kind] = {
    "model.name": _TEXT,
    "model.dtype": _TEXT,
    "task.name": _TEXT,
    "cell.scorer.name": _TEXT,
    "cell.budget": _AMOUNT,
    "cell.granularity": _TEXT,
    "cell.head_budget": _TEXT,
    "cell.graphkv": _Kind("an object, or null", lambda v: v is None or isinstance(v, dict)),
    "decode.mode": _TEXT,
    "model.device": _MAYBE_TEXT,
    "model.attention": _MAYBE_TEXT,
    "task.data": _MAYBE_TEXT,
    "task.protocol.name": _MAYBE_TEXT,
    "cell.head_floor": _Kind("a number, or null", lambda v: v is None or _is_number(v)),
    "decode.evict_every": _Kind("a whole number, or null", lambda v: v is None or _is_whole(v)),
}
_RUN: Mapping[str, _Kind] = {
    "run": _TEXT,
    "git_commit": _MAYBE_TEXT,
    "git_dirty": _Kind("true, false or null", lambda v: v is None or isinstance(v, bool)),
}
_RECORD: Mapping[str, _Kind] = {
    "sample": _TEXT,
    "task": _TEXT,
    "status": _Kind("ok or failed", lambda v: v in ("ok", "failed")),
    "run": _TEXT,
}
_FAILED: Mapping[str, _Kind] = {"error": _TEXT}
_FINISHED: Mapping[str, _Kind] = {
    "scores": _Kind(
        "an object of finite numbers", lambda v: isinstance(v, dict) and bool(v) and all(map(_is_number, v.values()))
    ),
    "text": _ANY_TEXT,
    "ids": _Kind("a list of token ids", lambda v: _is_list(v, _is_whole)),
    "finish": _Kind("stop, length or given", lambda v: v in ("stop", "length", "given")),
    "n_prompt": _COUNT,
    "kept": _Kind("a list of numbers, one a layer", lambda v: _is_list(v, lambda n: _is_number(n) and n >= 0) and v),
    "bytes": _WHOLE,
    "seconds.prefill": _SECONDS,
    "seconds.select": _SECONDS,
    "seconds.decode": _SECONDS,
    "decode_batch": _COUNT,
    "shared_with": _MAYBE_TEXT,
}
