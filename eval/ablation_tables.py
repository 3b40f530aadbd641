"""The ablations as tables: a row a setting, a column a panel; under the row its differences and the paper's numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from eval.ablation_figures import as_csv
from eval.ablation_words import FAMILY, span
from eval.ablations import BASE, MEAN, Ablation
from eval.records import write_atomically
from eval.table1_words import SHORT, marks
from eval.tables import MISSING, as_markdown, escape_markdown
from eval.tables import as_text as table_text


def write(ablation: Ablation, stem: Path) -> list[Path]:
    """Write `<stem>.md` and `<stem>.csv`, a line a point."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    title, caption = escape_markdown(ablation.title), escape_markdown(ablation.caption)
    texts = {
        Path(f"{stem}.md"): f"### {title}\n\n{as_markdown(as_frame(ablation))}\n\n{caption}\n",
        Path(f"{stem}.csv"): as_csv(ablation),
    }
    for path, text in texts.items():
        write_atomically(path, text)
    return list(texts)


def as_text(ablation: Ablation, width: int = 120) -> str:
    """Title, table and caption for a terminal; a figure's caption is about the figure, here its marks are explained."""
    caption = ablation.caption if ablation.design.table else marks(FAMILY)
    return "\n".join([ablation.title, "", table_text(as_frame(ablation)), "", *textwrap.wrap(caption, width)])


def as_frame(ablation: Ablation) -> pd.DataFrame:
    """Texts, ready to print: per setting a row of scores, and where there are any, of differences and the paper's."""
    points = ablation.points
    panels = list(dict.fromkeys(points["panel"]))
    rows = []
    # A base stands once, above the lines that start from it.
    for name in dict.fromkeys(points["row"]):
        of_row = points[points["row"] == name].drop_duplicates("panel").set_index("panel")
        rows += _rows(name, of_row.reindex(panels), wide=not ablation.design.table)
    headings = [SHORT.get(panel, panel) for panel in panels]
    return pd.DataFrame(rows, columns=["setting", *headings, "kept"])


def _rows(name: str, of_row: pd.DataFrame, *, wide: bool) -> Iterator[list[str]]:
    """The lines of a setting; with `wide` all differences have their intervals, else that of the mean."""
    yield [name, *(_fixed(score) for score in of_row["score"]), span(of_row["kept"])]
    if name != BASE and of_row["difference"].notna().any():
        yield ["  Δ", *(_difference(point, wide or panel == MEAN) for panel, point in of_row.iterrows()), ""]
    if of_row["paper"].notna().any():
        yield ["  paper", *(_fixed(value, missing="") for value in of_row["paper"]), ""]


def _difference(point: pd.Series, with_interval: bool) -> str:
    """`+0.24 [-0.10, +0.60] ≈`."""
    if math.isnan(point["difference"]):
        return MISSING
    ends = MISSING if math.isnan(point["low"]) else f"{_fixed(point['low'], '+')}, {_fixed(point['high'], '+')}"
    return f"{_fixed(point['difference'], '+')}{f' [{ends}]' if with_interval else ''} {point['mark']}"


def _fixed(value: float, sign: str = "", missing: str = MISSING) -> str:
    """Two decimals, never `-0.00`."""
    return missing if math.isnan(value) else f"{round(value, 2) + 0.0:{sign}.2f}"
