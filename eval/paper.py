"""What the GraphKV paper reports: arXiv:2509.00388v1 (EMNLP 2025, 10.18653/v1/2025.emnlp-main.1112)."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from eval.errors import UserError
from eval.metrics import LONGBENCH

MODELS = ("llama2", "llama3", "mistral")
METHODS = ("full", "knorm", "knorm+graphkv", "snapkv", "snapkv+graphkv", "pyramidkv", "pyramidkv+graphkv")
BUDGET = 512
"""Tokens a layer in all rows of Table 1 but those of the full cache."""

SOURCES: Mapping[str, str] = {
    "fig4": "Fig. 4, p. 6 (Llama3-8B, up to 8,000 tokens, 128 kept)",
    "fig6": "Fig. 6, p. 7 (F1; HotpotQA and Llama3-8B at 512 tokens, as its T = 0 is that of Table 1)",
    "table2": "Table 2, p. 7 (128 tokens kept; its ten tasks may be others than ours)",
    "table6": "Table 6, p. 11 (only the best scores that its text names)",
}
"""Where the numbers of `ablation` stand, and for what."""

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class PaperRow:
    """A row of Table 1.

    Attributes
    ----------
    model, method
        One of `MODELS` and of `METHODS`.
    scores
        Task → score in 0..100, for the 16 tasks.
    average
        The Avg. as printed.
    """

    model: str
    method: str
    scores: Mapping[str, float]
    average: float


def table1() -> Mapping[tuple[str, str], PaperRow]:
    """All 21 rows of Table 1 by (model, method)."""
    return dict(_table1())


def table1_row(model: str, method: str) -> PaperRow:
    """The row of a model and a method.

    Raises
    ------
    UserError
        Where Table 1 has no such row.
    """
    if (model, method) not in _table1():
        raise UserError(
            f"the paper's Table 1 has no row {method!r} of {model!r}: "
            f"models are {', '.join(MODELS)}, methods {', '.join(METHODS)}"
        )
    return _table1()[model, method]


def printed_average_differs(row: PaperRow) -> bool:
    """Whether the printed Avg. is not the mean of its columns, by more than rounding explains.

    Columns and average are each rounded to two decimals, so up to 0.01 is rounding.
    """
    mean = sum(row.scores.values()) / len(row.scores)
    return abs(row.average - mean) > 0.01 + 1e-9


def ablation(artifact: str, scorer: str, value: str, task: str) -> float | None:
    """A number of the paper's ablations, in 0..100.

    Parameters
    ----------
    artifact
        fig4, fig6, table2 or table6; the others of the paper have no numbers here.
    scorer
        Its name; a number whose scorer the paper does not name stands beside any.
    value
        Of what varies, such as `2` rounds; `none` is the run without graph.
    task
        LongBench's name, `needle`, or `avg`.

    Returns
    -------
    float or None
        None where the paper has none, or it was not transcribed.
    """
    found = _ablations()
    return found.get((artifact, scorer, value, task), found.get((artifact, "", value, task)))


@cache
def _table1() -> dict[tuple[str, str], PaperRow]:
    return {
        (line["model"], line["method"]): PaperRow(
            line["model"], line["method"], {task: float(line[task]) for task in LONGBENCH}, float(line["avg"])
        )
        for line in _lines("paper_table1.csv")
    }


@cache
def _ablations() -> dict[tuple[str, str, str, str], float]:
    return {
        (line["artifact"], line["scorer"], line["value"], line["task"]): float(line["score"])
        for line in _lines("paper_ablations.csv")
    }


def _lines(file: str) -> list[dict[str, str]]:
    with (_DATA / file).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(line for line in stream if not line.startswith("#")))
