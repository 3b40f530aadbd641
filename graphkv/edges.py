"""Edges of the graph, Eqs. (1) and (3): what is compared with what, how similar it is, and who is whose neighbour."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from eval.errors import UserError
from graphkv.selection import top_positions
from scorers import LayerView

_BLOCK_ELEMENTS = 1 << 23  # similarities held at once: 32 MiB of float32, whatever k and n are
_NOT_A_NEIGHBOR = -2.0  # below every cosine
_LANES = 64


def features(view: LayerView, edge: str, rope: str, rows: int, n_past: int) -> tuple[Tensor, Tensor]:
    """What the edges of a layer compare.

    Parameters
    ----------
    view
        The layer.
    edge
        Two letters of k(ey), q(uery) and v(alue): the kind of the source and the kind of its neighbours.
    rope
        `post`: keys and queries as attention uses them; `pre`: as they were before the rotary embedding.
    rows
        Rows of the scores: the KV heads, or the query heads, whose queries are then their own.
    n_past
        Tokens that are nodes: the first of the prompt.

    Returns
    -------
    tuple of Tensor
        Features of sources and of neighbours, the same object if they are of one kind: [heads, n_past, d], `heads`
        a divisor of `rows`. The query of a KV head is the mean over the query heads that share it.

    Raises
    ------
    UserError
        If queries of the prompt were not recorded, the model has no rotary embedding to undo, or sizes differ.
    """

    def of_kind(kind: str) -> Tensor:
        if kind == "v":
            return view.values[:, :n_past]
        if kind == "q":
            if view.queries.shape[1] < view.n:
                raise UserError(
                    f"graphkv.edge={edge} compares the queries of all {view.n} prompt tokens, but the prefill "
                    f"recorded {view.queries.shape[1]}: prefill with needs=Needs(queries=ALL_QUERIES)"
                )
            found = view.queries[:, :n_past].unflatten(0, (rows, -1)).mean(1, dtype=torch.float32)
        else:
            found = view.keys[:, :n_past]
        if rope == "post":
            return found
        if view.rope is None:
            raise UserError("graphkv.rope=pre undoes rotary embeddings, but none were recorded: use rope=post")
        return view.rope.unrotate(found, torch.arange(n_past, device=found.device))

    senders = of_kind(edge[0])
    receivers = senders if edge[1] == edge[0] else of_kind(edge[1])
    if senders.shape[-1] != receivers.shape[-1]:
        raise UserError(
            f"graphkv.edge={edge} compares vectors of {senders.shape[-1]} and of {receivers.shape[-1]} numbers: "
            "this model allows kk, qk, qq and vv"
        )
    return senders, receivers


def mean_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Float64 average of cos(a_i, b_j) over i ≠ j for [n, d] vectors of length one, n at least 2.

    In O(n d) instead of O(n² d): (⟨Σ a, Σ b⟩ - Σ ⟨a_i, b_i⟩) / (n (n - 1)).
    """
    every_pair = a.sum(0, dtype=torch.float64) @ b.sum(0, dtype=torch.float64)
    return (every_pair - (a * b).sum(dtype=torch.float64)) / (len(a) * (len(a) - 1))


