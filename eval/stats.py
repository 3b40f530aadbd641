"""How far a difference of benchmark scores can be trusted: the paired bootstrap over samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 10_000
_ZERO = 1e-12  # rows that cancel sum to 1e-17, not to 0


@dataclass(frozen=True)
class Difference:
    """A mean difference with its bootstrap interval, in the unit of the rows.

    Attributes
    ----------
    difference
        The difference itself, of the rows as they are.
    low, high
        Ends of the interval; None where there is none.
    n
        Number of paired rows.
    """

    difference: float
    low: float | None
    high: float | None
    n: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0; never without an interval."""
        return self.low is not None and (self.low > _ZERO or self.high < -_ZERO)


def paired_difference(
    tasks: Sequence[ArrayLike], *, resamples: int = RESAMPLES, seed: int = 0, level: float = 0.95
) -> Difference:
    """Difference of two means of task means, with a percentile interval.

    Each task's paired rows are drawn with replacement, as many as it has (stratified: a task keeps its size), and
    the unweighted mean of the task means is taken again. The interval covers the choice of samples; the choice of
    tasks is fixed.

    Parameters
    ----------
    tasks
        For each task the differences of its rows, score of one method minus score of the other on the same sample.
    resamples
        Number of draws.
    seed
        Of numpy's default generator: the same rows give the same interval. With one task it is that of
        `scipy.stats.bootstrap(..., paired=True, method="percentile")` with this generator.
    level
        Share of the draws inside the interval.

    Returns
    -------
    Difference
        Without interval where a task has a single row, which says nothing about its spread.

    Raises
    ------
    ValueError
        Without tasks, or for a task without rows or with one that is not finite.

    Notes
    -----
    B. Efron and R. Tibshirani, "An Introduction to the Bootstrap" (1993), chapters 8 and 13.
    """
    rows = [np.asarray(task, dtype=np.float64) for task in tasks]
    if not rows or any(task.ndim != 1 or not task.size or not np.isfinite(task).all() for task in rows):
        raise ValueError("a difference needs at least one task, and each task a list of at least one finite number")
    difference = float(np.mean([task.mean() for task in rows]))
    n = sum(task.size for task in rows)
    if min(task.size for task in rows) == 1:
        return Difference(difference, None, None, n)
    rng = np.random.default_rng(seed)
    means = np.zeros(resamples)
    for task in rows:  # one at a time: at most resamples × rows of a task are held
        means += task[rng.integers(0, task.size, (resamples, task.size))].mean(axis=1)
    low, high = np.quantile(means / len(rows), [(1 - level) / 2, (1 + level) / 2])
    return Difference(difference, float(low), float(high), n)
