"""GraphKV's re-ranking, Eqs. (1)–(5) of the paper: sources lower the scores of their most similar neighbours."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from graphkv.selection import top_positions

_AUTO = re.compile(r"auto(\d+)|min\((\d+),L\)")
_BLOCK_ELEMENTS = 1 << 23  # similarities held at once: 32 MiB of float32, whatever k and n are


@dataclass(frozen=True)
class Graph:
    """Hyper-parameters of the re-ranking.

    Parameters
    ----------
    source_ratio
        `k` as a share of the layer's past budget (tokens to keep without the window), rounded down, at least one
        token: the paper's `0.3 B` (Fig. 5).
    neighbors
        `m`: a number of tokens, or `autoC` = min(C, prompt tokens / 1000) rounded down, at least 1: the
        paper's `min(C, L)` (Fig. 5).
    rounds
        `T`: how often the decay is applied; 0 changes nothing. Sources and edges are those of the first scores,
        so that `T` rounds multiply a score by its decay to the power `T`.
    """

    source_ratio: float = 0.3
    neighbors: int | str = "auto3"
    rounds: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.source_ratio <= 1:
            raise ValueError(f"source_ratio must be in (0, 1], not {self.source_ratio}")
        if self.rounds < 0:
            raise ValueError(f"rounds must be 0 or more, not {self.rounds}")
        if isinstance(self.neighbors, str):
            if _auto_cap(self.neighbors) is None:
                raise ValueError(f"neighbors must be a number or autoC such as auto3, not {self.neighbors!r}")
        elif self.neighbors < 1:
            raise ValueError(f"neighbors must be 1 or more, not {self.neighbors}")

    def n_sources(self, past_budget: int) -> int:
        """`k` for a layer that keeps `past_budget` tokens of its past."""
        return max(1, int(self.source_ratio * past_budget + 1e-9))

    def n_neighbors(self, n: int) -> int:
        """`m` for a prompt of `n` tokens."""
        if isinstance(self.neighbors, int):
            return self.neighbors
        return max(1, min(_auto_cap(self.neighbors), n // 1000))


def _auto_cap(text: str) -> int | None:
    match = _AUTO.fullmatch(text.replace(" ", ""))
    return max(1, int(match[1] or match[2])) if match else None


def rerank(scores: Tensor, features: Tensor, graph: Graph, n: int, past_budget: int) -> Tensor:
    """Lower the scores of tokens that resemble higher-ranked ones.

    Eq. (2): the `k` best tokens are sources. Eq. (1): an edge is the cosine of two features. Eq. (3): each source's
    neighbours are its `m` most similar other tokens. Eq. (5): a neighbour's score is multiplied by `1 - e` for
    each source that has it as a neighbour, in each round.

    Readings where the paper is open: similarities are clamped to [0, 1], so a score never rises; exactly `m`
    neighbours, ties to the lower position; sources may be neighbours of other sources; only past tokens are nodes.

    Parameters
    ----------
    scores
        [heads, n_past] float32, non-negative.
    features
        [heads, n_past, d], any float dtype: post-rotary keys for the paper's key–key edges.
    graph
        k, m and T.
    n
        Prompt length in tokens, which `autoC` neighbours depend on.
    past_budget
        Past tokens that the layer will keep, which `k` is a share of.

    Returns
    -------
    Tensor
        [heads, n_past] float32, finite, non-negative, nowhere above `scores`. Memory is O(heads · (k·m + n)) beside
        one block of similarities.
    """
    n_past = scores.shape[-1]
    m = min(graph.n_neighbors(n), n_past - 1)
    if graph.rounds == 0 or m < 1:
        return scores
    k = min(graph.n_sources(past_budget), n_past)
    sources = top_positions(scores, k)
    neighbors, similarity = edges(features, sources, m)
    factor = torch.ones_like(scores).scatter_reduce_(
        -1, neighbors.flatten(-2), (1 - similarity).flatten(-2), "prod", include_self=True
    )
    return scores * factor**graph.rounds


def edges(features: Tensor, sources: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The `m` most similar other tokens of each source and their clamped cosines, Eqs. (1) and (3).

    Parameters
    ----------
    features
        [heads, n, d].
    sources
        [heads, k] int64 positions.
    m
        Neighbours a source, at most n - 1.

    Returns
    -------
    tuple of Tensor
        Positions [heads, k, m] int64 and similarities [heads, k, m] float32 in [0, 1].
    """
    heads, n, d = features.shape
    unit = functional.normalize(features.float(), dim=-1)
    neighbors, similarity = [], []
    for block in sources.split(max(1, _BLOCK_ELEMENTS // (heads * n)), dim=-1):
        senders = unit.gather(1, block[..., None].expand(-1, -1, d))
        cosine = (senders @ unit.transpose(-1, -2)).clamp_(0, 1)
        # Below every clamped cosine, so that a source is never its own neighbour.
        cosine.scatter_(-1, block[..., None], -1.0)
        found = top_positions(cosine, m)
        neighbors.append(found)
        similarity.append(cosine.gather(-1, found))
    return torch.cat(neighbors, 1), torch.cat(similarity, 1)
