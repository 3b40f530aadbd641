"""How much memory there is, and what running out of it looks like."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from graphkv.engine import Cell
from graphkv.prefill import Prefill

_SHARE = 0.8  # of what is free goes to a batch; the rest is for activations and logits
_PADDING = 2.0  # a row is padded to less than twice its length, see `graphkv.groups`


def available(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`; on CUDA with what torch holds in reserve."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available


def row_bytes(prefill: Prefill, cell: Cell, new_tokens: int) -> int:
    """Most bytes of keys and values that a cell takes up as a row of a batch which writes `new_tokens`."""
    grown = 0
    for kept, view in zip(cell.kept, prefill.layers, strict=True):
        grown += len(kept) * new_tokens * view.keys.shape[-1] * view.keys.element_size() * 2
    return int(_PADDING * cell.bytes) + grown


def batches(sizes: Sequence[int], max_rows: int, room: int) -> list[list[int]]:
    """Numbers of rows, in order, in batches of at most `max_rows` whose sizes in bytes fit into `room`.

    A row that does not fit alone gets a batch of its own.
    """
    result: list[list[int]] = []
    used = 0
    for number, size in enumerate(sizes):
        if result and len(result[-1]) < max_rows and used + size <= _SHARE * room:
            result[-1].append(number)
            used += size
        else:
            result.append([number])
            used = size
    return result


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
