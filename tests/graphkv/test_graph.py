"""The re-ranking in all its readings: against float64 loops written from Eqs. (1)–(5), and what must hold of it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import graph as naive

import scorers
from eval.errors import UserError
from graphkv import edges
from graphkv.config import CONF, cell_settings
from graphkv.edges import Similarity, features
from graphkv.graph import Graph, rerank, rerank_layer
from graphkv.selection import top_positions
from scorers import ALL_QUERIES, LayerView, Needs, Rope

RULES = [
    *itertools.product(["decay", "enhance"], ["product", "sum", "last"]),
    ("evict", "product"),
]
PRESETS = ["on", "off", "figure3", "algorithm2", "far"]


def random_problem(n: int, seed: int, heads: int = 2, d: int = 8):
    """Scores and features with an off-centre mean, so that cosines are mostly positive as real keys' are."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(heads, n, generator=generator) ** 4
    return scores, torch.randn(heads, n, d, generator=generator) + 0.7


def expected(scores, sent, graph: Graph, k: int, m: int, received=None) -> np.ndarray:
    """The loop over all rows, a row's features being those of its group."""
    names = ("signal", "accumulate", "source_immune", "reselect", "clamp", "center", "min_distance")
    options = {name: getattr(graph, name) for name in names}
    received = sent if received is None else received
    rows = []
    for row in range(len(scores)):
        a, b = (tensor[row * len(tensor) // len(scores)].double().numpy() for tensor in (sent, received))
        rows.append(naive.rerank_head(scores[row].numpy(), a, k, m, graph.rounds, receivers=b, **options))
    return np.stack(rows)


def assert_equals_the_loop(scores, sent, graph: Graph, n: int, past_budget: int, received=None, rtol: float = 1e-4):
    out = rerank(scores, sent, graph, n, past_budget, received)
    loop = expected(scores, sent, graph, graph.n_sources(past_budget), graph.n_neighbors(n), received)
    np.testing.assert_allclose(out.numpy(), loop, rtol=rtol, atol=1e-5 if graph.accumulate == "sum" else 1e-12)


@pytest.mark.parametrize("n", [2, 3, 40, 300])
@pytest.mark.parametrize(("ratio", "neighbors", "rounds"), [(0.3, 3, 1), (1.0, 1, 2), (0.1, 50, 3), (0.5, 7, 1)])
def test_equals_the_loop(n, ratio, neighbors, rounds):
    scores, sent = random_problem(n, seed=n)
    assert_equals_the_loop(scores, sent, Graph(ratio, neighbors, rounds), n, max(1, n // 3))


@pytest.mark.parametrize(("signal", "accumulate"), RULES)
@pytest.mark.parametrize("center", ["none", "mean", "baseline"])
@pytest.mark.parametrize("neighbors", [3, "all"])
def test_every_reading_equals_the_loop(signal, accumulate, center, neighbors):
    for seed, (immune, reselect, clamp) in enumerate(itertools.product([False, True], repeat=3)):
        options = {"source_immune": immune, "reselect": reselect, "clamp": clamp, "center": center}
        graph = Graph(0.4, neighbors, 2, signal=signal, accumulate=accumulate, **options)
        scores, sent = random_problem(24, seed)
        assert_equals_the_loop(scores, sent, graph, 24, 15, rtol=1e-3)


@pytest.mark.parametrize("layer", [0, 14, 29])
def test_equals_the_loop_on_the_real_model(smol_prompt, layer):
    view = smol_prompt.layers[layer]
    scores, past = scorers.get("snapkv")().score(view)[:, :200], view.keys[:, :200]
    graph = Graph(neighbors=3, rounds=2)
    out = rerank(scores, past, graph, smol_prompt.n, 96)
    np.testing.assert_allclose(out.numpy(), expected(scores, past, graph, 28, 3), rtol=1e-3, atol=1e-12)


# Worked examples


def worked_example():
    """Paper analysis 2.4: A is the source; cos(A, B) = 0.9, cos(A, C) = 0.1, D at a right angle."""
    sent = torch.tensor([[[1.0, 0, 0], [0.9, (1 - 0.81) ** 0.5, 0], [0.1, 0, (1 - 0.01) ** 0.5], [0, 0, 1]]])
    return torch.tensor([[1.0, 0.9, 0.7, 0.6]]), sent


@pytest.mark.parametrize("accumulate", ["product", "sum", "last"])
@pytest.mark.parametrize(
    ("signal", "rounds", "after", "kept"),
    [
        ("decay", 0, [1.0, 0.9, 0.7, 0.6], [0, 1]),
        ("decay", 1, [1.0, 0.09, 0.63, 0.6], [0, 2]),
        ("decay", 2, [1.0, 0.009, 0.567, 0.6], [0, 3]),
        ("decay", 3, [1.0, 0.0009, 0.5103, 0.6], [0, 3]),
        ("enhance", 1, [1.0, 1.71, 0.77, 0.6], [0, 1]),
        ("enhance", 2, [1.0, 3.249, 0.847, 0.6], [0, 1]),
        ("evict", 1, [1.0, 0, 0, 0.6], [0, 3]),
    ],
)
def test_worked_example(accumulate, signal, rounds, after, kept):
    # Case S5. With one source all rules agree.
    scores, sent = worked_example()
    out = rerank(scores, sent, Graph(0.5, 2, rounds, signal=signal, accumulate=accumulate), 4, 2)
    assert out[0].tolist() == pytest.approx(after, rel=1e-5)
    assert top_positions(out, 2).tolist() == [kept]


def gram(cosines: dict[tuple[int, int], float], n: int) -> torch.Tensor:
    """[1, n, n] unit vectors with the given cosines, all others zero."""
    matrix = torch.eye(n, dtype=torch.float64)
    for (i, j), value in cosines.items():
        matrix[i, j] = matrix[j, i] = value
    return torch.linalg.cholesky(matrix)[None]


@pytest.mark.parametrize(
    ("accumulate", "token_6"),
    [("sum", -0.07), ("product", 0.14), ("last", 0.7 * (1 - 0.6))],
    ids=lambda value: str(value),
)
def test_figure_3(accumulate, token_6):
    # Tokens 1 to 7; sources 4 and 7, two neighbours each, which are not sources; 4, 7 and 2 are kept.
    token = {name: name - 1 for name in range(1, 8)}
    cosines = {(4, 3): 0.7, (4, 6): 0.5, (7, 6): 0.6, (7, 5): 0.4}
    sent = gram({(token[i], token[j]): e for (i, j), e in cosines.items()}, 7)
    scores = torch.tensor([[0.1, 0.5, 0.3, 0.9, 0.3, 0.7, 0.8]])
    figure3 = preset("figure3") | {"accumulate": accumulate, "source_ratio": 0.7, "neighbors": 2}
    out = rerank(scores, sent, Graph(**figure3), 7, 3)[0]
    assert out[token[6]].item() == pytest.approx(token_6, rel=1e-5)
    assert out[token[3]].item() == pytest.approx(0.09, rel=1e-5)
    assert out[token[5]].item() == pytest.approx(0.18, rel=1e-5)
    assert top_positions(out, 3).tolist() == [token[2], token[4], token[7]]


@pytest.mark.parametrize(
    ("accumulate", "scores", "third"),
    [
        ("product", [1.0, 0.9, 0.7], 0.28),
        ("product", [0.9, 1.0, 0.7], 0.28),
        ("sum", [1.0, 0.9, 0.7], 0.21),
        ("sum", [0.9, 1.0, 0.7], 0.21),
        ("last", [1.0, 0.9, 0.7], 0.56),
        ("last", [0.9, 1.0, 0.7], 0.35),
        ("last", [1.0, 1.0, 0.7], 0.56),  # the later of two equals is the weaker
    ],
)
def test_two_sources(accumulate, scores, third):
    # Case S6: 0.7 · (1 - 0.5) · (1 - 0.2) = 0.28; Algorithm 2 read literally ends with its weakest source.
    sent = gram({(0, 2): 0.5, (1, 2): 0.2}, 3)
    out = rerank(torch.tensor([scores]), sent, Graph(1.0, 2, 1, accumulate=accumulate), 3, 2)
    assert out[0, 2].item() == pytest.approx(third, rel=1e-5)


@pytest.mark.parametrize(("signal", "kept_negative"), [("decay", 0.6), ("enhance", 0.4)])
@pytest.mark.parametrize("accumulate", ["product", "sum", "last"])
def test_negative_cosines(signal, kept_negative, accumulate):
    # Case S7: the paper's formula as it stands, 0.5 · (1 + 0.2), promotes the token.
    sent = torch.tensor([[[1.0, 0], [-0.2, (1 - 0.04) ** 0.5]]])
    scores = torch.tensor([[1.0, 0.5]])
    graph = Graph(1.0, 1, 1, signal=signal, accumulate=accumulate)
    assert torch.equal(rerank(scores, sent, graph, 2, 1), scores)
    literal = rerank(scores, sent, dataclasses.replace(graph, clamp=False), 2, 1)
    assert literal[0].tolist() == pytest.approx([1, kept_negative])


def test_negative_query_key_edges():
    # Case S7 for an edge of two kinds: opposite vectors are never similar.
    scores, keys = random_problem(30, seed=2)
    graph = Graph(0.5, 29, 1, edge="qk")
    assert torch.equal(rerank(scores, -keys.abs(), graph, 30, 20, keys.abs()), scores)
    raised = rerank(scores, -keys.abs(), dataclasses.replace(graph, clamp=False), 30, 20, keys.abs())
    assert (raised > scores).all()


def test_decay_demotes_the_copy_of_the_smallest_key():
    # Case S8: on scores -‖k‖ = (-1, -1.1, -2) the factor 1 - 0.9 would have promoted token 1 to the top.
    keys = torch.tensor([[[1.0, 0, 0], [0.99, 1.1 * (1 - 0.81) ** 0.5, 0], [0, 0, 2]]])
    scorer = scorers.get("knorm")()
    view = LayerView(keys, keys, keys, 1.0, 0, 1)
    out = rerank_layer(scorer.score(view), scorer, view, Graph(0.5, 1), 2)
    assert out[0].tolist() == pytest.approx([1, 0.1 / 1.1, 0.5], rel=1e-5)


@pytest.mark.parametrize("name", scorers.names())
def test_decay_never_raises_any_scorers_score(name, smol_prompt):
    # Case S8 on the real model.
    scorer = scorers.get(name)()
    if scorer.needs.mass or scorer.needs.answer or scorer.needs.queries > 64:
        pytest.skip("needs more of the prompt than is recorded here")
    for view in smol_prompt.layers[::7]:
        scores = scorer.score(view)
        out = rerank_layer(scores, scorer, view, Graph(), 200)
        assert ((out >= 0) & (out <= scores)).all()
        assert name in ("full", "streamingllm") or (out < scores).any()


def test_ties_give_exactly_m_neighbours_at_the_lowest_positions():
    # Case S10.
    same = torch.ones(1, 4, 3)
    similarity = Similarity(same, same, 1)
    positions, e = similarity.neighbors(torch.tensor([[2]]), 2)
    assert positions.tolist() == [[[0, 1]]]
    torch.testing.assert_close(e, torch.ones(1, 1, 2))
    assert similarity.neighbors(torch.tensor([[2]]), 3)[0].tolist() == [[[0, 1, 3]]]
    assert similarity.neighbors(torch.tensor([[1]]), 2, torch.tensor([[0, 1]]))[0].tolist() == [[[2, 3]]]
    opposite = torch.tensor([[[1.0, 0], [-1, 0]]])
    assert Similarity(opposite, opposite, 1).neighbors(torch.tensor([[0]]), 1)[0].tolist() == [[[1]]]
    out = rerank(torch.tensor([[0.1, 0.2, 0.9, 0.3]]), same, Graph(0.1, 99, 1), 4, 1)
    torch.testing.assert_close(out, torch.tensor([[0, 0, 0.9, 0]]), rtol=0, atol=1e-6)


# Properties


@st.composite
def problems(draw, kinds=("random", "equal", "zero keys", "equal scores", "zero scores", "tiny", "huge")):
    """Scores, features, graph, n, past budget and the kind of problem, degenerate ones among them."""
    kind = draw(st.sampled_from(kinds))
    n = draw(st.integers(1, 40))
    scores, sent = random_problem(n, draw(st.integers(0, 10**6)))
    if kind == "equal":
        sent = sent[:, :1].expand(-1, n, -1)
    elif kind == "zero keys":
        sent = torch.zeros_like(sent)
    elif kind == "equal scores":
        scores = torch.ones_like(scores)
    elif kind == "zero scores":
        scores = scores * (scores > 0.1)
    elif kind in ("tiny", "huge"):
        scores = scores * (1e-38 if kind == "tiny" else 1e30)
    signal, accumulate = draw(st.sampled_from(RULES))
    graph = Graph(
        draw(st.floats(0.01, 1)),
        draw(st.one_of(st.integers(1, 60), st.just("all"))),
        draw(st.integers(0, 4)),
        signal=signal,
        accumulate=accumulate,
        source_immune=draw(st.booleans()),
        reselect=draw(st.booleans()),
        clamp=draw(st.booleans()),
        center=draw(st.sampled_from(["none", "mean", "baseline"])),
        min_distance=draw(st.sampled_from([0, 0, 1, 5])),
    )
    return scores, sent, graph, n, draw(st.integers(1, 60)), kind


@settings(deadline=None, max_examples=300)
@given(problems())
def test_finite_and_in_the_right_direction(problem):
    scores, sent, graph, n, past_budget, kind = problem
    out = rerank(scores, sent, graph, n, past_budget)
    assert out.shape == scores.shape and out.dtype == torch.float32 and out.isfinite().all()
    if graph.signal == "evict":
        assert ((out == 0) | (out == scores) | (out == 2.0**-149)).all()
    elif graph.clamp and graph.signal == "enhance":
        assert (out >= scores).all()
    elif graph.clamp and (graph.accumulate != "sum" or graph.rounds == 1):
        # A negative sum squared is positive: rounds of the additive reading alternate.
        assert (out <= scores).all()
    if graph.accumulate != "sum" and graph.clamp:
        assert (out >= 0).all()
    if graph.rounds == 0 or (kind == "zero keys" and graph.signal != "evict"):
        assert torch.equal(out, scores)


@settings(deadline=None, max_examples=60)
@given(problems(kinds=["random"]), st.integers(0, 10**6))
def test_the_order_of_tokens_and_sources_does_not_matter(problem, seed):
    scores, sent, graph, n, past_budget, _ = problem
    # Scores that became 0, evicted or by an unclamped edge of -1, tie, and a choice among them would go by position.
    reselect = graph.reselect and graph.clamp and graph.signal != "evict"
    graph = dataclasses.replace(graph, min_distance=0, reselect=reselect)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    out = rerank(scores, sent, graph, n, past_budget)
    shuffled = rerank(scores[:, order], sent[:, order], graph, n, past_budget)
    torch.testing.assert_close(shuffled, out[:, order], rtol=1e-3, atol=1e-5 if graph.accumulate == "sum" else 1e-12)


@settings(deadline=None, max_examples=60)
@given(problems(kinds=["random", "equal scores"]), st.integers(-30, 30))
def test_scaling_scores_scales_the_result(problem, power):
    scores, sent, graph, n, past_budget, _ = problem
    out = rerank(scores, sent, graph, n, past_budget)
    scaled = rerank(scores * 2.0**power, sent, graph, n, past_budget)
    assert graph.signal == "evict" or torch.allclose(scaled, out * 2.0**power, rtol=1e-6, atol=1e-30)
    kept = min(past_budget, n)
    assert torch.equal(top_positions(scaled, kept), top_positions(out, kept))


@settings(deadline=None, max_examples=60)
@given(problems())
def test_more_neighbours_than_tokens_is_all_and_more_sources_than_tokens_every_one(problem):
    scores, sent, graph, n, past_budget, _ = problem
    every, many = dataclasses.replace(graph, neighbors="all"), dataclasses.replace(graph, neighbors=max(1, n - 1))
    assert torch.equal(rerank(scores, sent, every, n, past_budget), rerank(scores, sent, many, n, past_budget))
    more_than_n = dataclasses.replace(graph, source_ratio=1.0)
    assert torch.equal(rerank(scores, sent, more_than_n, n, n), rerank(scores, sent, more_than_n, n, 10 * n))


def test_a_removed_token_ranks_below_one_without_a_score():
    scores, sent = worked_example()
    scores[0, 3] = 0
    out = rerank(scores, sent, Graph(0.5, 2, signal="evict"), 4, 2)
    assert top_positions(out, 2).tolist() == [[0, 3]]


def test_equal_scores_equal_the_loop():
    # Sources are the first tokens, and the later of two equals is the weaker, which wins with `last`.
    scores, sent = random_problem(60, seed=8)
    for accumulate, neighbors in itertools.product(["product", "last"], [6, "all"]):
        assert_equals_the_loop(torch.ones_like(scores), sent, Graph(0.9, neighbors, 2, accumulate=accumulate), 60, 50)


def test_half_precision_features_are_compared_in_float32():
    scores, sent = random_problem(60, seed=8)
    for dtype in (torch.bfloat16, torch.float16):
        half = sent.to(dtype)
        assert torch.equal(rerank(scores, half, Graph(), 60, 30), rerank(scores, half.float(), Graph(), 60, 30))


@settings(deadline=None, max_examples=60)
@given(problems(kinds=["random", "zero scores", "tiny"]), st.data())
def test_evicting_equals_removing(problem, data):
    scores, sent, graph, n, past_budget, _ = problem
    neighbors = data.draw(st.integers(1, 4))
    graph = dataclasses.replace(graph, neighbors=neighbors, signal="evict", accumulate="product", reselect=False)
    out = rerank(scores, sent, graph, n, past_budget)
    k, m = graph.n_sources(past_budget), graph.n_neighbors(n)
    for row in range(len(scores)):
        e = naive.similarities(*[sent[row].double().numpy()] * 2, graph.center)
        options = (graph.source_immune, graph.clamp, graph.min_distance)
        incoming = naive.incoming_edges(scores[row].numpy(), e, k, m, *options)
        left = torch.tensor([not (edges and graph.rounds) for edges in incoming])
        count = data.draw(st.integers(0, int(left.sum())))
        survivors = left.nonzero()[:, 0]
        assert torch.equal(top_positions(out[row], count), survivors[top_positions(scores[row, left], count)])
        assert top_positions(out[row], n).tolist() == list(range(n))  # a larger budget is still filled


def test_duplicates_and_zero_keys():
    scores, sent = random_problem(40, seed=3, heads=1)
    source = int(scores.argmax())
    copy, zero = (source + 1) % 40, (source + 2) % 40
    sent[:, copy], sent[:, zero] = 3 * sent[:, source], 0
    out = rerank(scores, sent, Graph(0.1, 5), 40, 10)
    assert out[0, copy] <= 1e-6 * scores[0, copy] and out[0, source] == scores[0, source]
    assert rerank(scores, sent, Graph(0.1, "all"), 40, 10)[0, zero] == scores[0, zero]


def test_rounds_in_closed_form_equal_the_loop():
    scores, sent = random_problem(60, seed=5)
    factor = rerank(scores, sent, Graph(0.5, 4, 1), 60, 20) / scores
    once = scores
    for rounds in range(1, 5):
        once = once * factor
        torch.testing.assert_close(rerank(scores, sent, Graph(0.5, 4, rounds), 60, 20), once, rtol=1e-5, atol=0)


@pytest.mark.parametrize("signal", ["decay", "enhance"])
@pytest.mark.parametrize(("rounds", "reselect"), [(1, False), (3, False), (1, True), (3, True)])
def test_hundreds_of_factors_rank_rightly(signal, rounds, reselect):
    # 0.2^700 is no float32, and not even a float64: multiplied out, all tokens would tie at 0 (or at infinity).
    scores, sent = random_problem(800, seed=11, heads=1)
    out = rerank(scores, sent + 1.3, Graph(1.0, "all", rounds, signal=signal, reselect=reselect), 800, 800)[0]
    assert out.isfinite().all() and out.unique().numel() > 780
    unit = torch.nn.functional.normalize(sent[0].double() + 1.3, dim=-1)
    cosine = (unit @ unit.T).clamp(0, 1).fill_diagonal_(0)  # all 800 are sources, in each round
    exact = scores[0].double().log() + rounds * (cosine if signal == "enhance" else -cosine).log1p().sum(0)
    places = [values.argsort().argsort() for values in (out, exact)]
    assert (places[0] - places[1]).abs().max() <= 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": "last", "rounds": 300},
        {"accumulate": "sum", "rounds": 20},
        {"accumulate": "sum", "rounds": 300},
        {"signal": "enhance"},
        {"signal": "enhance", "accumulate": "sum", "rounds": 300},
        {"signal": "enhance", "accumulate": "last", "rounds": 300},
        {"signal": "enhance", "reselect": True, "rounds": 3},
    ],
)
def test_all_tokens_alike_stay_finite(options):
    # Factors of 2^1199, of -1198 and of its powers.
    scores, _ = random_problem(1200, seed=1)
    scores[:, ::3] = 0
    out = rerank(scores, torch.ones(2, 1200, 4), Graph(1.0, "all", **options), 1200, 1200)
    assert out.isfinite().all() and (out[:, ::3] == 0).all()


# Far edges


@pytest.mark.parametrize(("signal", "accumulate"), RULES)
@pytest.mark.parametrize("neighbors", [3, 14, "all"])
@pytest.mark.parametrize("min_distance", [1, 6, 12, 22])
def test_far_edges_equal_the_loop(signal, accumulate, neighbors, min_distance):
    # Of 24 tokens those in the middle have no neighbour more than 12 positions away.
    for seed, (immune, reselect, clamp) in enumerate(itertools.product([False, True], repeat=3)):
        options = {"source_immune": immune, "reselect": reselect, "clamp": clamp, "min_distance": min_distance}
        center = ["none", "mean", "baseline"][seed % 3]
        graph = Graph(0.4, neighbors, 2, signal=signal, accumulate=accumulate, center=center, **options)
        scores, sent = random_problem(24, seed)
        assert_equals_the_loop(scores, sent, graph, 24, 15, rtol=1e-3)


@pytest.mark.parametrize("accumulate", ["product", "sum", "last"])
def test_far_edges_of_sources_side_by_side_equal_the_loop(accumulate):
    # All sources are neighbours in position, so that most overwrite nothing of what is near.
    scores, sent = random_problem(60, seed=1)
    scores[:, 20:35] += 1
    graph = Graph(0.5, "all", accumulate=accumulate, min_distance=7)
    assert_equals_the_loop(scores, sent, graph, 60, 30)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 60), st.integers(0, 70), st.integers(1, 70), st.booleans(), st.integers(0, 10**6))
