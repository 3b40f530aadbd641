"""Fig. 4: heat maps of the needle scores, the difference that the graph makes to each scorer, and the paper's means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval import table1_words as words
from eval.cell_results import base_of
from eval.figures import Panels, needle_heatmap
from eval.paper import SOURCES, ablation
from eval.records import write_atomically
from eval.stats import RESAMPLES, Comparison, compare, corrected
from eval.tables import MISSING

BUDGET = 128
"""Tokens a layer in the paper's figure; its means stand beside cells of this budget."""


@dataclass(frozen=True)
class NeedleCell:
    """The needle scores of one cell.

    Attributes
    ----------
    label, cell
        Short name, and what decides which tokens are kept, as `CellSettings.describe` has it.
    scores
        A row a sample that was asked for: `sample`, `length` and `depth`, and `score` and `kept` (tokens a layer), NaN
        where there is no result.
    """

    label: str
    cell: Mapping[str, Any]
    scores: pd.DataFrame


@dataclass(frozen=True)
class Fig4:
    """The figure before it is drawn.

    Attributes
    ----------
    score
        Which score is shown.
    panels
        For `eval.figures.needle_heatmap`.
    title, caption
        What it is, and all that a reader must know to compare it with another one.
    means
        Texts, a row a panel: mean, finished samples, tokens kept, the difference to no graph, the paper's mean.
    points
        A row a sample and panel, with the facts of the run.
    """

    score: str
    panels: Panels
    title: str
    caption: str
    means: pd.DataFrame
    points: pd.DataFrame


def build(
    cells: Sequence[NeedleCell], score: str, facts: Mapping[str, Any], *, resamples: int = RESAMPLES, seed: int = 0
) -> Fig4:
    """The figure of one model.

    Parameters
    ----------
    cells
        In any order.
    score
        Which of the needle scores their `score` is.
    facts
        `model`, `dtype` and `data_hash`, and whatever else the CSV is to say; a text or number each.
    resamples, seed
        Of the bootstrap.
    """
    ordered = sorted(cells, key=lambda cell: words.order(cell.cell))
    settings = [cell.cell for cell in ordered]
    names = [words.name(cell.cell, settings) for cell in ordered]
    pairs = {name: (cell, base_of(cell, ordered)) for name, cell in zip(names, ordered, strict=True)}
    compared = {name: _compared(cell, base, resamples, seed) for name, (cell, base) in pairs.items() if base}
    differences = dict(zip(compared, corrected(list(compared.values())), strict=True))
    panels, means, points = [], [], []
    for name, cell in zip(names, ordered, strict=True):
        paper = _paper(cell.cell, score)
        panels.append((name if paper is None else f"{name} (paper {paper:.2f})", cell.scores))
        means.append(_mean(name, cell.scores, differences.get(name), paper))
        points.append(cell.scores.assign(panel=name, label=cell.label, paper=paper, **facts))
    budgets = {cell["budget"] for cell in settings if cell["scorer"]["name"] != "full"}
    return Fig4(
        score=score,
        panels=panels,
        title="Fig. 4. Needle in a haystack" + (f": {words.amount(*budgets)}" if len(budgets) == 1 else ""),
        caption=" ".join(_caption(ordered, names, score, facts, differences, resamples, seed)),
        means=pd.DataFrame(means),
        points=pd.concat(points, ignore_index=True),
    )


def write(figure: Fig4, stem: Path) -> list[Path]:
    """Write `<stem>.png`, `<stem>.pdf` and `<stem>.csv`, a line a sample and panel."""
    paths = needle_heatmap(figure.panels, stem, figure.title, score=figure.score, caption=figure.caption)
    table = Path(f"{stem}.csv")
    first = ["model", "panel", "label", "sample", "length", "depth", "score", "kept", "paper"]
    rest = [column for column in figure.points if column not in first]
    write_atomically(table, figure.points[first + rest].to_csv(index=False, float_format="%.6g"))
    return [*paths, table]


def _compared(cell: NeedleCell, base: NeedleCell, resamples: int, seed: int) -> Comparison | None:
    after, before = (found.scores.set_index("sample")["score"].sort_index() for found in (cell, base))
    if after.isna().any() or before.isna().any():
        return None
    return compare([after - before], resamples=resamples, seed=seed)


def _paper(cell: Mapping[str, Any], score: str) -> float | None:
    """The paper's mean, as a share; it is a share of words found, as `overlap` is."""
    if score != "overlap" or cell["budget"] != BUDGET:
        return None
    found = ablation("fig4", cell["scorer"]["name"], "none" if cell["graphkv"] is None else "graphkv", "needle")
    return None if found is None else found / 100


def _mean(name: str, scores: pd.DataFrame, found: Comparison | None, paper: float | None) -> dict[str, str]:
    """A row of `Fig4.means`; no mean over what is left where a sample is missing."""
    whole = scores["score"].notna().all()
    return {
        "cell": name,
        "mean": f"{scores['score'].mean():.3f}" if whole else MISSING,
        "samples": f"{scores['score'].count()}/{len(scores)}",
        "kept": f"{scores['kept'].mean():.1f}" if whole else MISSING,
        "Δ": _words(found) if found else "",
        "paper": "" if paper is None else f"{paper:.3f}",
    }


def _caption(
    cells: Sequence[NeedleCell],
    names: Sequence[str],
    score: str,
    facts: Mapping[str, Any],
    differences: Mapping[str, Comparison | None],
    resamples: int,
    seed: int,
) -> Iterator[str]:
    kept = ", ".join(
        f"{name} {cell.scores['kept'].mean():.1f}"
        for name, cell in zip(names, cells, strict=True)
        if cell.scores["kept"].notna().all()
    )
    yield (
        f"{facts['model']} ({facts['dtype']}); data sha256 {facts['data_hash'][:12]}; {len(cells[0].scores)} samples a "
        f"panel; colour: {score}. Tokens stored a layer: {kept}."
    )
    told = {name: found for name, found in differences.items() if found}
    if told:
        listed = "; ".join(f"{name} {_words(found)}" for name, found in told.items())
        yield (
            f"Difference of the mean to no graph: {listed} (95 % interval by a paired bootstrap over samples, "
            f"{resamples:,} resamples, seed {seed}). {words.marks('figure')}"
        )
    if any(_paper(cell.cell, score) is not None for cell in cells):
        yield f"paper: {SOURCES['fig4']} of arXiv:2509.00388v1; other texts, lengths and needles."


def _words(found: Comparison) -> str:
    change = found.difference
    ends = MISSING if change.low is None else f"{change.low:+.2f}, {change.high:+.2f}"
    return f"{change.difference:+.2f} [{ends}] {found.mark}"
