"""Table 1: tasks × methods of one or more models, with the paper's numbers and what GraphKV changes.

`build` computes everything once from the records; `eval.table1_render` lays it out. Rows find their base row
and the paper's row by what their cell is, never by where it stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval import table1_words as words
from eval.averages import mean_of_tasks, task_score
from eval.errors import UserError
from eval.metrics import LONGBENCH, TASKS
from eval.paper import BUDGET, PaperRow
from eval.paper import table1 as paper_rows
from eval.stats import RESAMPLES, Difference, paired_difference
from eval.table1_words import AVERAGE, SHORT, USUAL

_SAME = ("protocol", "similarity", "data", "data_hash")


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


@dataclass(frozen=True)
class Entry:
    """One row under one column, a task or `AVERAGE`.

    Attributes
    ----------
    n, asked
        Finished samples, and how many there should be.
    score
        In 0..100, rounded to two decimals; None where a sample (for Avg.: one of the 16 tasks) is missing.
    paper
        The paper's score.
    difference
        To the base row, in points, before rounding.
    kept, share
        Tokens stored a layer (mean over layers and samples), and their share of the prompt; None as for the score.
    """

    n: int
    asked: int
    score: float | None
    paper: float | None
    difference: Difference | None
    kept: float | None
    share: float | None


@dataclass(frozen=True)
class Row:
    """One cell.

    Attributes
    ----------
    name, label
        As printed, and the cell's.
    entries
        Task or `AVERAGE` → entry, in the order of columns.
    shared
        The tasks that are complete here and in the base row, without LongBench-E's where all 16 of LongBench are
        columns; empty without a base row.
    difference
        Of the mean of the `shared` tasks; it is that of Avg. where they are the 16.
    printed, printed_difference
        The paper's row, and its difference to its base row over the `shared` tasks.
    """

    name: str
    label: str
    entries: Mapping[str, Entry]
    shared: tuple[str, ...]
    difference: Difference | None
    printed: PaperRow | None
    printed_difference: float | None


@dataclass(frozen=True)
class Table1:
    """The table before it is laid out.

    Attributes
    ----------
    title, caption
        What it is, and all that a reader must know to compare it with another one.
    notes
        What is missing, a line a row.
    facts
        The facts that all models share.
    tasks
        The columns before Avg.
    blocks
        Model → rows.
    """

    title: str
    caption: str
    notes: tuple[str, ...]
    facts: Mapping[str, Any]
    tasks: tuple[str, ...]
    blocks: Mapping[str, tuple[Row, ...]]


def build(results: Sequence[ModelResults], *, resamples: int = RESAMPLES, seed: int = 0) -> Table1:
    """Compute the table.

    Parameters
    ----------
    results
        One entry a model, in the order of blocks.
    resamples, seed
        Of the bootstrap.

    Raises
    ------
    UserError
        No results, a task that is not LongBench's, a sample, cell or model twice, or models whose protocol, edit
        similarity, data or samples differ.
    """
    tasks = _checked_samples(results)
    cells = [cell.cell for result in results for cell in result.cells]
    blocks, notes = {}, []
    for result in results:
        ordered = sorted(result.cells, key=lambda cell: words.order(cell.cell))
        rows = []
        for cell in ordered:
            base = next((other for other in ordered if other.cell == {**cell.cell, "graphkv": None}), None)
            base = None if cell.cell["graphkv"] is None else base
            name = words.name(cell.cell, cells)
            rows.append(_row(result.model, name, cell, base, tasks, resamples, seed))
            notes += [f"{result.model}, {name}: {text}" for text in _gaps(cell, base, tasks)]
        blocks[result.model] = tuple(rows)
    return Table1(
        title=words.title(results[0].facts, tasks, cells),
        caption=" ".join(words.caption(results, tasks, cells, blocks, resamples, seed)),
        notes=tuple(notes),
        facts={fact: results[0].facts[fact] for fact in _SAME},
        tasks=tuple(tasks),
        blocks=blocks,
    )


def _checked_samples(results: Sequence[ModelResults]) -> dict[str, list[str]]:
    """Task → sample ids as asked for, tasks in the order of columns, of results that may share a table."""
    if not results or not all(result.samples and result.cells for result in results):
        raise UserError("Table 1 needs at least one model, and of each at least one sample and one cell")
    first = results[0]
    for result in results:
        for fact in _SAME:
            if result.facts[fact] != first.facts[fact]:
                raise UserError(
                    f"Table 1 cannot compare {first.model} with {result.model}: {fact} is {first.facts[fact]} and "
                    f"{result.facts[fact]}; make a table of each"
                )
        if set(result.samples) != set(first.samples):
            raise UserError(
                f"Table 1 cannot compare {first.model} with {result.model}: their samples differ; ask for the same "
                "tasks and limit"
            )
        for i, cell in enumerate(result.cells):
            if any(cell.cell == other.cell for other in result.cells[:i]):
                raise UserError(f"{result.model}: the cell {cell.label} is there twice")
    if model := _repeated(result.model for result in results):
        raise UserError(f"Table 1 has one block a model, {model} is there twice")
    if sample := _repeated(sample for sample, _ in first.samples):
        raise UserError(f"Table 1: the sample {sample} is there twice")
    if unknown := sorted({task for _, task in first.samples} - set(TASKS)):
        raise UserError(f"Table 1 has no column {unknown[0]}, its tasks are {', '.join(TASKS)}")
    found = {task: [sample for sample, of in first.samples if of == task] for task in TASKS}
    return {task: ids for task, ids in found.items() if ids}


def _repeated(items: Iterator[str]) -> str | None:
    return next((item for item, count in Counter(items).items() if count > 1), None)


def _row(
    model: str,
    name: str,
    cell: CellResult,
    base: CellResult | None,
    tasks: Mapping[str, Sequence[str]],
    resamples: int,
    seed: int,
) -> Row:
    finished = {task: _finished(cell, ids) for task, ids in tasks.items()}
    complete = _complete(cell, tasks)
    before = _complete(base, tasks) if base else {}
    # Sorted by sample, so that the order in which they were asked for does not reach the bootstrap.
    changes = {
        task: (_points(complete[task]) - _points(before[task]))[np.argsort(tasks[task])]
        for task in complete
        if task in before
    }
    shared = tuple(task for task in changes if task in LONGBENCH or not _has_average(tasks))
    printed = _printed(model, cell.cell)
    scores = {task: task_score([record["scores"]["score"] for record in complete[task]]) for task in complete}
    entries = {}
    for task, ids in tasks.items():
        kept, share = _achieved(complete[task]) if task in complete else (None, None)
        entries[task] = Entry(
            n=len(finished[task]),
            asked=len(ids),
            score=scores.get(task),
            paper=printed.scores.get(task) if printed else None,
            difference=paired_difference([changes[task]], resamples=resamples, seed=seed) if task in changes else None,
            kept=kept,
            share=share,
        )
    difference = None
    if shared:
        difference = paired_difference([changes[task] for task in shared], resamples=resamples, seed=seed)
    everything = [record for records in finished.values() for record in records]
    kept, share = _achieved(everything) if len(complete) == len(tasks) else (None, None)
    entries[AVERAGE] = Entry(
        n=len(everything),
        asked=sum(map(len, tasks.values())),
        score=mean_of_tasks(scores),
        paper=printed.average if printed and _has_average(tasks) else None,
        difference=difference if _has_average(shared) else None,
        kept=kept,
        share=share,
    )
    printed_difference = None
    if printed and shared and set(shared) <= set(LONGBENCH):
        without = _printed(model, base.cell)
        printed_difference = sum(printed.scores[task] - without.scores[task] for task in shared) / len(shared)
    return Row(name, cell.label, entries, shared, difference, printed, printed_difference)


def _has_average(tasks: Collection[str]) -> bool:
    """Whether the 16 tasks that Avg. is taken over are there."""
    return set(LONGBENCH) <= set(tasks)


def _finished(cell: CellResult, ids: Sequence[str]) -> list[Mapping[str, Any]]:
    records = (cell.records.get(sample, {}) for sample in ids)
    return [record for record in records if record.get("status") == "ok"]


def _complete(cell: CellResult, tasks: Mapping[str, Sequence[str]]) -> dict[str, list[Mapping[str, Any]]]:
    """Records of the tasks of which every sample is finished, in the order of the samples."""
    finished = {task: _finished(cell, ids) for task, ids in tasks.items()}
    return {task: records for task, records in finished.items() if len(records) == len(tasks[task])}


def _points(records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([100 * record["scores"]["score"] for record in records])


def _achieved(records: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Tokens stored a layer, and their share of the prompt; means over samples."""
    kept = np.array([np.mean(record["kept"]) for record in records])
    return float(kept.mean()), float((kept / [record["n_prompt"] for record in records]).mean())


