"""KeyDiff: keys that differ from the average key."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from scorers.base import LayerView, Scorer


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Score a token by how far its key points away from the mean direction: `s_j = 1 - cos(k_j, Σ_i k_i / ‖k_i‖)`.

    Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments" (2025, arXiv 2504.15364); reference code `NVIDIA/kvpress`, `KeyDiffPress`, which
    scores `-cos` and protects no token. The mean runs over the whole prompt, the window included.

    Divergences: `1 - cos` lies in [0, 2] and ranks as `-cos` does; the prompt is scored at once, not in the paper's
    blocks of 128 that are merged one by one into a full cache.

    Parameters
    ----------
    window
        0 as published: no recent token is protected.
    """

    window: int = 0

    def score(self, layer: LayerView) -> Tensor:
        """Distance of the past keys from the mean direction, [G, n - window]."""
        keys = functional.normalize(layer.keys.float(), dim=-1)  # a zero key stays zero: cosine 0
        anchor = functional.normalize(keys.mean(1), dim=-1)
        cosine = (keys[:, : layer.n - self.window] @ anchor.unsqueeze(-1)).squeeze(-1)
        return (1 - cosine).clamp_min(0)
