"""Set objectives: against loops from their definitions, what greedy promises, and how cells are cut with them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import coverage as naive

import graphkv
import scorers
from eval.errors import UserError
from graphkv import budgets, coverage
from graphkv.config import CONF, cell_settings
from graphkv.coverage import Coverage, Facility, Kernel, Selector, batched_greedy, lazy_greedy, select, value
from graphkv.edges import Similarity
from graphkv.graph import Graph, rerank
from graphkv.selection import keep, top_positions
from scorers import ALL_QUERIES, Needs

FUNCTIONS = {"coverage": Coverage, "facility": Facility}
NAMES = ["mmr", "coverage", "facility"]


def random_kernel(m: int, seed: int, heads: int = 1) -> torch.Tensor:
    """Symmetric [heads, m, m] float32 in [0, 1], ones on the diagonal, most entries small or zero."""
    kernel = torch.rand(heads, m, m, generator=torch.Generator().manual_seed(seed)).mul(1.3).sub(0.3).clamp(0)
    kernel = torch.maximum(kernel, kernel.mT) ** 2
    return kernel.diagonal_scatter(torch.ones(heads, m), dim1=1, dim2=2)


def random_weights(m: int, seed: int, heads: int = 1) -> torch.Tensor:
    """[heads, m] float64 with sum 1."""
    p = torch.rand(heads, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    return p / p.sum(-1, keepdim=True)


def random_layer(n: int, seed: int, heads: int = 2, window: int = 4):
    """Scores of the past, keys and values with a common direction."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(heads, n - window, generator=generator) ** 4
    return scores, *(torch.randn(heads, n, size, generator=generator) + 0.4 for size in (6, 5))


# Objectives


@pytest.mark.parametrize("kind", ["kv", "k"])
@pytest.mark.parametrize("center", ["mean", "baseline", "none"])
@pytest.mark.parametrize("power", [1.0, 4.0])
def test_the_kernel_equals_the_loop(kind, center, power):
    _, keys, values = random_layer(25, seed=1)
    kernel = Kernel(keys, values, Selector(kernel=kind, center=center, power=power))
    every = torch.arange(25).expand(2, -1)
    found = kernel.between(every[:, 3:20], every)
    for head in range(2):
        expected = naive.kernel(keys[head].double().numpy(), values[head].double().numpy(), kind, center, power)
        np.testing.assert_allclose(found[head].numpy(), expected[3:20], rtol=1e-4, atol=1e-5)


def test_only_tokens_alike_in_keys_and_values_stand_for_each_other():
    _, keys, values = random_layer(30, seed=2)
    keys[:, 9], keys[:, 12], values[:, 12] = keys[:, 5], keys[:, 5], values[:, 5]
    a, b = torch.tensor([[5]] * 2), torch.tensor([[9, 12]] * 2)
    both = Kernel(keys, values, Selector()).between(a, b)[:, 0]
    torch.testing.assert_close(both[:, 1], torch.ones(2))
    assert (both[:, 0] < 0.9).all()
    torch.testing.assert_close(Kernel(keys, values, Selector(kernel="k")).between(a, b), torch.ones(2, 1, 2))


def test_where_all_tokens_are_alike_each_stands_for_itself_only():
    # Nothing is left of a feature without the head's mean, and nobody is more similar than the average.
    scores, keys, values = torch.rand(2, 26), torch.ones(2, 30, 6), torch.ones(2, 30, 5)
    every = torch.arange(30).expand(2, -1)
    for center in ("mean", "baseline"):
        selector = Selector("coverage", 1.0, center=center)
        assert torch.equal(Kernel(keys, values, selector).between(every, every), torch.eye(30).expand(2, -1, -1))
        assert torch.equal(select(scores, keys, values, selector, 12), keep(scores, 12, 30))


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.floats(0, 1), st.data())
def test_gains_are_what_the_loop_gains(name, seed, weight, data):
    m = 8
    kept = data.draw(st.lists(st.integers(0, m - 1), unique=True, max_size=m - 1))
    p, kernel = random_weights(m, seed), random_kernel(m, seed)
    function = FUNCTIONS[name](p, weight)
    function.add(kernel[:, kept]) if kept else None
    gains = function.gains(kernel.double(), torch.arange(m)[None])[0]
    weights, kappa = p[0].numpy(), kernel[0].double().numpy()
    before = naive.objective(name, weights, kappa, kept, weight)
    chosen = torch.tensor([[j in kept for j in range(m)]])
    assert function.value(chosen).item() == pytest.approx(before, abs=1e-12)
    for j in set(range(m)) - set(kept):
        gain = naive.objective(name, weights, kappa, [*kept, j], weight) - before
        assert gains[j].item() == pytest.approx(gain, abs=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.floats(0, 1), st.data())