def _printed(model: str, cell: Mapping[str, Any]) -> PaperRow | None:
    """The paper's row of a cell: same scorer with the usual options, same budget, GraphKV or not.

    Its k, m and T are not published, and its budget is per query head, so neither is compared.
    """
    name, usual = cell["scorer"]["name"], USUAL.get(cell["scorer"]["name"], {})
    method = name if cell["graphkv"] is None else f"{name}+graphkv"
    same = name == "full" or cell["budget"] == BUDGET
    if not same or any(cell["scorer"].get(option, value) != value for option, value in usual.items()):
        return None
    return paper_rows().get((model, method))


def _gaps(cell: CellResult, base: CellResult | None, tasks: Mapping[str, Sequence[str]]) -> list[str]:
    """What a row lacks, in words."""
    parts = []
    for task, ids in tasks.items():
        lacking = len(ids) - len(_finished(cell, ids))
        failed = sum(cell.records.get(sample, {}).get("status") == "failed" for sample in ids)
        if lacking:
            parts.append(f"{SHORT[task]} {lacking} of {len(ids)}" + (f" ({failed} failed)" if failed else ""))
    gaps = [f"missing samples: {', '.join(parts)}"] if parts else []
    if cell.cell["graphkv"] is not None and base is None:
        gaps.append("no Δ, since the row without GraphKV is not there")
    return gaps
