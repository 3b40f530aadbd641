"""Tokens a layer: official integers, exact sums, and the corners that broke other code."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scorers
from graphkv.budgets import per_head, per_layer, resolve, shares
from scorers import LayerView

PYRAMID, SNAPKV, KNORM, CAKE = (scorers.get(name) for name in ("pyramidkv", "snapkv", "knorm", "cake"))


def layers_of(count: int) -> list[None]:
    """Layers for rules that need their number only."""
    return [None] * count


@pytest.mark.parametrize(
    ("budget", "window", "first", "last", "total"),
    [(128, 32, 220, 65, 4560), (128, 8, 242, 25, 4272), (512, 32, 968, 69, 16592), (512, 8, 991, 61, 16832)],
)
def test_official_pyramid_integers(budget, window, first, last, total):
    # Case B4; the first and the last layer's numbers include the window here as there.
    layers = per_layer(PYRAMID(window=window), budget, 7000, layers_of(32))
    assert (layers[0], layers[-1], sum(layers)) == (first, last, total)


def test_official_pyramid_of_a_large_budget():
    layers = per_layer(PYRAMID(window=8), 2048, 7000, layers_of(32))
    assert (layers[0], layers[-1]) == (3986, 111)
    assert sum(layers) / (32 * 2048) - 1 == pytest.approx(0.0002, abs=1e-4)


def test_official_pyramid_is_uniform_for_short_prompts():
    assert per_layer(PYRAMID(), 512, 959, layers_of(32)) == [512] * 32
    assert len(set(per_layer(PYRAMID(), 512, 960, layers_of(32)))) == 32


@given(
    st.integers(33, 600),
    st.integers(34, 3000),
    st.integers(1, 40),
    st.integers(1, 30),
    st.sampled_from([1, 8, 32]),
)
def test_exact_pyramid_sums_to_the_budget(budget, n, n_layers, beta, window):
    layers = per_layer(PYRAMID(window=window, beta=beta, schedule="exact"), budget, n, layers_of(n_layers))
    assert sum(layers) == min(budget, n) * n_layers
    assert all(a >= b for a, b in zip(layers, layers[1:], strict=False))
    assert all(window <= layer <= n for layer in layers)


@given(st.integers(33, 600), st.integers(34, 3000), st.integers(1, 40), st.sampled_from([1, 8, 32]))
def test_official_pyramid_stays_within_the_prompt(budget, n, n_layers, window):
    layers = per_layer(PYRAMID(window=window), budget, n, layers_of(n_layers))
    assert len(layers) == n_layers
    assert all(max(1, window) <= layer <= n for layer in layers)


def test_one_layer_gets_the_budget():
    # Case B1: other code divides by n_layers - 1.
    for schedule in ("official", "exact"):
        assert per_layer(PYRAMID(schedule=schedule), 128, 7000, layers_of(1)) == [128]


def test_ratios_never_empty_a_layer():
    # Cases B1 and B2.
    assert resolve(0.04, 10, 0) == 1
    assert resolve(0.4, 2, 0) == 1
    assert resolve(0.04, 100, 32) == 32
    assert per_layer(KNORM(), 0.04, 10, layers_of(4)) == [1] * 4
    assert min(per_layer(PYRAMID(), 0.04, 100, layers_of(32))) >= 32


def test_tokens_and_ratios():
    # Case B6.
    for n in (700, 7000, 31500):
        assert per_layer(SNAPKV(), 512, n, layers_of(2)) == [512, 512]
    assert [per_layer(SNAPKV(), 0.1, n, layers_of(1))[0] for n in (700, 7000, 31500)] == [70, 700, 3150]
    assert resolve(0.29, 100, 0) == 29
    assert resolve(1.0, 777, 32) == 777


@pytest.mark.parametrize("name", scorers.names())
@pytest.mark.parametrize("n", [1, 31, 32, 33, 256])
def test_a_prompt_that_fits_is_kept_whole(name, n):
    assert per_layer(scorers.get(name)(), 256, n, layers_of(3)) == [n] * 3


@dataclass(frozen=True)
class Asks(LayerView):
    """A layer whose preference is given."""

    wants: float = 1.0


@dataclass(frozen=True)
class Cake(CAKE):
    """CAKE with the preferences that the layers carry."""

    def preference(self, layer: Asks) -> float:
        return layer.wants


def asking(*wants: float) -> list[Asks]:
    """Layers with these preferences."""
    empty = torch.empty(1, 0, 1)
    return [Asks(empty, empty, empty, 1.0, i, len(wants), wants=want) for i, want in enumerate(wants)]


def test_cake_shares_the_past_in_proportion():
    # 100 past tokens a layer: 300 in parts of 1 : 2 : 3, and the window on top.
    assert per_layer(Cake(), 132, 7000, asking(1, 2, 3)) == [50 + 32, 100 + 32, 150 + 32]


def test_cake_gives_what_rounding_left_to_the_first_layers():
    # 10 * 3 tokens in parts of 1 : 1 : 5 are 4.29, 4.29, 21.43: 29 whole ones, and one more for the first layer.
    assert shares([1, 1, 5], 30, 1000) == [5, 4, 21]


def test_cake_cuts_at_the_prompt_and_hands_the_rest_out():
    # 8, 16, 176 of 200: the last is cut at 120, and 56 go to the first two, 28 each.
    assert shares([1, 2, 22], 200, 120) == [36, 44, 120]
    # An odd excess gives the first open layer one more: 9, 1, 90 cut at 79 leaves 11.
    assert shares([9, 1, 90], 100, 79) == [15, 6, 79]


def test_cake_goes_on_where_the_reference_loses_tokens():
    # 40 is cut at 20, and 10 more would make 21 of the second share: the reference drops one, the third gets it here.
    assert shares([40, 11, 4], 55, 20) == [20, 20, 15]
    assert shares([1, 2, 3], 1000, 20) == [20, 20, 20]


def test_cake_of_layers_that_ask_for_nothing_is_uniform():
    assert per_layer(Cake(), 64, 7000, asking(0, 0, 0)) == [64, 64, 64]
    assert per_layer(Cake(), 32, 7000, asking(1, 2)) == [32, 32]


def test_cake_in_cascade_never_gives_back():
    # Past 10 a layer, 30 in all. After layer 0: 30. After layer 1 (1 : 5): 5, 25. After layer 2 (1 : 5 : 9): 2, 10, 18.
    assert per_layer(Cake(cascading=True), 42, 7000, asking(1, 5, 9)) == [34, 42, 50]
    # A prompt with 12 past tokens: first 12, then 12 and 12 (both full), then 12, 9 and 9.
    assert per_layer(Cake(cascading=True), 42, 44, asking(4, 3, 3)) == [44, 41, 41]
    # 9 in all: 9, then 5 and 4, then 4, 5 and 0. The second layer has given its fifth token up by then.
    assert per_layer(Cake(cascading=True), 35, 7000, asking(6, 7, 1)) == [36, 36, 32]
    assert per_layer(Cake(), 35, 7000, asking(6, 7, 1)) == [36, 37, 32]


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1e30), min_size=1, max_size=40),
    st.integers(32, 600),
    st.integers(1, 3000),
    st.booleans(),
)
def test_cake_sums_to_the_budget_and_stays_within_the_prompt(wants, budget, n, cascading):
    layers = per_layer(Cake(cascading=cascading), budget, n, asking(*wants))
    assert len(layers) == len(wants)
    assert all(min(n, 32) <= layer <= n for layer in layers)
    assert sum(layers) <= min(budget, n) * len(wants)
    if not cascading:
        assert sum(layers) == min(budget, n) * len(wants)


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=12), st.integers(0, 200), st.integers(1, 300))
def test_a_layer_that_asks_for_more_gets_no_less(wants, total, cap):
    given_out = shares(sorted(wants), total, cap)
    # Left-over tokens go to the first layers, at most one each a round.
    assert all(a <= b + 2 for a, b in zip(given_out, given_out[1:], strict=False))


def test_cake_reads_the_layers(smol, smol_prompt):
    layers = per_layer(CAKE(), 64, smol_prompt.n, smol_prompt.layers)
    assert sum(layers) == 64 * 30 and len(set(layers)) > 5
    cascade = per_layer(CAKE(cascading=True), 64, smol_prompt.n, smol_prompt.layers)
    assert all(0 <= b - a <= 3 for a, b in zip(cascade, layers, strict=True))


def test_heads_with_larger_scores_keep_more():
    # The best 2 * 3 of both heads: five of the first, one of the second; the floor of 1/3 gives each one for sure.
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 1], [4.0, 3, 2, 1, 1, 1]])
    assert per_head(scores, 3, floor=0.0) == [5, 1]
    assert per_head(scores, 3, floor=1 / 3) == [4, 2]  # round(5 * 2/3 + 1), round(1 * 2/3 + 1)
    assert per_head(scores, 3, floor=1.0) == [3, 3]


def test_rounding_of_head_budgets_is_repaired_where_it_is_furthest_off():
    # Counts 5, 1, 0 of 3 * 2 with α = .2: int(.4) = 0, so 4, .8, 0 → 4, 1, 0, one short. Exact: 4.4, 1.2, .4.
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 0], [4.0, 1, 1, 1, 1, 1], [1.0, 1, 1, 1, 1, 1]])
    assert per_head(scores, 2, floor=0.2) == [4, 1, 1]
    # Counts 2, 2, 2 with α = .5: 2 each, already exact.
    assert per_head(torch.ones(3, 6), 2, floor=0.5) == [2, 2, 2]


def test_normalised_heads_count_by_how_concentrated_they_are():
    # Each head's best token holds 1/2 and 9/10 of its sum: 5 · .5 < 3 · .9.
    scores = torch.tensor([[5.0, 5, 0], [3.0, 1 / 3, 0]])
    assert per_head(scores, 1, floor=0.0) == [1, 1]  # no head is left empty: freely, both tokens would be the first's
    scores = torch.tensor([[5.0, 5, 4, 4], [3.0, 3, 0.1, 0.1]])
    assert per_head(scores, 2, floor=0.0) == [3, 1]
    assert per_head(scores, 2, floor=0.0, normalize=True) == [2, 2]  # 18 → 10/18: 2.8, 2.8, 2.2, 2.2; 6.2 → 2.9, 2.9


def test_equal_scores_give_equal_head_budgets():
    # Ties go to the lower position of every head, not to all tokens of the first head.
    assert per_head(torch.ones(4, 50), 10, floor=0.0) == [10] * 4
    assert per_head(torch.zeros(4, 50), 10, normalize=True) == [10] * 4


@settings(deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 60),
    st.integers(0, 70),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(["random", "one head", "equal", "few values"]),
    st.integers(0, 1000),
)
def test_head_budgets_sum_and_stay_within_the_past(heads, n_past, budget, floor, normalize, kind, seed):
    scores = torch.rand(heads, n_past, generator=torch.Generator().manual_seed(seed))
    if kind == "one head":
        scores[1:] *= 1e-6
    elif kind == "equal":
        scores = torch.ones_like(scores)
    elif kind == "few values":
        scores = (scores * 3).round()
    kept = per_head(scores, budget, floor, normalize)
    assert sum(kept) == heads * min(budget, n_past)
    assert all(min(1, budget) <= one <= n_past for one in kept)
    if budget < n_past:
        assert all(one >= int(floor * budget) - 1 for one in kept)


@pytest.mark.parametrize(("options", "part"), [({"floor": 1.5}, "floor"), ({"past_budget": -1}, "past_budget")])
def test_impossible_head_budgets_are_refused(options, part):
    with pytest.raises(ValueError, match=part):
        per_head(torch.ones(2, 9), **{"past_budget": 3, **options})
