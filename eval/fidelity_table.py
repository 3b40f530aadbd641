"""The fidelity of cells: a table of divergences with paired differences, and the divergence against the budget."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval import table1_words as words
from eval.errors import UserError
from eval.figures import save
from eval.records import write_atomically
from eval.stats import Comparison, Difference, compare, corrected, paired_difference
from eval.style import RC
from eval.table1 import CellResult, ModelResults
from eval.tables import MISSING

BASE = "snapkv"
"""The scorer that others are compared with, at the same budget and without re-ranking."""

_ZERO = 1e-6  # nats: below, a cell is the full cache but for rounding, and has no place on a logarithmic axis
_MARKERS = "osD^vPX*<>hp"
_MOST_LINES = 14  # more cannot be told apart


@dataclass(frozen=True)
class FidelityRow:
    """One cell.

    Attributes
    ----------
    name, series, cell
        As printed, without what belongs to the budget, and what it is.
    n, asked
        Finished samples, and how many there should be.
    kl
        Mean divergence over prompts in nats with its interval; None where a sample is missing.
    by_kind
        Mean divergence by kind of prompt; empty where a sample is missing.
    means
        Means over samples of the other scores.
    kept
        Mean tokens stored a layer.
    to_base, to_plain
        The divergence compared with that of `BASE`, and with that of the same cell without re-ranking, corrected over
        all comparisons of the table; None where there is no such cell or it is this one.
    to_base_by_kind, to_plain_by_kind
        The same differences by kind of prompt; empty where there is no comparison.
    """

    name: str
    series: str
    cell: Mapping[str, Any]
    n: int
    asked: int
    kl: Difference | None
    by_kind: Mapping[str, float]
    means: Mapping[str, float]
    kept: float | None
    to_base: Comparison | None
    to_plain: Comparison | None
    to_base_by_kind: Mapping[str, Difference]
    to_plain_by_kind: Mapping[str, Difference]


def build(result: ModelResults) -> list[FidelityRow]:
    """Rows of one model's cells, scorer by scorer and budget by budget.

    Raises
    ------
    UserError
        If there is no sample or no cell.
    """
    if not result.samples or not result.cells:
        raise UserError("a table of fidelity needs at least one sample and one cell")
    cells = [found.cell for found in result.cells]
    plain_budgets = [{**cell, "budget": None} for cell in cells]
    ordered = sorted(result.cells, key=lambda found: words.order(found.cell))
    rows = []
    for found in ordered:
        values = _values(found, result)
        of_kind = {**found.cell, "budget": None}
        done = [found.records[s] for s, _ in result.samples if found.records.get(s, {}).get("status") == "ok"]
        base, plain = _base(found, result), _without_graph(found, result)
        to_plain = _compared(found, plain, result)
        others = ("agreement", "first_disagreement", "kept_mass", "key_cosine", "output_error")
        frame = pd.DataFrame([record["scores"] for record in done])
        rows.append(
            FidelityRow(
                name=words.name(found.cell, cells),
                series=words.name(of_kind, plain_budgets),
                cell=found.cell,
                n=len(done),
                asked=len(result.samples),
                kl=paired_difference([[value for column in values.values() for value in column]]) if values else None,
                by_kind={kind: sum(column) / len(column) for kind, column in values.items()},
                means={name: float(frame[name].mean()) for name in others if name in frame},
                kept=float(pd.Series([sum(r["kept"]) / len(r["kept"]) for r in done]).mean()) if done else None,
                to_base=to_plain if base is plain else _compared(found, base, result),
                to_plain=to_plain,
                to_base_by_kind=_by_kind(found, base, result),
                to_plain_by_kind=_by_kind(found, plain, result),
            )
        )
    # Where the cell without re-ranking is the base, both are one comparison, which counts once.
    distinct = {id(found): found for row in rows for found in (row.to_base, row.to_plain) if found is not None}
    known = dict(zip(distinct, corrected(list(distinct.values())), strict=True))
    return [replace(row, to_base=known.get(id(row.to_base)), to_plain=known.get(id(row.to_plain))) for row in rows]


def _values(found: CellResult, result: ModelResults) -> dict[str, list[float]]:
    """Kind of prompt → divergences in the order of samples; empty where one is missing."""
    values: dict[str, list[float]] = {}
    for sample, kind in result.samples:
        record = found.records.get(sample, {})
        if record.get("status") != "ok":
            return {}
        values.setdefault(_kind(kind), []).append(record["scores"]["kl"])
    return values


def _kind(task: str) -> str:
    """The kind of prompt as printed: a fresh one's, or all of LongBench and all rows in its formats as one each."""
    source, _, rest = task.partition("-")
    return {"fresh": rest, "mini": source, "longbench": source}.get(source, task)


