"""A group: stored heads of some rows in one layer, padded to one tensor, so that one attention serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphkv.correction import Correction
from scorers import LayerView

Kept = Tensor | list[Tensor]
"""Kept positions of one layer: [heads, kept] int64, or a [kept] tensor a head where heads keep different numbers."""

# Entries at least this share of a group's longest join it: padding costs at most the inverse, and a full-cache row
# does not blow up the compressed rows beside it.
_GROUP_SHARE = 0.5


@dataclass(frozen=True)
class Group:
    """Entries of one layer that share a padded tensor.

    Attributes
    ----------
    pairs
        (row, stored head) of each entry, ascending.
    heads, kv_heads
        Stored heads of a row (KV heads, or query heads with a copy each), and the model's KV heads.
    entries
        [e] int64: row · heads + head, where an entry's queries are.
    sources
        [e] int64: row · kv_heads + KV head, where an entry's new keys come from.
    keys, values
        [e, columns, d].
    start
        Column of the first new token.
    visible
        [e, 1, 1, columns] bool, False on padding, or None if there is none.
    whole
        Whether every entry of the batch is here.
    lengths
        Columns before `start` that are not padding, of each entry.
    mass
        [e, shared query heads, columns] float32 attention received so far, if a policy needs it.
    bias
        [e, 1, 1, columns] in the model's dtype, added to the logits (-inf on padding), if a row has a correction.
    """

    pairs: list[tuple[int, int]]
    heads: int
    kv_heads: int
    entries: Tensor
    sources: Tensor
    keys: Tensor
    values: Tensor
    start: int
    visible: Tensor | None
    whole: bool
    lengths: list[int]
    mass: Tensor | None = None
    bias: Tensor | None = None


def similar(lengths: Sequence[int], kinds: Sequence[int] | None = None) -> list[list[int]]:
    """Partition entries into groups of one kind and similar length; each group ascends."""
    kinds = [0] * len(lengths) if kinds is None else kinds
    groups: list[list[int]] = []
    for entry in sorted(range(len(lengths)), key=lambda entry: (kinds[entry], -lengths[entry])):
        first = groups[-1][0] if groups else None
        if first is not None and kinds[entry] == kinds[first] and lengths[entry] >= _GROUP_SHARE * lengths[first]:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return [sorted(group) for group in groups]


def gather(view: LayerView, rows: Sequence[Kept], stored: Sequence[tuple[int, int]], capacity: int) -> Group:
    """Copy the kept keys and values of some (row, head) pairs into a padded group."""
    kv_heads, n, d = view.keys.shape
    device = view.keys.device
    heads = len(rows[stored[0][0]])
    lengths = [rows[row][head].shape[0] for row, head in stored]
    start = max(lengths)
    index = torch.zeros(len(stored), start, dtype=torch.int64, device=device)
    slot = 0
    while slot < len(stored):
        row, head = stored[slot]
        positions, length = rows[row], lengths[slot]
        if isinstance(positions, Tensor) and stored[slot : slot + heads] == [(row, h) for h in range(heads)]:
            index[slot : slot + heads, start - length :] = positions  # all heads of the row at once
            slot += heads
        else:
            index[slot, start - length :] = positions[head]
            slot += 1
    padding = torch.tensor([start - length for length in lengths], device=device)
    visible = None
    if min(lengths) < start:
        visible = (torch.arange(start + capacity, device=device) >= padding[:, None])[:, None, None]
    entries, sources = entry_numbers(stored, heads, kv_heads, device)
    flat = (index + (sources % kv_heads * n)[:, None]).flatten()

    def copy(cached: Tensor) -> Tensor:
        padded = cached.new_empty(len(stored), start + capacity, d)
        padded[:, :start] = cached.reshape(kv_heads * n, d)[flat].view(-1, start, d)
        return padded

    keys, values = copy(view.keys), copy(view.values)
    return Group(stored, heads, kv_heads, entries, sources, keys, values, start, visible, False, lengths)


def corrected(group: Group, layer: int, corrections: Sequence[Correction | None]) -> Group:
    """The group with the biases of its rows, and with their folded values written over the kept ones."""
    bias = group.keys.new_zeros(len(group.pairs), 1, 1, group.keys.shape[1])
    if group.visible is not None:
        bias.masked_fill_(~group.visible, float("-inf"))
    for slot, ((row, head), length) in enumerate(zip(group.pairs, group.lengths, strict=True)):
        found = corrections[row]
        if found is not None:
            bias[slot, 0, 0, group.start - length : group.start] = found.bias[layer][head].to(bias.dtype)
            if found.values is not None:
                group.values[slot, group.start - length : group.start] = found.values[layer][head]
    return replace(group, bias=bias)


def entry_numbers(
    pairs: Sequence[tuple[int, int]], heads: int, kv_heads: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`entries` and `sources` of a group."""
    row, head = torch.tensor(pairs, device=device).unbind(1)
    return row * heads + head, row * kv_heads + head * kv_heads // heads


def mask_of(group: Group, q: int, columns: int, shared: int) -> Tensor | None:
    """Which columns each of the `shared · q` queries of an entry may see, or what is added to them; None if all."""
    if group.bias is not None:
        bias = group.bias[..., :columns]
        if q > 1:
            future = torch.ones(q, columns, dtype=torch.bool, device=bias.device).triu(columns - q + 1)
            bias = bias.expand(-1, -1, q, -1).masked_fill(future, float("-inf")).repeat(1, 1, shared, 1)
        return bias
    if q == 1:
        return None if group.visible is None else group.visible[..., :columns]
    causal = torch.ones(q, columns, dtype=torch.bool, device=group.keys.device).tril(columns - q)
    causal = causal[None, None] if group.visible is None else causal & group.visible[..., :columns]
    return causal.repeat(1, 1, shared, 1)


def mask_up_to(group: Group, column: Tensor, columns: int) -> Tensor:
    """`mask_of` for one new token in the given `column` [1], where the number of `columns` does not depend on it."""
    written = torch.arange(columns, device=column.device) <= column
    if group.bias is not None:
        return group.bias[..., :columns].masked_fill(~written, float("-inf"))
    return written[None, None, None] if group.visible is None else written & group.visible[..., :columns]


def keep_rows(group: Group, rows: Sequence[int]) -> Group | None:
    renumbered = {row: new for new, row in enumerate(rows)}
    slots = [slot for slot, (row, _) in enumerate(group.pairs) if row in renumbered]
    if not slots:
        return None
    pairs = [(renumbered[group.pairs[slot][0]], group.pairs[slot][1]) for slot in slots]
    entries, sources = entry_numbers(pairs, group.heads, group.kv_heads, group.keys.device)
    if len(slots) == len(group.pairs):
        return replace(group, pairs=pairs, entries=entries, sources=sources)
    index = torch.tensor(slots, device=group.keys.device)
    return replace(
        group,
        pairs=pairs,
        entries=entries,
        sources=sources,
        keys=group.keys[index],
        values=group.values[index],
        visible=None if group.visible is None else group.visible[index],
        bias=None if group.bias is None else group.bias[index],
        lengths=[group.lengths[slot] for slot in slots],
        mass=None if group.mass is None else group.mass[index],
    )
