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

from eval.averages import mean_of_tasks, task_score
from eval.errors import UserError
from eval.longbench import ROWS
from eval.metrics import LONGBENCH, LONGBENCH_E, TASKS
from eval.paper import BUDGET, PaperRow, printed_average_differs
from eval.paper import table1 as paper_rows
from eval.stats import RESAMPLES, Difference, paired_difference
from eval.tables import MISSING

AVERAGE = "avg"

SHORT: dict[str, str] = {
    "narrativeqa": "NrtvQA",
    "qasper": "Qasper",
    "multifieldqa_en": "MF-en",
    "hotpotqa": "HotpotQA",
    "2wikimqa": "2WikiMQA",
    "musique": "Musique",
    "gov_report": "GovReport",
    "qmsum": "QMSum",
    "multi_news": "MultiNews",
    "trec": "TREC",
    "triviaqa": "TriviaQA",
    "samsum": "SAMSum",
    "passage_count": "PCount",
    "passage_retrieval_en": "PRe",
    "lcc": "LCC",
    "repobench-p": "RB-P",
}
"""Column headings; those of LongBench-E end in `-E`."""
SHORT |= {task: f"{SHORT[task.removesuffix('_e')]}-E" for task in LONGBENCH_E}

SCORERS: Mapping[str, str] = {
    "full": "Full",
    "knorm": "KNorm",
    "snapkv": "SnapKV",
    "pyramidkv": "PyramidKV",
    "h2o": "H2O",
    "cake": "CAKE",
}
"""Names in rows, in the order of rows; others follow under their own."""

