"""TOVA: what the last token attends to."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from scorers.base import LayerView, Needs, Scorer


@dataclass(frozen=True)
class TOVA(Scorer):
    """Attention of the last prompt token, averaged over all query heads: one ranking for the whole layer.

    `s_j = mean_h P_h[n - 1, j]`, the same for every KV head.

    Oren et al., "Transformers are Multi-State RNNs" (EMNLP 2024, arXiv 2401.06104), section 3; reference code
    `schwartz-lab-NLP/TOVA`.

    The reference goes on to evict a token at each decoding step by that step's attention: `decode.evict_every=1`.
    Divergences: by default the prompt is evicted once, after its prefill. Attention is float32.

    Parameters
    ----------
    window
        0 as published: even the newest token can be evicted. 1 forces it to stay, as kvpress does.
    """

    window: int = 0

    evicts_in_decode: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        """The last query."""
        return Needs(queries=1)

    def score(self, layer: LayerView) -> Tensor:
        """Attention of the last token, [G, n - window]; rows are equal."""
        attention = layer.window_attention(1)[:, 0].mean(0)
        return attention[: layer.n - self.window].repeat(layer.keys.shape[0], 1)
