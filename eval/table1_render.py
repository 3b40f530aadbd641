"""Table 1 as text, markdown, CSV and LaTeX: what `eval.table1.build` computed, laid out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd

from eval.metrics import TASKS
from eval.paper import printed_average_differs
from eval.records import write_atomically
from eval.stats import Comparison
from eval.table1 import Entry, Row, Table1
from eval.table1_words import AVERAGE, SHORT
from eval.tables import MISSING, escape_markdown


def as_text(table: Table1, width: int = 120) -> str:
    """The table for a terminal of `width` characters: as many bands as that takes, each with some of the columns."""
    grid = [["method", *_headings(table)]]
    grid += [[("  " if kind in _UNDER else "") + cells[0], *cells[1:]] for kind, cells in _lines(table)]
    # A model's line is one cell, which may run over all columns.
    widths = [max(map(len, column)) for column in zip(*(row for row in grid if len(row) > 1), strict=True)]
    groups = [*_groups(table), ("", list(range(len(table.tasks) + 1, len(widths))))]
    bands: list[list[tuple[str, list[int]]]] = []
    room = 0
    for category, columns in groups:
        widths[columns[-1]] += max(0, len(category) + 2 - sum(widths[i] + 2 for i in columns))
        needed = sum(widths[i] + 2 for i in columns)
        if not bands or needed > room:
            bands.append([])
            room = width - widths[0]
        bands[-1].append((category, columns))
        room -= needed
    text = [table.title]
    for band in bands:
        spans = [category.ljust(sum(widths[i] + 2 for i in columns)) for category, columns in band]
        columns = [i for _, columns in band for i in columns]
        text += ["", " " * (widths[0] + 2) + "".join(spans)] if any(map(str.strip, spans)) else [""]
        for row in [grid[0], ["-" * width for width in widths], *grid[1:]]:
            cells = [row[i].rjust(widths[i]) for i in columns] if len(row) > 1 else []
            text.append("  ".join([row[0].ljust(widths[0]), *cells]))
    text += ["", *textwrap.wrap(table.caption, width), *(f"- {note}" for note in table.notes)]
    return "\n".join(line.rstrip() for line in text)


def write(table: Table1, stem: Path) -> list[Path]:
    """Write `<stem>.md`, `<stem>.csv` (a line per model, row and task) and `<stem>.tex` (needs booktabs)."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    texts = {".md": _markdown(table), ".csv": _csv(table), ".tex": _latex(table)}
    paths = [stem.with_name(stem.name + suffix) for suffix in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        write_atomically(path, text)
    return paths


# From records to numbers --------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A printed line and its cells, of a model's line only the first."""

    kind: Literal["model", "ours", "difference", "paper"]
    cells: list[str]


_UNDER = ("difference", "paper")  # lines that belong to the row above


def _headings(table: Table1) -> list[str]:
    """Column headings but that of the method."""
    return [*(SHORT[task] for task in table.tasks), "Avg.", "kept", "of prompt", "Δ of mean [95 %]"]


def _groups(table: Table1) -> list[tuple[str, list[int]]]:
    """Categories, each with its columns; column 0 is the method."""
    found = groupby(range(1, len(table.tasks) + 1), key=lambda i: TASKS[table.tasks[i - 1]].category)
    return [(category[0].upper() + category[1:], list(columns)) for category, columns in found]


def _lines(table: Table1) -> Iterator[_Line]:
    for model, rows in table.blocks.items():
        yield _Line("model", [model])
        for row in rows:
            entries, average = row.entries.values(), row.entries[AVERAGE]
            kept = MISSING if average.kept is None else f"{average.kept:.1f}"
            share = MISSING if average.share is None else f"{average.share:.1%}"
            yield _Line("ours", [row.name, *(_fixed(entry.score) for entry in entries), kept, share, ""])
            if row.difference:
                changes = [_fixed(entry.difference and entry.difference.difference, "+") for entry in entries]
                yield _Line("difference", ["Δ", *changes, "", "", _interval(row)])
            if row.printed:
                scores = [_fixed(entry.paper) for entry in entries]
                if average.paper and printed_average_differs(row.printed):
                    scores[-1] += "†"
                change = row.printed_difference
                note = "" if change is None else f"{_tasks(row)}: {_fixed(change, '+')}"
                yield _Line("paper", ["paper", *scores, "", "", note])


def _fixed(value: float | None, sign: str = "") -> str:
    """Two decimals, never `-0.00`."""
    return MISSING if value is None else f"{round(value, 2) + 0.0:{sign}.2f}"


def _interval(row: Row) -> str:
    """`16 tasks: +0.24 [-0.10, +0.60] ≈`."""
    found = row.difference
    ends = MISSING if found.low is None else f"{_fixed(found.low, '+')}, {_fixed(found.high, '+')}"
    return f"{_tasks(row)}: {_fixed(found.difference, '+')} [{ends}] {row.comparison.mark}"


def _tasks(row: Row) -> str:
    return "1 task" if len(row.shared) == 1 else f"{len(row.shared)} tasks"


def _markdown(table: Table1) -> str:
    escape = escape_markdown
    headings = _headings(table)
    starts = {columns[0]: category for category, columns in _groups(table)}
    grid = [[starts.get(i, "") for i in range(len(headings) + 1)]]
    grid.append([f"**{heading}**" for heading in ["Method", *headings]])
    for kind, cells in _lines(table):
        mark = {"model": "**", "paper": "*"}.get(kind, "")
        marked = [f"{mark}{escape(cell)}{mark}" if cell else "" for cell in cells]
        grid.append(marked + [""] * (len(headings) + 1 - len(marked)))
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    body = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in grid]
    lines = [f"| {' | '.join(row)} |" for row in [body[0], rules, *body[1:]]]
    notes = ["", *(f"- {escape(note)}" for note in table.notes)] if table.notes else []
    return "\n".join([f"### {escape(table.title)}", "", *lines, "", escape(table.caption), *notes]) + "\n"


