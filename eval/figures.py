"""Figures of the benchmark, drawn without any global state: no pyplot, no display."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from eval.errors import UserError
from eval.records import replacing
from eval.style import CMAP, MISSING, RC

# Upper end of the colour scale; the lower end is 0.
SCORE_MAX = {"overlap": 1.0, "contains": 1.0, "rouge1": 10.0}

Panels = Sequence[tuple[str, pd.DataFrame]]


def needle_heatmap(
    panels: Panels,
    path_stem: str | Path,
    title: str | None = None,
    *,
    score: str = "overlap",
    caption: str | None = None,
) -> tuple[Path, Path]:
    """Draw the needle scores of some cells as heat maps (the paper's Fig. 4), and save them as PNG and PDF.

    Parameters
    ----------
    panels
        Name and scores of each cell: a frame with the columns `length` (tokens), `depth` (percent) and
        `score`. Rows of one square, such as several needles, are averaged. NaN or no row: a missing score.
    path_stem
        Where to save, without a suffix; folders are made.
    title
        Written above all panels.
    score
        What the scores are: overlap, contains (0 to 1) or rouge1 (0 to 10). Sets the one colour scale.
    caption
        Written below all panels: model, budget, number of needles, …

    Returns
    -------
    tuple[Path, Path]
        The PNG (150 dpi) and the PDF.

    Raises
    ------
    UserError
        If there is nothing to draw, a column is missing, or a score lies outside the scale.
    """
    return save(needle_figure(panels, title, score=score, caption=caption), path_stem)


@matplotlib.rc_context(RC)
def save(figure: Figure, path_stem: str | Path) -> tuple[Path, Path]:
    """Write `<path_stem>.png` and `.pdf` without a time stamp, so that the same data gives the same files."""
    png, pdf = Path(f"{path_stem}.png"), Path(f"{path_stem}.pdf")
    png.parent.mkdir(parents=True, exist_ok=True)
    with replacing(png) as part:
        figure.savefig(part, format="png", dpi=150, metadata={"Software": None})
    with replacing(pdf) as part:
        figure.savefig(part, format="pdf", metadata={"CreationDate": None})
    return png, pdf


@matplotlib.rc_context(RC)
def needle_figure(
    panels: Panels, title: str | None = None, *, score: str = "overlap", caption: str | None = None
) -> Figure:
    """The figure of `needle_heatmap`, not yet saved; its last axes is the colour scale."""
    _check(panels, score)
    lengths = sorted({int(x) for _, frame in panels for x in frame["length"]})
    depths = sorted({float(x) for _, frame in panels for x in frame["depth"]})
    grids = [_grid(frame, lengths, depths) for _, frame in panels]
    # A square is complete with as many scores as the fullest one has rows; what it lacks is shown.
    expected = max(_rows_per_square(frame) for _, frame in panels)

    n_columns = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3}.get(len(panels), 4)
    n_rows = math.ceil(len(panels) / n_columns)
    width = float(np.clip(0.8 + 0.42 * len(lengths), 2.3, 3.6))
    height = float(np.clip(0.9 + 0.24 * len(depths), 2.0, 3.2))
    figure = Figure(figsize=(max(n_columns * width + 1.1, 4.2), n_rows * height + 0.5), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True).ravel()

    scale = ScalarMappable(Normalize(0, SCORE_MAX[score]), CMAP)
    for index, ((name, frame), (means, counts)) in enumerate(zip(panels, grids, strict=True)):
        ax = axes[index]
        _draw_squares(ax, means, counts, expected, scale)
        mean = _mean_label(frame["score"], expected * means.size)
        ax.set_title("\n".join([*wrap(name, width * 0.9, 8), mean]))
        _label_axes(ax, lengths, depths, width, left=index % n_columns == 0, bottom=index + n_columns >= len(panels))
    for ax in axes[len(panels) :]:
        ax.remove()

    bar = figure.colorbar(
        scale, ax=list(axes[: len(panels)]), label=f"{score} score", aspect=30, fraction=0.05, pad=0.01
    )
    bar.outline.set_visible(False)
    inches = figure.get_figwidth() - 0.4
    if title:
        figure.suptitle("\n".join(wrap(title, inches, 10)))
    if any((counts < expected).any() for _, counts in grids):
        caption = f"{caption or ''} Hatched: scores are missing.".strip()
    if caption:
        figure.supxlabel("\n".join(wrap(caption, inches, 7)), fontsize=7, color="0.25")
    return figure


def _check(panels: Panels, score: str) -> None:
    if score not in SCORE_MAX:
        raise UserError(f"needle figure: score is {score!r}, but must be one of {', '.join(SCORE_MAX)}.")
    if not any(len(frame) for _, frame in panels):
        raise UserError("needle figure: there is no score to draw; run the needle task first.")
    for name, frame in panels:
        missing = [column for column in ("length", "depth", "score") if column not in frame]
        if missing:
            raise UserError(f"needle figure: the scores of {name!r} lack the column {', '.join(missing)}.")
        outside = frame["score"][(frame["score"] < 0) | (frame["score"] > SCORE_MAX[score])]
        if len(outside):
            raise UserError(
                f"needle figure: {name!r} has the score {outside.iloc[0]:g}, but {score} lies between 0 and "
                f"{SCORE_MAX[score]:g}."
            )


def _grid(frame: pd.DataFrame, lengths: Sequence[int], depths: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Mean (NaN where there is none) and number of the scores in each square, depth down, length across."""
    squares = frame.groupby(["depth", "length"])["score"]
    means, counts = (
        table.unstack("length").reindex(index=depths, columns=lengths) for table in (squares.mean(), squares.count())
    )
    return means.to_numpy(dtype=float), counts.fillna(0).to_numpy(dtype=int)


def _rows_per_square(frame: pd.DataFrame) -> int:
    """Rows, with a score or NaN, of the fullest square."""
    return int(frame.groupby(["depth", "length"]).size().max()) if len(frame) else 0


def _mean_label(scores: pd.Series, expected: int) -> str:
    n = int(scores.count())
    if n == 0:
        return f"no score of {expected}"
    return f"mean {scores.mean():.2f}" + (f" of {n}/{expected}" if n < expected else "")


def _draw_squares(ax: Axes, means: np.ndarray, counts: np.ndarray, expected: int, scale: ScalarMappable) -> None:
    """Colour the squares, hatch the incomplete ones, and print the values where there is room for them."""
    n_rows, n_columns = means.shape
    ax.imshow(np.ma.masked_invalid(means), cmap=scale.cmap, norm=scale.norm, aspect="auto", interpolation="nearest")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    printed = n_columns <= 8 and n_rows <= 11
    for (row, column), mean in np.ndenumerate(means):
        present = not np.isnan(mean)
        dark = present and np.dot(scale.to_rgba(mean)[:3], (0.299, 0.587, 0.114)) < 0.5
        ink = "white" if dark else "black"
        if counts[row, column] < expected:
            face, edge = ("none", ink) if present else ("white", MISSING)
            corner = (column - 0.5, row - 0.5)
            ax.add_patch(Rectangle(corner, 1, 1, facecolor=face, edgecolor=edge, hatch="/////", linewidth=0))
        if printed and present:
            text = f"{mean:.2f}" if scale.norm.vmax <= 1 else f"{mean:.1f}"
            ax.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink)
    if n_columns <= 30:
        ax.hlines(np.arange(1, n_rows) - 0.5, -0.5, n_columns - 0.5, color="white", linewidth=0.5)
        ax.vlines(np.arange(1, n_columns) - 0.5, -0.5, n_rows - 0.5, color="white", linewidth=0.5)