def test_no_edge_is_shorter_than_the_distance(n, distance, m, immune, seed):
    scores, sent = random_problem(n, seed)
    sources = top_positions(scores, max(1, n // 4))
    similarity = Similarity(sent, sent, 2, min_distance=distance)
    neighbors, e = similarity.neighbors(sources, min(m, n), sources if immune else None)
    for row, source, place in itertools.product(range(2), range(sources.shape[1]), range(min(m, n))):
        i, j = int(sources[row, source]), int(neighbors[row, source, place])
        assert abs(i - j) > distance or (i == j and e[row, source, place] == 0)
    far = [[abs(int(i) - j) > distance and not (immune and j in row) for j in range(n)] for row in sources for i in row]
    real = (neighbors != sources[..., None]).flatten(0, 1).sum(-1)
    assert real.tolist() == [min(m, n, sum(allowed)) for allowed in far]


@settings(deadline=None, max_examples=60)
@given(problems(), st.integers(0, 10))
def test_a_distance_beyond_the_prompt_leaves_no_edges(problem, more):
    scores, sent, graph, n, past_budget, _ = problem
    graph = dataclasses.replace(graph, min_distance=n - 1 + more)
    assert torch.equal(rerank(scores, sent, graph, n, past_budget), scores)


def test_blocks_leave_room_for_the_positions_of_near_tokens(monkeypatch):
    scores, sent = random_problem(64, seed=9)
    for neighbors, accumulate in itertools.product([3, "all"], ["product", "last"]):
        graph = Graph(0.9, neighbors, accumulate=accumulate, min_distance=16)
        whole = rerank(scores, sent, graph, 64, 40)
        with monkeypatch.context() as patch:
            patch.setattr(edges, "_BLOCK_ELEMENTS", 2 * (64 + 4 * 16) * 5)
            blocks = Similarity(sent, sent, 2, min_distance=16).blocks(top_positions(scores, 36))
            assert [cosine.shape[1] for _, cosine in blocks] == [5] * 7 + [1]
            torch.testing.assert_close(rerank(scores, sent, graph, 64, 40), whole)


# How it is computed


def test_rows_of_a_group_share_features():
    scores, keys = random_problem(50, seed=4, heads=2)
    scores = torch.rand(6, 50, generator=torch.Generator().manual_seed(0))
    queries = torch.randn(6, 50, 8, generator=torch.Generator().manual_seed(1))
    for center in ("none", "baseline"):
        graph = Graph(0.5, 4, center=center)
        repeated = keys.repeat_interleave(3, 0)
        torch.testing.assert_close(rerank(scores, keys, graph, 50, 20), rerank(scores, repeated, graph, 50, 20))
        out = rerank(scores, queries, graph, 50, 20, keys)
        torch.testing.assert_close(out, rerank(scores, queries, graph, 50, 20, repeated))
        assert_equals_the_loop(scores, queries, graph, 50, 20, keys)
        assert_equals_the_loop(scores, keys, graph, 50, 20, queries)


@pytest.mark.parametrize(("neighbors", "accumulate"), [(3, "product"), (3, "last"), ("all", "product"), ("all", "sum")])
def test_blocks_of_sources_give_the_same(monkeypatch, neighbors, accumulate):
    scores, sent = random_problem(64, seed=9)
    graph = Graph(0.9, neighbors, 1, accumulate=accumulate)
    whole = rerank(scores, sent, graph, 64, 40)
    monkeypatch.setattr(edges, "_BLOCK_ELEMENTS", 2 * 64 * 5)
    shapes = [cosine.shape for _, cosine in Similarity(sent, sent, 2).blocks(top_positions(scores, 36))]
    assert shapes == [(2, 5, 64)] * 7 + [(2, 1, 64)]
    torch.testing.assert_close(rerank(scores, sent, graph, 64, 40), whole)


@settings(deadline=None, max_examples=40)
@given(st.integers(500, 1500), st.integers(1, 9), st.sampled_from([2, 5, 50, 10**6]), st.integers(0, 10**6))
def test_nearest_equals_top_positions(n, m, levels, seed):
    cosine = torch.randint(-levels, levels + 1, (2, 3, n), generator=torch.Generator().manual_seed(seed)) / levels
    assert torch.equal(edges._nearest(cosine, m), top_positions(cosine, m))


def test_the_baseline_is_the_average_cosine_of_two_tokens():
    for sent, received in [(random_problem(30, 1)[1],) * 2, (random_problem(30, 2)[1], random_problem(30, 3)[1])]:
        sent = sent.clone()
        sent[:, 4] = 0
        found = Similarity(sent, received if received is not sent else sent, 2, "baseline").baseline
        for head in range(2):
            e = naive.similarities(sent[head].double().numpy(), received[head].double().numpy(), "none")
            assert found[head].item() == pytest.approx(e.sum() / (30 * 29), abs=1e-6)


def test_centred_edges_see_through_a_common_direction():
    # All keys share a large mean; only tokens 0 and 1 are alike beyond it.
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 40, 32, generator=generator)
    keys[:, 1] = keys[:, 0]
    scores = torch.linspace(1, 0.5, 40)[None]
    factors = {}
    for center in ("none", "mean", "baseline"):
        factors[center] = rerank(scores, keys + 3, Graph(0.05, "all", center=center), 40, 20)[0] / scores[0]
        assert factors[center][1] < 1e-5
    assert factors["none"][2:].max() < 0.3
    assert factors["mean"][2:].mean() > 0.8 and factors["baseline"][2:].mean() > 0.8


# What is compared


def layer(n: int = 40, groups: int = 2, group: int = 3, d: int = 8, d_values: int = 8, rope: bool = True) -> LayerView:
    """A layer with random keys, values and the queries of all tokens."""
    generator = torch.Generator().manual_seed(n)
    keys, values = (torch.randn(groups, n, size, generator=generator) for size in (d, d_values))
    queries = torch.randn(groups * group, n, d, generator=generator)
    angles = torch.arange(n)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01]).repeat(2)
    return LayerView(keys, values, queries, 1.0, 0, 1, Rope(angles.cos(), angles.sin()) if rope else None)