def test_monotone_and_submodular(name, seed, weight, data):
    # What a token brings is never negative, and never more to a larger set.
    m = 10
    larger = data.draw(st.lists(st.integers(0, m - 1), unique=True, min_size=1, max_size=m - 1))
    smaller = larger[: data.draw(st.integers(0, len(larger) - 1))]
    p, kernel = random_weights(m, seed), random_kernel(m, seed)
    left = torch.tensor([[j for j in range(m) if j not in larger]])
    gains = []
    for kept in (smaller, larger):
        function = FUNCTIONS[name](p, weight)
        function.add(kernel[:, kept]) if kept else None
        gains.append(function.gains(kernel[:, left[0]].double(), left))
    assert (gains[1] >= 0).all() and (gains[0] >= gains[1] - 1e-15).all()


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 2))
def test_greedy_is_within_1_minus_1_over_e_of_the_best_set(name, seed, count, weight, n_always):
    # All sets of up to five of nine candidates, beside tokens that are kept anyway.
    m = 9
    kernel = random_kernel(m + n_always, seed)
    p, kappa, always = random_weights(m, seed), kernel[0].double().numpy(), list(range(m, m + n_always))
    function = FUNCTIONS[name](p, weight)
    function.add(kernel[:, m:, :m]) if always else None
    chosen = lazy_greedy(function, kernel[:, :m, :m], count)[0].tolist()

    def f(kept):
        return naive.objective(name, p[0].numpy(), kappa, [*always, *kept], weight)

    best = max(f(kept) for kept in itertools.combinations(range(m), count))
    assert f(chosen) - f([]) >= (1 - 1 / math.e) * (best - f([])) - 1e-12
    assert function.value(torch.tensor([[j in chosen for j in range(m)]])).item() == pytest.approx(f(chosen))


def test_greedy_may_miss_the_best_set():
    # Else the bound above would say nothing: token 0 covers half of both halves, which 1 and 2 cover whole.
    kernel = torch.eye(7)[None].clone()
    kernel[0, 0, [3, 4, 5, 6]] = 0.7
    kernel[0, 1, [3, 4]] = kernel[0, 2, [5, 6]] = 1.0
    p = torch.tensor([[0, 0, 0, 0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    function = Facility(p, 1.0)
    chosen = lazy_greedy(function, kernel, 2)
    assert 0 in chosen[0].tolist()
    assert function.value(torch.zeros(1, 7, dtype=torch.bool)).item() == pytest.approx(0.85)


# Greedy


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(0, 20), st.floats(0, 1), st.booleans())
def test_lazy_equals_plain_greedy(name, seed, m, count, weight, ties):
    count = min(m, count)
    p, kernel = random_weights(m, seed, heads=2), random_kernel(m, seed, heads=2)
    if ties:  # of numbers whose sums and products are exact, so that equal gains come out equal
        p, kernel, weight = (p * 32).round() / 32, (kernel * 2).round() / 2, round(weight * 4) / 4
    chosen = lazy_greedy(coverage.OBJECTIVES[name](p, weight), kernel, count)
    one_a_round = batched_greedy(coverage.OBJECTIVES[name](p, weight), kernel.double(), count, max(1, count))
    for head in range(2):
        plain = naive.greedy(name, p[head].numpy(), kernel[head].double().numpy(), [], count, weight)
        assert one_a_round[head].tolist() == plain
        assert chosen[head].tolist() == plain


@pytest.mark.parametrize("name", NAMES)
def test_lazy_equals_plain_greedy_on_the_real_model(smol_prompt, name):
    view = smol_prompt.layers[13]
    scores = scorers.get("snapkv")().score(view)
    for selector in (Selector(name, 0.3), Selector(name, 1.0, kernel="k", center="baseline", power=2.0)):
        lazy, plain = (
            select(scores, view.keys, view.values, dataclasses.replace(selector, rounds=rounds), 80)
            for rounds in (None, 48)
        )
        assert torch.equal(lazy, plain)


def test_equal_candidates_are_taken_from_the_lowest_position():
    # More equal gains than the lazy greedy looks at together.
    for name in NAMES:
        function = coverage.OBJECTIVES[name](torch.full((1, 50), 0.02, dtype=torch.float64), 0.5)
        assert lazy_greedy(function, torch.eye(50)[None], 20)[0].tolist() == list(range(20))
        nothing = coverage.OBJECTIVES[name](torch.zeros(1, 50, dtype=torch.float64), 0.5)
        assert lazy_greedy(nothing, torch.eye(50)[None], 20)[0].tolist() == list(range(20))


def test_tokens_of_one_round_do_not_know_of_each_other():
    kernel = torch.eye(4)[None].clone()
    kernel[0, 0, 1] = kernel[0, 1, 0] = 1
    p = torch.tensor([[0.35, 0.3, 0.2, 0.15]], dtype=torch.float64)
    assert batched_greedy(Coverage(p, 1.0), kernel, 2, rounds=1)[0].tolist() == [0, 1]
    assert batched_greedy(Coverage(p, 1.0), kernel, 2, rounds=2)[0].tolist() == [0, 2]
    assert batched_greedy(Coverage(p, 1.0), kernel, 2, rounds=9)[0].tolist() == [0, 2]


# Selection


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(4, 30), st.integers(0, 6), st.sampled_from([None, 1, 5]), st.booleans())
def test_weight_0_is_top_k_exactly(name, seed, budget, sinks, rounds, ties):
    scores, keys, values = random_layer(40, seed)
    scores = (scores * 5).floor() if ties else scores * 1e-30
    chosen = select(scores, keys, values, Selector(name, 0.0, rounds=rounds), budget, sinks)
    assert torch.equal(chosen, keep(scores, budget, 40, sinks))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"weight": 1.0}, {"kernel": "k", "center": "baseline", "power": 4.0}])
