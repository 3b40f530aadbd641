"""Giving back the attention that evicted tokens had: a bias on the logits of kept keys, and optionally their values.

After eviction the softmax spreads the lost mass over all kept tokens. A bias of log((p_j + Σ p_i) / p_j) on the kept
token j lets it stand for the evicted tokens i that resemble it, p being the attention mass of the last prompt queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from scorers import LayerView, Needs

WINDOW = 32  # last prompt queries whose attention is the mass
CAP = math.log(4)  # most that a logit is raised by

KINDS = ("none", "mass", "uniform")
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Correction:
    """What a cell adds to the attention over its kept tokens.

    Attributes
    ----------
    bias
        One entry a layer, one [kept] float32 tensor a stored head: added to the attention logits of its keys.
    values
        The same of [kept, d] tensors in the model's dtype, instead of the kept values; None leaves those.
    """

    bias: list[list[Tensor]]
    values: list[list[Tensor]] | None = None


def needs(kind: str) -> Needs:
    """What must have been recorded of a prompt."""
    return Needs() if kind == "none" else Needs(queries=WINDOW)


def correct(views: Sequence[LayerView], kept: Sequence[Sequence[Tensor]], kind: str, fold: bool) -> Correction:
    """The correction of a cell.

    Parameters
    ----------
    views
        Layers with the heads that the cell stores, and at least the last `WINDOW` queries.
    kept
        For each layer and stored head the kept positions, ascending [kept] int64.
    kind
        `mass`: an evicted token's mass goes to the kept token whose key is most similar (cosine); `uniform`: the lost
        mass of a head is shared in proportion, one bias for all of its tokens.
    fold
        With `mass`: kept values become the mean of their own and of those they stand for, weighted by mass.

    Notes
    -----
    The idea of a bias for merged tokens: KeepKV (arXiv 2504.09936). A bias never exceeds log 4.
    """
    biases, values = [], []
    for view, heads in zip(views, kept, strict=True):
        window = min(WINDOW, view.n)
        mass = view.window_attention(window).mean(1).unflatten(0, (view.keys.shape[0], -1)).mean(1)
        layer = [_of_head(view, head, mass[head], positions, kind, fold) for head, positions in enumerate(heads)]
        biases.append([bias for bias, _ in layer])
        values.append([folded for _, folded in layer])
    return Correction(biases, values if fold and kind == "mass" else None)


def _of_head(
    view: LayerView, head: int, mass: Tensor, positions: Tensor, kind: str, fold: bool
) -> tuple[Tensor, Tensor | None]:
    """Bias [kept] and, if asked for, values [kept, d] of one stored head."""
    held = mass[positions].clamp_min(_TINY)
    if kind == "uniform":
        return (mass.sum() / held.sum()).log().clamp(0, CAP).expand_as(held), None
    evicted = torch.ones_like(mass, dtype=torch.bool)
    evicted[positions] = False
    gone = evicted.nonzero()[:, 0]
    keys = functional.normalize(view.keys[head].float(), dim=-1)
    nearest = (keys[gone] @ keys[positions].mT).argmax(-1)
    given = torch.zeros_like(held).index_add_(0, nearest, mass[gone])
    bias = torch.log1p(given / held).clamp_max(CAP)
    if not fold:
        return bias, None
    own = view.values[head]
    sums = (held[:, None] * own[positions].float()).index_add_(0, nearest, mass[gone, None] * own[gone].float())
    return bias, (sums / (held + given)[:, None]).to(own.dtype)
