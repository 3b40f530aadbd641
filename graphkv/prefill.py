"""A prompt → `Prefill`: everything that any cell needs of it, from one pass through full attention."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphkv.attention import forward
from scorers import LayerView, Scorer


@dataclass(frozen=True)
class Prefill:
    """One prefilled prompt, never changed by the cells that are cut from it.

    Attributes
    ----------
    ids
        The prompt's token ids.
    layers
        One `LayerView` a layer: keys and values [G, n, d], the last queries [H, w, d].
    logits
        [vocabulary] float32 logits after the last prompt token: they give token 0 of every cell.
    seconds
        Wall time of the pass.
    scores
        Scores already computed, by scorer: one list of [G, n - window] tensors, a layer each.
    """

    ids: tuple[int, ...]
    layers: list[LayerView]
    logits: Tensor
    seconds: float
    scores: dict[Scorer, list[Tensor]] = field(default_factory=dict, repr=False)

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
    window
        How many of the last queries are kept.
    backend
        Name of a transformers attention function (`sdpa`, `flash_attention_2`, …).
    """

    def __init__(self, n: int, n_layers: int, window: int, backend: str) -> None:
        self.n = n
        self.window = min(window, n)
        self.done = 0
        self.backend_name = backend
        self.backend = ALL_ATTENTION_FUNCTIONS[backend]
        self.views: list[LayerView | None] = [None] * n_layers
        self.keys: list[Tensor | None] = [None] * n_layers
        self.values: list[Tensor | None] = [None] * n_layers
        self.queries: list[Tensor | None] = [None] * n_layers

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
        if end == self.n:
            self.views[layer] = LayerView(keys[0], values[0], self.queries[layer][0], scaling, layer, len(self.views))
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


@torch.inference_mode()
def prefill(
    model: PreTrainedModel,
    ids: Sequence[int],
    *,
    window: int,
    backend: str = "sdpa",
    chunk: int | None = None,
) -> Prefill:
    """Read a prompt once.

    Parameters
    ----------
    model
        A causal language model loaded with graphkv attention.
    ids
        Prompt token ids, at least one.
    window
        How many of the last queries are recorded: the largest `needs.queries` of the scorers to come.
    backend
        Attention function of transformers that does the work.
    chunk
        Read so many tokens at a time: the same result in less memory. None reads all at once.
    """
    if not ids:
        raise ValueError("the prompt has no tokens")
    start = time.perf_counter()
    device = model.get_input_embeddings().weight.device
    tokens = torch.tensor([list(ids)], device=device)
    recorder = Recorder(len(ids), model.config.num_hidden_layers, window, backend)
    for begin in range(0, len(ids), chunk or len(ids)):
        part = tokens[:, begin : begin + (chunk or len(ids))]
        logits = forward(model, part, begin, recorder)
        recorder.done += part.shape[1]
    final = logits[0, -1].float()
    synchronize(final.device)
    return Prefill(tuple(ids), recorder.views, final, time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    """Wait for `device` to finish, so that a wall time measured next means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