@pytest.mark.parametrize("sinks", [0, 3])
def test_equals_plain_greedy_from_window_and_sinks(name, options, sinks):
    scores, keys, values = random_layer(40, seed=4)
    selector = Selector(name, **options, candidates=2)
    chosen = select(scores, keys, values, selector, 12, sinks)
    for head in range(2):
        candidates = (top_positions(scores[head, sinks:], 24) + sinks).tolist()
        always = [*range(sinks), *range(36, 40)]
        tokens = [*candidates, *always]
        kappa = naive.kernel(
            *(x[head].double().numpy() for x in (keys, values)), selector.kernel, selector.center, selector.power
        )[np.ix_(tokens, tokens)]
        p = scores[head, candidates].double().numpy()
        seeds = list(range(len(candidates), len(tokens)))
        plain = naive.greedy(name, p / p.sum(), kappa, seeds, 12 - len(always), selector.weight)
        assert chosen[head].tolist() == sorted([*always, *(candidates[j] for j in plain)])


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(NAMES), st.integers(0, 10**6), st.integers(4, 39), st.integers(0, 50), st.integers(1, 3), st.data()
)
def test_window_and_sinks_stay_and_the_rest_are_candidates(name, seed, budget, sinks, candidates, data):
    scores, keys, values = random_layer(40, seed)
    selector = Selector(
        name, data.draw(st.floats(0, 1)), candidates=candidates, rounds=data.draw(st.sampled_from([None, 3]))
    )
    chosen = select(scores, keys, values, selector, budget, sinks)
    assert chosen.shape == (2, budget) and (chosen.diff(dim=-1) > 0).all()
    first = min(sinks, budget - 4)
    assert chosen[:, :first].tolist() == [list(range(first))] * 2
    assert chosen[:, budget - 4 :].tolist() == [list(range(36, 40))] * 2
    best = first + top_positions(scores[:, first:], min(36 - first, candidates * budget))
    for row, allowed in zip(chosen[:, first : budget - 4], best, strict=True):
        assert set(row.tolist()) <= set(allowed.tolist())


@pytest.mark.parametrize("name", ["coverage", "facility"])
def test_of_duplicates_only_one_is_kept(name):
    # Tokens 3 and 20 are one token twice, with the two largest scores.
    scores, keys, values = random_layer(60, seed=5)
    keys[:, 20], values[:, 20] = keys[:, 3], values[:, 3]
    scores[:, 3], scores[:, 20] = 2.0, 1.9
    assert all({3, 20} <= set(row) for row in keep(scores, 16, 60).tolist())
    for row in select(scores, keys, values, Selector(name, 1.0, power=4.0), 16).tolist():
        assert len({3, 20} & set(row)) == 1


def test_copies_of_the_window_are_not_kept():
    scores, keys, values = random_layer(60, seed=6)
    keys[:, 7], values[:, 7], scores[:, 7] = keys[:, 59], values[:, 59], 1.5
    assert 7 in keep(scores, 16, 60)[0]
    assert 7 not in select(scores, keys, values, Selector("coverage", 1.0), 16)[0]


