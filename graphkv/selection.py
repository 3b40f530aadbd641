"""Scores and a budget → kept positions: exact size, ties to the lower position, ascending."""

from __future__ import annotations

import torch
from torch import Tensor


def top_positions(scores: Tensor, k: int) -> Tensor:
    """Positions of the `k` largest scores of each row; among equal scores the lower position wins.

    `torch.topk` and unstable sorts leave the order of ties open, and it differs between devices and between `k`.
    Here `top_positions(s, k)` is always a subset of `top_positions(s, k + 1)`.

    Parameters
    ----------
    scores
        [..., n] float, without NaN.
    k
        0 ≤ k ≤ n.

    Returns
    -------
    Tensor
        [..., k] int64, ascending.
    """
    n = scores.shape[-1]
    if not 0 <= k <= n:
        raise ValueError(f"cannot take {k} of {n} positions")
    if k == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.int64, device=scores.device)
    if k == n:
        return torch.arange(n, device=scores.device).expand(scores.shape).contiguous()
    rows = scores.reshape(-1, n)
    if not rows.is_cpu:  # a look at the ties would make the host wait
        chosen = _lowest_of_ties(rows, k)
    else:
        values, found = rows.topk(k + 1)
        chosen = found[:, :k].sort(-1).values
        tied = (values[:, k - 1] == values[:, k]).nonzero()[:, 0]
        if len(tied):
            chosen[tied] = _lowest_of_ties(rows[tied], k)
    return chosen.view(*scores.shape[:-1], k)


def _lowest_of_ties(rows: Tensor, k: int) -> Tensor:
    """`top_positions` of [rows, n] without a sort or a host sync: each chosen position goes to its rank."""
    threshold = rows.topk(k).values[:, -1:]
    above = rows > threshold
    tied = rows == threshold
    free = k - above.sum(-1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(-1) <= free))
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, k)  # column k collects what is not chosen
    positions = torch.arange(rows.shape[-1], device=rows.device).expand(rows.shape)
    return positions.new_empty(rows.shape[0], k + 1).scatter_(-1, slot, positions)[:, :k]


def keep(scores: Tensor, budget: int, n: int, sinks: int = 0) -> Tensor:
    """Kept prompt positions of a layer: sinks, the best of the rest of the past, the whole window.

    Parameters
    ----------
    scores
        [heads, n_past] float32 scores of the past, the first `n_past` tokens.
    budget
        Tokens to keep, window and sinks included; at least the window, at most `n`.
    n
        Prompt length; tokens `n_past … n - 1` are the window.
    sinks
        The first so many tokens are kept whatever their scores are, as far as the budget goes.

    Returns
    -------
    Tensor
        [heads, budget] int64, ascending.
    """
    n_past = scores.shape[-1]
    past_budget = budget - (n - n_past)
    sinks = min(sinks, past_budget)
    best = sinks + top_positions(scores[..., sinks:], past_budget - sinks)
    positions = torch.arange(n, device=scores.device).expand(*scores.shape[:-1], -1)
    return torch.cat([positions[..., :sinks], best, positions[..., n_past:]], -1)
