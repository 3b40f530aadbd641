"""Case C15: a layer is scored, re-ranked and cut on its own device, whichever that is.

The stand-in for a second GPU is torch's `meta` device: an operation that mixes it with another device raises.
"""

from __future__ import annotations

import pytest
import torch

import scorers
from graphkv.graph import Graph, rerank_layer
from graphkv.selection import keep
from scorers import LayerView, Rope

N = 300


def elsewhere(*shape: int) -> torch.Tensor:
    """A float32 tensor on the other device."""
    return torch.empty(*shape, device="meta")


@pytest.fixture
def view() -> LayerView:
    """A layer with everything that scorers and edges look at, none of it on the default device."""
    rope = Rope(elsewhere(N + 512, 16), elsewhere(N + 512, 16))
    return LayerView(
        elsewhere(2, N, 16),
        elsewhere(2, N, 16),
        elsewhere(4, N, 16),
        0.25,
        0,
        2,
        rope=rope,
        mass=elsewhere(4, N),
        answer_queries=elsewhere(4, 8, 16),
    )


# `full` scores nothing, and R-KV picks rows by what is in them, which meta tensors cannot.
@pytest.mark.parametrize("name", [name for name in scorers.names() if name not in ("full", "rkv")])
def test_scores_and_kept_positions_stay_on_the_layers_device(name, view):
    scorer = scorers.get(name)()
    scores = scorer.score(view)
    assert scores.device.type == "meta" and scores.shape == (2, N - scorer.window)
    ranked = rerank_layer(scores, scorer, view, Graph(), 100)
    kept = keep(ranked, 100, N, scorer.sinks)
    assert kept.device.type == "meta" and kept.shape == (2, 100)


@pytest.mark.parametrize("edge", ["kk", "qk", "qq", "kv", "vv"])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": "sum"}, {"accumulate": "last"}, {"signal": "evict"}, {"rope": "pre"}, {"neighbors": "all"}],
)
def test_every_reading_of_the_graph_stays_on_the_layers_device(edge, options, view):
    scorer = scorers.get("snapkv")()
    graph = Graph(edge=edge, center="baseline", source_immune=True, **options)
    assert rerank_layer(scorer.score(view), scorer, view, graph, 100).device.type == "meta"
