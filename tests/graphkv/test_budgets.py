"""Tokens a layer: official integers, exact sums, and the corners that broke other code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import scorers
from graphkv.budgets import per_layer, resolve

PYRAMID, SNAPKV, KNORM = scorers.get("pyramidkv"), scorers.get("snapkv"), scorers.get("knorm")


@pytest.mark.parametrize(
    ("budget", "window", "first", "last", "total"),
    [(128, 32, 220, 65, 4560), (128, 8, 242, 25, 4272), (512, 32, 968, 69, 16592), (512, 8, 991, 61, 16832)],
)
def test_official_pyramid_integers(budget, window, first, last, total):
    # Case B4; the first and the last layer's numbers include the window here as there.
    layers = per_layer(PYRAMID(window=window), budget, 7000, 32)
    assert (layers[0], layers[-1], sum(layers)) == (first, last, total)


def test_official_pyramid_of_a_large_budget():
    layers = per_layer(PYRAMID(window=8), 2048, 7000, 32)
    assert (layers[0], layers[-1]) == (3986, 111)
    assert sum(layers) / (32 * 2048) - 1 == pytest.approx(0.0002, abs=1e-4)


def test_official_pyramid_is_uniform_for_short_prompts():
    assert per_layer(PYRAMID(), 512, 959, 32) == [512] * 32
    assert len(set(per_layer(PYRAMID(), 512, 960, 32))) == 32


@given(
    st.integers(33, 600),
    st.integers(34, 3000),
    st.integers(1, 40),
    st.integers(1, 30),
    st.sampled_from([1, 8, 32]),
)
def test_exact_pyramid_sums_to_the_budget(budget, n, n_layers, beta, window):
    layers = per_layer(PYRAMID(window=window, beta=beta, schedule="exact"), budget, n, n_layers)
    assert sum(layers) == min(budget, n) * n_layers
    assert all(a >= b for a, b in zip(layers, layers[1:], strict=False))
    assert all(window <= layer <= n for layer in layers)


@given(st.integers(33, 600), st.integers(34, 3000), st.integers(1, 40), st.sampled_from([1, 8, 32]))
def test_official_pyramid_stays_within_the_prompt(budget, n, n_layers, window):
    layers = per_layer(PYRAMID(window=window), budget, n, n_layers)
    assert len(layers) == n_layers
    assert all(max(1, window) <= layer <= n for layer in layers)


def test_one_layer_gets_the_budget():
    # Case B1: other code divides by n_layers - 1.
    for schedule in ("official", "exact"):
        assert per_layer(PYRAMID(schedule=schedule), 128, 7000, 1) == [128]


def test_ratios_never_empty_a_layer():
    # Cases B1 and B2.
    assert resolve(0.04, 10, 0) == 1
    assert resolve(0.4, 2, 0) == 1
    assert resolve(0.04, 100, 32) == 32
    assert per_layer(KNORM(), 0.04, 10, 4) == [1] * 4
    assert min(per_layer(PYRAMID(), 0.04, 100, 32)) >= 32


def test_tokens_and_ratios():
    # Case B6.
    for n in (700, 7000, 31500):
        assert per_layer(SNAPKV(), 512, n, 2) == [512, 512]
    assert [per_layer(SNAPKV(), 0.1, n, 1)[0] for n in (700, 7000, 31500)] == [70, 700, 3150]
    assert resolve(0.29, 100, 0) == 29
    assert resolve(1.0, 777, 32) == 777


@pytest.mark.parametrize("name", scorers.names())
@pytest.mark.parametrize("n", [1, 31, 32, 33, 256])
def test_a_prompt_that_fits_is_kept_whole(name, n):
    assert per_layer(scorers.get(name)(), 256, n, 3) == [n] * 3