USUAL: Mapping[str, Mapping[str, Any]] = {
    "knorm": {"window": 0},
    "snapkv": {"window": 32, "kernel": 7, "pooling": "avg", "group": "mean"},
    "pyramidkv": {"window": 32, "kernel": 7, "pooling": "avg", "group": "mean", "beta": 20, "schedule": "official"},
}
"""Options that a row's name leaves out: those of the paper's code base (`group` is ours, it has no KV heads)."""

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
        ordered = sorted(result.cells, key=lambda cell: _order(cell.cell))
        rows = []
        for cell in ordered:
            base = next((other for other in ordered if other.cell == {**cell.cell, "graphkv": None}), None)
            base = None if cell.cell["graphkv"] is None else base
            name = _name(cell.cell, cells)
            rows.append(_row(result.model, name, cell, base, tasks, resamples, seed))
            notes += [f"{result.model}, {name}: {text}" for text in _gaps(cell, base, tasks)]
        blocks[result.model] = tuple(rows)
    return Table1(
        title=_title(results[0].facts, tasks, cells),
        caption=" ".join(_caption(results, tasks, cells, blocks, resamples, seed)),
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


# Names, title, caption ----------------------------------------------------------------------------------------


def _name(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """Scorer and GraphKV, with what sets the row apart: unusual options, and whatever varies between `cells`."""
    scorer = cell["scorer"]
    usual = USUAL.get(scorer["name"], {})
    siblings = [other["scorer"] for other in cells if other["scorer"]["name"] == scorer["name"]]
    parts = {
        option: value
        for option, value in scorer.items()
        if (value != usual[option] if option in usual else _varies(option, siblings))
    }
    if scorer["name"] != "full":
        parts |= {key: cell[key] for key in _settings(cell) if _varies(key, _compressed(cells))}
    name = SCORERS.get(scorer["name"], scorer["name"]) + _bracketed(parts)
    if cell["graphkv"] is None:
        return name
    graphs = [other["graphkv"] for other in cells if other["graphkv"] is not None]
    changed = {option: value for option, value in cell["graphkv"].items() if _varies(option, graphs)}
    return f"{name}+GraphKV{_bracketed(changed)}"


def _settings(cell: Mapping[str, Any]) -> list[str]:
    """Keys of a cell beside scorer and graph: budget, granularity."""
    return sorted(cell.keys() - {"scorer", "graphkv"})


def _compressed(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cells that have a budget."""
    return [cell for cell in cells if cell["scorer"]["name"] != "full"]


def _varies(key: str, dicts: Sequence[Mapping[str, Any]]) -> bool:
    return any(other.get(key) != dicts[0].get(key) for other in dicts)


def _bracketed(parts: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{key} {value}'.replace('_', ' ') for key, value in parts.items())})" if parts else ""


def _order(cell: Mapping[str, Any]) -> tuple:
    """Sorts cells: scorer, its usual options first, budget, and each row with GraphKV after the one without."""
    name, names = cell["scorer"]["name"], list(SCORERS)
    usual = USUAL.get(name, {})
    options = {key: value for key, value in cell["scorer"].items() if value != usual.get(key)}
    settings = {key: cell[key] for key in _settings(cell)}
    rank = names.index(name) if name in names else len(names)
    return rank, name, _sortable(options), _sortable(settings), _sortable(cell["graphkv"] or {})


def _sortable(values: Mapping[str, Any]) -> list[tuple]:
    """Items that compare although a value may be a number, a text or None."""
    return [(key, value is not None, isinstance(value, str), value) for key, value in sorted(values.items())]


def _title(facts: Mapping[str, Any], tasks: Mapping[str, Sequence[str]], cells: Sequence[Mapping[str, Any]]) -> str:
    budgets = {cell["budget"] for cell in _compressed(cells)}
    budget = f", budget {_amount(*budgets)}" if len(budgets) == 1 else ""
    if facts["data"] == "mini":
        return f"Table 1. mini: a test bed, NOT LongBench{budget}"
    if any(len(ids) != ROWS[task] for task, ids in tasks.items()):
        return f"Table 1. A part of LongBench's rows{budget}"
    return f"Table 1. LongBench{budget}"


def _amount(budget: int | float) -> str:
    return f"{budget} tokens a layer" if isinstance(budget, int) else f"{budget:.4g} of the prompt a layer"


def _caption(
    results: Sequence[ModelResults],
    tasks: Mapping[str, Sequence[str]],
    cells: Sequence[Mapping[str, Any]],
    blocks: Mapping[str, Sequence[Row]],
    resamples: int,
    seed: int,
) -> Iterator[str]:
    """Sentences that say what the numbers are, how they were made, and with what they may be compared."""
    facts = results[0].facts
    rows = [row for block in blocks.values() for row in block]
    yield (
        f"Protocol {facts['protocol']}; edit similarity {facts['similarity']}; data {facts['data']}, "
        f"sha256 {facts['data_hash'][:12]}; {_counts(tasks)}."
    )
    for result in results:
        yield _tally(result)
    yield (
        "Scores are 0 to 100: a task's is the mean of its samples, Avg. the mean of the 16 tasks; "
        f"{MISSING}: a sample or task is missing, and nothing is averaged over what is left."
    )
    kinds = sorted({cell["granularity"].replace("_", " ").replace("kv", "KV") for cell in _compressed(cells)})
    yield (
        f"kept: tokens stored a layer (mean over layers and samples{', per ' + ' or '.join(kinds) if kinds else ''}), "
        "the window included; of prompt: their share of it."
    )
    if any(row.difference for row in rows):
        yield (
            "Δ: difference to the row without GraphKV, all else equal, before rounding; last column: that of the mean "
            f"of so many tasks, with its 95 % interval by a paired bootstrap over samples within tasks ({resamples:,} "
            f"resamples, seed {seed}). ≈: not distinguishable from 0 (the interval holds 0, or a task has a single "
            "sample and so no interval)."
        )
    if any(cell["scorer"]["name"] == "knorm" and cell["scorer"].get("window") for cell in cells):
        yield "KNorm with a window is not in the paper: it tells what a protected window does from what the graph does."
    if any(row.printed for row in rows):
        beside = "not comparable with mini; " if facts["data"] == "mini" else ""
        beside += "prompts, cut, stops and edit similarity of its own script, " if facts["protocol"] != "paper" else ""
        yield (
            f"paper: Table 1 of arXiv:2509.00388v1 ({beside}the "
            "budget per query head, k, m and T not published): compare differences, not levels."
        )
    if any(row.entries[AVERAGE].paper and printed_average_differs(row.printed) for row in rows):
        yield "†: the paper's printed average is not the mean of its columns, which Δ is taken from."


def _counts(tasks: Mapping[str, Sequence[str]]) -> str:
    """`200 samples a task (MF-en 150, LCC 500)`."""
    usual = Counter(map(len, tasks.values())).most_common(1)[0][0]
    others = [f"{SHORT[task]} {len(ids)}" for task, ids in tasks.items() if len(ids) != usual]
    noun = "sample" if usual == 1 else "samples"
    return f"{usual} {noun} a task" + (f" ({', '.join(others)})" if others else "")


def _tally(result: ModelResults) -> str:
    """What happened to a model's prompts and results."""
    records = [[cell.records.get(sample, {}) for cell in result.cells] for sample, _ in result.samples]
    truncated = sum(any(record.get("truncated") for record in of_sample) for of_sample in records)
    beyond = sum(any(_overflow(record) for record in of_sample) for of_sample in records)
    failed = sum(record.get("status") == "failed" for of_sample in records for record in of_sample)
    return (
        f"{result.model} ({result.facts['dtype']}): of {len(records)} prompts {truncated} truncated and {beyond} "
        f"beyond the model's positions; of {len(records) * len(result.cells)} results {failed} failed."
    )


def _overflow(record: Mapping[str, Any]) -> bool:
    """Whether prompt and new tokens exceed the model's positions."""
    return (record.get("notes") or {}).get("overflow", 0) > 0
