"""Eviction while the answer is written: rows are cut back to their budget by the scores that their cache has then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphkv.groups import Group, Kept, entry_numbers
from graphkv.selection import keep
from scorers import LayerView, Scorer


@dataclass(frozen=True)
class Policy:
    """How a row is kept within its budget while its answer is written.

    Attributes
    ----------
    scorer
        Scores the row's cache as it scored the prompt; see `Scorer.decode_score`.
    budgets
        Tokens that each layer keeps, window included.
    """

    scorer: Scorer
    budgets: Sequence[int]


class Entry(NamedTuple):
    """One stored head of one row without padding: keys, values [L, d], mass [shared query heads, L] or None."""

    pair: tuple[int, int]
    keys: Tensor
    values: Tensor
    mass: Tensor | None


def with_mass(group: Group, view: LayerView, rows: Sequence[Kept], capacity: int) -> Group:
    """The group with the mass that its kept tokens had when the prompt was read."""
    if view.mass is None:
        return group
    by_head = view.mass.unflatten(0, (group.heads, -1))
    mass = view.mass.new_zeros(len(group.pairs), by_head.shape[1], group.start + capacity)
    for slot, ((row, head), length) in enumerate(zip(group.pairs, group.lengths, strict=True)):
        mass[slot, :, group.start - length : group.start] = by_head[head][:, rows[row][head]]
    return replace(group, mass=mass)


def add_mass(group: Group, queries: Tensor, columns: int, scaling: float) -> None:
    """Add the attention of one new token's [e, shared, d] queries to the mass of every column."""
    logits = queries.float() @ group.keys[:, :columns].float().mT * scaling
    if group.visible is not None:
        logits.masked_fill_(~group.visible[:, 0, :, :columns], float("-inf"))
    group.mass[..., :columns] += logits.softmax(-1)


def unpack(group: Group, since: int) -> list[Entry]:
    end = group.start + since
    return [
        Entry(
            pair,
            group.keys[slot, group.start - length : end],
            group.values[slot, group.start - length : end],
            None if group.mass is None else group.mass[slot, :, group.start - length : end],
        )
        for slot, (pair, length) in enumerate(zip(group.pairs, group.lengths, strict=True))
    ]


def evict(stored: Sequence[Entry], view: LayerView, recent: Tensor, policy: Policy, budget: int) -> list[Entry]:
    """The stored heads of one row, cut to `budget` tokens each."""
    mass = None if stored[0].mass is None else torch.cat([entry.mass for entry in stored])
    now = replace(
        view,
        keys=torch.stack([entry.keys for entry in stored]),
        values=torch.stack([entry.values for entry in stored]),
        queries=recent,
        mass=mass,
        answer_queries=None,
    )
    scores = policy.scorer.decode_score(now)
    kept = keep(scores, budget, now.n, policy.scorer.sinks)
    return [
        Entry(
            entry.pair,
            entry.keys[index],
            entry.values[index],
            None if entry.mass is None else entry.mass[:, index],
        )
        for entry, index in zip(stored, kept, strict=True)
    ]


def pack(entries: Sequence[Entry], heads: int, view: LayerView, capacity: int) -> Group:
    """A padded group of entries with room for `capacity` more tokens."""
    kv_heads, d, device = view.keys.shape[0], view.keys.shape[-1], view.keys.device
    pairs = [entry.pair for entry in entries]
    lengths = [entry.keys.shape[0] for entry in entries]
    start = max(lengths)
    keys, values = (view.keys.new_zeros(len(entries), start + capacity, d) for _ in range(2))
    first = entries[0].mass
    mass = None if first is None else first.new_zeros(len(entries), first.shape[0], start + capacity)
    for slot, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
        keys[slot, start - length : start] = entry.keys
        values[slot, start - length : start] = entry.values
        if mass is not None:
            mass[slot, :, start - length : start] = entry.mass
    padding = torch.tensor([start - length for length in lengths], device=device)
    visible = None
    if min(lengths) < start:
        visible = (torch.arange(start + capacity, device=device) >= padding[:, None])[:, None, None]
    numbers = entry_numbers(pairs, heads, kv_heads, device)
    return Group(pairs, heads, kv_heads, *numbers, keys, values, start, visible, False, lengths, mass)