def _base(found: CellResult, result: ModelResults) -> CellResult | None:
    """The plain `BASE` cell of the same budget."""
    for other in result.cells:
        cell = other.cell
        if cell["scorer"]["name"] == BASE and cell["budget"] == found.cell["budget"] and _is_plain(cell):
            return None if other is found or found.cell["scorer"]["name"] == "full" else other
    return None


def _is_plain(cell: Mapping[str, Any]) -> bool:
    usual = words.USUAL.get(cell["scorer"]["name"], {})
    return (
        all(cell["scorer"][name] == value for name, value in usual.items())
        and cell["graphkv"] is None
        and cell["granularity"] == "kv_head"
        and cell["head_budget"] == "uniform"
        and not cell.keys() & {"bias", "selector"}
    )


def _without_graph(found: CellResult, result: ModelResults) -> CellResult | None:
    if found.cell["graphkv"] is None:
        return None
    return next((other for other in result.cells if other.cell == {**found.cell, "graphkv": None}), None)


def _changes(found: CellResult, base: CellResult | None, result: ModelResults) -> dict[str, list[float]]:
    """Kind of prompt → differences of the divergences; empty where there is nothing to compare."""
    if base is None:
        return {}
    mine, its = _values(found, result), _values(base, result)
    if not mine or not its:
        return {}
    return {kind: [a - b for a, b in zip(values, its[kind], strict=True)] for kind, values in mine.items()}


def _compared(found: CellResult, base: CellResult | None, result: ModelResults) -> Comparison | None:
    # Prompts are drawn without regard to their kind: with few of a kind, draws within kinds understate the spread.
    changes = _changes(found, base, result)
    return compare([[change for of_kind in changes.values() for change in of_kind]]) if changes else None


def _by_kind(found: CellResult, base: CellResult | None, result: ModelResults) -> dict[str, Difference]:
    return {kind: paired_difference([changes]) for kind, changes in _changes(found, base, result).items()}


def as_frame(rows: Sequence[FidelityRow]) -> pd.DataFrame:
    """One row a cell, numbers as numbers: what is written to the CSV."""
    table = []
    for row in rows:
        entry = {
            "cell": row.name,
            "series": row.series,
            "budget": row.cell["budget"],
            "kept": row.kept,
            "n": row.n,
            "asked": row.asked,
            **_columns("kl", row.kl),
            **_columns("to_base", row.to_base and row.to_base.difference),
            "to_base_p_holm": row.to_base and row.to_base.p_holm,
            **_columns("to_plain", row.to_plain and row.to_plain.difference),
            "to_plain_p_holm": row.to_plain and row.to_plain.p_holm,
            **row.means,
            **{f"kl_{kind}": value for kind, value in row.by_kind.items()},
        }
        for name, by_kind in (("to_base", row.to_base_by_kind), ("to_plain", row.to_plain_by_kind)):
            for kind, difference in by_kind.items():
                entry |= _columns(f"{name}_{kind}", difference)
        table.append(entry)
    return pd.DataFrame(table)


def _columns(name: str, found: Difference | None) -> dict[str, float | None]:
    if found is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: found.difference, f"{name}_low": found.low, f"{name}_high": found.high}