def _label_axes(
    ax: Axes, lengths: Sequence[int], depths: Sequence[float], width: float, *, left: bool, bottom: bool
) -> None:
    """Label every n-th tick, as many as fit, and only along the outside of the figure."""
    columns = _every_nth(len(lengths), int(width / 0.42))
    rows = _every_nth(len(depths), 12)
    ax.set_xticks(columns, [f"{lengths[i]}" for i in columns])
    ax.set_yticks(rows, [f"{depths[i]:g}" for i in rows])
    ax.tick_params(labelbottom=bottom, labelleft=left)
    if bottom:
        ax.set_xlabel("prompt length (tokens)")
    if left:
        ax.set_ylabel("needle depth (%)")


def _every_nth(n: int, n_max: int) -> list[int]:
    return list(range(0, n, math.ceil(n / n_max)))


def wrap(text: str, inches: float, points: float) -> list[str]:
    """Lines of `text` that fit into a width at a font size, broken behind blanks, slashes and commas if possible."""
    n_max = max(int(inches * 72 / (0.6 * points)), 8)  # 0.6 em: a little more than the mean width of a letter
    lines = [""]
    for piece in re.findall(rf"[^ /,]{{1,{n_max - 1}}}[ /,]*|[ /,]+", text):
        if len(lines[-1]) + len(piece.rstrip()) > n_max:
            lines.append("")
        lines[-1] += piece
    return [line.strip() for line in lines]
