"""The records of a command in the form that tables and figures are made from, and what they say of a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from eval.metrics import TASKS

Tasks = Mapping[str, Sequence[str]]
"""Task → ids of the samples that were asked for."""


class Described(Protocol):
    """Whatever belongs to one cell."""

    @property
    def cell(self) -> Mapping[str, Any]:
        """The cell, as `CellSettings.describe` writes it."""


_Described = TypeVar("_Described", bound=Described)


@dataclass(frozen=True)
class CellResult:
    """The records of one cell.

    Attributes
    ----------
    label
        Short name, unique within the model.
    cell
        What decides which tokens are kept: `scorer` (with its `name` and options), `budget`, `graphkv` (None or
        options), `granularity`, as stored in the manifest.
    records
        Sample id → record, as stored.
    """

    label: str
    cell: Mapping[str, Any]
    records: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ModelResults:
    """All cells of one model.

    Attributes
    ----------
    model
        Its name; those in `eval.paper.MODELS` get the paper's rows.
    facts
        `protocol`, `similarity`, `data` (mini, hub or a folder), `data_hash` (hex) and `dtype`.
    samples
        (sample id, task) of everything that was asked for.
    cells
        In any order.
    """

    model: str
    facts: Mapping[str, Any]
    samples: Sequence[tuple[str, str]]
    cells: Sequence[CellResult]


def by_task(samples: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Sample ids by LongBench's tasks, in the order of `TASKS`; tasks without samples are left out."""
    found = {task: [sample for sample, of in samples if of == task] for task in TASKS}
    return {task: ids for task, ids in found.items() if ids}


def base_of(cell: _Described, cells: Sequence[_Described]) -> _Described | None:
    """The cell that differs from a cell with a graph in having none; None where there is none."""
    if cell.cell["graphkv"] is None:
        return None
    return next((other for other in cells if other.cell == {**cell.cell, "graphkv": None}), None)


def finished(cell: CellResult, ids: Sequence[str]) -> list[Mapping[str, Any]]:
    """Records of the samples that succeeded, in the order of `ids`."""
    records = (cell.records.get(sample, {}) for sample in ids)
    return [record for record in records if record.get("status") == "ok"]


def complete(cell: CellResult, tasks: Tasks) -> dict[str, list[Mapping[str, Any]]]:
    """Records of the tasks of which every sample is finished, in the order of the samples."""
    found = {task: finished(cell, ids) for task, ids in tasks.items()}
    return {task: records for task, records in found.items() if len(records) == len(tasks[task])}


def changes(cell: CellResult, base: CellResult | None, tasks: Tasks) -> dict[str, np.ndarray]:
    """What each sample gained over the base, in points, of the tasks that are complete in both.

    Rows are sorted by sample, so that the order in which they were asked for does not reach the bootstrap.
    """
    after, before = complete(cell, tasks), complete(base, tasks) if base else {}
    return {
        task: (_points(after[task]) - _points(before[task]))[np.argsort(tasks[task])]
        for task in after
        if task in before
    }


def achieved(records: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Tokens stored a layer, and their share of the prompt; means over samples."""
    kept = np.array([np.mean(record["kept"]) for record in records])
    return float(kept.mean()), float((kept / [record["n_prompt"] for record in records]).mean())


def _points(records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([100 * record["scores"]["score"] for record in records])
