"""R-KV: important tokens that are not like all the others."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from scorers.base import LayerView
from scorers.snapkv import SnapKV, pool, reduce_group

_BLOCK_COLUMNS = 256  # similarities held at once: those of so many tokens to all others


@dataclass(frozen=True)
class RKV(SnapKV):
    """Importance minus redundancy, `Z_j = λ I_j - (1 - λ) R_j`, the closest published competitor of GraphKV.

    I: logits of the last `window` queries, the largest of a group's heads, softmax over the past, mean over the
    queries, pooled. R: softmax over all tokens j of the mean over i of `C_ij`, the cosine of two keys, where `C_ii`
    and, for each i, one more entry are 0: that of the most recent j with `C_ij > threshold`, or of token 0 without one.

    Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models" (2025, arXiv 2505.24133), section 3;
    reference code `Zefan-Cai/R-KV`, `R1KV._compute_scores` and `cal_similarity`.

    Divergences: the score is `λ I + (1 - λ)(max R - R)`, Z raised by a constant of the head, so that none is negative
    and a factor of the graph lowers it; one eviction after the prefill, unless `decode.evict_every=128`, the
    reference's interval, goes on; float32; the mean of C comes from sums of unit keys, so similarities never exist as
    n x n.

    Parameters
    ----------
    window
        Length of the observation window in tokens, at least 1.
    kernel, pooling
        Pooling of I, as in SnapKV; `max` over 7 tokens in the reference.
    group
        How the logits of the query heads that share a KV head are reduced: `max` in the reference.
    weight
        λ in [0, 1]: 0.07 in the reference's code, 0.1 in its README.
    threshold
        Cosine above which two keys count as alike.
    spare_last
        Spare the most recent near-copy of each token, as above; False zeroes the diagonal only.
    """

    window: int = 8
    pooling: str = "max"
    group: str = "max"
    weight: float = 0.07
    threshold: float = 0.5
    spare_last: bool = True

    evicts_in_decode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be in [0, 1], not {self.weight}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be a cosine in [0, 1], not {self.threshold}")

    def raw_score(self, layer: LayerView) -> Tensor:
        """Importance, which is pooled, and lack of redundancy of the past, [G, n - window]."""
        n_past, kv_heads = layer.n - self.window, layer.keys.shape[0]
        queries = layer.queries[:, -self.window :].float().unflatten(0, (kv_heads, -1))
        past = layer.keys[:, None, :n_past].float()
        logits = reduce_group(queries @ past.mT * layer.scaling, self.group)
        importance = pool(logits.softmax(-1).mean(1), self.kernel, self.pooling)
        redundancy = torch.stack([self._similarity(keys) for keys in layer.keys]).softmax(-1)[:, :n_past]
        novelty = redundancy.amax(-1, keepdim=True) - redundancy
        return self.weight * importance + (1 - self.weight) * novelty

    def finish(self, raw: Tensor) -> Tensor:
        """Nothing: only the importance is pooled, and it has been."""
        return raw

    def _similarity(self, keys: Tensor) -> Tensor:
        """Mean of C over its rows for the keys of one head, [n] from [n, d]."""
        keys = functional.normalize(keys.float(), dim=-1)
        total = keys @ keys.sum(0) - keys.square().sum(-1)
        return (total - self._spared(keys) if self.spare_last else total) / len(keys)

    def _spared(self, keys: Tensor) -> Tensor:
        """What the zeroed entries off the diagonal would have added to each column, [n] from [n, d] unit keys.

        Columns are searched from the end. Keys share a direction, so few rows are left after the first blocks.
        """
        n = len(keys)
        spared, rows = keys.new_zeros(n), torch.arange(n, device=keys.device)
        for end in range(n, 0, -_BLOCK_COLUMNS):
            begin = max(0, end - _BLOCK_COLUMNS)
            columns = torch.arange(begin, end, dtype=torch.int32, device=keys.device)
            cosine = keys[rows] @ keys[begin:end].mT
            alike = (cosine > self.threshold) & (columns != rows[:, None])
            last = torch.where(alike, columns, -1).amax(-1, keepdim=True)
            spared[begin:end] = torch.where(columns == last, cosine, 0).sum(0)
            rows = rows[last[:, 0] < 0]
        spared[0] += (keys[rows[rows > 0]] @ keys[0]).sum()
        return spared
