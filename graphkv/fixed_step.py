"""The decode step with shapes that stay the same, so that a GPU can replay it as one CUDA graph.

Batch-1 decoding of a 7B model launches about a thousand small kernels a token, and waits for each launch. Recorded once
and replayed, they cost one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphkv.attention import forward
from graphkv.cache import RaggedCache

STEPS = 128
"""Tokens that one recording serves: its attention reads so many columns from the beginning, masked."""
WORTH = 32
"""Recording costs some steps; with fewer tokens to come it does not pay."""

_REFUSED: WeakSet[PreTrainedModel] = WeakSet()  # models whose step could not be recorded


class FixedStep:
    """Logits of the next token of every row, from the tokens that rows wrote last.

    On CUDA the step is recorded and replayed; on other devices the same operations run one by one.

    Parameters
    ----------
    model
        A model loaded with graphkv attention, all of it on one device.
    cache
        Of rows without policies. It is advanced by each call.
    """

    def __init__(self, model: PreTrainedModel, cache: RaggedCache) -> None:
        self.model, self.cache = model, cache
        self.device = model.get_input_embeddings().weight.device
        self.record = self.device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.end = 0  # appended tokens until which the frame reaches
        self.ids: Tensor | None = None
        self.position: Tensor | None = None
        self.logits: Tensor | None = None

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """[rows, vocabulary] float32; overwritten by the next call."""
        cache = self.cache
        if cache.frame is None or cache.appended >= self.end:
            self._begin(tokens)
        frame = cache.frame
        self.ids.copy_(torch.tensor(tokens)[:, None])
        self.position.fill_(cache.position)
        frame.appended.fill_(cache.appended)
        if self.graph is None:
            logits = self._run()
        else:
            self.graph.replay()
            logits = self.logits
        cache.advance(1)
        return logits

    def _begin(self, tokens: Sequence[int]) -> None:
        """Fix shapes for the next `STEPS` tokens, and record what pays."""
        self.graph = self.logits = None
        self.end = self.cache.fix(STEPS).reach
        self.ids = torch.tensor(tokens, device=self.device)[:, None]
        self.position = torch.full_like(self.ids[:1], self.cache.position)
        if self.record and self.cache.capacity - self.cache.appended >= WORTH:
            self._record()

    def _record(self) -> None:
        """Record the step; where that fails, say why and go on without, for this model for good."""
        with torch.cuda.device(self.device):
            here, aside = torch.cuda.current_stream(), _stream(self.device)
            aside.wait_stream(here)
            try:
                # A first run outside of the recording lets libraries allocate what they need. It writes the column that
                # the recorded step writes again.
                with torch.cuda.stream(aside):
                    self._run()
                here.wait_stream(aside)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=aside):
                    logits = self._run()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                torch.cuda.set_stream(here)  # a recording that fails to begin or end leaves its own stream behind
                self.record = False
                _REFUSED.add(self.model)
                print(f"decoding goes on without a CUDA graph: {_cause(error)}", file=sys.stderr)
                return
        self.graph, self.logits = graph, logits

    def _run(self) -> Tensor:
        return forward(self.model, self.ids, self.position, self.cache)[:, -1].float()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps are recorded on: one a device, since libraries keep memory for each."""
    return torch.cuda.Stream(device)


def _cause(error: BaseException) -> str:
    """First line of what began it: the end of a failed recording only says that something failed before."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error) or type(error).__name__).splitlines()[0]


def possible(model: PreTrainedModel, cache: RaggedCache, steps: int) -> bool:
    """Whether recording the step pays: one CUDA device, shapes that can stay, and enough tokens to come."""
    devices = {parameter.device for parameter in model.parameters()}
    on_one_gpu = len(devices) == 1 and devices.pop().type == "cuda"
    return on_one_gpu and not cache.policies and steps >= WORTH and model not in _REFUSED
