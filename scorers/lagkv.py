"""LagKV: tokens that stand out against the block that follows them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from scorers.base import LayerView, Scorer


@dataclass(frozen=True)
class LagKV(Scorer):
    """Spread over channels of a token's key and value on the scale of the next block.

    After the sinks the prompt is cut into blocks of `lag` tokens. A vector x of block p is scaled by the next block's
    smallest and largest value a channel, `x̄ = (x - min_{p+1}) / (max_{p+1} - min_{p+1})`, and scored
    `softmax_block( std_channels x̄ )`; a token's information is its key's plus `value_weight` times its value's.

    Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important" (2025, arXiv
    2504.04704); reference code `AI-Lab-China-Merchants-Bank/LagKV`, with kvpress' `LagKVPress` for the ranking.

    The reference keeps the same share of every block, the sinks, the last full block and what follows it. As one
    ranking: sinks score 2; the tail, which has no next block, 1 + j/n, the newest first when the budget is below it; a
    token of a block its rank within the block, in [0, 1). A prompt shorter than `sinks + 2 lag` is all tail, so that
    sinks and the most recent tokens stay.

    Divergences: the budget decides what share is kept, not a ratio; nothing is evicted in decoding; `lag` is 128 as in
    kvpress, since the tail of the reference's 1024 alone exceeds the usual budgets; a channel that is constant in the
    next block has no scale and counts 0, where the reference divides by zero.

    Parameters
    ----------
    window
        0: the tail protects what is recent.
    sinks
        First tokens that are kept before all others; blocks begin after them.
    lag
        Length of a block in tokens.
    value_weight
        Weight of the value's information.
    across
        How tokens of different blocks compare: `rank` within the block, or `score`, the information itself (kvpress'
        `cross_scoring`).
    """

    window: int = 0
    sinks: int = 16
    lag: int = 128
    value_weight: float = 1.0
    across: str = "rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag < 1:
            raise ValueError(f"lag must be 1 or more tokens, not {self.lag}")
        if self.value_weight < 0:
            raise ValueError(f"value_weight must be 0 or more, not {self.value_weight}")
        if self.across not in ("rank", "score"):
            raise ValueError(f"across must be rank or score, not {self.across!r}")

    def score(self, layer: LayerView) -> Tensor:
        """Sinks, tail and block ranks, [G, n - window]."""
        n, device = layer.n, layer.keys.device
        score = 1 + torch.arange(n, device=device) / n
        score[: self.sinks] = 2
        score = score.repeat(layer.keys.shape[0], 1)
        blocks = (n - self.sinks) // self.lag - 1
        if blocks > 0:
            begin, end = self.sinks, self.sinks + blocks * self.lag
            keys, values = (x[:, begin : end + self.lag].float() for x in (layer.keys, layer.values))
            information = self._information(keys) + self.value_weight * self._information(values)
            if self.across == "rank":
                place = information.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
                information = (self.lag - 1 - place) / self.lag
            else:
                information = information / (1 + self.value_weight)
            score[:, begin:end] = information.flatten(1)
        return score[:, : n - self.window]

    def _information(self, x: Tensor) -> Tensor:
        """[G, blocks, lag] from [G, (blocks + 1) · lag, d]."""
        x = x.unflatten(1, (-1, self.lag))
        low, high = x[:, 1:].amin(2, keepdim=True), x[:, 1:].amax(2, keepdim=True)
        scale = high - low
        known = scale > 1e-12
        scaled = torch.where(known, (x[:, :-1] - low) / torch.where(known, scale, 1), 0)
        return scaled.std(-1).softmax(-1)
