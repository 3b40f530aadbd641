"""Records → tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

MISSING = "—"


def cell_table(
    cells: Mapping[str, Mapping[str, Mapping[str, Any]]], samples: Sequence[str], score: str
) -> pd.DataFrame:
    """One row a cell: mean score, achieved budget, bytes, tokens and seconds.

    Parameters
    ----------
    cells
        Records by sample id, by the cell's label.
    samples
        Ids of all samples that the table is about.
    score
        Which of the stored scores is averaged.

    Returns
    -------
    pandas.DataFrame
        Texts, ready to print. A cell with a missing or failed sample has no mean: the score shows `—`.
    """
    rows = []
    for label, records in cells.items():
        done = [records[s] for s in samples if records.get(s, {}).get("status") == "ok"]
        failed = sum(records.get(s, {}).get("status") == "failed" for s in samples)
        row = {"cell": label, score: MISSING, "samples": f"{len(done)}/{len(samples)}"}
        if failed:
            row["samples"] += f" ({failed} failed)"
        if done:
            frame = pd.DataFrame(done)
            kept = frame["kept"].map(lambda layers: sum(layers) / len(layers))
            seconds = frame["seconds"].map(lambda parts: sum(parts.values()))
            row |= {
                "kept/layer": f"{kept.mean():.1f}",
                "of prompt": f"{(kept / frame['n_prompt']).mean():.1%}",
                "KV MiB": f"{frame['bytes'].mean() / 2**20:.2f}",
                "tokens": str(frame["ids"].map(len).sum()),
                "seconds": f"{seconds.sum():.1f}",
            }
        if len(done) == len(samples):
            row[score] = f"{sum(record['scores'][score] for record in done) / len(done):.3f}"
        rows.append(row)
    return pd.DataFrame(rows).fillna(MISSING)


def as_text(table: pd.DataFrame) -> str:
    """A table for the terminal: first column left, numbers right."""
    columns = list(table.columns)
    cells = [columns, *table.astype(str).values.tolist()]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def as_markdown(table: pd.DataFrame) -> str:
    """A table of texts as markdown: first column left, numbers right."""
    rows = [
        [escape_markdown(text) for text in row] for row in [list(table.columns), *table.astype(str).values.tolist()]
    ]
    rules = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rules, *rows[1:]])


def escape_markdown(text: str) -> str:
    """The text with nothing in it that markdown takes for markup."""
    return re.sub(r"([\\|_*`<])", r"\\\1", text)
