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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from eval.errors import UserError

SCHEMA = 1
RECORDS, MANIFEST = "records.jsonl", "manifest.json"
_LOCK = ".lock"
_PAUSE = 0.5  # seconds between two looks at a lock


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
    """

    def __init__(
        self, root: Path, label: str, identity: Mapping[str, Any], shard: tuple[int, int] | None = None
    ) -> None:
        self.identity = {"schema": SCHEMA, **identity}
        self.key = key_of(self.identity)
        self.folder = root / f"{re.sub(r'[^A-Za-z0-9._+=-]+', '_', label)}-{self.key[:12]}"
        self.records: dict[str, dict[str, Any]] = {}
        self._part = "" if shard is None else f"-{shard[0]}of{shard[1]}"
        self._lock = FileLock(self.folder / f"{_LOCK}{self._part}")
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
        count = self._part.rpartition("of")[2]
        return [
            path
            for path in self.folder.glob(f"{_LOCK}*")
            if path.name not in (f"{_LOCK}-gate", f"{_LOCK}{self._part}")
            and not (count and path.name.endswith(f"of{count}"))
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
        """Add what is about to produce records to the manifest, unless the same already did."""
        manifest = {"key": self.key, "identity": self.identity, "runs": []}
        path = self.folder / MANIFEST
        with FileLock(self.folder / f"{_LOCK}-gate"):  # shards write one manifest
            if path.exists():
                manifest = json.loads(path.read_text(encoding="utf-8"))
            if made_by not in manifest["runs"]:
                manifest["runs"].append(made_by)
                write_atomically(path, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")

    def _check_manifest(self) -> None:
        path = self.folder / MANIFEST
        if not path.exists():
            return
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            found = manifest["identity"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}): move {self.folder} away to start that cell anew") from error
        if found.get("schema") != SCHEMA:
            raise UserError(
                f"{path} has schema {found.get('schema')}, but this version writes {SCHEMA}: use another results_dir"
            )
        if key_of(found) != self.key:
            raise UserError(f"{path} describes another cell: move {self.folder} away, or use another results_dir")


def _held(path: Path) -> bool:
    """Whether a process holds the lock of a file."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


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
    for path in sorted(folder.glob("records*.jsonl")):
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
    for number, line in enumerate(data[:whole].decode("utf-8").split("\n")[:-1], 1):
        try:
            record = json.loads(line)
            sample, status = record["sample"], record["status"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number} is not a record ({error}): restore or remove the file") from error
        if records.get(sample, {}).get("status") == "ok":
            if status == "ok":
                raise UserError(f"{path}:{number} repeats sample {sample}: remove one of the two lines")
            continue
        records[sample] = record
    return records


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's contents so that a reader, or a crash, sees the old or the new, never a part."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)
