"""Cosines and components against slow definitions in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from graphkv.studies.cosines import histogram, mean_cosine, principal_components, unit


def keys(n: int, d: int = 6, seed: int = 0) -> torch.Tensor:
    """Keys that share a direction, as a model's do, one of them zero."""
    found = torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + 0.8
    found[n // 2] = 0
    return found


def naive(x: torch.Tensor) -> list[float]:
    """Cosine of every pair i < j, one after the other."""
    rows = [[float(value) for value in row] for row in x]
    pairs = []
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            norms = math.hypot(*a) * math.hypot(*b)
            pairs.append(sum(p * q for p, q in zip(a, b, strict=True)) / norms if norms else 0.0)
    return pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_of_pairs(dtype):
    x = keys(40).to(dtype)
    assert mean_cosine(unit(x)) == pytest.approx(np.mean(naive(x)), abs=1e-12)
    assert math.isnan(mean_cosine(unit(x[:1])))
    assert mean_cosine(unit(x[:1].repeat(3, 1))) == pytest.approx(1)


def test_histogram_over_blocks_of_rows():
    x, edges = keys(600), np.linspace(-1, 1, 21)
    counts = histogram(unit(x), edges)
    assert counts.sum() == 600 * 599 // 2
    np.testing.assert_array_equal(counts, np.histogram(np.clip(naive(x), -1, 1), edges)[0])
    assert histogram(unit(x[:1].repeat(4, 1)), edges)[-1] == 6  # 1 and what rounding makes of it


def test_components_are_those_of_the_svd():
    points = keys(200).double().numpy() * np.arange(1, 7)
    place, share = principal_components(points)
    _, s, directions = np.linalg.svd(points - points.mean(0), full_matrices=False)
    expected = (points - points.mean(0)) @ directions[:2].T
    np.testing.assert_allclose(share, s[:2] ** 2 / (s**2).sum(), rtol=1e-10)
    for ours, theirs, direction in zip(place.T, expected.T, directions, strict=False):
        sign = np.sign(direction[np.abs(direction).argmax()])
        np.testing.assert_allclose(ours, sign * theirs, atol=1e-9)


def test_the_sign_of_a_component_is_fixed():
    points = keys(50).double().numpy()
    order = np.random.default_rng(0).permutation(50)
    place, _ = principal_components(points)
    again, _ = principal_components(points[order])
    np.testing.assert_allclose(again, place[order], atol=1e-10)


def test_points_that_do_not_vary_explain_nothing():
    place, share = principal_components(np.ones((5, 3)))
    assert not place.any() and share.tolist() == [0, 0]
