"""Drawings of key cosines (Fig. 2) and of principal components (Fig. 7), from frames of numbers."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from eval.figures import wrap
from eval.style import CMAP, COLOURS, MISSING, RC

_SETS = {
    "all": {"color": MISSING, "linestyle": ":"},
    "kept before": {"color": COLOURS[1], "linestyle": "--"},
    "kept after": {"color": COLOURS[0], "linestyle": "-"},
}


@matplotlib.rc_context(RC)
def heat_maps(maps: pd.DataFrame, pairs: pd.DataFrame, means: pd.DataFrame, top: int, caption: str) -> Figure:
    """Fig. 2: one row a layer with three heat maps on one colour scale and the distributions of pairs.

    Parameters
    ----------
    maps
        layer, panel (`all`, `top before`, `top after`), row, column (positions, row ≤ column), cosine.
    pairs
        layer, set (`all`, `kept before`, `kept after`), low, high, share: the share of the set's pairs in each bin.
    means
        layer, set, mean_cosine: what titles and legends say; sets of both frames.
    top
        How many tokens `top` stands for.
    caption
        Written below.

    Returns
    -------
    Figure
        Four axes a layer in the order above; the last axes is the colour scale.
    """
    layers = list(dict.fromkeys(maps["layer"]))
    figure = Figure(figsize=(9.4, 2.4 * len(layers) + 1), layout="constrained")
    axes = figure.subplots(len(layers), 4, squeeze=False)
    lowest = math.floor(10 * maps["cosine"].min()) / 10
    scale = ScalarMappable(Normalize(lowest, 1), CMAP)
    titles = {"all": "all past tokens", "top before": f"top {top} before", "top after": f"top {top} after"}
    for layer, row in zip(layers, axes, strict=True):
        mean = means[means["layer"] == layer].set_index("set")["mean_cosine"]
        for ax, (panel, title) in zip(row, titles.items(), strict=False):
            _draw_map(ax, maps[(maps["layer"] == layer) & (maps["panel"] == panel)], scale, sparse=panel == "all")
            ax.set_title(f"{title}\nmean cosine {mean[panel]:.3f}")
        stay = len(np.intersect1d(*(_positions(maps, layer, panel) for panel in ("top before", "top after"))))
        row[2].set_title(f"{titles['top after']}, {stay} stay\nmean cosine {mean['top after']:.3f}")
        row[0].set_ylabel(f"layer {layer}\nposition")
        _draw_pairs(row[3], pairs[pairs["layer"] == layer], mean)
    for ax in axes[-1, :3]:
        ax.set_xlabel("position")
    axes[-1, 3].set_xlabel("cosine of two keys")
    figure.align_xlabels(axes[-1, :3])
    bar = figure.colorbar(scale, ax=list(axes[:, :3].ravel()), label="cosine", aspect=30, fraction=0.03, pad=0.01)
    bar.outline.set_visible(False)
    _write_below(figure, caption)
    return figure


def _positions(maps: pd.DataFrame, layer: int, panel: str) -> np.ndarray:
    return maps.loc[(maps["layer"] == layer) & (maps["panel"] == panel), "row"].unique()


def _draw_map(ax: Axes, cosines: pd.DataFrame, scale: ScalarMappable, sparse: bool) -> None:
    """One heat map; every position is labelled, or with `sparse` a few of them."""
    positions = np.unique(cosines["row"])
    place = {position: index for index, position in enumerate(positions)}
    image = np.empty((len(positions), len(positions)))
    row, column = cosines["row"].map(place), cosines["column"].map(place)
    image[row, column] = image[column, row] = cosines["cosine"]
    ax.imshow(image, cmap=scale.cmap, norm=scale.norm, interpolation="nearest")
    ticks = np.linspace(0, len(positions) - 1, 5).round().astype(int) if sparse else np.arange(len(positions))
    if not sparse and len(positions) > 12:
        ticks = ticks[:: math.ceil(len(positions) / 12)]
    ticks = np.unique(ticks)
    labels = [str(position) for position in positions[ticks]]
    ax.set_xticks(ticks, labels, rotation=90, fontsize=6)
    ax.set_yticks(ticks, labels, fontsize=6)
    ax.tick_params(length=1.5)
    ax.spines[:].set_visible(False)


def _draw_pairs(ax: Axes, pairs: pd.DataFrame, mean: pd.Series) -> None:
    """Distributions of cosines as outlines, cut to where there are pairs."""
    for name, style in _SETS.items():
        bins = pairs[pairs["set"] == name]
        edges = np.append(bins["low"], bins["high"].iloc[-1])
        ax.stairs(bins["share"], edges, label=f"{name}, mean {mean[name]:.3f}", linewidth=1.2, **style)
    used = pairs[pairs["pairs"] > 0]
    ax.set_xlim(used["low"].min(), used["high"].max())
    ax.set_ylim(0, 1.5 * pairs["share"].max())  # room for the legend above the curves
    ax.set_ylabel("share of pairs")
    ax.legend(loc="upper center", fontsize=6.5, handlelength=2.2, borderaxespad=0.2)


@matplotlib.rc_context(RC)
def scatter(points: pd.DataFrame, panels: pd.DataFrame, explained: np.ndarray, top: int, caption: str) -> Figure:
    """Fig. 7: one panel a number of rounds; the points never move, their marks do.

    Parameters
    ----------
    points
        rounds, component_1, component_2, kept, top: each past token in each panel.
    panels
        rounds, kept, kept_cosine, top_cosine, new (kept, but not so in the first panel), explained.
    explained
        [2] share of the variance that each component explains.
    top
        How many tokens `top` stands for.
    caption
        Written below.
    """
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(3.3 * columns, 4.4), 2.9 * rows + 1), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for index, (ax, panel) in enumerate(zip(axes, panels.itertuples(), strict=False)):
        here = points[points["rounds"] == panel.rounds]
        _mark(ax, here[~here["kept"]], "evicted", color="0.75", s=5)
        _mark(ax, here[here["kept"]], "kept", color=COLOURS[0], s=9)
        ringed = {"facecolors": "none", "edgecolors": COLOURS[1], "linewidths": 1.1}
        _mark(ax, here[here["top"]], f"{top} highest scores", s=46, **ringed)
        ax.set_title(
            f"T = {panel.rounds}; {panel.explained:.0%} of the variance shown\n"
            f"mean cosine: kept {panel.kept_cosine:.3f}, highest {top} {panel.top_cosine:.3f}\n"
            + (f"{panel.new} of {panel.kept} kept are new" if index else f"{panel.kept} kept")
        )
        if index % columns == 0:
            ax.set_ylabel(f"component 2 ({explained[1]:.0%})")
        if index + columns >= len(panels):
            ax.set_xlabel(f"component 1 ({explained[0]:.0%})")
            ax.tick_params(labelbottom=True)
    for ax in axes[len(panels) :]:
        ax.remove()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, markerscale=1.3)
    _write_below(figure, caption)
    return figure


def _write_below(figure: Figure, caption: str) -> None:
    figure.supxlabel("\n".join(wrap(caption, figure.get_figwidth() - 0.4, 7)), fontsize=7, color="0.25")


def _mark(ax: Axes, points: pd.DataFrame, label: str, **style) -> None:
    style = {"linewidths": 0, **style}
    ax.scatter(points["component_1"], points["component_2"], label=label, rasterized=len(points) > 2000, **style)
