"""A prompt → `Prefill`: everything that any cell needs of it, from one pass through full attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphkv.attention import forward
from scorers import LayerView, Needs, Rope, Scorer

_MASS_ROWS = 256  # queries whose probabilities exist at once while the mass is summed
ROPE_AHEAD = 512  # answer positions that rotary embeddings are recorded for


@dataclass(frozen=True)
class Scoring:
    """What is known of a prompt's scores, by scorer and granularity.

    Attributes
    ----------
    scores
        A list of [heads, n - window] tensors, one a layer.
    seconds
        Wall time of scoring while the prompt was read, until a cell takes it into account.
    failures
        What a scorer raised then.
    """

    scores: dict[tuple[Scorer, str], list[Tensor]] = field(default_factory=dict, repr=False)
    seconds: dict[tuple[Scorer, str], float] = field(default_factory=dict)
    failures: dict[tuple[Scorer, str], Exception] = field(default_factory=dict)

    def __contains__(self, key: tuple[Scorer, str]) -> bool:
        return key in self.scores or key in self.failures


@dataclass(frozen=True)
class Prefill:
    """One prefilled prompt. Cells that are cut from it leave its tensors alone; they only add to `scoring`.

    Attributes
    ----------
    ids
        The prompt's token ids.
    layers
        One `LayerView` a layer: keys and values [G, n, d], and what else was asked for.
    logits
        [vocabulary] float32 logits after the last prompt token: they give token 0 of every cell.
    seconds
        Wall time of the pass, without that of scoring.
    scoring
        Scores that were computed already.
    """

    ids: tuple[int, ...]
    layers: list[LayerView]
    logits: Tensor
    seconds: float
    scoring: Scoring = field(default_factory=Scoring)

    @property
    def n(self) -> int:
        """Prompt length in tokens, and the true position of the first generated token."""
        return len(self.ids)

    @property
    def device(self) -> torch.device:
        """Where the last layer lies, and with it the logits."""
        return self.logits.device


class Recorder:
    """Attention state of a prefill: delegates to the chosen back end and keeps what cells need.

    Parameters
    ----------
    n
        Prompt length in tokens.
    n_layers
        Layers of the model.
    needs
        What is recorded beside keys and values.
    rope
        The model's rotary embeddings, handed on to the views.
    backend
        Name of a transformers attention function (`sdpa`, `flash_attention_2`, …).
    on_layer
        Called with each layer when all of the prompt was read; what it returns stays.
    """

    def __init__(
        self,
        n: int,
        n_layers: int,
        needs: Needs,
        rope: Rope | None,
        backend: str,
        on_layer: Callable[[LayerView], LayerView] | None = None,
    ) -> None:
        self.n = n
        self.window = min(needs.queries, n)
        self.wants_mass = needs.mass
        self.rope = rope
        self.on_layer = on_layer
        self.done = 0
        self.backend_name = backend
        self.backend = ALL_ATTENTION_FUNCTIONS[backend]
        self.views: list[LayerView | None] = [None] * n_layers
        self.keys: list[Tensor | None] = [None] * n_layers
        self.values: list[Tensor | None] = [None] * n_layers
        self.queries: list[Tensor | None] = [None] * n_layers
        self.mass: list[Tensor | None] = [None] * n_layers

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Causal attention of a chunk over itself and all earlier chunks; see `graphkv.attention.State`."""
        layer, q = module.layer_idx, query.shape[2]
        end = self.done + q
        if q == self.n:
            keys, values = key, value
        else:
            if self.keys[layer] is None:
                self.keys[layer] = key.new_empty(*key.shape[:2], self.n, key.shape[3])
                self.values[layer] = value.new_empty(*value.shape[:2], self.n, value.shape[3])
            self.keys[layer][:, :, self.done : end] = key
            self.values[layer][:, :, self.done : end] = value
            keys, values = self.keys[layer][:, :, :end], self.values[layer][:, :, :end]
        self._remember_queries(layer, query)
        if self.wants_mass:
            self._add_mass(layer, query[0], keys[0], scaling)
        if end == self.n:
            view = LayerView(
                keys[0],
                values[0],
                self.queries[layer][0],
                scaling,
                layer,
                len(self.views),
                rope=self.rope,
                mass=self.mass[layer],
            )
            self.queries[layer] = self.mass[layer] = None
            self.views[layer] = view if self.on_layer is None else self.on_layer(view)
        mask = None
        if self.done and self.backend_name == "sdpa":  # flash kernels align the causal mask to the end themselves
            rows = torch.arange(self.done, end, device=query.device)
            mask = rows[:, None] >= torch.arange(end, device=query.device)
            mask = mask[None, None]
        output, _ = self.backend(module, query, keys, values, mask, dropout=0.0, scaling=scaling)
        return output.transpose(1, 2)

    def _remember_queries(self, layer: int, query: Tensor) -> None:
        tail = query[:, :, -self.window :] if self.window else query[:, :, :0]
        if self.queries[layer] is not None:
            tail = torch.cat([self.queries[layer], tail], 2)[:, :, -self.window :] if self.window else tail
        self.queries[layer] = tail.clone()  # not a view: the other queries of the chunk are freed

    def _add_mass(self, layer: int, query: Tensor, keys: Tensor, scaling: float) -> None:
        """Add the attention that each key gets from a chunk's queries, a block of rows at a time."""
        if self.mass[layer] is None:
            self.mass[layer] = torch.zeros(query.shape[0], self.n, device=query.device)
        kv_heads, end, d = keys.shape
        transposed = keys.float().transpose(-1, -2)
        for begin in range(0, query.shape[1], _MASS_ROWS):
            rows = query[:, begin : begin + _MASS_ROWS].float()
            n_rows, seen = rows.shape[1], self.done + begin + rows.shape[1]
            logits = rows.reshape(kv_heads, -1, d) @ transposed[..., :seen] * scaling
            logits = logits.view(-1, n_rows, seen)
            future = torch.ones(n_rows, n_rows, dtype=torch.bool, device=rows.device).triu(1)
            logits[..., seen - n_rows :].masked_fill_(future, float("-inf"))
            self.mass[layer][:, :seen] += logits.softmax(-1).sum(1)