@pytest.mark.parametrize("name", ["coverage", "facility"])
def test_the_value_of_a_kept_set(name):
    scores, keys, values = random_layer(50, seed=7)
    selector = Selector(name, 0.6)
    chosen, best = select(scores, keys, values, selector, 14, 2), keep(scores, 14, 50, 2)
    greedy, top = (value(scores, keys, values, selector, kept, 2) for kept in (chosen, best))
    assert (greedy > top).all() and (greedy < 1).all()
    for head in range(2):
        candidates = range(2, 46)
        kappa = naive.kernel(*(x[head].double().numpy() for x in (keys, values)), "kv", "mean", 1.0)
        p = scores[head, 2:].double().numpy()
        tokens = [*candidates, 0, 1, *range(46, 50)]
        kept = [tokens.index(j) for j in best[head].tolist()]
        expected = naive.objective(name, p / p.sum(), kappa[np.ix_(tokens, tokens)], kept, 0.6)
        assert top[head].item() == pytest.approx(expected, rel=1e-5)
    everything = torch.arange(50).expand(2, -1)
    torch.testing.assert_close(value(scores, keys, values, selector, everything), torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="mmr has no objective"):
        value(scores, keys, values, Selector("mmr"), chosen)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_give_the_same(monkeypatch, name):
    scores, keys, values = random_layer(90, seed=8, heads=3)
    whole = [select(scores, keys, values, Selector(name, 0.7, rounds=rounds), 20) for rounds in (None, 4)]
    for limit, elements in (("_BLOCK_ELEMENTS", 3 * 80 * 7), ("_KERNEL_ELEMENTS", 80 * 80), ("_KEPT_AT_ONCE", 3)):
        monkeypatch.setattr(coverage, limit, elements)
        again = [select(scores, keys, values, Selector(name, 0.7, rounds=rounds), 20) for rounds in (None, 4)]
        assert all(torch.equal(*pair) for pair in zip(whole, again, strict=True))


# Eq. (5)


@pytest.mark.parametrize("neighbors", [3, "all"])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("source_immune", [False, True])
def test_eq_5_is_the_self_term_of_a_greedy_step_from_the_sources(neighbors, rounds, source_immune):
    # Gain of token j to coverage with S = the sources: p_j r_j(S), which is Eq. (5), and Σ_{i ≠ j} p_i κ_ij r_i(S).
    n, budget = 40, 20
    scores, keys, _ = random_layer(n, seed=9, window=0)
    graph = Graph(0.5, neighbors, rounds, source_immune=source_immune)
    ranked = rerank(scores, keys, graph, n, budget)
    sources = top_positions(scores, 10)
    m = min(graph.n_neighbors(n), n - (10 if source_immune else 1))
    neighbor, e = Similarity(keys, keys, 2).neighbors(sources, m, sources if source_immune else None)
    kernel = torch.zeros(2, 10, n).scatter_(-1, neighbor, e)  # κ has support on the edges; T rounds sharpen it
    kernel = 1 - (1 - kernel.double()) ** rounds

    function = Coverage(scores.double(), 1.0)
    function.add(kernel)
    every = torch.arange(n).expand(2, -1)
    itself = torch.eye(n, dtype=torch.float64).expand(2, -1, -1)
    # A source is no neighbour of its own: for sources, S is the other sources, which is what Eq. (3) says.
    torch.testing.assert_close(function.gains(itself, every), ranked.double(), rtol=1e-5, atol=1e-7)

    if neighbors == "all" and rounds == 1 and not source_immune:
        cosine = Kernel(keys, keys, Selector(kernel="k", center="none")).between(every, every)
        whole = Coverage(scores.double(), 1.0)
        whole.add(cosine[torch.arange(2)[:, None], sources])
        residual = torch.stack([torch.stack([1 - cosine[h, s].double() for s in sources[h]]).prod(0) for h in range(2)])
        rest = (cosine.double() * (scores.double() * residual)[:, None]).sum(-1) - scores.double() * residual
        gains = whole.gains(cosine.double(), every)
        other = torch.ones(2, n, dtype=torch.bool).scatter_(-1, sources, False)
        torch.testing.assert_close((gains - rest)[other], ranked.double()[other], rtol=1e-4, atol=1e-6)
        assert (rest[other] > 0.05 * gains[other]).all()  # the half that the graph leaves out


# Cells

BUDGET = 40


