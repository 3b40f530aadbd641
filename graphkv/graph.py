"""GraphKV's re-ranking, Eqs. (1)–(5) of the paper: sources lower the scores of their most similar neighbours."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphkv.edges import Similarity, features
from graphkv.selection import top_positions
from scorers import ALL_QUERIES, LayerView, Needs, Scorer

_AUTO = re.compile(r"auto(\d+)|min\((\d+),L\)")
_CHOICES = {
    "edge": ("kk", "qk", "qq", "kv", "vv"),
    "signal": ("decay", "enhance", "evict"),
    "accumulate": ("product", "sum", "last"),
    "rope": ("post", "pre"),
    "center": ("none", "mean", "baseline"),
    "space": ("after", "before"),
    "k_of": ("past", "budget"),
}
_MIN = torch.finfo(torch.float32).smallest_normal
_MAX = torch.finfo(torch.float32).max
_LEAST = 2.0**-149  # the smallest positive float32


@dataclass(frozen=True)
class Graph:
    """Hyper-parameters of the re-ranking; the paper leaves several open, and each reading has a name here.

    Parameters
    ----------
    source_ratio
        `k` as a share of the layer's budget, rounded down, at least one token: the paper's `0.3 B` (Fig. 5).
    neighbors
        `m`: a number of tokens; `autoC` = min(C, prompt tokens / 1000) rounded down, at least 1, the paper's
        `min(C, L)` (Fig. 5); or `all` other tokens.
    rounds
        `T`: how often the signal is applied; 0 changes nothing.
    edge
        What a source is compared by and what its neighbours are compared by (Fig. 8): k(ey), q(uery) or v(alue).
        A KV head's query is the mean over the query heads that share it.
    signal
        What neighbours receive (Table 2). `decay`: factors 1 - e. `enhance`: factors 1 + e. `evict`: neighbours are
        removed whatever e is: their score is 0 and other scores are at least 2⁻¹⁴⁹, so that removed tokens are kept,
        the first of the prompt before later ones, only when nothing else is left.
    accumulate
        How the edges into a token join in a round. `product`: its factors multiply (Eq. 5). `sum`: 1 - Σ e, which may
        be negative, as the -0.07 in Fig. 3 is. `last`: sources write in descending order of score and overwrite each
        other (Algorithm 2 read literally), so that the weakest source counts. Evicting is the same in all three.
    source_immune
        Sources receive nothing and take no neighbour's place (Fig. 3); else sources may be each other's neighbours.
    reselect
        Sources and edges are chosen again in each round, from the scores so far; else those of the first scores stay,
        and `T` rounds apply the same factor `T` times.
    clamp
        Negative similarities count as 0, so that a decay never raises a score; else they are kept (the paper's
        formula as it stands).
    rope
        Compare keys and queries `post` or `pre` rotary embedding.
    center
        Keys of a head point in similar directions. `mean` subtracts the head's mean first; `baseline` measures
        cosines from the head's own average c: (cos - c) / (1 - c).
    space
        Re-rank the scores `after` a scorer has pooled them, or `before` and pool what comes out. The same for
        scorers that do not pool.
    k_of
        `source_ratio` is a share of the layer's `past` budget (without the window) or of the whole `budget`.
    min_distance
        Tokens at most so many positions from a source are not its neighbours, whatever `m` is; 0 is the paper's graph.
        A rotary key is most like the key beside it, so near edges thin out the span that was found.
    """

    source_ratio: float = 0.3
    neighbors: int | str = "auto3"
    rounds: int = 1
    edge: str = "kk"
    signal: str = "decay"
    accumulate: str = "product"
    source_immune: bool = False
    reselect: bool = False
    clamp: bool = True
    rope: str = "post"
    center: str = "none"
    space: str = "after"
    k_of: str = "past"
    min_distance: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.source_ratio <= 1:
            raise ValueError(f"source_ratio must be in (0, 1], not {self.source_ratio}")
        if self.rounds < 0:
            raise ValueError(f"rounds must be 0 or more, not {self.rounds}")
        if isinstance(self.neighbors, str):
            if self.neighbors != "all" and _auto_cap(self.neighbors) is None:
                raise ValueError(f"neighbors must be a number, autoC such as auto3, or all, not {self.neighbors!r}")
        elif self.neighbors < 1:
            raise ValueError(f"neighbors must be 1 or more, not {self.neighbors}")
        if self.min_distance < 0:
            raise ValueError(f"min_distance must be 0 or more positions, not {self.min_distance}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")

    @property
    def needs(self) -> Needs:
        """What must have been recorded for the edges."""
        return Needs(queries=ALL_QUERIES) if self.rounds and "q" in self.edge else Needs()

    def n_sources(self, past_budget: int, window: int = 0) -> int:
        """`k` for a layer that keeps `past_budget` tokens of its past, and the window."""
        whole = past_budget + (window if self.k_of == "budget" else 0)
        return max(1, int(self.source_ratio * whole + 1e-9))

    def n_neighbors(self, n: int) -> int:
        """`m` for a prompt of `n` tokens."""
        if self.neighbors == "all":
            return n
        if isinstance(self.neighbors, int):
            return self.neighbors
        return max(1, min(_auto_cap(self.neighbors), n // 1000))


def _auto_cap(text: str) -> int | None:
    match = _AUTO.fullmatch(text.replace(" ", ""))
    return max(1, int(match[1] or match[2])) if match else None


@dataclass(frozen=True)
class Edges:
    """The edges of one choice of sources: who sends to whom.

    Attributes
    ----------
    sources
        [rows, k] int64 positions: ascending, or with `accumulate="last"` the strongest first.
    neighbors
        [rows, k, m] int64: ascending positions of each source's neighbours, its own position for each that it lacks
        because of `min_distance`. None where every other token (that is far enough away) is one.
    similarity
        [rows, k, m] float32 similarity of each neighbour to its source; None with `neighbors`.
    """

    sources: Tensor
    neighbors: Tensor | None
    similarity: Tensor | None


@dataclass(frozen=True)
class Trace:
    """The re-ranking of one layer and how it came about.

    Attributes
    ----------
    scores
        [rows, n_past] float32: what is ranked.
    factors
        [rows, n_past] float64: what all rounds together multiplied each token's score by, 1 where nothing reached it;
        with `space="before"` the score before pooling. Evicting gives 0, summed decays may be negative.
    edges
        One for each choice of sources: a single one unless `reselect` chooses anew in each round, none where nothing
        was re-ranked.
    """

    scores: Tensor
    factors: Tensor
    edges: tuple[Edges, ...]


def rerank_layer(scores: Tensor, scorer: Scorer, view: LayerView, graph: Graph, budget: int) -> Tensor:
    """Re-rank a scorer's scores of one layer: [rows, n_past] float32; parameters as for `trace_layer`."""
    return trace_layer(scores, scorer, view, graph, budget).scores


