"""From the scores of rows to the numbers of a table: tasks, LongBench-E's lengths, and LongBench's two means.

As github.com/THUDM/LongBench at 2e00731f (LongBench/eval.py and README). No mean is taken over what happens
to be there: where a task is missing there is none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from eval.errors import UserError
from eval.metrics import LONGBENCH, TASKS

BUCKETS = ("0-4k", "4-8k", "8k+")


def task_score(scores: Sequence[float]) -> float:
    """Score of a task: 100 times the mean of its rows' `score`, rounded to two decimals as published."""
    if not scores:
        raise UserError("a task without rows has no score")
    return round(100 * sum(scores) / len(scores), 2)


def bucket_scores(scores: Sequence[float], lengths: Sequence[int]) -> dict[str, float | None]:
    """LongBench-E: scores of the rows under 4,000, under 8,000 and from 8,000 words on; `None` for no rows.

    Parameters
    ----------
    scores
        The rows' `score`.
    lengths
        The rows' stored `length` in words; counting anew gives other buckets.
    """
    buckets: dict[str, list[float]] = {name: [] for name in BUCKETS}
    for score, length in zip(scores, lengths, strict=True):
        buckets[BUCKETS[(length >= 4000) + (length >= 8000)]].append(score)
    # numpy's mean, as the official code: its sum is rounded otherwise than Python's.
    return {name: round(100 * float(np.mean(rows)), 2) if rows else None for name, rows in buckets.items()}


def mean_of_tasks(scores: Mapping[str, float], tasks: Collection[str] = LONGBENCH) -> float | None:
    """Mean of the scores of the 16 tasks, as papers print it, or of some; `None` where one is missing."""
    if not scores.keys() >= set(tasks):
        return None
    return round(sum(scores[task] for task in tasks) / len(tasks), 2)


def mean_of_categories(scores: Mapping[str, float]) -> float | None:
    """Mean of the means of LongBench's six categories, as in its README; `None` where a task is missing."""
    if not scores.keys() >= set(LONGBENCH):
        return None
    categories: dict[str, list[float]] = {}
    for task in LONGBENCH:
        categories.setdefault(TASKS[task].category, []).append(scores[task])
    return round(sum(sum(members) / len(members) for members in categories.values()) / len(categories), 2)
