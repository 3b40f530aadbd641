"""Top of the budget: exact size, ties to the lower position, the window outside the ranking."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphkv import selection
from graphkv.selection import keep, top_positions


def expected_top(row: list[float], k: int) -> list[int]:
    """By definition: sort by (-score, position), take k, sort by position."""
    return sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])


def test_ties_go_to_the_lower_position():
    # Case S2: torch.topk answers [3, 4, 1, 0, 2] and [3, 5] on a CPU.
    assert top_positions(torch.zeros(1000), 5).tolist() == [0, 1, 2, 3, 4]
    assert top_positions(torch.tensor([5.0, 1, 5, 5, 0, 5]), 2).tolist() == [0, 2]


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.5]), min_size=1, max_size=40), st.data())
def test_equals_the_definition_and_grows_with_k(row, data):
    k = data.draw(st.integers(0, len(row)))
    scores = torch.tensor([row, row[::-1]])
    chosen = top_positions(scores, k)
    assert chosen.tolist() == [expected_top(row, k), expected_top(row[::-1], k)]
    if k < len(row):
        assert set(chosen[0].tolist()) < set(top_positions(scores, k + 1)[0].tolist())


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=40), st.data())
def test_the_path_without_host_syncs_chooses_the_same(row, data):
    k = data.draw(st.integers(1, len(row) - 1))
    assert selection._lowest_of_ties(torch.tensor([row]), k).tolist() == [expected_top(row, k)]


def test_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="4 of 3"):
        top_positions(torch.zeros(3), 4)


@pytest.mark.parametrize("window", [0, 1, 8])
def test_window_is_kept_whatever_the_scores_are(window):
    # Case S3: uniform attention, 64 tokens, keep 16.
    n, budget = 64, 16
    for scores in (torch.ones(2, n - window), torch.full((2, n - window), float("inf"))):
        kept = keep(scores, budget, n)
        assert kept.shape == (2, budget)
        assert (kept[:, budget - window :] == torch.arange(n - window, n)).all()
        assert kept[:, : budget - window].tolist() == [list(range(budget - window))] * 2


def test_kept_positions_ascend_and_do_not_repeat():
    scores = torch.rand(3, 500, generator=torch.Generator().manual_seed(1))
    kept = keep(scores, 100, 532)
    assert (kept.diff(dim=-1) > 0).all()
    assert kept.shape == (3, 100)