@torch.inference_mode()
def prefill(
    model: PreTrainedModel,
    ids: Sequence[int],
    needs: Needs,
    *,
    backend: str = "sdpa",
    chunk: int | None = None,
    early: Callable[[LayerView, Scoring], LayerView] | None = None,
) -> Prefill:
    """Read a prompt once.

    Parameters
    ----------
    model
        A causal language model loaded with graphkv attention.
    ids
        Prompt token ids, at least one.
    needs
        What the scorers to come must find, joined with `|`.
    backend
        Attention function of transformers that does the work.
    chunk
        Read so many tokens at a time: the same result in less memory. None reads all at once.
    early
        Scores a layer as soon as it is read and returns what stays of it.
    """
    if not ids:
        raise ValueError("the prompt has no tokens")
    start = time.perf_counter()
    device = model.get_input_embeddings().weight.device
    tokens = torch.tensor([list(ids)], device=device)
    rope = rotary_embeddings(model, len(ids) + ROPE_AHEAD)
    scoring = Scoring()
    on_layer = None if early is None else partial(early, done=scoring)
    recorder = Recorder(len(ids), model.config.num_hidden_layers, needs, rope, backend, on_layer)
    for begin in range(0, len(ids), chunk or len(ids)):
        part = tokens[:, begin : begin + (chunk or len(ids))]
        logits = forward(model, part, begin, recorder)
        recorder.done += part.shape[1]
    final = logits[0, -1].float()
    synchronize(final.device)
    seconds = time.perf_counter() - start - sum(scoring.seconds.values())
    return Prefill(tuple(ids), recorder.views, final, seconds, scoring)


def rotary_embeddings(model: PreTrainedModel, n: int) -> Rope | None:
    """Cosines and sines of positions 0 … n - 1; None if the model has none, or some that change with the length."""
    module = getattr(model.base_model, "rotary_emb", None)
    if module is None or getattr(module, "rope_type", None) in ("dynamic", "longrope"):
        return None
    weight = model.get_input_embeddings().weight
    positions = torch.arange(n, device=weight.device)[None]
    cos, sin = module(weight.new_zeros(1, dtype=torch.float32), positions)
    return Rope(cos[0], sin[0])


def synchronize(device: torch.device) -> None:
    """Wait for `device` to finish, so that a wall time measured next means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
