"""Expected Attention: what the queries to come would attend to, if they were like those that came."""

from dataclasses import dataclass

import torch
from torch import Tensor

from scorers.base import ALL_QUERIES, LayerView, Needs, Rope, Scorer
from scorers.snapkv import reduce_group


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Attention of a normally distributed future query, times the norm of the value.

    Queries before rotary embedding have mean μ and covariance Σ over the prompt. R̄, the mean rotation of the next
    `n_future` positions, turns them to the future: `μ̄ = R̄ μ`, `Σ̄ = R̄ Σ R̄ᵀ`. Then with c the scaling
    `z_j = c μ̄ᵀk_j + ½ c² k_jᵀ Σ̄ k_j` and `s_j = (mean_g softmax_j(z) + ε) ‖v_j‖`.

    Devoto, Jeblick, Jégou, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution" (2025, arXiv 2510.00636); reference code `NVIDIA/kvpress`, `ExpectedAttentionPress`. As there, sinks
    take no part in statistics and softmax and are kept first, and the covariance divides by the number of queries.

    Divergences: queries are those that the model used, turned back, so models that normalise their queries work too;
    all in float32; future positions end where those of `LayerView.rope` do. A prompt of sinks only scores ones.

    Parameters
    ----------
    window
        0 as published: no recent token is protected.
    sinks
        First tokens that are kept before all others and have no part in the estimate.
    n_future
        Positions after the prompt that are averaged.
    covariance
        Use Σ; False drops the quadratic term.
    value_norms
        Multiply by the norm of the value; False leaves the expected attention, without ε.
    epsilon
        ε: 0 is kvpress' default; its leaderboard uses 0.01, with AdaKV's budgets per head.
    group
        How the query heads that share a KV head are reduced: `mean`, `max` or `sum`.
    """

    window: int = 0
    sinks: int = 4
    n_future: int = 512
    covariance: bool = True
    value_norms: bool = True
    epsilon: float = 0.0
    group: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_future < 1:
            raise ValueError(f"n_future must be 1 or more positions, not {self.n_future}")
        if self.epsilon < 0:
            raise ValueError(f"epsilon must be 0 or more, not {self.epsilon}")
        if self.group not in ("mean", "max", "sum"):
            raise ValueError(f"group must be mean, max or sum, not {self.group!r}")

    @property
    def needs(self) -> Needs:
        """Every query."""
        return Needs(queries=ALL_QUERIES)

    def score(self, layer: LayerView) -> Tensor:
        """Expected attention times value norms, sinks above all, [G, n - window]."""
        if layer.rope is None:
            raise ValueError("expected_attention needs fixed rotary embeddings, and this model has none")
        n, kv_heads = layer.n, layer.keys.shape[0]
        if n <= self.sinks:
            return torch.ones(kv_heads, n - self.window, device=layer.keys.device)
        queries = layer.queries.unflatten(0, (kv_heads, -1))
        # One KV head at a time: float32 copies of all queries of a long prompt would be as large as its cache.
        pairs = zip(queries[:, :, self.sinks :], layer.keys[:, self.sinks :].float(), strict=True)
        attention = torch.stack([self._attention(layer, q, k) for q, k in pairs])
        score = reduce_group(attention, self.group)
        if self.value_norms:
            score = (score + self.epsilon) * layer.values[:, self.sinks :].float().norm(dim=-1)
        first = (2 * score.amax(-1, keepdim=True) + 1).expand(-1, self.sinks)
        return torch.cat([first, score], -1)[:, : n - self.window]

    def _attention(self, layer: LayerView, queries: Tensor, keys: Tensor) -> Tensor:
        """Softmax of z for [g, t, d] queries and [t, d] keys after the sinks, [g, t]."""
        rope, n, c = layer.rope, layer.n, layer.scaling
        queries = rope.unrotate(queries, torch.arange(self.sinks, n, device=queries.device))
        mean = queries.mean(1, keepdim=True)
        last = len(rope.cos)
        future = slice(min(n, last - 1), min(n + self.n_future, last))
        average = Rope(rope.cos[future].mean(0, keepdim=True), rope.sin[future].mean(0, keepdim=True))
        only = torch.zeros(1, dtype=torch.int64, device=queries.device)
        z = c * (average.rotate(mean, only) @ keys.mT).squeeze(1)
        if self.covariance:
            centred = queries - mean
            sigma = centred.mT @ centred / centred.shape[1]
            sigma = average.rotate(average.rotate(sigma, only).mT, only)
            z = z + 0.5 * c**2 * ((keys @ sigma) * keys).sum(-1)
        return z.softmax(-1)