@pytest.mark.parametrize("edge", ["kk", "qk", "qq", "kv", "vv"])
@pytest.mark.parametrize("rope", ["post", "pre"])
@pytest.mark.parametrize("rows", [2, 6])
def test_every_edge_equals_the_loop(edge, rope, rows):
    view, n_past = layer(), 32
    back = view.rope.unrotate if rope == "pre" else lambda x, _: x
    positions = torch.arange(n_past)
    queries = view.queries[:, :n_past]
    if rows == 2:
        queries = torch.stack([queries[:3].sum(0) / 3, queries[3:].sum(0) / 3])
    of_kind = {
        "k": back(view.keys[:, :n_past], positions),
        "q": back(queries, positions),
        "v": view.values[:, :n_past],
    }
    scores = torch.rand(rows, n_past, generator=torch.Generator().manual_seed(7))
    graph = Graph(0.5, 4, 2, edge=edge, rope=rope)
    out = rerank_layer(scores, scorers.get("knorm")(window=8), view, graph, 28)
    loop = expected(scores, of_kind[edge[0]], graph, 10, 4, of_kind[edge[1]])
    np.testing.assert_allclose(out.numpy(), loop, rtol=1e-3, atol=1e-12)


def test_edges_of_the_real_model(smol, smol_prompt):
    graph = Graph(edge="qk", neighbors=3)
    prompt = smol.prefill(smol_prompt.ids[:200], needs=graph.needs)
    cell = smol.compress(prompt, "snapkv", 64, dataclasses.asdict(graph))
    assert all(positions.shape == (3, 64) for positions in cell.kept)
    view = prompt.layers[9]
    unrotated, _ = features(view, "kk", "pre", 3, 168)
    rotated = view.rope.rotate(unrotated, torch.arange(168))
    torch.testing.assert_close(rotated, view.keys[:, :168], rtol=1e-4, atol=1e-4)
    scores = scorers.get("snapkv")().score(view)
    out = rerank_layer(scores, scorers.get("snapkv")(), view, graph, 64)
    queries = view.queries[:, :168].unflatten(0, (3, 3)).mean(1)
    loop = expected(scores, queries, graph, 9, 3, view.keys[:, :168])
    np.testing.assert_allclose(out.numpy(), loop, rtol=1e-3, atol=1e-12)


