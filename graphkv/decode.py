"""Greedy decoding of many cells of one prompt at once, and of one cell alone as the reference."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graphkv import fixed_step
from graphkv.attention import forward
from graphkv.cache import RaggedCache
from graphkv.correction import Correction
from graphkv.decode_eviction import Policy
from graphkv.fixed_step import FixedStep
from graphkv.groups import Kept
from graphkv.prefill import Prefill, synchronize

_SHRINK = 0.5  # with a fixed step, rows that are done leave when no more than this share goes on


@dataclass
class Generation:
    """What one cell wrote.

    Attributes
    ----------
    ids
        Generated token ids, the stop token included if one was reached.
    finish
        `stop` at a stop token, `length` at the limit.
    seconds
        The cell's share of the wall time: each step is split evenly over the rows that took part.
    batch
        How many rows the batch had when decoding began.
    """

    ids: list[int] = field(default_factory=list)
    finish: str = "length"
    seconds: float = 0.0
    batch: int = 1


@torch.inference_mode()
def greedy(
    model: PreTrainedModel,
    prefill: Prefill,
    kept: Sequence[Sequence[Kept]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    min_new_tokens: int = 0,
    policies: Sequence[Policy | None] | None = None,
    evict_every: int | None = None,
    corrections: Sequence[Correction | None] | None = None,
    cuda_graph: bool = True,
) -> list[Generation]:
    """Decode the rows of a batch greedily; a row ends at its stop token, and leaves the batch.

    Token 0 comes from the prefill's logits, so it is the full cache's for every cell. In half precision the
    tokens may depend on the batch's size and on `cuda_graph`; in float32 they are those of `solo` decoding.

    Parameters
    ----------
    model
        The model that made `prefill`.
    prefill
        The prompt, unchanged by decoding.
    kept
        One entry a row; see `RaggedCache`.
    max_new_tokens
        Limit for every row.
    stop_ids
        Tokens that end a row.
    min_new_tokens
        Stop tokens cannot be chosen before so many tokens were written.
    policies, evict_every
        After every so many appended tokens, rows with a policy are cut back to their budget; None never.
    corrections
        What is added to the attention of each row, or None.
    cuda_graph
        Replay the step as a CUDA graph where that is possible. Rows then leave the batch when half of them are done:
        each change of shape is recorded anew.

    Returns
    -------
    list of Generation
        In the order of `kept`.
    """
    results = [Generation(batch=len(kept)) for _ in kept]
    if max_new_tokens < 1 or not kept:
        return results
    begin = time.perf_counter()
    stop = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=prefill.device)
    cache = RaggedCache(prefill, kept, max_new_tokens - 1, policies if evict_every else None, corrections)
    fixed = cuda_graph and fixed_step.possible(model, cache, cache.capacity)
    step = FixedStep(model, cache) if fixed else partial(_step, model, cache)
    rows = list(range(len(kept)))  # of the batch, as numbers of results
    active = rows
    logits = prefill.logits.expand(len(kept), -1)
    for written in range(1, max_new_tokens + 1):
        if written <= min_new_tokens:
            logits = logits.index_fill(-1, stop, float("-inf"))
        tokens = logits.argmax(-1).tolist()  # the step's one host sync
        now = time.perf_counter()
        for row, token in zip(rows, tokens, strict=True):
            result = results[row]
            if result.finish == "stop":
                continue
            result.ids.append(token)
            result.seconds += (now - begin) / len(active)
            if token in stop_ids:
                result.finish = "stop"
        begin = now
        active = [row for row in active if results[row].finish != "stop"]
        if written == max_new_tokens or not active:
            break
        if len(active) <= len(rows) * (_SHRINK if fixed else 1) and len(active) < len(rows):
            staying = [slot for slot, row in enumerate(rows) if results[row].finish != "stop"]
            cache.keep_rows(staying)
            rows, tokens = active, [tokens[slot] for slot in staying]
        logits = step(tokens)
        if evict_every and cache.appended % evict_every == 0:
            cache.trim()
    synchronize(prefill.device)
    return results


def _step(model: PreTrainedModel, cache: RaggedCache, tokens: Sequence[int]) -> Tensor:
    """Logits [rows, vocabulary] float32 of the next token of every row, from the tokens that rows wrote last."""
    ids = torch.tensor(tokens, device=model.get_input_embeddings().weight.device)[:, None]
    logits = forward(model, ids, cache.position, cache)[:, -1].float()
    cache.advance(1)
    return logits


def solo(
    model: PreTrainedModel,
    prefill: Prefill,
    kept: Sequence[Sequence[Kept]],
    *,
    policies: Sequence[Policy | None] | None = None,
    corrections: Sequence[Correction | None] | None = None,
    **options,
) -> list[Generation]:
    """`greedy`, one row after the other: the reference that batching is measured against."""
    nothing = [None] * len(kept)
    rows = zip(kept, policies or nothing, corrections or nothing, strict=True)
    return [
        greedy(model, prefill, [row], policies=[policy], corrections=[correction], **options)[0]
        for row, policy, correction in rows
    ]


class _QueryTap:
    """Attention state that remembers the queries of its one row and leaves the rest to a cache."""

    def __init__(self, cache: RaggedCache) -> None:
        self.cache = cache
        self.queries: list[Tensor] = []

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.queries.append(query[0])
        return self.cache.attend(module, query, key, value, scaling)


@torch.inference_mode()
def read_on(
    model: PreTrainedModel, prefill: Prefill, kept: Sequence[Kept], ids: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """Read `ids` after the prompt, over one row's cache.

    Returns
    -------
    tuple
        Logits [len(ids), vocabulary] in the model's dtype, and the rotated queries [H, len(ids), d] of every layer.
    """
    tap = _QueryTap(RaggedCache(prefill, [kept], capacity=len(ids)))
    logits = forward(model, torch.tensor([list(ids)], device=prefill.device), prefill.n, tap, last=0)
    return logits[0], tap.queries


def teacher_force(
    model: PreTrainedModel,
    prefill: Prefill,
    kept: Sequence[Sequence[Kept]],
    ids: Sequence[int],
    corrections: Sequence[Correction | None] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Logits of every row over one given continuation.

    Returns
    -------
    Tensor
        [rows, len(ids), vocabulary] in the model's dtype: entry `t` is the prediction after `ids[: t + 1]`.
    """
    return torch.cat(list(teacher_forced(model, prefill, kept, ids, corrections, chunk)), 1)


@torch.inference_mode()
def teacher_forced(
    model: PreTrainedModel,
    prefill: Prefill,
    kept: Sequence[Sequence[Kept]],
    ids: Sequence[int],
    corrections: Sequence[Correction | None] | None = None,
    chunk: int | None = None,
) -> Iterator[Tensor]:
    """`teacher_force`, `chunk` tokens of all rows in a forward (None: all tokens in one): [rows, chunk, vocabulary]."""
    cache = RaggedCache(prefill, kept, capacity=len(ids), corrections=corrections)
    tokens = torch.tensor(list(ids), device=prefill.device).expand(len(kept), -1)
    for part in tokens.split(chunk or len(ids), dim=1):
        yield forward(model, part, cache.position, cache, last=0)
        cache.advance(part.shape[1])
