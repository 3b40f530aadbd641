"""What the retention explorer says of a cell: kept tokens, ranks, sources, neighbours and discounts, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import graph as naive

from graphkv.config import cell_settings
from graphkv.prefill import Scoring
from graphkv.retention import retention
from scorers import ALL_QUERIES, Needs

BUDGET = 64
PAST = 88  # tokens before the window of a prompt of 120
CELLS = {
    "snapkv": ("snapkv", BUDGET, None, {}),
    "graph": ("snapkv", BUDGET, {"neighbors": 3}, {}),
    "pyramid": ("pyramidkv", BUDGET, {}, {}),
    "query_head": ("snapkv", BUDGET, {"neighbors": 2}, {"granularity": "query_head"}),
    "ada": ("snapkv", BUDGET, {"neighbors": 2}, {"head_budget": "ada"}),
    "no window": ("knorm", BUDGET, {"neighbors": 4, "rounds": 2}, {}),
    "sinks": ("streamingllm", BUDGET, None, {}),
    "skipped layer": ("snapkv", BUDGET, {}, {"scorer_options": {"skip_layers": [1], "sinks": 3}}),
    "everything": ("snapkv", 1.0, {}, {}),
    "full": ("full", 1.0, None, {}),
}


@pytest.fixture(scope="module")
def prompt(tiny, essay):
    """300 bytes of real text with every query recorded."""
    return tiny.prefill(essay[:299], needs=Needs(queries=ALL_QUERIES))


@pytest.fixture(scope="module")
def scattered(tiny, essay):
    """120 tokens with random keys and values: no two pairs are equally similar, in any precision."""
    prompt = tiny.prefill(essay[:119], window=32)
    generator = torch.Generator().manual_seed(0)
    layers = [
        replace(view, **{name: torch.randn(2, 120, 16, generator=generator) + 0.7 for name in ("keys", "values")})
        for view in prompt.layers
    ]
    return replace(prompt, layers=layers, scoring=Scoring())


def found(tiny, prompt, name: str):
    """A cell and its retention."""
    scorer, budget, graph, options = CELLS[name]
    cell = tiny.cut(prompt, cell_settings(scorer, budget, graph, **options))
    return cell, retention(prompt, cell)


# What a cell kept


@pytest.mark.parametrize("name", CELLS)
def test_kept_tokens_are_those_of_the_cell(tiny, prompt, name):
    cell, result = found(tiny, prompt, name)
    for layer, heads in enumerate(cell.kept):
        assert len(result.kept[layer]) == len(heads)
        for head, positions in enumerate(heads):
            assert np.flatnonzero(result.kept[layer, head]).tolist() == positions.tolist()


@pytest.mark.parametrize("name", CELLS)
def test_the_best_ranks_are_what_was_kept(tiny, prompt, name):
    cell, result = found(tiny, prompt, name)
    scorer = cell.settings.scorer
    for kept, ranks in zip(result.kept.reshape(-1, 300), result.ranks.reshape(-1, 300), strict=True):
        if kept.all():
            assert not ranks.any()
            continue
        ranked = range(scorer.sinks, 300 - scorer.window)
        assert sorted(ranks[ranked]) == list(range(1, len(ranked) + 1))
        assert not ranks[: scorer.sinks].any() and not ranks[300 - scorer.window :].any()
        chosen = int(kept.sum()) - scorer.window - scorer.sinks
        assert (kept[ranked] == (ranks[ranked] <= chosen)).all()


def test_equal_scores_are_ranked_as_they_are_selected(tiny, prompt):
    settings = cell_settings("snapkv", BUDGET)
    prompt.scoring.scores[settings.scorer, "kv_head"] = [torch.ones(2, 268)] * 2
    result = retention(prompt, tiny.cut(prompt, settings))
    del prompt.scoring.scores[settings.scorer, "kv_head"]
    assert result.ranks[0, 0].tolist() == [*range(1, 269), *[0] * 32]


@pytest.mark.parametrize("name", ["snapkv", "query_head", "full"])
def test_similarity_is_the_mean_over_pairs_of_kept_past_keys(tiny, prompt, name):
    cell, result = found(tiny, prompt, name)
    n_past = 300 - cell.settings.scorer.window
    group = result.kept.shape[1] // 2
    for layer, heads in enumerate(result.kept):
        for head, kept in enumerate(heads):
            keys = prompt.layers[layer].keys[head // group].double().numpy()
            chosen = np.flatnonzero(kept[:n_past])
            pairs = [naive.cosine(keys[i], keys[j]) for i in chosen[:40] for j in chosen[:40] if i != j]
            if len(chosen) <= 40:
                assert result.similarity[layer, head] == pytest.approx(sum(pairs) / len(pairs), abs=1e-5)
            else:
                unit = keys[chosen] / np.linalg.norm(keys[chosen], axis=1, keepdims=True)
                cosines = unit @ unit.T
                mean = (cosines.sum() - np.trace(cosines)) / (len(chosen) * (len(chosen) - 1))
                assert result.similarity[layer, head] == pytest.approx(mean, abs=1e-5)


def test_similarity_of_no_past_token_is_unknown(tiny, prompt):
    result = retention(prompt, tiny.cut(prompt, cell_settings("snapkv", 32)))
    assert np.isnan(result.similarity).all()


# What the graph did


@pytest.mark.parametrize(
    "options",
    [
        {"neighbors": 3},
        {"neighbors": 1, "rounds": 3},
        {"neighbors": 5, "rounds": 2, "reselect": True},
        {"neighbors": 4, "source_immune": True},
        {"neighbors": 6, "accumulate": "sum"},
        {"neighbors": 6, "accumulate": "last"},
        {"neighbors": 3, "signal": "evict"},
        {"neighbors": 3, "signal": "enhance"},
        {"neighbors": "all", "source_ratio": 0.1},
        {"neighbors": "all", "source_ratio": 0.1, "accumulate": "last"},
        {"neighbors": 3, "center": "mean"},
        {"neighbors": 3, "edge": "vv"},
        {"neighbors": 3, "min_distance": 5},
    ],
    ids=str,
)
def test_sources_neighbours_and_discounts_equal_the_loop(tiny, scattered, options):
    settings = cell_settings("snapkv", BUDGET, options)
    graph, result = settings.graph, retention(scattered, tiny.cut(scattered, settings))
    k, m = graph.n_sources(BUDGET - 32), graph.n_neighbors(120)
    names = ("signal", "accumulate", "source_immune", "reselect", "clamp", "center", "min_distance")
    rules = {name: getattr(graph, name) for name in names}
    for layer, view in enumerate(scattered.layers):
        for head in range(2):
            features = (view.values if graph.edge == "vv" else view.keys)[head, :PAST].double().numpy()
            scores = settings.scorer.score(view)[head].numpy()
            check_edges(result.edges[layer], head, scores, features, graph, k, m)
            after = naive.rerank_head(scores, features, k, m, graph.rounds, **rules)
            np.testing.assert_allclose(result.factors[layer, head, :PAST] * scores, after, rtol=1e-3, atol=1e-10)
            assert (result.factors[layer, head, PAST:] == 1).all()


def check_edges(choices, head: int, scores, features, graph, k: int, m: int) -> None:
    """The first choice of sources and their neighbours against the definitions."""
    assert len(choices) == (graph.rounds if graph.reselect else 1)
    sources = naive.ranked(scores, k)
    assert sorted(choices[0].sources[head].tolist()) == sorted(sources)
    if graph.neighbors == "all":
        assert choices[0].neighbors is None and choices[0].similarity is None
        return
    e = naive.similarities(features, features, graph.center)
    for place, source in enumerate(choices[0].sources[head].tolist()):
        barred = set(sources) if graph.source_immune else set()
        allowed = [j for j in range(PAST) if abs(j - source) > graph.min_distance and j not in barred]
        nearest = [allowed[i] for i in naive.ranked([e[source, j] for j in allowed], m)]
        assert choices[0].neighbors[head, place].tolist() == sorted(nearest)
        ours = choices[0].similarity[head, place].tolist()
        assert ours == pytest.approx([max(0.0, e[source, j]) for j in sorted(nearest)], abs=1e-5)


def test_without_rounds_nothing_is_an_edge(tiny, prompt):
    result = retention(prompt, tiny.cut(prompt, cell_settings("snapkv", BUDGET, {"rounds": 0})))
    assert result.edges == [(), ()] and (result.factors == 1).all()
    assert np.array_equal(result.ranks, result.plain_ranks)