def trace_layer(scores: Tensor, scorer: Scorer, view: LayerView, graph: Graph, budget: int) -> Trace:
    """Re-rank a scorer's scores of one layer, and tell how.

    Parameters
    ----------
    scores
        [rows, n_past] float32 from `scorer.score(view)`, a row for each KV head or for each query head.
    scorer
        Knows its window, and with `space="before"` its scores before pooling.
    view
        The layer.
    graph
        The re-ranking.
    budget
        Tokens that the layer keeps, window included.

    Returns
    -------
    Trace
        Finite scores; see `rerank`.
    """
    if graph.rounds == 0 or budget <= scorer.window:
        return _untouched(scores)
    pools_after = graph.space == "before"
    nodes = scorer.raw_score(view) if pools_after else scores
    senders, receivers = features(view, graph.edge, graph.rope, *nodes.shape)
    found = trace(nodes, senders, graph, view.n, budget - scorer.window, receivers)
    return replace(found, scores=scorer.finish(found.scores)) if pools_after else found


def rerank(
    scores: Tensor, features: Tensor, graph: Graph, n: int, past_budget: int, receivers: Tensor | None = None
) -> Tensor:
    """Change the scores of tokens that resemble higher-ranked ones.

    Eq. (2): the `k` best tokens are sources. Eq. (1): an edge is the cosine of two features. Eq. (3): each source's
    neighbours are its `m` most similar other tokens. Eq. (5): a neighbour's score is multiplied by `1 - e` for
    each source that has it as a neighbour, in each round.

    Readings where the paper is open and no option says otherwise: exactly `m` neighbours, ties to the lower position;
    only past tokens are nodes.

    Parameters
    ----------
    scores
        [rows, n_past] float32, non-negative.
    features
        [heads, n_past, d], any float dtype: post-rotary keys for the paper's key–key edges. `rows` is a multiple of
        `heads`; rows of a group share a head's features.
    graph
        k, m, T and what an edge does.
    n
        Prompt length in tokens, which `autoC` neighbours depend on; the tokens after `n_past` are the window.
    past_budget
        Past tokens that the layer will keep, which `k` is a share of.
    receivers
        Features of the neighbours [heads', n_past, d], if they are others than those of the sources.

    Returns
    -------
    Tensor
        [rows, n_past] float32, finite. With clamped edges: decay and evict give nothing above `scores` (but for
        evict's 2⁻¹⁴⁹), enhance nothing below; negative only if decays are summed. Memory is O(rows · (k·m + n)) beside
        one block of similarities.
    """
    return trace(scores, features, graph, n, past_budget, receivers).scores


