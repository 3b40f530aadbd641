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
    """

    window: int = 0

    def score(self, layer: LayerView) -> Tensor:
        """Inverse key norms of the past, [G, n - window]."""
        past = layer.keys[:, : layer.n - self.window].float()
        # The floor keeps an all-zero key (norm 0) finite; real norms are near 10.
        return past.norm(dim=-1).clamp_min(1e-12).reciprocal()
