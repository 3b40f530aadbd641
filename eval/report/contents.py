"""What the page shows of the records: groups of cells that may be compared, their numbers, their answers."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eval import table1_words as words
from eval.catalogue import Catalogue, Damaged, StoredCell
from eval.errors import UserError
from eval.records import MANIFEST, record_files
from eval.report.files import link
from eval.report.numbers import Records, change, main_score, numbers
from eval.report.samples import Answers


@dataclass
class Contents:
    """What the scripts of the page work on.

    Attributes
    ----------
    groups, cells, runs
        JSON values: groups of cells that were run on the same samples in the same way, the cells, and what produced
        their records.
    answers
        A group each.
    damaged
        Cells that cannot be shown.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)
    runs: list[Mapping[str, Any]] = field(default_factory=list)
    answers: list[Answers] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How much there is, by what it is."""
        return {
            "model": len({group["model"] for group in self.groups}),
            "task": len({group["task"] for group in self.groups}),
            "cell": len(self.cells),
            "result": sum(cell["n"] for cell in self.cells),
            "failed": sum(cell["failed"] for cell in self.cells),
            "damaged": len(self.damaged),
        }


def collect(catalogue: Catalogue, page: Path) -> Contents:
    """Read all records, a group at a time, and compute what the page shows of them.

    Parameters
    ----------
    catalogue
        The cells.
    page
        Where the page will be; links are relative to it.
    """
    contents = Contents(damaged=list(catalogue.damaged))
    # The table has a column for the budget, so that names need not tell it.
    every = [_unbudgeted(cell) for cell in catalogue.cells]
    for cells, records in _read(catalogue, contents.damaged):
        asked = list(dict.fromkeys(sample for by_id in records for sample in by_id))
        score = main_score(cells, records)
        first = len(contents.cells)
        for cell, by_id in zip(cells, records, strict=True):
            row = numbers(by_id, asked, score) | _facts(cell, page)
            row |= {"group": len(contents.groups), "name": words.name(_unbudgeted(cell), every)}
            row |= {"change": _change(cell, cells, records, asked, score), "runs": _runs(cell, by_id, contents.runs)}
            contents.cells.append(row)
        contents.answers.append(Answers.of(range(first, len(contents.cells)), records, asked))
        contents.groups.append(_group(cells[0], catalogue.root) | {"score": score, "samples": len(asked)})
    _tell_apart(contents.groups)
    return contents


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested JSON objects as one, with dotted names; lists as texts."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = json.dumps(value) if isinstance(value, (list, dict)) else value
    return leaves


def _read(catalogue: Catalogue, damaged: list[Damaged]) -> Iterator[tuple[list[StoredCell], list[Records]]]:
    """Cells of each group with their records, in the order of Table 1's rows; `damaged` gets what cannot be read."""
    for group in catalogue.groups():
        cells, records = [], []
        for cell in sorted(group, key=lambda cell: words.order(cell.settings)):
            try:
                records.append(cell.records())
                cells.append(cell)
            except UserError as error:
                damaged.append(Damaged(cell.folder, str(error)))
        if cells:
            yield cells, records


def _unbudgeted(cell: StoredCell) -> dict[str, Any]:
    return {name: value for name, value in cell.settings.items() if name != "budget"}


def _facts(cell: StoredCell, page: Path) -> dict[str, Any]:
    """What a cell is, and where its files are."""
    paths = [cell.folder / MANIFEST, *record_files(cell.folder)]
    return {
        "scorer": cell.scorer,
        "budget": None if cell.scorer == "full" else cell.settings["budget"],
        "graph": cell.settings["graphkv"] is not None,
        "settings": flat(cell.settings),
        "links": [asdict(link(path, page)) for path in paths],
    }


def _change(
    cell: StoredCell, cells: Sequence[StoredCell], records: Sequence[Records], asked: Sequence[str], score: str | None
) -> dict[str, Any] | None:
    """What the graph changes: the cell against the one that is the same without it, if that is there."""
    base = {**cell.settings, "graphkv": None}
    found = [number for number, other in enumerate(cells) if other.settings == base]
    if score is None or cell.settings["graphkv"] is None or not found:
        return None
    difference = change(records[cells.index(cell)], records[found[0]], asked, score)
    return None if difference is None else {**asdict(difference), "clear": difference.clear}


def _runs(cell: StoredCell, records: Records, known: list[Mapping[str, Any]]) -> list[tuple[int, int | None]]:
    """What produced a cell: numbers in `known`, which gets what is new, each with the number of its records.

    The number is None where records do not name their run.
    """
    counts = Counter(record.get("run") for record in records.values())
    made_by = []
    for run in cell.runs:
        shown = {name: value for name, value in run.items() if name != "config"}
        if shown not in known:
            known.append(shown)
        made_by.append((known.index(shown), counts[run["run"]] if "run" in run else None))
    return made_by


def _group(cell: StoredCell, root: Path) -> dict[str, Any]:
    """What a group is, told from any of its cells; `place` are the folders that are named neither model nor task."""
    folders = cell.folder.relative_to(root).parts[:-1]
    return {
        "model": cell.model,
        "task": cell.task,
        "place": "/".join(name for name in folders if name not in (cell.model, cell.task)),
        "identity": flat(cell.shared),
    }


def _tell_apart(groups: Sequence[dict[str, Any]]) -> None:
    """Give each group a `note`: what sets it apart from others of the same model, task and place."""
    for group in groups:
        name = [group[key] for key in ("model", "task", "place")]
        twins = [other["identity"] for other in groups if [other[key] for key in ("model", "task", "place")] == name]
        keys = dict.fromkeys(key for twin in twins for key in twin)
        differing = [key for key in keys if any(twin.get(key) != twins[0].get(key) for twin in twins)]
        group["note"] = ", ".join(f"{key.rpartition('.')[2]} {_brief(group['identity'].get(key))}" for key in differing)


def _brief(value: Any) -> str:
    """A value in a few characters; a long one by its hash."""
    text = "none" if value is None else str(value)
    return text if len(text) <= 20 else hashlib.sha256(text.encode()).hexdigest()[:6]
