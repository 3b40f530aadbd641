"""Every cell below a folder of results: what its manifest says of it, and its records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import UserError
from eval.records import MANIFEST, cell_folders, key_of, read_cell, read_manifest, record_files

Record = Mapping[str, Any]

_NEEDED = (("model", "name"), ("task", "name"), ("cell", "scorer", "name"), ("cell", "budget"), ("cell", "graphkv"))


@dataclass(frozen=True)
class StoredCell:
    """A cell as its manifest describes it; its records are read when they are asked for.

    Attributes
    ----------
    folder
        Where manifest and records are.
    identity
        Everything that the records depend on, beside the sample.
    runs
        What produced the records: code, packages, machine, settings.
    """

    folder: Path
    identity: Mapping[str, Any]
    runs: Sequence[Mapping[str, Any]]

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.identity["model"]["name"]

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.identity["task"]["name"]

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides which tokens are kept: `scorer`, `budget`, `graphkv` (None or options), `granularity`, …."""
        return self.identity["cell"]

    @property
    def scorer(self) -> str:
        """Name of the scorer."""
        return self.settings["scorer"]["name"]

    @property
    def shared(self) -> dict[str, Any]:
        """What it has in common with the cells that it may be compared with: all of its identity but the settings."""
        return {name: value for name, value in self.identity.items() if name != "cell"}

    def records(self) -> dict[str, Record]:
        """Records by sample id.

        Raises
        ------
        UserError
            If a file cannot be read, a line is no record, or a finished record lacks what every measure stores.
        """
        try:
            records = read_cell(self.folder)
        except OSError as error:
            raise UserError(f"cannot read the records of {self.folder}: {error.strerror}") from error
        for record in records.values():
            if record["status"] == "ok":
                self._check(record)
        return records

    def _check(self, record: Record) -> None:
        try:
            of_parts = [*record["seconds"].values(), *record["scores"].values()]
            values = [*record["kept"], record["bytes"], record["n_prompt"], *of_parts]
            usable = record["kept"] and record["n_prompt"] > 0 and all(map(math.isfinite, values))
            usable = usable and isinstance(record.get("text", ""), str)
        except (KeyError, TypeError, AttributeError):
            usable = False
        if not usable:
            raise UserError(
                f"sample {record['sample']} of {self.folder} is damaged: kept, bytes, n_prompt, seconds and scores "
                "must be finite numbers, and text a text"
            )


@dataclass(frozen=True)
class Damaged:
    """A folder that holds a cell which cannot be shown, with one sentence that says why."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Catalogue:
    """All cells below a folder.

    Attributes
    ----------
    root
        The folder of results.
    cells
        In the order of their folders.
    damaged
        Cells without a usable manifest.
    """

    root: Path
    cells: Sequence[StoredCell]
    damaged: Sequence[Damaged]

    @classmethod
    def read(cls, root: Path) -> Catalogue:
        """Find all cells; no records are read yet.

        Raises
        ------
        UserError
            If `root` is not a folder.
        """
        if not root.is_dir():
            raise UserError(f"{root} is not a folder: name the results_dir of a run")
        cells, damaged = [], []
        for folder in cell_folders(root):
            if not (folder / MANIFEST).exists() and not record_files(folder):
                continue  # a run that was stopped before it produced anything
            try:
                cells.append(_read_cell(folder))
            except UserError as error:
                damaged.append(Damaged(folder, str(error)))
        return cls(root, cells, damaged)

    def groups(self) -> Iterator[list[StoredCell]]:
        """Cells that were run on the same samples in the same way, and so may be compared; by model and task."""
        together: dict[tuple[str, str, str], list[StoredCell]] = {}
        for cell in self.cells:
            together.setdefault((cell.model, cell.task, key_of(cell.shared)), []).append(cell)
        for key in sorted(together):
            yield together[key]


def _read_cell(folder: Path) -> StoredCell:
    path = folder / MANIFEST
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        raise UserError(f"{folder} has records, but no {MANIFEST} says what they are") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    identity = manifest["identity"]
    if manifest.get("key") != key_of(identity):
        raise UserError(f"{path} was changed: its key does not belong to its identity")
    for names in _NEEDED:
        value = identity
        for name in names:
            if not isinstance(value, dict) or name not in value:
                raise UserError(f"{path} does not say {'.'.join(names)}")
            value = value[name]
    if not all(isinstance(run, dict) for run in manifest["runs"]):
        raise UserError(f"{path} is damaged (runs are JSON objects)")
    return StoredCell(folder, identity, manifest["runs"])
