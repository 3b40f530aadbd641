"""Results on disk: one JSON line per finished sample of a cell, appended at once, found again by its key.

A cell's folder holds `manifest.json` (what the records depend on, and what produced them) and `records.jsonl`, or a
file a shard, such as `records-0of2.jsonl`, where a run was cut into several processes. All files of a folder are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from eval.errors import UserError

SCHEMA = 1
RECORDS, MANIFEST = "records.jsonl", "manifest.json"
PART = ".part"  # ends the names of files that are being written
_FILES = "records*.jsonl"
_LOCK = ".lock"
_PAUSE = 0.5  # seconds between two looks at a lock


class UnknownSchema(UserError):
    """A manifest that another version wrote; `schema` is what it says."""

    def __init__(self, message: str, schema: Any) -> None:
        super().__init__(message)
        self.schema = schema


def key_of(identity: Mapping[str, Any]) -> str:
    """sha256 (hex) of everything that a cell's records depend on, written as canonical JSON."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class CellStore:
    """The records of one cell.

    Used as a context manager: entering creates the folder, waits for another process that writes the same cell,
    and reads what is there; leaving closes the file and lets go of the lock. The kernel drops a dead process's lock.
    Shards of one cut have disjoint samples and files of their own and do not wait for each other; they do wait for a
    process that writes the whole cell, or that cut it otherwise.

    Parameters
    ----------
    root
        Folder of the model and task.
    label
        Readable beginning of the folder's name.
    identity
        JSON values that the records depend on, beside the sample.
    shard
        (number, count) of the part of the samples that this process does; None for all.
    cut
        Names the list of samples that was cut into shards. Two lists cut into as many shards may put one sample into
        shards of different numbers, so those wait for each other.
    """

    def __init__(
        self,
        root: Path,
        label: str,
        identity: Mapping[str, Any],
        shard: tuple[int, int] | None = None,
        cut: str = "",
    ) -> None:
        self.identity = {"schema": SCHEMA, **identity}
        self.key = key_of(self.identity)
        self.folder = root / f"{re.sub(r'[^A-Za-z0-9._+=-]+', '_', label)}-{self.key[:12]}"
        self.records: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}  # what produced records, by the name that these give
        self._part = "" if shard is None else f"-{shard[0]}of{shard[1]}"
        self._siblings = "" if shard is None else f"of{shard[1]}-{cut}"  # how the locks of this cut's shards end
        self._lock = FileLock(self.folder / (_LOCK if shard is None else f"{_LOCK}-{shard[0]}{self._siblings}"))
        self._stream: BinaryIO | None = None

    @property
    def path(self) -> Path:
        """The file that this store appends to."""
        return self.folder / f"records{self._part}.jsonl"

    def __enter__(self) -> CellStore:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._acquire()
            self._check_manifest()
            self.records = read_cell(self.folder, repair=self.path)
            self._stream = self.path.open("ab", buffering=0)  # a failed write leaves nothing behind in a buffer
        except OSError as error:
            self._lock.release()
            raise UserError(f"cannot write results to {self.folder}: {error.strerror}") from error
        except UserError:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
        self._lock.release()

    def _acquire(self) -> None:
        """Take this part's lock when no other process holds one that overlaps with it."""
        waited = False
        while True:
            with FileLock(self.folder / f"{_LOCK}-gate"):
                if not any(_held(path) for path in self._overlapping()):
                    try:
                        self._lock.acquire(timeout=0)
                        return
                    except Timeout:
                        pass
            if not waited:
                print(f"waiting for another process that writes {self.folder}", file=sys.stderr)
            waited = True
            time.sleep(_PAUSE)

    def _overlapping(self) -> list[Path]:
        """Lock files of parts that may have samples of this one, other than its own."""
        own = Path(self._lock.lock_file).name
        return [
            path
            for path in self.folder.glob(f"{_LOCK}*")
            if path.name not in (f"{_LOCK}-gate", own) and not (self._siblings and path.name.endswith(self._siblings))
        ]

    def done(self, sample_id: str) -> bool:
        """Whether the sample is finished; a failed one is not, and is tried again."""
        return self.records.get(sample_id, {}).get("status") == "ok"

    def load(self) -> None:
        """Read the records that are there, to look at them only."""
        if self.folder.is_dir():
            self._check_manifest()
            self.records = read_cell(self.folder)

    def append(self, record: dict[str, Any]) -> None:
        """Store a record; it is on the disk when this returns. NaN is refused, since JSON has none.

        Raises
        ------
        UserError
            If the disk is full or gone; the file then ends as it did before.
        """
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        end = os.fstat(self._stream.fileno()).st_size
        try:
            while line:
                line = line[self._stream.write(line) :]
            os.fsync(self._stream.fileno())
        except OSError as error:
            self._stream.truncate(end)
            raise UserError(f"cannot write results to {self.path}: {error.strerror}") from error
        self.records[record["sample"]] = record

    def note_run(self, made_by: Mapping[str, Any]) -> None:
        """Add what is about to produce records to the manifest, unless the same already did; errors as for `append`."""
        manifest = {"key": self.key, "identity": self.identity, "runs": []}
        path = self.folder / MANIFEST
        try:
            with FileLock(self.folder / f"{_LOCK}-gate"):  # shards write one manifest
                if path.exists():
                    manifest = read_manifest(path)
                if made_by not in manifest["runs"]:
                    manifest["runs"].append(made_by)
                    write_atomically(path, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
                self._know(manifest)
        except OSError as error:
            raise UserError(f"cannot write results to {path}: {error.strerror}") from error

    def _check_manifest(self) -> None:
        path = self.folder / MANIFEST
        if not path.exists():
            return
        manifest = read_manifest(path)
        if key_of(manifest["identity"]) != self.key:
            raise UserError(f"{path} describes another cell: move {self.folder} away, or use another results_dir")
        self._know(manifest)

    def _know(self, manifest: Mapping[str, Any]) -> None:
        self.runs = {run["run"]: run for run in manifest["runs"] if isinstance(run, dict) and "run" in run}


def _held(path: Path) -> bool:
    """Whether a process holds the lock of a file."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def in_use(folder: Path) -> bool:
    """Whether a process writes the cell of a folder right now."""
    return any(_held(path) for path in folder.glob(f"{_LOCK}*") if path.name != f"{_LOCK}-gate")


def remove_cell(folder: Path) -> bool:
    """Delete a cell: its records first, so that a crash leaves whole files; False where a process writes it.

    Raises
    ------
    OSError
        If the folder cannot be changed, or holds other files, which stay.
    """
    with FileLock(folder / f"{_LOCK}-gate"):  # nobody begins to write it meanwhile
        if in_use(folder):
            return False
        for path in [*record_files(folder), folder / MANIFEST, *folder.glob(f"{_LOCK}*")]:
            path.unlink(missing_ok=True)
        folder.rmdir()
    return True


def cell_folders(root: Path) -> list[Path]:
    """All folders at or below `root` that hold something of a cell, be it a lock alone, sorted."""

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error

    return sorted(
        Path(folder)
        for folder, _, names in os.walk(root, onerror=refuse)
        if any(name in (MANIFEST, f"{_LOCK}-gate") or fnmatch(name, _FILES) for name in names)
    )


def record_files(folder: Path) -> list[Path]:
    """The files with the records of a cell, sorted."""
    return sorted(folder.glob(_FILES))


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest: `key`, `identity` (a JSON object with the `schema`) and `runs` (a list).

    Raises
    ------
    UserError
        If it is damaged; `UnknownSchema` if another version wrote it.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        schema = manifest["identity"]["schema"]
        key_of(manifest["identity"])
        if not isinstance(manifest.setdefault("runs", []), list):
            raise TypeError("runs must be a list")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is damaged ({reason}): move {path.parent} away to start that cell anew") from error
    if schema != SCHEMA:
        raise UnknownSchema(
            f"{path} has schema {schema}, but this version writes {SCHEMA}: use another results_dir", schema
        )
    return manifest


def read_cell(folder: Path, repair: Path | None = None) -> dict[str, dict[str, Any]]:
    """Records of a cell by sample id, from all files of its folder; parameters and errors as for `read_records`.

    Parameters
    ----------
    folder
        A cell's folder; one without records has none.
    repair
        The one file that may be repaired, because its lock is held.
    """
    records: dict[str, dict[str, Any]] = {}
    for path in record_files(folder):
        for sample, record in read_records(path, repair=path == repair).items():
            if records.get(sample, {}).get("status") != "ok":
                records[sample] = record
            elif record["status"] == "ok":
                raise UserError(f"{path} repeats sample {sample} of another file of its folder: remove one of the two")
    return records


def read_records(path: Path, repair: bool = False) -> dict[str, dict[str, Any]]:
    """Records of a file by sample id, the successful one where a failed one was tried again.

    Parameters
    ----------
    path
        A `records.jsonl`; an absent file has no records.
    repair
        Cut a torn last line (of a process that was killed while writing) off the file; it is left out either way,
        with a warning.

    Raises
    ------
    UserError
        For a broken line before the last one, or a sample that was finished twice.
    """
    records: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return records
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        print(f"warning: dropped a torn last line of {path}; its sample is done again", file=sys.stderr)
        if repair:
            with path.open("r+b") as stream:
                stream.truncate(whole)
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
        try:
            record = parse_record(line)
        except ValueError as error:
            raise UserError(f"{path}:{number} is not a record ({error}): restore or remove the file") from error
        sample, status = record["sample"], record["status"]
        if records.get(sample, {}).get("status") == "ok":
            if status == "ok":
                raise UserError(f"{path}:{number} repeats sample {sample}: remove one of the two lines")
            continue
        records[sample] = record
    return records


def parse_record(line: bytes) -> dict[str, Any]:
    """The record of a line: a JSON object with a text `sample` and a `status`; ValueError says what it is instead."""
    try:
        record = json.loads(line.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if not isinstance(record.get("sample"), str):
        raise ValueError("sample is missing, or is not a text")
    if "status" not in record:
        raise ValueError("status is missing")
    return record


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's contents so that a reader, or a crash, sees the old or the new, never a part."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which it replaces at the end if nothing was raised."""
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    try:
        yield part
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
