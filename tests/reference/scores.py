"""Scorers as loops over float64 numbers."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor


def softmax_row(logits: list[float]) -> list[float]:
    """exp / sum over one row, `-inf` allowed."""
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    total = sum(powers)
    return [p / total for p in powers]


def window_mass(queries: Tensor, keys: Tensor, scaling: float, window: int) -> np.ndarray:
    """Attention mass [H, n] that the last `window` positions give to every position, each causal."""
    q, k = queries[:, -window:].double().numpy(), keys.double().numpy()
    heads, n = q.shape[0], k.shape[1]
    group = heads // k.shape[0]
    mass = np.zeros((heads, n))
    for h in range(heads):
        for row in range(q.shape[1]):
            position = n - q.shape[1] + row
            logits = (k[h // group, : position + 1] @ q[h, row]) * scaling
            mass[h, : position + 1] += softmax_row(list(logits))
    return mass


def pooled(row: np.ndarray, kernel: int, how: str) -> np.ndarray:
    """Pooling with zero padding counted in the mean, and nothing outside in the maximum."""
    half = kernel // 2
    out = np.zeros_like(row)
    for j in range(len(row)):
        inside = [row[i] for i in range(j - half, j + half + 1) if 0 <= i < len(row)]
        out[j] = sum(inside) / kernel if how == "avg" else max(inside)
    return out


def snapkv(queries, keys, scaling, window, kernel, pooling, group_how) -> np.ndarray:
    """SnapKV scores [G, n - window]."""
    mass = window_mass(queries, keys, scaling, window)[:, : keys.shape[1] - window]
    group = queries.shape[0] // keys.shape[0]
    rows = []
    for g in range(keys.shape[0]):
        members = mass[g * group : (g + 1) * group]
        row = {"mean": members.mean(0), "max": members.max(0), "sum": members.sum(0)}[group_how]
        rows.append(row if pooling == "none" else pooled(row, kernel, pooling))
    return np.stack(rows)


def knorm(keys: Tensor, window: int) -> np.ndarray:
    """Inverse norms [G, n - window]."""
    past = keys.double().numpy()[:, : keys.shape[1] - window]
    return 1 / np.sqrt((past**2).sum(-1))