@functools.cache
def tiny_prompt() -> tuple[graphkv.Engine, graphkv.Prefill]:
    """200 tokens on the tiny model with everything recorded."""
    engine = graphkv.Engine.from_pretrained("tiny")
    read = engine.prefill([(7 * i + i // 5) % 250 for i in range(200)], needs=Needs(queries=ALL_QUERIES, mass=True))
    return engine, engine.look_ahead(read, 4, stop_ids=())


@pytest.mark.parametrize("name", scorers.names())
@pytest.mark.parametrize("selector", NAMES)
def test_every_scorer_granularity_and_head_budget(name, selector):
    engine, read = tiny_prompt()
    graph = {"neighbors": 3, "min_distance": 5}
    for options in ((None, None, "kv_head", "uniform"), (graph, None, "query_head", "ada")):
        chosen = cell_settings(name, BUDGET, *options, selector={"name": selector, "weight": 0.5})
        cell, plain = (engine.cut(read, x) for x in (chosen, cell_settings(name, BUDGET, *options)))
        assert cell.kept_per_head == plain.kept_per_head
        window = chosen.scorer.window
        for layer in cell.kept:
            for head in layer:
                assert (head.diff() > 0).all() and head[len(head) - window :].tolist() == list(range(200 - window, 200))
        none = engine.cut(read, cell_settings(name, BUDGET, *options, selector={"name": selector, "weight": 0.0}))
        assert none.keeps_same(plain)
        if name not in ("full", "oracle") and selector != "facility":
            assert not cell.keeps_same(plain)


def test_layers_with_budgets_of_their_own():
    engine, read = tiny_prompt()
    cell = engine.cut(read, cell_settings("pyramidkv", BUDGET, selector={"name": "coverage"}))
    assert cell.kept_per_layer == budgets.per_layer(scorers.get("pyramidkv")(), BUDGET, 200, read.layers)
    assert len(set(cell.kept_per_layer)) == 2


@pytest.mark.parametrize("file", ["topk", *NAMES])
def test_presets_name_every_option(file):
    values = yaml.safe_load((CONF / "selector" / f"{file}.yaml").read_text())
    assert set(values) == {field.name for field in dataclasses.fields(Selector)}
    default = dataclasses.asdict(Selector(file, weight=1.0 if file == "mmr" else 0.3))
    assert values == default


def test_what_cells_say_of_selectors_and_far_edges():
    # Records made before there were any keep their key.
    plain = cell_settings("snapkv", 128, {})
    assert set(plain.describe()) == {"scorer", "budget", "graphkv", "granularity", "head_budget", "head_floor"}
    assert "min_distance" not in plain.describe()["graphkv"]
    assert cell_settings("snapkv", 128, {}, selector={"name": "topk", "weight": 0.9}) == plain
    assert cell_settings("full", 128, {}, selector={"name": "mmr"}) == cell_settings("full", 128)
    far = cell_settings("snapkv", 128, {"min_distance": 10}, selector={"name": "mmr", "weight": 1.0})
    assert far.label == "snapkv-128+graphkv(min_distance=10)+mmr(weight=1.0)"
    assert far.describe()["graphkv"]["min_distance"] == 10
    described = {key: value for key, value in far.describe().items() if key.startswith("selector")}
    assert described == {
        **{"selector": "mmr", "selector_weight": 1.0, "selector_kernel": "kv", "selector_center": "mean"},
        **{"selector_power": 1.0, "selector_candidates": 4, "selector_rounds": None},
    }


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"name": "dpp"}, "name must be one of topk, mmr, coverage, facility, not 'dpp'"),
        ({"name": "mmr", "weight": 1.5}, r"weight must be in \[0, 1\]"),
        ({"name": "mmr", "kernel": "v"}, "kernel must be one of kv, k"),
        ({"name": "mmr", "center": "median"}, "center must be one of mean, baseline, none"),
        ({"name": "mmr", "power": 0.0}, "power must be positive"),
        ({"name": "mmr", "candidates": 0}, "candidates must be 1 or more"),
        ({"name": "mmr", "rounds": 0}, "rounds must be 1 or more or null"),
        ({"name": "mmr", "lambda": 0.5}, "selector.lambda is not a setting"),
        ({"name": "mmr", "rounds": 1.5}, "selector.rounds must be a whole number or null"),
    ],
)
def test_impossible_options_are_refused(options, part):
    with pytest.raises(UserError, match=part):
        cell_settings("snapkv", 128, selector=options)


def test_combinations_without_a_meaning_are_refused():
    for graph in ({"accumulate": "sum"}, {"signal": "evict"}):
        option, setting = next(iter(graph.items()))
        with pytest.raises(UserError, match=rf"selector=coverage .*graphkv\.{option}={setting}"):
            cell_settings("snapkv", 128, graph, selector={"name": "coverage"})
        cell_settings("snapkv", 128, graph)
    with pytest.raises(UserError, match="selector=topk only"):
        cell_settings("h2o", 128, selector={"name": "mmr"}).check_decode_eviction()
