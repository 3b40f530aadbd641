"""How alike the keys of a head are: pairwise cosines and principal components, in float64."""

from __future__ import annotations

import numpy as np
from torch import Tensor

_ROWS = 512  # rows of the cosine matrix that exist at once


def unit(keys: Tensor) -> np.ndarray:
    """[n, d] keys, any float dtype, as float64 vectors of length one; a zero vector stays zero."""
    keys = keys.double().cpu().numpy()
    length = np.linalg.norm(keys, axis=-1, keepdims=True)
    return keys / np.where(length > 0, length, 1)


def mean_cosine(vectors: np.ndarray) -> float:
    """Mean cosine of all pairs i < j of [n, d] unit vectors, in O(n d); NaN if there is no pair.

    The sum over i ≠ j is |Σ u|² - Σ |u|².
    """
    n = len(vectors)
    if n < 2:
        return float("nan")
    total = vectors.sum(0)
    return float((total @ total - np.square(vectors).sum()) / (n * (n - 1)))


def histogram(vectors: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Number of pairs i < j of [n, d] unit vectors whose cosine lies in each bin, like `numpy.histogram`.

    Cosines are cut to [-1, 1], which rounding may leave.
    """
    counts = np.zeros(len(edges) - 1, dtype=np.int64)
    for begin in range(0, len(vectors), _ROWS):
        cosine = vectors[begin : begin + _ROWS] @ vectors[begin:].T
        pairs = cosine[np.triu_indices(len(cosine), 1, cosine.shape[1])]
        counts += np.histogram(pairs.clip(-1, 1), edges)[0]
    return counts


def principal_components(points: np.ndarray, count: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Project points onto the directions in which they vary most.

    Parameters
    ----------
    points
        [n, d] float64.
    count
        How many components, at most d.

    Returns
    -------
    tuple of numpy.ndarray
        Coordinates [n, count] around the mean, and the share of the variance that each component explains [count].
        A component's largest entry is positive, which fixes the sign.
    """
    centered = points - points.mean(0)
    variance, directions = np.linalg.eigh(centered.T @ centered)
    variance, directions = variance[::-1].clip(0), directions[:, ::-1]
    directions = directions[:, :count]
    largest = np.abs(directions).argmax(0)
    directions = directions * np.sign(directions[largest, np.arange(directions.shape[1])])
    total = variance.sum()
    return centered @ directions, variance[:count] / (total if total > 0 else 1)
