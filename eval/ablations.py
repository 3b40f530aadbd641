"""The paper's ablations from records: what varies in each figure and table, and the points that it shows.

A line is a base, a cell without graph, and cells that add graphs which differ in one option alone. Lines are found by
what the cells are, never by their order or label. What varies beside the options of a figure, such as the budget, makes
figures of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pandas as pd

from eval import ablation_words as words
from eval.averages import mean_of_tasks, task_score
from eval.cell_results import CellResult, ModelResults, Tasks, achieved, base_of, by_task, changes, complete, finished
from eval.errors import UserError
from eval.metrics import TASKS
from eval.paper import ablation as printed
from eval.records import key_of
from eval.stats import RESAMPLES, Comparison, compare, corrected
from eval.table1_words import bracketed, order
from eval.table1_words import name as cell_name

BASE = "no graph"
"""Series and setting of a base."""
MEAN = "mean"
"""Panel of the mean over all tasks."""


@dataclass(frozen=True)
class Design:
    """What a figure or table of the paper varies and compares.

    Attributes
    ----------
    number, title
        In the paper, and what it is about.
    options
        The options of the graph that vary, one at a time.
    panels
        What has a panel, or a column, of its own: a `category` of tasks, a `scorer`, or a `task`.
    table
        A table, with the mean over its tasks; else a figure.
    """

    number: str
    title: str
    options: tuple[str, ...]
    panels: Literal["category", "scorer", "task"]
    table: bool = False


DESIGNS: Mapping[str, Design] = {
    "fig5": Design("Fig. 5", "Number of sources and neighbours", ("source_ratio", "neighbors"), "category"),
    "fig6": Design("Fig. 6", "Rounds of propagation", ("rounds",), "scorer"),
    "fig8": Design("Fig. 8", "What a source and its neighbours are compared by", ("edge",), "task"),
    "table2": Design("Table 2", "What neighbours receive", ("signal",), "task", table=True),
    "table6": Design("Table 6", "Sources and neighbours by task", ("source_ratio", "neighbors"), "task", table=True),
}
"""By artifact."""

AXES: Mapping[str, str] = {
    "source_ratio": "sources k (share of the budget)",
    "neighbors": "neighbours m of a source",
    "rounds": "rounds T",
    "edge": "source–neighbour",
    "signal": "signal",
}
"""What an option is called along an axis."""

_FIXED = "fixed m"
_NAMED = {"edge": ("qq", "qk", "kk", "kv", "vv"), "signal": ("decay", "enhance", "evict")}


class Place(NamedTuple):
    """Where a value of an option stands.

    Attributes
    ----------
    position
        Along the axis: the number itself, or its place among the names.
    tick, name
        On the axis, and in a table.
    series
        What it is drawn with.
    """

    position: float
    tick: str
    name: str
    series: str = "GraphKV"


def place(option: str, value: Any) -> Place:
    """The place of a value of one of `AXES`."""
    match option:
        case "neighbors" if value == "all":
            return Place(math.inf, "all", "m = all", _FIXED)
        case "neighbors" if isinstance(value, str):
            cap = re.search(r"\d+", value)[0]
            return Place(float(cap), cap, f"m = min({cap}, L)", "min(m, L)")
        case "neighbors":
            return Place(float(value), str(value), f"m = {value}", _FIXED)
        case "source_ratio":
            return Place(float(value), f"{value:g}", f"k = {value:g} B")
        case "rounds":
            return Place(float(value), str(value), f"T = {value}")
        case "edge":
            return Place(float(_NAMED[option].index(value)), "–".join(value), "–".join(value))
    return Place(float(_NAMED[option].index(value)), value, value)


@dataclass(frozen=True)
class Line:
    """A base and its variants.

    Attributes
    ----------
    option
        What varies.
    settings, rest
        What the cells have in common: their settings beside the graph, and the graph's other options.
    base
        None where it was not run.
    cells
        Value of the option → cell.
    """

    option: str
    settings: Mapping[str, Any]
    rest: Mapping[str, Any]
    base: CellResult | None
    cells: Mapping[Any, CellResult]


@dataclass(frozen=True)
class Ablation:
    """One figure or table before it is laid out.

    Attributes
    ----------
    name, model, design
        The artifact, whose results they are, and what is shown.
    title, caption
        What a reader must know to compare it with another one.
    facts
        Of the results.
    points
        A row a point: `panel`, `option`, `series`, `setting`, `x` (along the axis), `position`, `row` (name in a
        table), `scorer`, `label` (of the cell), `tasks`; `score` (0..100, NaN where a sample is missing), `n` and
        `asked`; `baseline`; `difference` to it, `low` and `high` in points; `better`, `worse`, `p_sign`, `p_holm`,
        `detectable` and `mark` of `eval.stats.Comparison`; `kept` and `of_prompt`; `paper`, `paper_difference`. A base
        has a row in each panel.
    """

    name: str
    model: str
    design: Design
    title: str
    caption: str
    facts: Mapping[str, Any]
    points: pd.DataFrame


def build(result: ModelResults, name: str, *, resamples: int = RESAMPLES, seed: int = 0) -> list[Ablation]:
    """The figures or tables of one model's records.

    Parameters
    ----------
    result
        Of LongBench.
    name
        A key of `DESIGNS`.
    resamples, seed
        Of the bootstrap.

    Returns
    -------
    list of Ablation
        One for each setting (scorer, budget, …; with a panel a scorer: budget, …) that is not what varies.

    Raises
    ------
    UserError
        If no option of the design takes two values.
    """
    design, tasks = DESIGNS[name], by_task(result.samples)
    together: dict[str, list[Line]] = {}
    for option in design.options:
        for line in lines_of(result.cells, option):
            apart = {key: value for key, value in line.settings.items() if design.panels != "scorer" or key != "scorer"}
            together.setdefault(key_of(apart), []).append(line)
    if not together:
        raise UserError(
            f"artifact={name} shows what {' and '.join(design.options)} of the graph change, but no two cells differ "
            "in one of them alone; the records are stored"
        )
    return [_ablation(result, name, lines, tasks, resamples, seed) for lines in together.values()]


def lines_of(cells: Sequence[CellResult], option: str) -> list[Line]:
    """The lines of an option that have at least two points besides the base, in the order of Table 1's rows."""
    found: dict[str, dict[Any, CellResult]] = {}
    for cell in sorted(cells, key=lambda cell: order(cell.cell)):
        if graph := cell.cell["graphkv"]:
            found.setdefault(key_of({**cell.cell, "graphkv": {**graph, option: None}}), {})[graph[option]] = cell
    lines = []
    for by_value in found.values():
        places = {value: place(option, value) for value in by_value}
        values = sorted(by_value, key=lambda value: (places[value].series == _FIXED, places[value].position))
        first = by_value[values[0]]
        settings = {key: value for key, value in first.cell.items() if key != "graphkv"}
        rest = {key: value for key, value in first.cell["graphkv"].items() if key != option}
        if len(values) > 1:
            ordered = {value: by_value[value] for value in values}
            lines.append(Line(option, settings, rest, base_of(first, cells), ordered))
    return lines


