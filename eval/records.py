"""Results on disk: one JSON line per finished sample of a cell, appended at once, found again by its key.

A cell's folder holds `manifest.json` (what the records depend on, and what produced them) and `records.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from eval.errors import UserError

SCHEMA = 1
RECORDS, MANIFEST = "records.jsonl", "manifest.json"


def key_of(identity: Mapping[str, Any]) -> str:
    """sha256 (hex) of everything that a cell's records depend on, written as canonical JSON."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class CellStore:
    """The records of one cell.

    Used as a context manager: entering creates the folder, waits for another process that writes the same cell,
    and reads what is there; leaving closes the file and lets go of the lock. The kernel drops a dead process's lock.

    Parameters
    ----------
    root
        Folder of the model and task.
    label
        Readable beginning of the folder's name.
    identity
        JSON values that the records depend on, beside the sample.
    """

    def __init__(self, root: Path, label: str, identity: Mapping[str, Any]) -> None:
        self.identity = {"schema": SCHEMA, **identity}
        self.key = key_of(self.identity)
        self.folder = root / f"{re.sub(r'[^A-Za-z0-9._+=-]+', '_', label)}-{self.key[:12]}"
        self.records: dict[str, dict[str, Any]] = {}
        self._lock = FileLock(self.folder / ".lock")
        self._stream: TextIO | None = None

    def __enter__(self) -> CellStore:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                print(f"waiting for another process that writes {self.folder}", file=sys.stderr)
                self._lock.acquire()
            self._check_manifest()
            self.records = read_records(self.folder / RECORDS, repair=True)
        except PermissionError as error:
            raise UserError(f"cannot write results to {self.folder}: {error.strerror}") from error
        self._stream = (self.folder / RECORDS).open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
        self._lock.release()

    def done(self, sample_id: str) -> bool:
        """Whether the sample is finished; a failed one is not, and is tried again."""
        return self.records.get(sample_id, {}).get("status") == "ok"

    def append(self, record: dict[str, Any]) -> None:
        """Store a record; it is on the disk when this returns. NaN is refused, since JSON has none."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        self._stream.write(line + "\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.records[record["sample"]] = record

    def note_run(self, made_by: Mapping[str, Any]) -> None:
        """Add what is about to produce records to the manifest, unless the same already did."""
        manifest = {"key": self.key, "identity": self.identity, "runs": []}
        path = self.folder / MANIFEST
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
