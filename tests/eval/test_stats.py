"""The paired bootstrap: scipy's numbers for one task, strata for several, and what has no interval."""

from __future__ import annotations

import time

import numpy as np
import pytest

from eval.stats import Difference, paired_difference

stats = pytest.importorskip("scipy.stats")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("level", [0.95, 0.8])
def test_one_task_is_scipys_paired_bootstrap_draw_for_draw(level):
    a, b = normal(1, 2, 60)
    found = paired_difference([a - b], resamples=2000, seed=7, level=level)
    expected = stats.bootstrap(
        (a, b),
        lambda x, y, axis: (x - y).mean(axis=axis),
        paired=True,
        method="percentile",
        n_resamples=2000,
        confidence_level=level,
        rng=np.random.default_rng(7),
    )
    assert found.difference == pytest.approx((a - b).mean(), abs=1e-12)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval), abs=1e-12)
    assert found.n == 60


def test_tasks_count_the_same_whatever_their_size():
    found = paired_difference([[1.0] * 200 + [3.0] * 200, [0.0, 4.0], [-1.0, -1.0]], resamples=500)
    assert found.difference == pytest.approx((2 + 2 - 1) / 3)
    assert found.n == 404


def test_rows_are_drawn_within_their_task():
    # Without strata the share of each task would vary, and the interval with it.
    assert paired_difference([[1.0] * 50, [-1.0] * 5]) == Difference(0.0, 0.0, 0.0, 55)


def test_the_width_is_that_of_a_mean_of_task_means():
    tasks = [10 * normal(2, 200), 3 * normal(3, 150) + 1, normal(4, 500)]
    found = paired_difference(tasks)
    error = np.sqrt(sum(task.var() / len(task) for task in tasks)) / len(tasks)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.03)
    assert found.low < found.difference < found.high


def test_the_interval_holds_the_true_difference_as_often_as_it_says():
    rng = np.random.default_rng(5)
    truth = (0.5 - 1.0 + 2.0) / 3
    covered = 0
    for trial in range(400):
        # Skewed rows with different spreads, as scores have.
        tasks = [rng.exponential(2, 40) - 1.5, rng.normal(-1, 3, 60), rng.integers(0, 2, 50) * 4.0]
        found = paired_difference(tasks, resamples=400, seed=trial)
        covered += found.low <= truth <= found.high
    assert 0.91 <= covered / 400 <= 0.98


def test_the_seed_decides_the_interval_and_not_the_difference():
    tasks = [normal(6, 30), normal(7, 30)]
    first, second = paired_difference(tasks, seed=1), paired_difference(tasks, seed=2)
    assert paired_difference(tasks, seed=1) == first
    assert first.difference == second.difference
    assert first.low != second.low
    assert first.low == pytest.approx(second.low, abs=0.03)


def test_exchanging_the_methods_turns_the_sign():
    rows = normal(8, 80) + 0.2
    there, back = paired_difference([rows]), paired_difference([-rows])
    assert (back.difference, back.low, back.high) == pytest.approx((-there.difference, -there.high, -there.low))


@pytest.mark.parametrize(
    ("low", "high", "clear"),
    [(0.1, 0.3, True), (-0.3, -0.1, True), (-0.1, 0.1, False), (0.0, 0.2, False), (0.0, 0.0, False)],
)
def test_a_difference_is_clear_where_the_interval_excludes_zero(low, high, clear):
    assert Difference((low + high) / 2, low, high, 9).clear is clear


def test_rounding_errors_are_no_difference():
    # 0.1 + 0.2 - 0.3 is 5.6e-17.
    assert not Difference(5.6e-17, 5.6e-17, 5.6e-17, 3).clear


def test_equal_methods_differ_by_nothing():
    found = paired_difference([np.zeros(20), np.zeros(5)])
    assert found == Difference(0.0, 0.0, 0.0, 25)
    assert not found.clear


@pytest.mark.parametrize("tasks", [[[0.3]], [[0.3], [0.1, 0.2, 0.3]]])
def test_a_single_row_has_no_interval(tasks):
    found = paired_difference(tasks)
    assert (found.low, found.high, found.clear) == (None, None, False)
    assert found.difference == pytest.approx(np.mean([np.mean(task) for task in tasks]))


@pytest.mark.parametrize("tasks", [[], [[]], [[1.0], []], [[1.0, float("nan")]], [[[1.0, 2.0]]]])
def test_what_is_no_list_of_rows_is_refused(tasks):
    with pytest.raises(ValueError, match="at least one"):
        paired_difference(tasks)


def test_all_of_longbench_takes_seconds_at_most():
    tasks = [normal(n, n) for n in [200] * 13 + [150, 500, 500]]
    begin = time.process_time()
    paired_difference(tasks)
    assert time.process_time() - begin < 5