class Similarity:
    """How similar sources are to all tokens, computed from features in blocks when it is asked for.

    Parameters
    ----------
    senders, receivers
        [A, n, d] and [B, n, d] features of any float dtype; pass one object twice if they are the same.
    rows
        Rows of scores, a multiple of A and of B: rows of a group share a head's features, which are not repeated.
    center
        `none`; `mean`: the head's mean feature is subtracted first; `baseline`: an edge is (cos - c) / (1 - c), with
        c the head's average cosine of two different tokens, so that an average pair has none.
    clamp
        Raise negative similarities to 0; else they are kept, down to -1.
    min_distance
        Tokens at most so many positions from a source are not its neighbours; 0: only the source itself is not.
    """

    def __init__(
        self,
        senders: Tensor,
        receivers: Tensor,
        rows: int,
        center: str = "none",
        clamp: bool = True,
        min_distance: int = 0,
    ) -> None:
        self.rows, self.lowest, self.min_distance = rows, 0.0 if clamp else -1.0, min_distance
        self.senders = unit(senders, center == "mean")
        self.receivers = self.senders if receivers is senders else unit(receivers, center == "mean")
        self.baseline = self._mean_cosine().float() if center == "baseline" else None

    def _mean_cosine(self) -> Tensor:
        """[rows, 1, 1] float64 average similarity of two different tokens."""
        means = []
        for row in range(self.rows):
            a, b = (heads[row * len(heads) // self.rows] for heads in (self.senders, self.receivers))
            means.append(mean_cosine(a, b))
        return torch.stack(means)[:, None, None]

    def blocks(self, sources: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of the [rows, k] `sources`, each with its cosines [rows, block, n] to all tokens."""
        groups, n, d = self.receivers.shape
        head = torch.arange(self.rows, device=sources.device)[:, None] * len(self.senders) // self.rows
        columns = n + 4 * self.min_distance  # positions of near tokens, 2 d + 1 of 8 bytes, are held beside a block
        for block in sources.split(max(1, _BLOCK_ELEMENTS // (self.rows * columns)), dim=-1):
            cosine = self.senders[head, block].view(groups, -1, d) @ self.receivers.mT
            yield block, cosine.view(self.rows, -1, n).clamp_(-1, 1)

    def without_near(self, values: Tensor, block: Tensor, value: float) -> Tensor:
        """Overwrite [rows, block, n] values with `value` where a token is too near to the source of its row."""
        reach = torch.arange(-self.min_distance, self.min_distance + 1, device=block.device)
        return values.scatter_(-1, (block[..., None] + reach).clamp_(0, values.shape[-1] - 1), value)

    def weigh(self, cosine: Tensor) -> Tensor:
        """Similarities [rows, …, …] of cosines: centred, and in [0, 1] or [-1, 1]. May write into its argument."""
        if self.baseline is not None:
            spread = 1 - self.baseline
            # Where all tokens point the same way, nobody is more similar than the average: the rest is rounding.
            cosine = torch.where(spread > 1e-5, (cosine - self.baseline) / spread, 0)
        return cosine.clamp_(self.lowest, 1)

    def neighbors(self, sources: Tensor, m: int, excluded: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The `m` most similar other tokens of each source, ties to the lower position.

        Parameters
        ----------
        sources
            [rows, k] int64 positions in any order.
        m
            Neighbours a source, at most the tokens that are left.
        excluded
            [rows, x] positions that are nobody's neighbours.

        Returns
        -------
        tuple of Tensor
            Positions [rows, k, m] int64, ascending, and similarities [rows, k, m] float32. Where fewer than `m` tokens
            are far enough away, the source's own position with similarity 0 stands for each that is lacking.
        """
        found, similarity = [], []
        for block, cosine in self.blocks(sources):
            self.without_near(cosine, block, _NOT_A_NEIGHBOR)
            if excluded is not None:
                cosine.scatter_(-1, excluded[:, None].expand(-1, block.shape[-1], -1), _NOT_A_NEIGHBOR)
            nearest = _nearest(cosine, m)
            cosine = cosine.gather(-1, nearest)
            lacking = cosine == _NOT_A_NEIGHBOR
            found.append(torch.where(lacking, block[..., None], nearest))
            similarity.append(self.weigh(cosine).masked_fill_(lacking, 0))
        return torch.cat(found, 1), torch.cat(similarity, 1)


def unit(x: Tensor, centered: bool = False) -> Tensor:
    """Float32 vectors of length one along the last axis; a zero vector stays zero and resembles nothing."""
    x = x.float()
    return functional.normalize(x - x.mean(1, keepdim=True) if centered else x, dim=-1)


def _nearest(cosine: Tensor, m: int) -> Tensor:
    """`top_positions(cosine, m)`, on a CPU at a third of its time for few neighbours among many tokens.

    Each row is cut into interleaved lanes, whose maxima vectorise. Its `m + 1` largest values are found in the
    `m + 1` lanes with the largest maxima: any value elsewhere is at most as large as these maxima.
    """
    n = cosine.shape[-1]
    whole = n - n % _LANES
    if not cosine.is_cpu or m >= _LANES // 8 or n < 8 * _LANES:
        return top_positions(cosine, m)
    lanes = cosine[..., :whole].unflatten(-1, (-1, _LANES)).amax(-2).topk(m + 1).indices
    inside = (lanes[..., None] + torch.arange(0, whole, _LANES)).flatten(-2)
    among = torch.cat([inside, torch.arange(whole, n).expand(*cosine.shape[:-1], -1)], -1)
    values, index = cosine.gather(-1, among).topk(m + 1)
    nearest = among.gather(-1, index[..., :m]).sort(-1).values
    tied = values[..., m - 1] == values[..., m]
    if tied.any():
        nearest[tied] = top_positions(cosine[tied], m)
    return nearest