def as_markdown(rows: Sequence[FidelityRow], caption: str) -> str:
    """The table for people."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.by_kind))
    head = ["cell", "kept", "KL [95 %]", f"Δ to {words.SCORERS[BASE]}", "Δ of GraphKV", "same token", "kept mass"]
    head += kinds if len(kinds) > 1 else []
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in rows:
        cells = [
            row.name,
            MISSING if row.kept is None else f"{row.kept:.0f}",
            _interval(row.kl) if row.kl else f"{MISSING} ({row.n}/{row.asked})",
            _change(row.to_base),
            _change(row.to_plain),
            f"{row.means['agreement']:.1%}" if "agreement" in row.means else MISSING,
            f"{row.means['kept_mass']:.1%}" if "kept_mass" in row.means else MISSING,
        ]
        if len(kinds) > 1:
            cells += [f"{row.by_kind[kind]:.3f}" if kind in row.by_kind else MISSING for kind in kinds]
        lines.append("| " + " | ".join(cells) + " |")
    parts = ["\n".join(lines), caption]
    if len(kinds) > 1:
        parts += _tables_by_kind(rows, kinds)
    return "\n\n".join(parts) + "\n"


def _tables_by_kind(rows: Sequence[FidelityRow], kinds: Sequence[str]) -> list[str]:
    """Both differences by kind of prompt, with a headline each."""
    titles = {
        f"Δ to {words.SCORERS[BASE]} by kind of prompt": [(row.name, row.to_base_by_kind) for row in rows],
        "Δ of GraphKV by kind of prompt": [(row.name, row.to_plain_by_kind) for row in rows],
    }
    parts = []
    for title, shown in titles.items():
        lines = ["| " + " | ".join(["cell", *kinds]) + " |", "| --- |" + " ---: |" * len(kinds)]
        for name, found in shown:
            if found:
                lines.append("| " + " | ".join([name, *(_interval(found[kind], "+") for kind in kinds)]) + " |")
        if len(lines) > 2:
            parts += [f"**{title}**", "\n".join(lines)]
    return parts


def brief(rows: Sequence[FidelityRow]) -> pd.DataFrame:
    """The table for the terminal, as texts."""
    return pd.DataFrame(
        {
            "cell": row.name,
            "kept": MISSING if row.kept is None else f"{row.kept:.0f}",
            "samples": f"{row.n}/{row.asked}",
            "KL [95 %]": _interval(row.kl),
            f"to {words.SCORERS[BASE]}": _change(row.to_base),
            "of GraphKV": _change(row.to_plain),
            "same token": f"{row.means['agreement']:.1%}" if "agreement" in row.means else MISSING,
        }
        for row in rows
    )


def _interval(found: Difference | None, sign: str = "", mark: str = "") -> str:
    if found is None:
        return MISSING
    text = f"{found.difference:{sign}.3f}{mark}"
    return text if found.low is None else f"{text} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def _change(found: Comparison | None) -> str:
    return MISSING if found is None else _interval(found.difference, "+", found.mark.replace("≈", ""))


def caption_of(result: ModelResults, rows: Sequence[FidelityRow]) -> str:
    """What a reader must know."""
    kinds: dict[str, int] = {}
    for _, kind in result.samples:
        kinds[_kind(kind)] = kinds.get(_kind(kind), 0) + 1
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    compared = len({id(found) for row in rows for found in (row.to_base, row.to_plain) if found is not None})
    return (
        f"{result.model}, {result.facts['dtype']}. KL(full ‖ cell) of the next-token distribution in nats, "
        f"teacher-forced over the full cache's continuation; mean over prompts ({counts}). 95 % bootstrap intervals "
        "over prompts, paired for differences: * excludes 0; ** and the sign test agrees, Holm-corrected over the "
        f"{compared} comparisons of the table (p < 0.05); differences by kind are not corrected. "
        "Lower is closer to the full cache, which is not the same as right. "
        f"Data {result.facts['data']}, {result.facts['data_hash'][:8]}."
    )


def write(result: ModelResults, path_stem: Path) -> tuple[list[FidelityRow], list[Path]]:
    """Compute and save `<stem>.md`, `.csv`, `.png` and `.pdf`; returns the rows and the paths."""
    rows = build(result)
    caption = caption_of(result, rows)
    path_stem.parent.mkdir(parents=True, exist_ok=True)
    text, table = Path(f"{path_stem}.md"), Path(f"{path_stem}.csv")
    write_atomically(text, as_markdown(rows, caption))
    write_atomically(table, as_frame(rows).to_csv(index=False))
    paths = [text, table]
    if any(row.kl is not None and row.cell["scorer"]["name"] != "full" for row in rows):
        paths += save(figure(rows, caption), path_stem)
    return rows, paths


@matplotlib.rc_context(RC)
def figure(rows: Sequence[FidelityRow], caption: str) -> Figure:
    """Divergence against kept tokens, a line a method; of many methods, or one budget, a row of points, best first."""
    shown = [row for row in rows if row.kl is not None and row.cell["scorer"]["name"] != "full"]
    series = list(dict.fromkeys(row.series for row in shown))
    budgets = sorted({row.cell["budget"] for row in shown})
    if len(budgets) > 1 and len(series) <= _MOST_LINES:
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        _lines(figure.subplots(), shown, series)
    else:
        figure = Figure(figsize=(4 + 2.6 * len(budgets), 1.4 + 0.17 * len(series)), layout="constrained")
        _points(figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0], shown, budgets)
    width = int(18 * figure.get_figwidth())
    figure.supxlabel("\n".join(textwrap.wrap(caption, width)), fontsize=7, color="0.25")
    return figure


def _lines(ax: Axes, rows: Sequence[FidelityRow], series: Sequence[str]) -> None:
    colors = matplotlib.colormaps["tab20"].colors
    for number, name in enumerate(series):
        own = sorted((row for row in rows if row.series == name), key=lambda row: row.kept)
        shift = 1 + 0.012 * (number - len(series) / 2)  # side by side, so that intervals can be told apart
        x = [row.kept * shift for row in own]
        y = [max(_ZERO, row.kl.difference) for row in own]
        low = [y_ - max(_ZERO, row.kl.low) if row.kl.low is not None else 0 for y_, row in zip(y, own, strict=True)]
        high = [row.kl.high - y_ if row.kl.high is not None else 0 for y_, row in zip(y, own, strict=True)]
        style = {"marker": _MARKERS[number % len(_MARKERS)], "ms": 4, "lw": 1, "elinewidth": 0.6, "capsize": 1.5}
        dashed = "--" if "GraphKV" in name else "-"
        ax.errorbar(x, y, yerr=[low, high], color=colors[number % 20], ls=dashed, label=name, **style)
    ax.set(xscale="log", yscale="log", xlabel="kept tokens a layer", ylabel="KL to the full cache (nats)")
    whole = sorted({row.cell["budget"] for row in rows if isinstance(row.cell["budget"], int)})
    ticks = whole or sorted({round(row.kept) for row in rows})
    ax.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    ax.minorticks_off()
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=6.5)


def _points(panels: Sequence[Axes], rows: Sequence[FidelityRow], budgets: Sequence[int | float]) -> None:
    """A panel a budget and a line a method, the one with the smallest mean over its budgets on top."""
    of_series: dict[str, list[FidelityRow]] = {}
    for row in rows:
        of_series.setdefault(row.series, []).append(row)
    # A method with fewer budgets is placed by those that it has, relative to all methods there.
    middle = {budget: _log_mean([row for row in rows if row.cell["budget"] == budget]) for budget in budgets}
    height = {
        name: sum(math.log(_positive(row)) - middle[row.cell["budget"]] for row in own) / len(own)
        for name, own in of_series.items()
    }
    names = sorted(of_series, key=height.get, reverse=True)
    for ax, budget in zip(panels, budgets, strict=True):
        for row in (row for row in rows if row.cell["budget"] == budget):
            y, graph = names.index(row.series), row.cell["graphkv"] is not None
            if row.kl.low is not None:
                ax.plot([max(_ZERO, row.kl.low), row.kl.high], [y, y], color="0.6", lw=1, zorder=1)
            marker, color = ("s", "#b35806") if graph else ("o", "#2c5aa0")
            ax.plot(_positive(row), y, marker=marker, color=color, ms=4.5, zorder=2)
        ax.set(xscale="log", ylim=(-0.7, len(names) - 0.3))
        ax.set_title(f"{budget} tokens" if isinstance(budget, int) else f"{budget:.4g} of the prompt")
        ax.grid(axis="x", lw=0.3, color="0.85")
        ax.grid(axis="y", lw=0.2, color="0.92")
    panels[0].set_yticks(range(len(names)), names, fontsize=7)
    panels[len(panels) // 2].set_xlabel("KL to the full cache (nats); squares: with GraphKV")


def _positive(row: FidelityRow) -> float:
    return max(_ZERO, row.kl.difference)


def _log_mean(rows: Sequence[FidelityRow]) -> float:
    return sum(math.log(_positive(row)) for row in rows) / len(rows)
