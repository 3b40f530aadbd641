"""The contract of a scorer: a layer of a prefilled prompt in, one importance per past token out."""

from __future__ import annotations

import abc
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

ALL_QUERIES = sys.maxsize
"""`Needs.queries` of a scorer that wants the query of every prompt token."""


@dataclass(frozen=True)
class Needs:
    """What must have been recorded while the prompt was read, beside keys and values.

    Attributes
    ----------
    queries
        How many of the last prompt queries.
    mass
        Causal attention mass of every key over all queries.
    answer
        The queries that the full cache's answer used; only `oracle` may know them.
    """

    queries: int = 0
    mass: bool = False
    answer: bool = False

    def __or__(self, other: Needs) -> Needs:
        """What serves both."""
        return Needs(max(self.queries, other.queries), self.mass or other.mass, self.answer or other.answer)


@dataclass(frozen=True)
class Rope:
    """Rotary embeddings of a model, to turn its recorded keys and queries back or on.

    Pairs are (i, i + r/2) of the first r channels, as in Llama, Mistral and Qwen; channels from r on are not rotated.

    Attributes
    ----------
    cos, sin
        [positions, r] float32, scaled as the model scales them.
    """

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate [..., n, d] vectors, float32, to int64 `positions` [n]."""
        return self._turn(x, self.cos[positions], self.sin[positions])

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """The inverse of `rotate`: [..., n, d] vectors as they were before they were put at `positions` [n]."""
        cos, sin = self.cos[positions], self.sin[positions]
        scale = cos.square() + sin.square()  # not 1 where a model scales its attention through the embeddings
        return self._turn(x, cos / scale, -sin / scale)

    @staticmethod
    def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        r = cos.shape[-1]
        turned, rest = x[..., :r].float(), x[..., r:].float()
        first, second = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


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
    rope
        The model's rotary embeddings for prompt and answer positions.
    mass
        [H, n] float32: attention that each key got from all prompt queries, causal; None if nobody needs it.
    answer_queries
        [H, t, d]: rotated queries of the full cache's answer, at positions n, n + 1, …; None if nobody needs them.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    scaling: float
    layer: int
    n_layers: int
    rope: Rope | None = None
    mass: Tensor | None = None
    answer_queries: Tensor | None = None

    @property
    def n(self) -> int:
        """Prompt length in tokens."""
        return self.keys.shape[-2]

    def per_query_head(self) -> LayerView:
        """The same layer with keys and values repeated for every query head, as code bases without GQA store them."""
        group = self.queries.shape[0] // self.keys.shape[0]
        keys, values = (cached.repeat_interleave(group, 0) for cached in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

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
    sinks
        The first `sinks` tokens are kept always, within the budget.
    skip_layers
        Layers, counted from 0, that keep everything.
    """

    window: int = 32
    sinks: int = 0
    skip_layers: tuple[int, ...] = ()

    budget_rule: ClassVar[str] = "uniform"
    """How the budget is spread over layers (`graphkv.budgets.RULES`)."""
    evicts_in_decode: ClassVar[bool] = False
    """Whether the method is defined to go on evicting while the answer is written (`decode.evict_every`)."""
    keeps_all: ClassVar[bool] = False
    """True for the full cache only: nothing is evicted and no budget applies."""

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window must be 0 or more tokens, not {self.window}")
        if self.sinks < 0:
            raise ValueError(f"sinks must be 0 or more tokens, not {self.sinks}")
        if any(layer < 0 for layer in self.skip_layers):
            raise ValueError(f"skip_layers must be layers counted from 0, not {list(self.skip_layers)}")

    @property
    def needs(self) -> Needs:
        """What must have been recorded for `score`."""
        return Needs()

    @abc.abstractmethod
    def score(self, layer: LayerView) -> Tensor:
        """Importance of the past tokens, those before the window.

        Returns
        -------
        Tensor
            [G, n - window] float32, finite, non-negative, higher = keep. Multiplying a score by a factor in
            [0, 1] must mean "less important", which is why it may not be negative.
        """

    def decode_score(self, layer: LayerView) -> Tensor:
        """`score` while the answer is written: `layer` holds what the cache stores then, and the newest queries."""
        return self.score(layer)

    def raw_score(self, layer: LayerView) -> Tensor:
        """`score` before a scorer that pools has pooled: `score(layer)` is `finish(raw_score(layer))`."""
        return self.score(layer)

    def finish(self, raw: Tensor) -> Tensor:
        """The pooling that turns raw scores [..., n - window], or what became of them, into scores."""
        return raw