def test_what_edges_need():
    assert Graph(edge="qk").needs == Graph(edge="qq").needs == Needs(queries=ALL_QUERIES)
    assert Graph().needs == Graph(edge="kv").needs == Graph(edge="qk", rounds=0).needs == Needs()


def test_impossible_edges_are_refused_with_a_sentence():
    with pytest.raises(UserError, match="queries of all 40 prompt tokens, but the prefill recorded 8"):
        features(dataclasses.replace(layer(), queries=layer().queries[:, -8:]), "qk", "post", 2, 32)
    with pytest.raises(UserError, match="rope=pre"):
        features(layer(rope=False), "kk", "pre", 2, 32)
    with pytest.raises(UserError, match="vectors of 8 and of 4 numbers"):
        features(layer(d_values=4), "kv", "post", 2, 32)


# In a layer


def test_before_pooling_ranks_the_raw_scores_and_pools_the_result():
    view, scorer = layer(100), scorers.get("snapkv")(window=10, kernel=5)
    graph = Graph(0.5, 4, space="before")
    out = rerank_layer(scorer.score(view), scorer, view, graph, 40)
    torch.testing.assert_close(
        out, scorer.finish(rerank(scorer.raw_score(view), view.keys[:, :90], graph, 100, 30)), rtol=0, atol=0
    )
    assert not torch.equal(out, rerank_layer(scorer.score(view), scorer, view, Graph(0.5, 4), 40))


