"""What the ablations' figures and tables are called, and what their captions say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from eval import table1_words as words
from eval.cell_results import ModelResults, Tasks
from eval.paper import SOURCES
from eval.tables import MISSING

if TYPE_CHECKING:
    from eval.ablations import Design, Line

_MOST_GAPS = 4  # cells that a caption names
FAMILY = "column and block"
"""What Holm's correction is over, in words: the cells of a line, in one panel."""


def title(design: Design, settings: Mapping[str, Any], result: ModelResults, tasks: Tasks) -> str:
    """`Fig. 5. Number of sources and neighbours: SnapKV, 512 tokens a layer. LongBench`."""
    cell = {**settings, "graphkv": None}
    # As if all had this budget, which is told anyway.
    cells = [{**other.cell, "budget": settings["budget"]} for other in result.cells]
    parts = [words.amount(settings["budget"])]
    if design.panels != "scorer":
        parts.insert(0, words.name(cell, cells))
    elif varying := words.varying_settings(cell, cells):
        parts.append(words.bracketed(varying).strip())
    return f"{design.number}. {design.title}: {', '.join(parts)}. {words.data(result.facts, tasks)}"


def caption(
    name: str,
    design: Design,
    result: ModelResults,
    lines: Sequence[Line],
    tasks: Tasks,
    points: pd.DataFrame,
    resamples: int,
    seed: int,
) -> Iterator[str]:
    """Sentences that say what the numbers are, how they were made, and with what they may be compared."""
    cells = {cell.label: cell for line in lines for cell in (line.base, *line.cells.values()) if cell}
    yield words.tally(ModelResults(result.model, result.facts, result.samples, list(cells.values())))
    yield words.origin(result.facts, tasks)
    yield f"Score: 0 to 100, {_mean(design, tasks)}."
    if "source_ratio" in design.options:
        yield "k: share of a layer's budget B without window. L: thousands of prompt tokens, rounded down, at least 1."
    yield f"Tokens stored a layer (mean over layers and samples{_heads(lines)}), window included: {_kept(points)}."
    if points["difference"].notna().any():
        yield from _intervals(design, points, resamples, seed)
        found = points["detectable"].dropna()
        yield from words.power(found.tolist())
        yield from words.few(tasks)
    if points["paper"].notna().any():
        mini = "; not comparable with mini" if result.facts["data"] == "mini" else ""
        how = (
            "paper"
            if design.table
            else "Diamonds: the paper's difference to its own run without graph, drawn from ours"
        )
        yield f"{how}: {SOURCES[name]} of arXiv:2509.00388v1{mini}."
    gaps = [f"{label}: {lacking}" for label, cell in cells.items() if (lacking := words.lacking(cell, tasks))]
    if gaps:
        shown = MISSING if design.table else "hatched"
        more = f"; and {len(gaps) - _MOST_GAPS} more cells" if len(gaps) > _MOST_GAPS else ""
        listed = "; ".join(gaps[:_MOST_GAPS])
        yield f"Missing samples ({shown}; nothing is averaged over what is left): {listed}{more}."


def _mean(design: Design, tasks: Tasks) -> str:
    if design.panels == "task":
        return "a task's is the mean of its samples, mean that of the tasks" if design.table else "mean of the samples"
    if len(tasks) == 1:
        return f"mean of the samples of {words.SHORT[next(iter(tasks))]}"
    return f"mean of the scores of {', '.join(words.SHORT[task] for task in tasks)}"


def _heads(lines: Sequence[Line]) -> str:
    return ", per query head" if lines[0].settings["granularity"] == "query_head" else ", per KV head"


def _kept(points: pd.DataFrame) -> str:
    """`SnapKV 512.0, PyramidKV 518.5`."""
    kept = points.groupby("scorer", sort=False)["kept"]
    return ", ".join(f"{words.SCORERS.get(scorer, scorer)} {span(amounts)}" for scorer, amounts in kept)


def span(amounts: pd.Series) -> str:
    """`512.0`, or `500.1 to 512.0` where they differ; what is missing is left out."""
    return " to ".join(dict.fromkeys(MISSING if pd.isna(x) else f"{x:.1f}" for x in (amounts.min(), amounts.max())))


def _intervals(design: Design, points: pd.DataFrame, resamples: int, seed: int) -> Iterator[str]:
    bootstrap = f"paired bootstrap over samples within tasks, {resamples:,} resamples, seed {seed}"
    if design.table:
        yield f"Δ: difference to no graph, with its 95 % interval ({bootstrap}). {words.marks(FAMILY)}"
    elif points["low"].notna().any():
        yield (
            "Dashed: no graph. Bars: the 95 % interval of the paired difference to the dashed line, measured from it "
            f"({bootstrap}); a bar that crosses the line is a difference that cannot be told from 0. Filled: the "
            "difference also survives Holm's correction over the settings of a line (exact sign test over the same "
            "samples, ties left out, p < 0.05)."
        )
    else:
        yield "Dashed: no graph. No intervals: a task has a single sample, which says nothing about the spread."
