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

_FILE = Path(__file__).parent / "data" / "paper_table1.csv"


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


@cache
def _table1() -> dict[tuple[str, str], PaperRow]:
    with _FILE.open(encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(line for line in stream if not line.startswith("#")))
    return {
        (line["model"], line["method"]): PaperRow(
            line["model"], line["method"], {task: float(line[task]) for task in LONGBENCH}, float(line["avg"])
        )
        for line in lines
    }
