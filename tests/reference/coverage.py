"""Set objectives and their greedy maximisation from the definitions, pair by pair, in float64."""

from __future__ import annotations

import math

import numpy as np

from reference.graph import similarities


def kernel(keys: np.ndarray, values: np.ndarray, kind: str, center: str, power: float) -> np.ndarray:
    """κ [n, n] of all tokens of a head."""
    n = len(keys)
    kappa = np.ones((n, n))
    for features in [keys, values] if kind == "kv" else [keys]:
        e = similarities(features, features, center)
        for i in range(n):
            for j in range(n):
                kappa[i, j] *= 1.0 if i == j else min(1.0, max(0.0, e[i, j]))
    return kappa**power


def stands_for(name: str, p: np.ndarray, kappa: np.ndarray, kept: list[int]) -> float:
    """C(S): what the `kept` rows of κ stand for of the tokens with the weights p."""
    total = 0.0
    for i in range(len(p)):
        alike = [kappa[j, i] for j in kept]
        if name == "coverage":
            total += p[i] * (1 - math.prod(1 - x for x in alike))
        else:
            total += p[i] * max(alike, default=0.0)
    return total


def objective(name: str, p: np.ndarray, kappa: np.ndarray, kept: list[int], weight: float) -> float:
    """F(S); p has no weight for rows of κ beyond its length, which stand for tokens that are kept always."""
    return (1 - weight) * sum(p[i] for i in kept if i < len(p)) + weight * stands_for(name, p, kappa, kept)


def greedy(name: str, p: np.ndarray, kappa: np.ndarray, always: list[int], count: int, weight: float) -> list[int]:
    """Candidates added one at a time, each the best of all that are left, the lower position of equals."""
    kept = list(always)
    for _ in range(count):
        left = [j for j in range(len(p)) if j not in kept]
        if name == "mmr":
            gains = [p[j] * math.exp(-weight * max((kappa[s, j] for s in kept), default=0.0)) for j in left]
        else:
            gains = [objective(name, p, kappa, [*kept, j], weight) for j in left]
        best = max(gains)
        kept.append(next(j for j, gain in zip(left, gains, strict=True) if gain >= best - 1e-14))
    return sorted(kept[len(always) :])