@pytest.mark.parametrize(("name", "options"), [("knorm", {}), ("snapkv", {"pooling": "none"})])
def test_before_is_after_without_pooling(name, options):
    view, scorer = layer(100), scorers.get(name)(window=10, **options)
    one, other = (
        rerank_layer(scorer.score(view), scorer, view, Graph(0.5, 4, space=space), 40) for space in ("before", "after")
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["knorm", "snapkv", "pyramidkv"])
def test_scores_are_finished_raw_scores(name):
    view, scorer = layer(100), scorers.get(name)(window=10)
    assert torch.equal(scorer.finish(scorer.raw_score(view)), scorer.score(view))


def test_nothing_to_choose_changes_nothing():
    view, scorer = layer(100), scorers.get("snapkv")(window=10)
    scores = scorer.score(view)
    assert rerank_layer(scores, scorer, view, Graph(rounds=0, edge="qq", space="before"), 40) is scores
    assert rerank_layer(scores, scorer, view, Graph(), 10) is scores
    one, sent = random_problem(1, seed=0)
    assert rerank(one, sent, Graph(signal="evict"), 1, 1) is one
    assert rerank(scores, view.keys[:, :90], Graph(1.0, signal="evict", source_immune=True), 100, 90) is scores


@pytest.mark.parametrize(
    "options",
    [
        *({"signal": signal, "accumulate": accumulate} for signal, accumulate in RULES),
        {"neighbors": "all", "center": "baseline"},
        {"source_immune": True, "reselect": True, "rounds": 2, "clamp": False, "center": "mean"},
        {"rope": "pre", "space": "before", "k_of": "budget", "edge": "vv"},
        {"min_distance": 10, "neighbors": 40},
        {"min_distance": 1, "neighbors": "all", "accumulate": "last"},
    ],
)
@pytest.mark.parametrize("scorer", ["snapkv", "knorm"])
@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
def test_every_option_cuts_exact_cells(tiny, tiny_prompt, options, scorer, granularity):
    cell = tiny.cut(tiny_prompt, cell_settings(scorer, 80, {"neighbors": 3, **options}, granularity=granularity))
    off = tiny.cut(tiny_prompt, cell_settings(scorer, 80, None, granularity=granularity))
    none = tiny.cut(tiny_prompt, cell_settings(scorer, 80, {**options, "rounds": 0}, granularity=granularity))
    rows = {"kv_head": 2, "query_head": 4}[granularity]
    for positions, without, rounds_0 in zip(cell.kept, off.kept, none.kept, strict=True):
        assert positions.shape == (rows, 80) and (positions.diff() > 0).all()
        assert torch.equal(without, rounds_0)
    assert any(not torch.equal(*pair) for pair in zip(cell.kept, off.kept, strict=True))


