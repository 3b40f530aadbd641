"""Bootstrap, sign test, Holm and power: scipy's numbers, hand examples, strata, and what has no interval."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scipy import stats

from eval.stats import (
    Comparison,
    Difference,
    SignTest,
    compare,
    corrected,
    detectable_difference,
    holm,
    mean_interval,
    paired_difference,
    sign_test,
)


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


def test_the_interval_of_a_mean_is_scipys_draw_for_draw():
    rows = normal(9, 45) + 3
    expected = stats.bootstrap(
        (rows,), np.mean, method="percentile", n_resamples=1500, rng=np.random.default_rng(3)
    ).confidence_interval
    assert mean_interval([rows], resamples=1500, seed=3) == pytest.approx(tuple(expected), abs=1e-12)
    assert mean_interval([rows, [1.0]]) is None


# Sign test


def test_the_sign_test_is_exact_and_leaves_ties_out():
    # 8 of 10 up: 2 (C(10,8) + C(10,9) + C(10,10)) / 2^10.
    found = sign_test([[1.0] * 5 + [0.0] * 30, [0.5] * 3 + [-2.0] * 2])
    assert (found.better, found.worse, found.equal) == (8, 2, 30)
    assert found.p == pytest.approx(2 * (45 + 10 + 1) / 1024)
    turned = sign_test([[-1.0] * 5, [-0.5] * 3 + [2.0] * 2])
    assert (turned.better, turned.worse, turned.p) == (2, 8, pytest.approx(found.p))


def test_without_a_difference_the_sign_test_says_nothing():
    assert sign_test([[0.0, 0.0]]) == SignTest(0, 0, 2, 1.0)
    assert sign_test([[0.1 + 0.2 - 0.3]]).equal == 1  # 5.6e-17


@pytest.mark.parametrize(("n", "below"), [(5, False), (6, True)])
def test_fewer_than_six_rows_are_never_enough(n, below):
    assert (sign_test([[1.0] * n]).p < 0.05) is below


# Holm


def test_holm_by_hand():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 is 0.02, 0.03, 0.06, 0.04; none below the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_of_one_of_none_and_above_one():
    assert holm([]) == [] and holm([0.2]) == [0.2]
    assert holm([0.9, 0.8, 0.5]) == [1.0, 1.0, 1.0]


def test_holm_is_between_the_raw_values_and_bonferronis():
    p_values = list(np.random.default_rng(0).uniform(size=30) ** 3)
    for raw, adjusted in zip(p_values, holm(p_values), strict=True):
        assert raw <= adjusted <= min(1, 30 * raw) + 1e-12


def test_a_family_has_only_what_was_compared():
    twice = [compare([normal(seed, 20) + 1]) for seed in (1, 2)]
    with_gap = corrected([twice[0], None, twice[1]])
    assert with_gap[1] is None
    assert [found.p_holm for found in with_gap if found] == holm([found.sign.p for found in twice])


# What samples can show


def test_the_detectable_difference_by_hand():
    rows = [1.0, -1.0] * 50  # s² = 100 / 99
    assert detectable_difference([rows]) == pytest.approx((1.959964 + 0.841621) * np.sqrt(100 / 99 / 100), rel=1e-6)
    # Of two tasks: se² = (s²/n + s²/n) / 4.
    assert detectable_difference([rows, rows]) == pytest.approx(detectable_difference([rows]) / np.sqrt(2))
    assert detectable_difference([rows, [1.0]]) is None


def test_the_detectable_difference_is_found_four_times_in_five():
    rng = np.random.default_rng(6)
    sizes, spreads = (40, 80), (2.0, 5.0)
    error = np.sqrt(sum(s**2 / n for n, s in zip(sizes, spreads, strict=True))) / 2
    shift = (1.959964 + 0.841621) * error
    found, claimed = 0, []
    for trial in range(300):
        tasks = [rng.normal(shift, spread, size) for size, spread in zip(sizes, spreads, strict=True)]
        found += paired_difference(tasks, resamples=400, seed=trial).clear
        claimed.append(detectable_difference(tasks))
    assert np.mean(claimed) == pytest.approx(shift, rel=0.03)
    assert found / 300 == pytest.approx(0.8, abs=0.06)


# All together


@pytest.mark.parametrize(
    ("low", "high", "better", "worse", "p_holm", "mark"),
    [
        (0.1, 0.3, 20, 2, 0.01, "**"),
        (-0.3, -0.1, 2, 20, 0.01, "**"),
        (0.1, 0.3, 20, 2, 0.05, "*"),  # does not survive
        (0.1, 0.3, 2, 20, 0.01, "*"),  # survives in the other direction
        (0.1, 0.3, 20, 2, None, "*"),  # not corrected yet
        (-0.1, 0.3, 20, 2, 0.01, "≈"),
        (None, None, 1, 0, 0.01, "≈"),
    ],
)
def test_the_mark_of_a_difference(low, high, better, worse, p_holm, mark):
    change = Difference(0.2 if low is None else (low + high) / 2, low, high, 22)
    assert Comparison(change, SignTest(better, worse, 0, 0.001), 0.1, p_holm).mark == mark


def test_three_samples_that_agree_do_not_survive():
    found = corrected([compare([[1.0, 2.0, 3.0]])])[0]
    assert found.difference.clear and found.mark == "*" and found.p_holm == 0.25
