"""Scores against loops in float64, on the real model's own keys and queries."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import yaml
from reference import scores as naive

import scorers
from graphkv.config import CONF
from scorers import LayerView
from scorers.snapkv import pool, reduce_group

ALL = ["full", "knorm", "snapkv", "pyramidkv"]


def view_of(keys, queries=None, values=None) -> LayerView:
    """A layer made of given tensors."""
    queries = torch.zeros(keys.shape[0], 1, keys.shape[2]) if queries is None else queries
    return LayerView(keys, keys if values is None else values, queries, keys.shape[-1] ** -0.5, 0, 1)


def random_view(n: int, dtype=torch.float32, seed: int = 0) -> LayerView:
    """Two KV heads with three query heads each."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(2, n, 16, generator=generator), torch.randn(6, min(n, 64), 16, generator=generator)
    keys, queries = (tensor.to(dtype) for tensor in made)
    return view_of(keys, queries)


def test_the_list_of_scorers_is_the_folder():
    assert scorers.names() == sorted(ALL)


@pytest.mark.parametrize("name", ALL)
def test_yaml_and_dataclass_have_the_same_fields_and_defaults(name):
    in_yaml = yaml.safe_load((CONF / "scorer" / f"{name}.yaml").read_text())
    assert in_yaml.pop("name") == name
    assert in_yaml == dataclasses.asdict(scorers.get(name)())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [33, 64, 200])
def test_shape_dtype_and_range(name, dtype, n):
    scorer = scorers.get(name)()
    score = scorer.score(random_view(n, dtype))
    assert score.shape == (2, n - scorer.window)
    assert score.dtype == torch.float32
    assert score.isfinite().all() and (score >= 0).all()


@pytest.mark.parametrize("pooling", ["avg", "max", "none"])
@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_snapkv_equals_the_loop_on_the_real_model(smol_prompt, pooling, group):
    view = smol_prompt.layers[11]
    scorer = scorers.get("snapkv")(window=24, kernel=5, pooling=pooling, group=group)
    expected = naive.snapkv(view.queries, view.keys, view.scaling, 24, 5, pooling, group)
    np.testing.assert_allclose(scorer.score(view).numpy(), expected, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("layer", [0, 29])
def test_snapkv_defaults_equal_the_loop_on_the_real_model(smol_prompt, layer):
    view = smol_prompt.layers[layer]
    expected = naive.snapkv(view.queries, view.keys, view.scaling, 32, 7, "avg", "mean")
    np.testing.assert_allclose(scorers.get("snapkv")().score(view).numpy(), expected, rtol=2e-4, atol=1e-7)
    assert torch.equal(scorers.get("pyramidkv")().score(view), scorers.get("snapkv")().score(view))


@pytest.mark.parametrize("window", [0, 32])
def test_knorm_equals_the_loop_on_the_real_model(smol_prompt, window):
    view = smol_prompt.layers[7]
    scorer = scorers.get("knorm")(window=window)
    np.testing.assert_allclose(scorer.score(view).numpy(), naive.knorm(view.keys, window), rtol=1e-5)


def test_knorm_scores_are_float32_whatever_the_cache_is():
    # Case S1: norms in bfloat16 would leave about 55 distinct scores of 512.
    keys = torch.randn(1, 512, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    knorm = scorers.get("knorm")()
    score = knorm.score(view_of(keys))
    assert torch.equal(score, knorm.score(view_of(keys.float())))
    assert len(score.unique()) > 500


def test_knorm_prefers_small_norms_and_survives_a_zero_key():
    keys = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [0.0, 0.0], [6.0, 8.0]]])
    score = scorers.get("knorm")().score(view_of(keys))[0]
    assert score.argsort(descending=True).tolist() == [2, 1, 0, 3]
    assert score.isfinite().all()


def test_pooling_counts_the_padding_and_keeps_the_length():
    # Case S13.
    row = torch.tensor([[0.0, 0, 6, 0, 0, 0, 0]])
    assert pool(row, 3, "avg").tolist() == [[0, 2, 2, 2, 0, 0, 0]]
    assert pool(row, 3, "max").tolist() == [[0, 6, 6, 6, 0, 0, 0]]
    assert pool(row, 3, "none").tolist() == row.tolist()
    assert pool(torch.tensor([[6.0, 0, 0]]), 3, "avg").tolist() == [[2, 2, 0]]


def test_group_reduction_decides_which_token_stays():
    # Case S15: mean and sum prefer token 1, max prefers token 0.
    scores = torch.tensor([[[1.0, 0], [0, 0.9], [0, 0.9], [0, 0]]])
    assert torch.allclose(reduce_group(scores, "mean"), torch.tensor([[0.25, 0.45]]))
    assert torch.allclose(reduce_group(scores, "sum"), torch.tensor([[1.0, 1.8]]))
    assert torch.allclose(reduce_group(scores, "max"), torch.tensor([[1.0, 0.9]]))


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("snapkv", {"window": 0}, "window"),
        ("snapkv", {"kernel": 4}, "kernel"),
        ("snapkv", {"pooling": "mean"}, "pooling"),
        ("snapkv", {"group": "min"}, "group"),
        ("knorm", {"window": -1}, "window"),
        ("pyramidkv", {"beta": 0}, "beta"),
        ("pyramidkv", {"schedule": "even"}, "schedule"),
    ],
)
def test_impossible_options_are_refused(name, options, part):
    with pytest.raises(ValueError, match=part):
        scorers.get(name)(**options)


def test_unknown_scorer_lists_the_known_ones():
    with pytest.raises(ValueError, match="snapkw.*knorm, pyramidkv, snapkv"):
        scorers.get("snapkw")
