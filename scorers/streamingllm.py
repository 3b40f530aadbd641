"""StreamingLLM: the first tokens and the last, whatever they say."""

from dataclasses import dataclass

import torch
from torch import Tensor

from scorers.base import LayerView, Scorer


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """Keep `sinks` first tokens, the attention sinks, and fill the budget with the most recent tokens.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (ICLR 2024, arXiv 2309.17453), section
    3.2; reference code `mit-han-lab/streaming-llm`.

    The recent window grows with the budget, so it is ranked, not protected: `s_j = j` for a position j, and `s_j = n`
    for a sink. The top of budget B is then the sinks and the last `B - sinks` tokens.

    Divergence: kept tokens stay at their true positions, as in KVCache-Factory. The reference caches keys before
    rotary embedding and gives them the positions 0, 1, … within the cache.

    Parameters
    ----------
    window
        0: everything is ranked. Any other value keeps the same tokens, while the budget covers it and the sinks.
    sinks
        First tokens that are kept before all others.
    """

    window: int = 0
    sinks: int = 4

    def score(self, layer: LayerView) -> Tensor:
        """Positions, sinks above all, [G, n - window]."""
        score = torch.arange(layer.n, dtype=torch.float32, device=layer.keys.device)
        score[: self.sinks] = layer.n
        return score[: layer.n - self.window].repeat(layer.keys.shape[0], 1)
