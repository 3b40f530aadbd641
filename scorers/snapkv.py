"""SnapKV: what the end of the prompt attends to."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from scorers.base import LayerView, Needs, Scorer


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Attention mass that the last `window` queries give to each past token, pooled over neighbours.

    `s_j = pool( mean_{h in group} Σ_{q in window} P_h[q, j] )`, P the causal softmax over the whole prompt.

    Li et al., "SnapKV: LLM Knows What You Are Looking for Before Generation" (NeurIPS 2024), section 3; reference
    code `FasterDecoding/SnapKV`. Defaults are those of the GraphKV script: window 32, kernel 7, average pooling.

    Divergences: the query heads of a KV head are reduced to one score before pooling (the reference repeats the
    keys and keeps one set per query head, `granularity=query_head`); sums are float32, not half precision.

    Parameters
    ----------
    window
        Length of the observation window in tokens, at least 1.
    kernel
        Width of the pooling in tokens, odd; 1 does nothing.
    pooling
        `avg` (edges are divided by the full kernel, as `avg_pool1d` does), `max` or `none`.
    group
        How the query heads that share a KV head are reduced: `mean`, `max` or `sum`.
    """

    kernel: int = 7
    pooling: str = "avg"
    group: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"window must be 1 or more tokens, not {self.window}: its queries make the scores")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be an odd number of tokens, not {self.kernel}")
        if self.pooling not in ("avg", "max", "none"):
            raise ValueError(f"pooling must be avg, max or none, not {self.pooling!r}")
        if self.group not in ("mean", "max", "sum"):
            raise ValueError(f"group must be mean, max or sum, not {self.group!r}")

    @property
    def needs(self) -> Needs:
        """The queries of the window."""
        return Needs(queries=self.window)

    def score(self, layer: LayerView) -> Tensor:
        """Pooled window attention to the past, [G, n - window]."""
        return self.finish(self.raw_score(layer))

    def raw_score(self, layer: LayerView) -> Tensor:
        """Window attention to the past, [G, n - window]."""
        mass = layer.window_attention(self.window)[:, :, : layer.n - self.window].sum(1)
        mass = mass.view(layer.keys.shape[0], -1, mass.shape[-1])
        return reduce_group(mass, self.group)

    def finish(self, raw: Tensor) -> Tensor:
        """Pool window attention over neighbouring tokens."""
        return pool(raw, self.kernel, self.pooling)


def reduce_group(scores: Tensor, how: str) -> Tensor:
    """Reduce [G, g, n] scores of the `g` query heads of each KV head to [G, n] (`mean`, `max` or `sum`)."""
    return scores.amax(1) if how == "max" else getattr(scores, how)(1)


def pool(scores: Tensor, kernel: int, how: str) -> Tensor:
    """Pool [G, n] scores over `kernel` neighbouring tokens, length kept (`avg`, `max` or `none`)."""
    if how == "none" or kernel == 1 or scores.shape[-1] == 0:
        return scores
    pooling = functional.avg_pool1d if how == "avg" else functional.max_pool1d
    return pooling(scores, kernel, stride=1, padding=kernel // 2)
