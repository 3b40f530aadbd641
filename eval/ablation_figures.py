"""The ablations' figures: scores along what varies, each with the interval of its difference to the base."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from eval.ablations import AXES, BASE, Ablation
from eval.figures import save, wrap
from eval.records import write_atomically
from eval.style import COLOURS, MARKERS, MISSING, PAPER, RC
from eval.table1_words import SHORT

_WIDTH, _HEIGHT = 2.2, 2.0  # inches of a panel
_LEAST_WIDTH = 6.0
_MOST_COLUMNS = 5
_LEAST_RANGE = 2.0  # points that a score axis spans, so that equal scores do not look like different ones
_NUMBERS = ("source_ratio", "rounds")  # options whose axis is to scale; the others' points stand side by side
_BASE_LINE = {"color": "black", "linestyle": (0, (4, 2)), "linewidth": 0.9}


def write(ablation: Ablation, stem: Path) -> list[Path]:
    """Write `<stem>.png`, `<stem>.pdf` and `<stem>.csv`, a line a point."""
    paths = [*save(draw(ablation), stem), Path(f"{stem}.csv")]
    write_atomically(paths[-1], as_csv(ablation))
    return paths


def as_csv(ablation: Ablation) -> str:
    """The points, each with what it depends on beside its own columns."""
    facts = {key: ablation.facts[key] for key in ("dtype", "protocol", "similarity", "data", "data_hash")}
    first = pd.DataFrame({"artifact": ablation.name, "model": ablation.model}, index=ablation.points.index)
    return pd.concat([first, ablation.points.assign(**facts)], axis=1).to_csv(index=False, float_format="%.6g")


@matplotlib.rc_context(RC)
def draw(ablation: Ablation) -> Figure:
    """The figure, not yet saved."""
    options, panels = (list(dict.fromkeys(ablation.points[key])) for key in ("option", "panel"))
    n_columns = min(len(panels), _MOST_COLUMNS)
    n_rows = len(options) * math.ceil(len(panels) / n_columns)
    width = max(n_columns * _WIDTH, _LEAST_WIDTH)
    title, caption = wrap(ablation.title, width - 0.2, 10), wrap(ablation.caption, width - 0.2, 7)
    height = n_rows * _HEIGHT + 0.17 * len(title) + 0.12 * len(caption) + 0.5
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False, sharey=ablation.design.panels == "scorer")
    styles = _styles(ablation.points)
    # Each option begins a row.
    rows = np.split(grid, len(options))
    for option, axes in zip(options, rows, strict=True):
        for number, (panel, ax) in enumerate(zip(panels, axes.flat, strict=False)):
            points = ablation.points.query("option == @option and panel == @panel")
            _draw_panel(ax, points, option, styles)
            ax.set_title(_title(panel, points))
            ax.set_xlabel(AXES[option])
            ax.set_ylabel("score" if number % n_columns == 0 else "")
        for ax in axes.flat[len(panels) :]:
            ax.remove()
    for ax in figure.axes:
        _widen(ax)
    handles = list(_legend(ablation.points, styles))
    # The title is the legend's: a title of the figure would be drawn over a legend outside of the panels.
    bold = {"weight": "bold", "size": 10}
    where = {"loc": "outside upper center", "ncols": len(handles)}
    legend = figure.legend(handles=handles, title="\n".join(title), title_fontproperties=bold, **where)
    legend.get_title().set_multialignment("center")
    figure.supxlabel("\n".join(caption), fontsize=7, color="0.25")
    return figure


def _title(panel: str, points: pd.DataFrame) -> str:
    lines = [SHORT.get(panel, panel)]
    if panel not in SHORT:
        lines.append(", ".join(SHORT[task] for task in points["tasks"].iloc[0].split()))
    if points["baseline"].isna().all():
        lines.append("(no graph: missing)")
    return "\n".join(lines)


def _widen(ax: Axes) -> None:
    """Make the score axis span `_LEAST_RANGE` at least, after all panels that share it were drawn."""
    low, high = ax.get_ylim()
    if high - low < _LEAST_RANGE:
        ax.set_ylim((low + high - _LEAST_RANGE) / 2, (low + high + _LEAST_RANGE) / 2)


def _draw_panel(ax: Axes, points: pd.DataFrame, option: str, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """The lines of an option and their base."""
    base, variants = points[points["series"] == BASE], points[points["series"] != BASE]
    values = sorted(set(variants["position"]))
    at = {value: value if option in _NUMBERS else float(number) for number, value in enumerate(values)}
    step = float(min(np.diff(sorted(at.values())), default=1.0))
    for baseline in set(base["score"].dropna()):
        ax.axhline(baseline, **_BASE_LINE)
    start = base.dropna(subset="position")
    ax.plot(start["position"], start["score"], color="black", marker="o", markersize=4, linestyle="none")
    names = list(dict.fromkeys(variants["series"]))
    for number, name in enumerate(names):
        series = variants[variants["series"] == name]
        x = series["position"].map(at) + 0.2 * step * (number - (len(names) - 1) / 2)
        _draw_series(ax, x, series, styles[name], joined=option != "edge")
        ax.plot(x + 0.12 * step, series["baseline"] + series["paper_difference"], **PAPER)
        _hatch(ax, x[series["score"].isna()], 0.2 * step)
    _hatch(ax, start["position"][start["score"].isna()], 0.2 * step)
    ticks = dict(zip([*start["position"], *variants["position"].map(at)], [*start["x"], *variants["x"]], strict=True))
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.set_xlim(min(ticks) - 0.5 * step, max(ticks) + 0.5 * step)
    ax.margins(y=0.12)


def _draw_series(ax: Axes, x: pd.Series, series: pd.DataFrame, style: Mapping[str, Any], *, joined: bool) -> None:
    """Scores with the intervals of their differences; filled where a difference survives."""
    if joined:
        ax.plot(x, series["score"], color=style["color"], linewidth=0.7, alpha=0.6)
    # Rounding may put an end on the wrong side of the difference.
    bars = np.array([series["difference"] - series["low"], series["high"] - series["difference"]]).clip(min=0)
    survives = series["mark"] == "**"
    for chosen, face in ((survives, style["color"]), (~survives, "white")):
        ax.errorbar(
            x[chosen],
            series["score"][chosen],
            yerr=bars[:, chosen],
            linestyle="none",
            linewidth=1.0,
            capsize=2.5,
            markerfacecolor=face,
            **style,
        )


def _hatch(ax: Axes, places: pd.Series, width: float) -> None:
    """Mark where a score is missing, over the whole height."""
    for x in places:
        corner = (x - width / 2, 0)
        look = {"facecolor": "white", "edgecolor": MISSING, "hatch": "/////", "linewidth": 0}
        ax.add_patch(Rectangle(corner, width, 1, transform=ax.get_xaxis_transform(), **look))


def _styles(points: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Colour and marker of each series, the same in all panels."""
    names = dict.fromkeys(points["series"][points["series"] != BASE])
    return {
        name: {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        for number, name in enumerate(names)
    }


def _legend(points: pd.DataFrame, styles: Mapping[str, Mapping[str, Any]]) -> Iterator[Artist]:
    yield Line2D([], [], label=BASE, **_BASE_LINE)
    for name, style in styles.items():
        yield Line2D([], [], label=name, linewidth=0.7, markerfacecolor="white", **style)
    if points["paper_difference"].notna().any():
        yield Line2D([], [], label="paper's difference", **PAPER)
