"""One plotting style for every figure."""

from __future__ import annotations

from typing import Any

# A sequential map that is monotone in lightness: readable in grey and with any colour vision.
CMAP = "cividis"
MISSING = "0.55"

# For series: Okabe and Ito's colours, told apart with any colour vision, each with a marker for print in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "v", "P", "X")
PAPER = {"color": "0.4", "marker": "D", "markersize": 4, "linestyle": "none", "fillstyle": "none"}

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so that a figure is the same on every machine
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "figure.titlesize": 10,
    "figure.titleweight": "bold",
    "figure.dpi": 150,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,  # text stays text: searchable and editable
    "savefig.dpi": 150,
    "savefig.facecolor": "white",
}
