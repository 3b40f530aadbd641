"""The decode step with shapes that stay the same, so that a GPU can replay it as one CUDA graph.

Batch-1 decoding of a 7B model launches about a thousand small kernels a token, and waits for each launch. Recorded once
and replayed, they cost one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphkv.attention import forward
from graphkv.cache import RaggedCache

STEPS = 128
"""Tokens that one recording serves: its attention reads so many columns from the beginning, masked."""
WORTH = 32
"""Recording costs some steps; with fewer tokens to come it does not pay."""


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
        self.pool = torch.cuda.graph_pool_handle() if self.record else None
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
            try:
                self._record()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.record, self.graph = False, None
                print(f"decoding goes on without a CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr)

    def _record(self) -> None:
        # A first run outside of the recording lets libraries allocate what they need. It writes the column that the
        # recorded step writes again.
        here, aside = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            self._run()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.logits = self._run()
        self.graph = graph

    def _run(self) -> Tensor:
        return forward(self.model, self.ids, self.position, self.cache)[:, -1].float()


def possible(model: PreTrainedModel, cache: RaggedCache, steps: int) -> bool:
    """Whether recording the step pays: one CUDA device, shapes that can stay, and enough tokens to come."""
    devices = {parameter.device for parameter in model.parameters()}
    return len(devices) == 1 and devices.pop().type == "cuda" and not cache.policies and steps >= WORTH
