"""The contract of a scorer: a layer of a prefilled prompt in, one importance per past token out."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerView:
    """What a scorer may look at: one layer of one prefilled prompt.

    Shapes: `G` KV heads, `H` query heads (`H` a multiple of `G`), `n` prompt tokens, `d` head size,
    `w` recorded window queries. Dtypes are the model's; scorers compute in float32.

    Attributes
    ----------
    keys, values
        [G, n, d]; keys carry rotary embeddings at their true positions.
    queries
        [H, w, d]: rotated queries of the last `w` prompt tokens, `w` at least what the scorer `needs`.
    scaling
        The model's factor on query-key products (usually 1/√d).
    layer, n_layers
        Index of this layer, counted from the embedding, and how many there are.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    scaling: float
    layer: int
    n_layers: int

    @property
    def n(self) -> int:
        """Prompt length in tokens."""
        return self.keys.shape[-2]

    def window_attention(self, window: int) -> Tensor:
        """Attention probabilities of the last `window` queries over the prompt, causal among themselves.

        Returns
        -------
        Tensor
            [H, window, n] float32; each row sums to one.
        """
        group = self.queries.shape[0] // self.keys.shape[0]
        n, d = self.n, self.keys.shape[-1]
        queries = self.queries[:, -window:].float().reshape(self.keys.shape[0], group * window, d)
        logits = (queries @ self.keys.float().transpose(-1, -2)) * self.scaling
        logits = logits.view(-1, window, n)
        future = torch.ones(window, window, dtype=torch.bool, device=logits.device).triu(1)
        logits[:, :, n - window :].masked_fill_(future, float("-inf"))
        return logits.softmax(-1)


@dataclass(frozen=True)
class Scorer(abc.ABC):
    """Importance of each past token for one layer. Hyper-parameters are fields, so `repr` is the configuration.

    A subclass is one file `scorers/<name>.py` and one file `conf/scorer/<name>.yaml` with the same fields.

    Parameters
    ----------
    window
        The last `window` prompt tokens are kept always and are outside the ranking; 0 protects nothing.
    """

    window: int = 32

    budget_rule: ClassVar[str] = "uniform"
    """How the budget is spread over layers (`graphkv.budgets.RULES`)."""
    keeps_all: ClassVar[bool] = False
    """True for the full cache only: nothing is evicted and no budget applies."""

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window must be 0 or more tokens, not {self.window}")

    @property
    def needs_queries(self) -> int:
        """How many of the last prompt queries must have been recorded."""
        return 0

    @abc.abstractmethod
    def score(self, layer: LayerView) -> Tensor:
        """Importance of the past tokens, those before the window.

        Returns
        -------
        Tensor
            [G, n - window] float32, finite, non-negative, higher = keep. Multiplying a score by a factor in
            [0, 1] must mean "less important", which is why it may not be negative.
        """