def _csv(table: Table1) -> str:
    """Tidy: a line per model, row and task, and for Avg.; empty fields where there is no number."""
    lines = []
    for model, rows in table.blocks.items():
        for row in rows:
            entries = [(task, entry, entry.difference) for task, entry in row.entries.items()]
            if row.difference and row.entries[AVERAGE].difference is None:
                nothing = Entry(row.difference.n, row.difference.n, None, None, None, None, None)
                entries.append((f"mean of {_tasks(row)}", nothing, row.difference))
            lines += [
                {
                    "model": model,
                    "row": row.name,
                    "label": row.label,
                    "task": task,
                    "ours": entry.score,
                    "paper": entry.paper,
                    "n": entry.n,
                    "asked": entry.asked,
                    "difference": change and change.difference,
                    "low": change and change.low,
                    "high": change and change.high,
                    "distinguishable": change and change.clear,
                    **_evidence(row.comparison if change is row.difference else None),
                    "kept": entry.kept,
                    "of_prompt": entry.share,
                    **table.facts,
                }
                for task, entry, change in entries
            ]
    return pd.DataFrame(lines).to_csv(index=False, float_format="%.6g")


def _evidence(found: Comparison | None) -> dict[str, float | None]:
    """What a row's overall difference has beside its interval."""
    return {
        "better": found and found.sign.better,
        "worse": found and found.sign.worse,
        "p_sign": found and found.sign.p,
        "p_holm": found and found.p_holm,
        "detectable": found and found.detectable,
    }


_LATEX = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": "$<$", ">": "$>$", "Δ": r"$\Delta$", "≈": r"$\approx$", "—": "---", "†": r"\dag{}"}
)


def _latex(table: Table1) -> str:
    def escape(text: str) -> str:
        return re.sub(r"(?<![\w-])-(?=\d)", "$-$", text.translate(_LATEX))

    headings, groups = _headings(table), _groups(table)
    rest = len(headings) - len(table.tasks)
    # LaTeX numbers the table itself.
    title = table.title.removeprefix("Table 1. ")
    caption = " ".join([f"{title}.", table.caption, *(f"{note}." for note in table.notes)])
    spans = [f"\\multicolumn{{{len(columns)}}}{{c}}{{{escape(category)}}}" for category, columns in groups]
    rules = [f"\\cmidrule(lr){{{columns[0] + 1}-{columns[-1] + 1}}}" for _, columns in groups]
    lines = [
        "% Needs booktabs; with graphicx it is scaled to the width of the text.",
        "\\begin{table*}",
        "\\providecommand{\\resizebox}[3]{#3}",
        f"\\caption{{{escape(caption)}}}",
        "\\scriptsize\\setlength{\\tabcolsep}{2pt}",
        "\\resizebox{\\textwidth}{!}{%",
        f"\\begin{{tabular}}{{l{'r' * len(headings)}}}",
        "\\toprule",
        " & ".join(["", *spans, *[""] * rest]) + r" \\",
        " ".join(rules),
        " & ".join(["Method", *map(escape, headings)]) + r" \\",
    ]
    for kind, cells in _lines(table):
        if kind == "model":
            name = f"\\multicolumn{{{len(headings) + 1}}}{{c}}{{\\textbf{{{escape(cells[0])}}}}}"
            lines += ["\\midrule", name + r" \\", "\\midrule"]
            continue
        escaped = [escape(cell) for cell in cells]
        if kind == "paper":
            escaped = [f"\\textit{{{cell}}}" if cell else "" for cell in escaped]
        lines.append(("\\quad " if kind in _UNDER else "") + " & ".join(escaped) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}}", "\\end{table*}"]) + "\n"