def trace(
    scores: Tensor, features: Tensor, graph: Graph, n: int, past_budget: int, receivers: Tensor | None = None
) -> Trace:
    """`rerank` with the edges and the factors that led to its scores; the same parameters."""
    rows, n_past = scores.shape
    k = min(graph.n_sources(past_budget, n - n_past), n_past)
    others = n_past - (k if graph.source_immune else 1)
    m = min(graph.n_neighbors(n), others)
    if graph.rounds == 0 or m < 1 or graph.min_distance >= n_past - 1:
        return _untouched(scores)
    receivers = features if receivers is None else receivers
    similarity = Similarity(features, receivers, rows, graph.center, graph.clamp, graph.min_distance)
    if graph.signal == "evict":
        scores = scores.clamp_min(_LEAST)
    choices, repeats = (graph.rounds, 1) if graph.reselect else (1, graph.rounds)
    changed, total, edges = scores, 0.0 if _logarithmic(graph) else 1.0, []
    for _ in range(choices):
        change, chosen = _change(changed, similarity, graph, k, m, all_others=m == others)
        edges.append(chosen)
        if _logarithmic(graph):
            total = total + repeats * change
            changed = _scaled(scores, total)
        else:
            # Bounded, so that 0 times it is 0 whatever the number of rounds.
            total = (total * (1 + change) ** repeats).clamp(-1e300, 1e300)
            changed = (scores * total).clamp(-_MAX, _MAX).float()
    return Trace(changed, total.exp() if _logarithmic(graph) else total, tuple(edges))


def _untouched(scores: Tensor) -> Trace:
    return Trace(scores, torch.ones_like(scores, dtype=torch.float64), ())


def _logarithmic(graph: Graph) -> bool:
    """Whether edges bring logarithms of factors (evicting: of 0), else what is added to one."""
    return graph.accumulate == "product" or graph.signal == "evict"


def _change(
    scores: Tensor, similarity: Similarity, graph: Graph, k: int, m: int, all_others: bool
) -> tuple[Tensor, Edges]:
    """What one round does to each token, [rows, n_past] float64: the sum of what its edges bring, see `_signal`.

    Float64 because tokens have hundreds of edges, and so that the order of the sources leaves no trace.
    """
    sources = chosen = top_positions(scores, k)
    immune = sources if graph.source_immune else None
    last = graph.accumulate == "last" and not _logarithmic(graph)
    if last:
        sources = sources.gather(-1, scores.gather(-1, sources).argsort(dim=-1, descending=True, stable=True))
        if all_others:
            # Any token is too near to at most 2 d + 1 sources, so one of the 2 d + 2 weakest is the last to write it.
            sources = sources[:, -2 * (graph.min_distance + 1) :]
    total = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
    if all_others and not last:
        for block, cosine in similarity.blocks(sources):
            signal = similarity.without_near(_signal(similarity.weigh(cosine), graph), block, 0)
            total += signal.sum(1, dtype=torch.float64)
        return total if immune is None else total.scatter_(-1, immune, 0), Edges(chosen, None, None)
    neighbors, e = similarity.neighbors(sources, m, immune)
    edges = Edges(chosen, None, None) if all_others else Edges(sources, neighbors, e)
    lacking = (neighbors == sources[..., None]).flatten(1)
    signal, neighbors = _signal(e.double(), graph).flatten(1).masked_fill_(lacking, 0), neighbors.flatten(1)
    if last:
        order = torch.arange(sources.shape[1], device=scores.device).repeat_interleave(m).expand_as(neighbors)
        order = order.masked_fill(lacking, -1)
        final = torch.full_like(scores, -1, dtype=torch.int64).scatter_reduce_(-1, neighbors, order, "amax")
        signal = torch.where(final.gather(-1, neighbors) == order, signal, 0)
    return total.scatter_add_(-1, neighbors, signal), edges


def _signal(e: Tensor, graph: Graph) -> Tensor:
    """What edges of similarity `e`, which is overwritten, bring; see `_logarithmic`."""
    if graph.signal == "evict":
        return torch.full_like(e, -math.inf)
    added = e if graph.signal == "enhance" else e.neg_()
    return added.log1p_() if graph.accumulate == "product" else added


def _scaled(scores: Tensor, log: Tensor) -> Tensor:
    """`scores · exp(log)` in float32, ranked rightly even where hundreds of factors leave its range.

    There a number made of the logarithm stands for the product: below the smallest normal number, or above a third
    of the largest, and in the same order.
    """
    size = scores.double().log() + log
    result = (scores * log.clamp_max(700).exp()).float()
    low, high = math.log(_MIN), math.log(_MAX)
    result = torch.where((size < low) & (scores >= _MIN), (_MIN * low / size).float(), result)
    return torch.where(size > high - 1, (_MAX * (1 - 0.5 * (high - 1) / size)).float(), result)
