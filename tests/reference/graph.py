"""Eqs. (1)–(5) of the GraphKV paper in all their readings, token by token, in float64."""

from __future__ import annotations

import math

import numpy as np


def ranked(values, count: int) -> list[int]:
    """Positions of the largest values, equal ones in order of position."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Eq. (1); a zero vector resembles nothing."""
    norms = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return 0.0 if norms == 0 else min(1.0, max(-1.0, float(a @ b) / norms))


def similarities(senders: np.ndarray, receivers: np.ndarray, center: str) -> np.ndarray:
    """[n, n] similarity of each source (row) to each other token (column), not clamped."""
    n = len(senders)
    if center == "mean":
        senders, receivers = senders - senders.mean(0), receivers - receivers.mean(0)
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    e = np.zeros((n, n))
    for i, j in pairs:
        e[i, j] = cosine(senders[i], receivers[j])
    if center == "baseline" and pairs:
        c = sum(e[pair] for pair in pairs) / len(pairs)
        for pair in pairs:
            e[pair] = (e[pair] - c) / (1 - c) if c < 1 - 1e-5 else 0.0
    return e


def incoming_edges(
    scores, e: np.ndarray, k: int, m: int, source_immune: bool, clamp: bool, min_distance: int = 0
) -> list[list[float]]:
    """Similarities of the edges into each token, those from the strongest source first."""
    n = len(scores)
    sources = ranked(scores, min(k, n))
    incoming: list[list[float]] = [[] for _ in range(n)]
    for i in sources:
        allowed = [j for j in range(n) if abs(j - i) > min_distance and not (source_immune and j in sources)]
        for place in ranked([e[i, j] for j in allowed], m):
            j = allowed[place]
            incoming[j].append(max(0.0 if clamp else -1.0, e[i, j]))
    return incoming


def factor(edges: list[float], signal: str, accumulate: str) -> float:
    """What a token's score is multiplied by in a round."""
    if not edges:
        return 1.0
    if signal == "evict":
        return 0.0
    sign = {"decay": -1, "enhance": 1}[signal]
    if accumulate == "product":
        return math.prod(1 + sign * e for e in edges)
    return 1 + sign * (sum(edges) if accumulate == "sum" else edges[-1])


def rerank_head(
    scores: np.ndarray,
    features: np.ndarray,
    k: int,
    m: int,
    rounds: int,
    *,
    receivers: np.ndarray | None = None,
    signal: str = "decay",
    accumulate: str = "product",
    source_immune: bool = False,
    reselect: bool = False,
    clamp: bool = True,
    center: str = "none",
    min_distance: int = 0,
) -> np.ndarray:
    """Scores of one head after `rounds` rounds; options are those of `graphkv.graph.Graph`."""
    current = scores.astype(np.float64).copy()
    if signal == "evict":
        current = np.maximum(current, 2.0**-149)
    e = similarities(features, features if receivers is None else receivers, center)
    incoming = None
    for _ in range(rounds):
        if reselect or incoming is None:
            incoming = incoming_edges(current, e, k, m, source_immune, clamp, min_distance)
        current = np.array([s * factor(edges, signal, accumulate) for s, edges in zip(current, incoming, strict=True)])
    return current
