"""KNorm: keys with a small norm attract attention."""

from dataclasses import dataclass

from torch import Tensor

from scorers.base import LayerView, Scorer


@dataclass(frozen=True)
class KNorm(Scorer):
    """Score a token by the inverse L2 norm of its key: `s_j = 1 / ‖k_j‖`.

    Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (EMNLP 2024),
    reference code `alessiodevoto/l2compress`, which ranks by `-‖k‖` and protects no recent token.

    Divergence: the positive map 1/‖k‖ ranks as -‖k‖ does, and stays meaningful under GraphKV's factor (1 - e),
    which would *raise* a negative score. Norms are float32 whatever the cache's dtype: in bfloat16 most tie.

    Parameters
    ----------
    window
        0 as published: even the question can be evicted. Set 32 for the window that SnapKV protects.
    positive
        How -‖k‖ becomes positive. All maps rank alike; what is left after a factor (1 - e) differs.
        `inverse`: 1/‖k‖, a factor inflates the norm by 1/(1 - e); `max_minus`: the head's largest past norm minus
        ‖k‖; `softmax`: of -‖k‖ over the past; `rank`: the share of past tokens that are not better, in (0, 1].
    """

    window: int = 0
    positive: str = "inverse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positive not in ("inverse", "max_minus", "softmax", "rank"):
            raise ValueError(f"positive must be inverse, max_minus, softmax or rank, not {self.positive!r}")

    def score(self, layer: LayerView) -> Tensor:
        """Decreasing positive map of the past's key norms, [G, n - window]."""
        norms = layer.keys[:, : layer.n - self.window].float().norm(dim=-1)
        if self.positive == "inverse":
            # The floor keeps an all-zero key (norm 0) finite; real norms are near 10.
            return norms.clamp_min(1e-12).reciprocal()
        if self.positive == "max_minus":
            return norms.amax(-1, keepdim=True) - norms
        if self.positive == "softmax":
            return (-norms).softmax(-1)
        place = norms.argsort(dim=-1, stable=True).argsort(dim=-1)
        return 1 - place / norms.shape[-1]
