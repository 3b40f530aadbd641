"""The re-ranking against a float64 loop written from Eqs. (1)–(5), and what must hold of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import graph as naive

import scorers
from graphkv import graph as module
from graphkv.graph import Graph, edges, rerank
from graphkv.selection import top_positions


def random_problem(n: int, seed: int, heads: int = 2, d: int = 8):
    """Scores and features with an off-centre mean, so that cosines are mostly positive as real keys' are."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(heads, n, generator=generator) ** 4
    return scores, torch.randn(heads, n, d, generator=generator) + 0.7


@pytest.mark.parametrize("n", [2, 3, 40, 300])
@pytest.mark.parametrize(("ratio", "neighbors", "rounds"), [(0.3, 3, 1), (1.0, 1, 2), (0.1, 50, 3), (0.5, 7, 1)])
def test_equals_the_loop(n, ratio, neighbors, rounds):
    scores, features = random_problem(n, seed=n)
    graph, past_budget = Graph(ratio, neighbors, rounds), max(1, n // 3)
    out = rerank(scores, features, graph, n, past_budget)
    for head in range(2):
        expected = naive.rerank_head(
            scores[head].numpy(),
            features[head].double().numpy(),
            graph.n_sources(past_budget),
            neighbors,
            rounds,
        )
        np.testing.assert_allclose(out[head].numpy(), expected, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("layer", [0, 14, 29])
def test_equals_the_loop_on_the_real_model(smol_prompt, layer):
    view = smol_prompt.layers[layer]
    scores = scorers.get("snapkv")().score(view)
    past = view.keys[:, : scores.shape[1]]
    out = rerank(scores, past, Graph(neighbors=3, rounds=2), smol_prompt.n, 96)
    for head in range(len(scores)):
        expected = naive.rerank_head(scores[head].numpy(), past[head].double().numpy(), 28, 3, 2)
        np.testing.assert_allclose(out[head].numpy(), expected, rtol=1e-3, atol=1e-12)


def worked_example():
    """Paper analysis 2.4: A is the source; cos(A, B) = 0.9, cos(A, C) = 0.1, D at a right angle."""
    features = torch.tensor([[[1.0, 0, 0], [0.9, (1 - 0.81) ** 0.5, 0], [0.1, 0, (1 - 0.01) ** 0.5], [0, 0, 1]]])
    return torch.tensor([[1.0, 0.9, 0.7, 0.6]]), features


@pytest.mark.parametrize(
    ("rounds", "expected", "kept"),
    [
        (0, [1.0, 0.9, 0.7, 0.6], [0, 1]),
        (1, [1.0, 0.09, 0.63, 0.6], [0, 2]),
        (2, [1.0, 0.009, 0.567, 0.6], [0, 3]),
        (3, [1.0, 0.0009, 0.5103, 0.6], [0, 3]),
    ],
)
def test_worked_example(rounds, expected, kept):
    # Case S5.
    scores, features = worked_example()
    out = rerank(scores, features, Graph(source_ratio=0.5, neighbors=2, rounds=rounds), 4, 2)
    assert out[0].tolist() == pytest.approx(expected, rel=1e-5)
    assert top_positions(out, 2).tolist() == [kept]


def test_rounds_in_closed_form_equal_the_loop():
    scores, features = random_problem(60, seed=5)
    once = scores
    sources_and_edges_stay = Graph(0.5, 4, 1)
    factor = rerank(scores, features, sources_and_edges_stay, 60, 20) / scores
    for rounds in range(1, 5):
        once = once * factor
        out = rerank(scores, features, Graph(0.5, 4, rounds), 60, 20)
        torch.testing.assert_close(out, once, rtol=1e-5, atol=0)


def test_two_sources_multiply():
    # Case S6: 0.7 · (1 - 0.5) · (1 - 0.2) = 0.28, whichever source comes first; Algorithm 2 read literally gives 0.56.
    a, c = (1 - 0.25) ** 0.5, (1 - 0.04) ** 0.5
    features = torch.tensor([[[0.5, a, 0], [0.2, 0, c], [1.0, 0, 0]]])
    for order in ([0, 1, 2], [1, 0, 2]):
        scores = torch.tensor([[1.0, 0.9, 0.7]])
        out = rerank(scores, features[:, order], Graph(1.0, 2, 1), 3, 2)
        assert out[0, 2].item() == pytest.approx(0.28, rel=1e-5)


def test_negative_cosines_change_nothing():
    # Case S7: unclamped, 0.5 · (1 + 0.2) would promote the token.
    features = torch.tensor([[[1.0, 0], [-0.2, (1 - 0.04) ** 0.5]]])
    scores = torch.tensor([[1.0, 0.5]])
    assert torch.equal(rerank(scores, features, Graph(1.0, 1, 1), 2, 1), scores)


def test_ties_give_exactly_m_neighbours_at_the_lowest_positions():
    # Case S10.
    features = torch.ones(1, 4, 3)
    positions, similarity = edges(features, torch.tensor([[2]]), 2)
    assert positions.tolist() == [[[0, 1]]]
    torch.testing.assert_close(similarity, torch.ones(1, 1, 2))
    positions, _ = edges(features, torch.tensor([[2]]), 3)
    assert positions.tolist() == [[[0, 1, 3]]]
    out = rerank(torch.tensor([[0.1, 0.2, 0.9, 0.3]]), features, Graph(0.1, 99, 1), 4, 1)
    torch.testing.assert_close(out, torch.tensor([[0, 0, 0.9, 0]]), rtol=0, atol=1e-6)


def test_source_order_does_not_matter():
    scores, features = random_problem(50, seed=7)
    sources = top_positions(scores, 12)
    shuffled = sources[:, torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    one, other = edges(features, sources, 5), edges(features, shuffled, 5)
    factor = [
        torch.ones_like(scores).scatter_reduce_(-1, n.flatten(-2), (1 - s).flatten(-2), "prod") for n, s in (one, other)
    ]
    torch.testing.assert_close(factor[0], factor[1], rtol=1e-5, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 40),
    st.floats(0.01, 1),
    st.integers(1, 60),
    st.integers(0, 4),
    st.integers(1, 60),
    st.integers(0, 10**6),
    st.sampled_from(["random", "equal", "zero keys", "equal scores", "tiny"]),
)
def test_never_raises_a_score_and_stays_finite(n, ratio, neighbors, rounds, past_budget, seed, kind):
    scores, features = random_problem(n, seed)
    if kind == "equal":
        features = features[:, :1].expand(-1, n, -1)
    elif kind == "zero keys":
        features = torch.zeros_like(features)
    elif kind == "equal scores":
        scores = torch.ones_like(scores)
    elif kind == "tiny":
        scores = scores * 1e-38
    out = rerank(scores, features, Graph(ratio, neighbors, rounds), n, past_budget)
    assert out.isfinite().all()
    assert ((out >= 0) & (out <= scores)).all()
    if rounds == 0 or kind == "zero keys":
        assert torch.equal(out, scores)


@pytest.mark.parametrize("name", scorers.names())
def test_decay_never_raises_any_scorers_score(name, smol_prompt):
    # Case S8: on -‖k‖ the factor would promote the redundant token.
    for view in smol_prompt.layers[::7]:
        scores = scorers.get(name)().score(view)
        out = rerank(scores, view.keys[:, : scores.shape[1]], Graph(), smol_prompt.n, 200)
        assert ((out >= 0) & (out <= scores)).all()
        assert (out < scores).any()


def test_blocks_of_sources_give_the_same(monkeypatch):
    scores, features = random_problem(64, seed=9)
    whole = rerank(scores, features, Graph(0.9, 3, 1), 64, 40)
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 2 * 64 * 5)
    torch.testing.assert_close(rerank(scores, features, Graph(0.9, 3, 1), 64, 40), whole)


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (999, 1), (1500, 1), (2000, 2), (3000, 3), (7950, 3), (31500, 3)])
def test_automatic_neighbours(n, expected):
    # Case B9: L counts thousands of prompt tokens, rounded down, at least one neighbour.
    assert Graph(neighbors="auto3").n_neighbors(n) == expected
    assert Graph(neighbors="min(3, L)").n_neighbors(n) == expected


def test_sources_are_a_share_of_the_past_budget():
    assert Graph(source_ratio=0.3).n_sources(480) == 144
    assert Graph(source_ratio=0.3).n_sources(512) == 153
    assert Graph(source_ratio=0.1).n_sources(1) == 1
    assert Graph(source_ratio=1.0).n_sources(512) == 512


@pytest.mark.parametrize(
    "options",
    [{"source_ratio": 0.0}, {"source_ratio": 1.1}, {"neighbors": 0}, {"neighbors": "three"}, {"rounds": -1}],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Graph(**options)