def _ablation(
    result: ModelResults, name: str, lines: Sequence[Line], tasks: Tasks, resamples: int, seed: int
) -> Ablation:
    design = DESIGNS[name]
    settings = [{**line.settings, "graphkv": None} for line in lines]
    rows: list[dict[str, Any]] = []
    for line in lines:
        suffix = _suffix(line, lines)
        scorer = cell_name({**line.settings, "graphkv": None}, settings)
        for panel, within in _panels(design, tasks, scorer):
            rows += _points(name, line, panel, within, suffix, resamples, seed)
    points = pd.DataFrame(rows)
    return Ablation(
        name=name,
        model=result.model,
        design=design,
        title=words.title(design, lines[0].settings, result, tasks),
        caption=" ".join(words.caption(name, design, result, lines, tasks, points, resamples, seed)),
        facts=result.facts,
        points=points,
    )


def _suffix(line: Line, lines: Sequence[Line]) -> str:
    """What tells a line from others of the same option and base."""
    others = [other.rest for other in lines if (other.option, other.settings) == (line.option, line.settings)]
    varying = {key: value for key, value in line.rest.items() if any(other[key] != value for other in others)}
    return bracketed(varying)


def _panels(design: Design, tasks: Tasks, scorer: str) -> Iterator[tuple[str, Tasks]]:
    """Name of each panel of a line, and the tasks that it is the mean of."""
    if design.panels == "scorer":
        yield scorer, tasks
    elif design.panels == "category":
        for category in dict.fromkeys(TASKS[task].category for task in tasks):
            yield category, {task: ids for task, ids in tasks.items() if TASKS[task].category == category}
    else:
        for task, ids in tasks.items():
            yield task, {task: ids}
        if design.table and len(tasks) > 1:
            yield MEAN, tasks


