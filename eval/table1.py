"""Table 1: tasks × methods of one or more models, with the paper's numbers and what GraphKV changes.

`build` computes everything once from the records; `eval.table1_render` lays it out. Rows find their base row
and the paper's row by what their cell is, never by where it stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval import table1_words as words
from eval.averages import mean_of_tasks, task_score
from eval.cell_results import CellResult, ModelResults, achieved, base_of, by_task, changes, complete, finished
from eval.errors import UserError
from eval.metrics import LONGBENCH, TASKS
from eval.paper import BUDGET, PaperRow
from eval.paper import table1 as paper_rows
from eval.stats import RESAMPLES, Comparison, Difference, compare, corrected, paired_difference
from eval.table1_words import AVERAGE, USUAL

_SAME = ("protocol", "similarity", "data", "data_hash")


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
    comparison
        With the base row, of the mean of the `shared` tasks; Holm's family is all rows of the table that have one.
    printed, printed_difference
        The paper's row, and its difference to its base row over the `shared` tasks.
    """

    name: str
    label: str
    entries: Mapping[str, Entry]
    shared: tuple[str, ...]
    comparison: Comparison | None
    printed: PaperRow | None
    printed_difference: float | None

    @property
    def difference(self) -> Difference | None:
        """Of the mean of the `shared` tasks; it is that of Avg. where they are the 16."""
        return self.comparison and self.comparison.difference


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
            base = base_of(cell, ordered)
            name = words.name(cell.cell, cells)
            rows.append(_row(result.model, name, cell, base, tasks, resamples, seed))
            notes += [f"{result.model}, {name}: {text}" for text in _gaps(cell, base, tasks)]
        blocks[result.model] = rows
    blocks = _corrected(blocks)
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
    return by_task(first.samples)


def _corrected(blocks: Mapping[str, Sequence[Row]]) -> dict[str, tuple[Row, ...]]:
    """The rows with Holm's correction over all of them."""
    found = iter(corrected([row.comparison for rows in blocks.values() for row in rows]))
    return {model: tuple(replace(row, comparison=next(found)) for row in rows) for model, rows in blocks.items()}


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
    whole, changed = complete(cell, tasks), changes(cell, base, tasks)
    shared = tuple(task for task in changed if task in LONGBENCH or not _has_average(tasks))
    printed = _printed(model, cell.cell)
    scores = {task: task_score([record["scores"]["score"] for record in whole[task]]) for task in whole}
    entries = {}
    for task, ids in tasks.items():
        kept, share = achieved(whole[task]) if task in whole else (None, None)
        entries[task] = Entry(
            n=len(finished(cell, ids)),
            asked=len(ids),
            score=scores.get(task),
            paper=printed.scores.get(task) if printed else None,
            difference=paired_difference([changed[task]], resamples=resamples, seed=seed) if task in changed else None,
            kept=kept,
            share=share,
        )
    found = compare([changed[task] for task in shared], resamples=resamples, seed=seed) if shared else None
    everything = [record for ids in tasks.values() for record in finished(cell, ids)]
    kept, share = achieved(everything) if len(whole) == len(tasks) else (None, None)
    entries[AVERAGE] = Entry(
        n=len(everything),
        asked=sum(map(len, tasks.values())),
        score=mean_of_tasks(scores),
        paper=printed.average if printed and _has_average(tasks) else None,
        difference=found.difference if _has_average(shared) else None,
        kept=kept,
        share=share,
    )
    printed_difference = None
    if printed and shared and set(shared) <= set(LONGBENCH):
        without = _printed(model, base.cell)
        printed_difference = sum(printed.scores[task] - without.scores[task] for task in shared) / len(shared)
    return Row(name, cell.label, entries, shared, found, printed, printed_difference)


def _has_average(tasks: Collection[str]) -> bool:
    """Whether the 16 tasks that Avg. is taken over are there."""
    return set(LONGBENCH) <= set(tasks)


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
    lacking = words.lacking(cell, tasks)
    gaps = [f"missing samples: {lacking}"] if lacking else []
    if cell.cell["graphkv"] is not None and base is None:
        gaps.append("no Δ, since the row without GraphKV is not there")
    return gaps
