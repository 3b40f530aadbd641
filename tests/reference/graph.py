"""Eqs. (1)–(5) of the GraphKV paper, token by token, in float64."""

from __future__ import annotations

import math

import numpy as np


def ranked(values, count: int) -> list[int]:
    """Positions of the largest values, equal ones in order of position."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Eq. (1), clamped to [0, 1]; a zero vector resembles nothing."""
    norms = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return 0.0 if norms == 0 else min(1.0, max(0.0, float(a @ b) / norms))


def rerank_head(scores: np.ndarray, features: np.ndarray, k: int, m: int, rounds: int) -> np.ndarray:
    """Scores of one head after `rounds` applications of Eq. (5)."""
    n = len(scores)
    sources = ranked(scores, min(k, n))
    edges: list[tuple[int, float]] = []
    for i in sources:
        similar = [cosine(features[i], features[j]) if j != i else -1.0 for j in range(n)]
        edges += [(j, similar[j]) for j in ranked(similar, min(m, n - 1))]
    current = scores.astype(np.float64).copy()
    for _ in range(rounds):
        for j, e in edges:
            current[j] *= 1 - e
    return current
