"""How far a difference of benchmark scores can be trusted: bootstrap, sign test, Holm's correction, power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binomtest

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
    """Difference of two means of task means, with the interval of `mean_interval`.

    Parameters
    ----------
    tasks
        For each task the differences of its rows, score of one method minus score of the other on the same sample.
    resamples, seed, level
        See `mean_interval`.

    Returns
    -------
    Difference
        Without interval where a task has a single row.

    Raises
    ------
    ValueError
        Without tasks, or for a task without rows or with one that is not finite.
    """
    rows = _rows(tasks)
    low, high = mean_interval(rows, resamples=resamples, seed=seed, level=level) or (None, None)
    return Difference(float(np.mean([task.mean() for task in rows])), low, high, sum(task.size for task in rows))


def mean_interval(
    tasks: Sequence[ArrayLike], *, resamples: int = RESAMPLES, seed: int = 0, level: float = 0.95
) -> tuple[float, float] | None:
    """Percentile interval of a mean of task means.

    Each task's rows are drawn with replacement, as many as it has (stratified: a task keeps its size), and the
    unweighted mean of the task means is taken again. The interval covers the choice of samples; the choice of tasks is
    fixed.

    Parameters
    ----------
    tasks
        For each task the values of its rows.
    resamples
        Number of draws.
    seed
        Of numpy's default generator: the same rows give the same interval. With one task it is that of
        `scipy.stats.bootstrap(..., method="percentile")` with this generator.
    level
        Share of the draws inside the interval.

    Returns
    -------
    tuple[float, float] or None
        The ends; None where a task has a single row, which says nothing about its spread.

    Raises
    ------
    ValueError
        Without tasks, or for a task without rows or with one that is not finite.

    Notes
    -----
    B. Efron and R. Tibshirani, "An Introduction to the Bootstrap" (1993), chapters 8 and 13.
    """
    rows = _rows(tasks)
    if min(task.size for task in rows) == 1:
        return None
    rng = np.random.default_rng(seed)
    means = np.zeros(resamples)
    for task in rows:  # one at a time: at most resamples × rows of a task are held
        means += task[rng.integers(0, task.size, (resamples, task.size))].mean(axis=1)
    low, high = np.quantile(means / len(rows), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class SignTest:
    """How many paired rows went up and down, and whether a fair coin would do that.

    Attributes
    ----------
    better, worse, equal
        Numbers of rows above, below and at 0.
    p
        Exact two-sided p-value of the sign test; equal rows are left out, and with nothing else it is 1.
    """

    better: int
    worse: int
    equal: int
    p: float


def sign_test(tasks: Sequence[ArrayLike]) -> SignTest:
    """The exact sign test over the paired rows of all tasks, each row counting the same.

    It asks nothing of the distribution of the rows and holds for any number of them, but it looks at their signs only:
    fewer than six rows that differ are never below p = 0.05.

    Parameters
    ----------
    tasks
        As for `paired_difference`.

    Raises
    ------
    ValueError
        As `paired_difference`.
    """
    rows = np.concatenate(_rows(tasks))
    better, worse = int((rows > _ZERO).sum()), int((rows < -_ZERO).sum())
    p = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
    return SignTest(better, worse, rows.size - better - worse, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values of a family of tests, in the order given.

    Rejecting where the adjusted value is below α keeps the chance of any false rejection in the family below α,
    whatever the tests have to do with each other.

    Parameters
    ----------
    p_values
        Each in [0, 1].

    Notes
    -----
    S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979).
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, (len(p_values) - rank) * p_values[i])
        adjusted[i] = min(largest, 1.0)
    return adjusted


def detectable_difference(tasks: Sequence[ArrayLike], *, power: float = 0.8, alpha: float = 0.05) -> float | None:
    """The smallest true difference that as many paired rows with as much spread would find as often as `power`.

    `(z_{1-α/2} + z_power) · se` for a two-sided test at `alpha`, with the standard error of the mean of task means
    `se² = Σ_t s_t² / n_t / T²` from the standard deviations s_t of the differences (normal approximation).

    Parameters
    ----------
    tasks
        As for `paired_difference`.
    power, alpha
        Chance to find the difference, and level of the test.

    Returns
    -------
    float or None
        In the unit of the rows; None where a task has a single row.
    """
    rows = _rows(tasks)
    if min(task.size for task in rows) == 1:
        return None
    error = float(np.sqrt(sum(task.var(ddof=1) / task.size for task in rows))) / len(rows)
    return (NormalDist().inv_cdf(1 - alpha / 2) + NormalDist().inv_cdf(power)) * error


@dataclass(frozen=True)
class Comparison:
    """A difference and what speaks for it.

    Attributes
    ----------
    difference
        Mean and interval.
    sign
        The sign test over the same rows.
    detectable
        See `detectable_difference`.
    p_holm
        The sign test's p-value corrected over a family; None before `corrected`.
    """

    difference: Difference
    sign: SignTest
    detectable: float | None
    p_holm: float | None = None

    @property
    def survives(self) -> bool:
        """Whether the interval excludes 0 and the corrected sign test agrees with it, in its direction, at 0.05."""
        agrees = (self.sign.better - self.sign.worse) * self.difference.difference > 0
        return self.difference.clear and agrees and self.p_holm is not None and self.p_holm < 0.05

    @property
    def mark(self) -> str:
        """`≈`: the interval holds 0, or there is none; `*`: it excludes 0; `**`: the difference also survives."""
        return "**" if self.survives else "*" if self.difference.clear else "≈"


def compare(tasks: Sequence[ArrayLike], *, resamples: int = RESAMPLES, seed: int = 0) -> Comparison:
    """Everything about one difference; parameters and errors as for `paired_difference`."""
    difference = paired_difference(tasks, resamples=resamples, seed=seed)
    return Comparison(difference, sign_test(tasks), detectable_difference(tasks))


def corrected(family: Sequence[Comparison | None]) -> list[Comparison | None]:
    """The comparisons with `p_holm` over all of them; None, where there is nothing to compare, is not of the family."""
    adjusted = iter(holm([found.sign.p for found in family if found]))
    return [found and replace(found, p_holm=next(adjusted)) for found in family]


def _rows(tasks: Sequence[ArrayLike]) -> list[np.ndarray]:
    rows = [np.asarray(task, dtype=np.float64) for task in tasks]
    if not rows or any(task.ndim != 1 or not task.size or not np.isfinite(task).all() for task in rows):
        raise ValueError("a difference needs at least one task, and each task a list of at least one finite number")
    return rows