def _points(
    name: str, line: Line, panel: str, tasks: Tasks, suffix: str, resamples: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Rows of a line in a panel, the base first; Holm's family is the line's settings in the panel."""
    compared = [_compared(cell, line.base, tasks, resamples, seed) for cell in line.cells.values()]
    baseline = _score(line.base, tasks) if line.base else math.nan
    common = {
        "panel": panel,
        "option": line.option,
        "scorer": line.settings["scorer"]["name"],
        "tasks": " ".join(tasks),
        "baseline": baseline,
    }
    if line.base:
        start = 0.0 if line.option == "rounds" else math.nan
        where = {"series": BASE, "setting": "none", "x": "0" if start == 0 else "", "position": start, "row": BASE}
        yield common | where | _numbers(line.base, tasks, None) | _paper(name, line, "none", panel, tasks)
    for (value, cell), found in zip(line.cells.items(), corrected(compared), strict=True):
        at = place(line.option, value)
        where = {
            "series": at.series + suffix,
            "setting": str(value),
            "x": at.tick,
            "position": at.position,
            "row": at.name + suffix,
        }
        setting = str(float(value)) if line.option == "source_ratio" else str(value)
        yield common | where | _numbers(cell, tasks, found) | _paper(name, line, setting, panel, tasks)


def _compared(cell: CellResult, base: CellResult | None, tasks: Tasks, resamples: int, seed: int) -> Comparison | None:
    """The comparison with the base; None where a sample of either is missing."""
    found = changes(cell, base, tasks)
    if len(found) < len(tasks):
        return None
    return compare([found[task] for task in tasks], resamples=resamples, seed=seed)


def _score(cell: CellResult, tasks: Tasks) -> float:
    """Mean of the tasks' scores; NaN where a sample is missing."""
    scores = {
        task: task_score([record["scores"]["score"] for record in records])
        for task, records in complete(cell, tasks).items()
    }
    mean = mean_of_tasks(scores, tasks)
    return math.nan if mean is None else mean


def _numbers(cell: CellResult, tasks: Tasks, found: Comparison | None) -> dict[str, Any]:
    done = [record for ids in tasks.values() for record in finished(cell, ids)]
    asked = sum(map(len, tasks.values()))
    kept, share = achieved(done) if len(done) == asked else (math.nan, math.nan)
    return {
        "label": cell.label,
        "score": _score(cell, tasks),
        "n": len(done),
        "asked": asked,
        "difference": found.difference.difference if found else math.nan,
        "low": _number(found and found.difference.low),
        "high": _number(found and found.difference.high),
        "better": _number(found and found.sign.better),
        "worse": _number(found and found.sign.worse),
        "p_sign": _number(found and found.sign.p),
        "p_holm": _number(found and found.p_holm),
        "detectable": _number(found and found.detectable),
        "mark": found.mark if found else "",
        "kept": kept,
        "of_prompt": share,
    }


def _paper(name: str, line: Line, setting: str, panel: str, tasks: Tasks) -> dict[str, float]:
    """The paper's number of a point, and its difference to the paper's base; NaN where there is none."""
    scorer = line.settings["scorer"]["name"]
    task = "avg" if panel == MEAN else next(iter(tasks))
    if len(tasks) != (10 if task == "avg" else 1):
        return {"paper": math.nan, "paper_difference": math.nan}
    here, base = (_number(printed(name, scorer, value, task)) for value in (setting, "none"))
    return {"paper": here, "paper_difference": math.nan if setting == "none" else here - base}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