# Settings


def preset(name: str) -> dict:
    """A file of conf/graphkv without the switch."""
    values = yaml.safe_load((CONF / "graphkv" / f"{name}.yaml").read_text())
    assert values.pop("enabled") is (name != "off")
    return values


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_every_option(name):
    assert set(preset(name)) == {field.name for field in dataclasses.fields(Graph)}
    Graph(**preset(name))


def test_presets_differ_from_the_default_reading_as_they_say():
    default = dataclasses.asdict(Graph())
    assert sorted(path.stem for path in (CONF / "graphkv").glob("*.yaml")) == sorted(PRESETS)
    assert preset("on") == preset("off") == default
    assert preset("figure3") == default | {"accumulate": "sum", "source_immune": True}
    assert preset("algorithm2") == default | {"accumulate": "last"}
    assert preset("far") == default | {"min_distance": 10}


@pytest.mark.parametrize(("n", "m"), [(1, 1), (999, 1), (1500, 1), (2000, 2), (3000, 3), (7950, 3), (31500, 3)])
def test_automatic_neighbours(n, m):
    # Case B9: L counts thousands of prompt tokens, rounded down, at least one neighbour.
    assert Graph(neighbors="auto3").n_neighbors(n) == m
    assert Graph(neighbors="min(3, L)").n_neighbors(n) == m


def test_sources_are_a_share_of_the_past_budget_or_of_the_whole():
    assert Graph(source_ratio=0.3).n_sources(480) == 144
    assert Graph(source_ratio=0.3).n_sources(512) == 153
    assert Graph(source_ratio=0.1).n_sources(1) == 1
    assert Graph(source_ratio=1.0).n_sources(512) == 512
    assert Graph(source_ratio=0.3).n_sources(480, window=32) == 144
    assert Graph(source_ratio=0.3, k_of="budget").n_sources(480, window=32) == 153
    scores, sent = random_problem(90, seed=0)
    whole, past = Graph(0.5, 2, k_of="budget"), Graph(0.5, 2)
    assert torch.equal(rerank(scores, sent, whole, 100, 20), rerank(scores, sent, past, 100, 30))


@pytest.mark.parametrize(
    "options",
    [
        {"source_ratio": 0.0},
        {"source_ratio": 1.1},
        {"neighbors": 0},
        {"neighbors": "three"},
        {"rounds": -1},
        {"edge": "vk"},
        {"signal": "amplify"},
        {"accumulate": "mean"},
        {"rope": "none"},
        {"center": "median"},
        {"space": "during"},
        {"k_of": "n"},
        {"min_distance": -1},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Graph(**options)
