"""H2O: heavy hitters, the tokens that attention has summed up on."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scorers.base import ALL_QUERIES, LayerView, Needs, Scorer
from scorers.snapkv import reduce_group

_BLOCK_ELEMENTS = 1 << 23  # attention held at once: 32 MiB of float32, whatever the prompt's length


@dataclass(frozen=True)
class H2O(Scorer):
    """Attention mass that a token received from all queries of the prompt: `s_j = Σ_q P[q, j]`.

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (NeurIPS
    2023), section 4, Algorithm 1; reference code `FMInference/H2O`. The window is its "recent" half.

    `causal=False` reproduces the baseline that papers of 2024 and 2025 compare with, GraphKV's Fig. 6 included:
    `Zefan-Cai/KVCache-Factory` at ffac160, where only the last `window` x `window` block was masked, so that all other
    queries also attend to their future. It was made causal in commit 9f9aa2e (June 2026).

    The reference goes on to add and evict at each decoding step: `decode.evict_every=1`. Divergences: by default the
    prompt is evicted once, after its prefill, as KVCache-Factory does. Query heads of a KV head are reduced to one
    score (the reference covers models without shared keys only). Softmax and sums are float32; the reference's are
    half precision.

    Parameters
    ----------
    window
        Recent tokens that are always kept.
    causal
        True: each query attends to its past. False: the mask described above.
    group
        How the query heads that share a KV head are reduced: `mean`, `max` or `sum`.
    """

    causal: bool = True
    group: str = "mean"

    evicts_in_decode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group not in ("mean", "max", "sum"):
            raise ValueError(f"group must be mean, max or sum, not {self.group!r}")

    @property
    def needs(self) -> Needs:
        """The recorded mass, or every query to compute what no forward pass computes."""
        return Needs(mass=True) if self.causal else Needs(queries=ALL_QUERIES)

    def score(self, layer: LayerView) -> Tensor:
        """Attention mass of the past, [G, n - window]."""
        mass = layer.mass if self.causal else column_mass(layer.queries, layer.keys, layer.scaling, self.window)
        return reduce_group(mass[:, : layer.n - self.window].unflatten(0, (layer.keys.shape[0], -1)), self.group)


def column_mass(queries: Tensor, keys: Tensor, scaling: float, causal_tail: int = 0) -> Tensor:
    """Attention that each key gets from all queries, summed; memory is one block of rows, never [t, n].

    Parameters
    ----------
    queries
        [H, t, d], any float dtype.
    keys
        [G, n, d], `H` a multiple of `G`.
    scaling
        Factor on query-key products.
    causal_tail
        The last so many queries, which then must be the last tokens of the keys, do not see their future; the
        others see everything.

    Returns
    -------
    Tensor
        [H, n] float32; sums to `t` over the keys.
    """
    (heads, t, d), (kv_heads, n, _) = queries.shape, keys.shape
    transposed = keys.float().transpose(-1, -2)
    columns = torch.arange(n, device=keys.device)
    mass = torch.zeros(heads, n, device=keys.device)
    rows = max(1, _BLOCK_ELEMENTS // (heads * n))
    for begin in range(0, t, rows):
        block = queries[:, begin : begin + rows].float().reshape(kv_heads, -1, d)
        logits = (block @ transposed * scaling).view(heads, -1, n)
        end = begin + logits.shape[1]
        if end > t - causal_tail:
            row = torch.arange(begin, end, device=keys.device)[:, None]
            logits.masked_fill_((row >= t - causal_tail) & (columns > row + n - t), float("-inf"))
        mass += logits.softmax(-1).sum(1)
    return mass
