"""The ragged cache: the kept keys and values of many cells of one prompt, decoded as rows of one batch.

Lengths differ by row and by layer. In each layer rows of similar length form a group that is padded on the left,
so that the next token of every row lands in the same column, and attention runs once a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from graphkv.prefill import Prefill

# Rows at least this share of a group's longest row join it: padding costs at most the inverse, and a full-cache row
# does not blow up the compressed rows beside it.
_GROUP_SHARE = 0.5


@dataclass
class _Group:
    """Rows of one layer that share a padded tensor.

    rows: [r] row numbers in the batch; keys, values: [r, heads, columns, d]; start: the column of the first new token;
    visible: [r, 1, 1, columns] bool, False on padding, or None if no row is padded.
    """

    rows: Tensor
    keys: Tensor
    values: Tensor
    start: int
    visible: Tensor | None

    def select(self, rows: Tensor, index: Tensor) -> _Group:
        """The group's rows `index`, renumbered to `rows`."""
        visible = None if self.visible is None else self.visible[index]
        return _Group(rows, self.keys[index], self.values[index], self.start, visible)


class RaggedCache:
    """Keys and values of several cells, with room for the tokens to come; an attention `State`.

    Parameters
    ----------
    prefill
        The prompt; it is read, never changed.
    kept
        One entry a row: its kept positions as a list of [heads, kept] int64 tensors, a layer each.
    capacity
        How many tokens will be appended at most.
    """

    def __init__(self, prefill: Prefill, kept: Sequence[Sequence[Tensor]], capacity: int) -> None:
        self.prompt_length = prefill.n
        self.appended = 0
        self.n_rows = len(kept)
        self.layers = [
            [
                self._gather(view, [row[layer] for row in kept], rows, capacity)
                for rows in _similar([row[layer].shape[-1] for row in kept])
            ]
            for layer, view in enumerate(prefill.layers)
        ]

    @staticmethod
    def _gather(view, kept: list[Tensor], rows: list[int], capacity: int) -> _Group:
        heads, n, d = view.keys.shape
        device = view.keys.device
        lengths = [kept[row].shape[-1] for row in rows]
        start = max(lengths)
        shape = (len(rows), heads, start + capacity, d)
        # Zeros, not garbage: padding is masked, but 0 · NaN would still be NaN.
        keys, values = view.keys.new_zeros(shape), view.values.new_zeros(shape)
        for slot, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length == n:  # everything is kept: a plain copy
                keys[slot, :, start - length : start] = view.keys
                values[slot, :, start - length : start] = view.values
                continue
            index = kept[row].to(device)[..., None].expand(-1, -1, d)
            torch.gather(view.keys, 1, index, out=keys[slot, :, start - length : start])
            torch.gather(view.values, 1, index, out=values[slot, :, start - length : start])
        visible = None
        if min(lengths) < start:
            padding = torch.tensor([start - length for length in lengths], device=device)
            visible = torch.arange(start + capacity, device=device) >= padding[:, None]
            visible = visible[:, None, None]
        return _Group(torch.tensor(rows, device=device), keys, values, start, visible)

    @property
    def position(self) -> int:
        """True position of the next token, whatever was evicted."""
        return self.prompt_length + self.appended

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of `q` new tokens of every row over that row's cache and, causally, over each other."""
        rows, heads, q, d = query.shape
        begin = self.appended
        output = torch.empty_like(query)
        for group in self.layers[module.layer_idx]:
            everyone = len(group.rows) == rows
            new = slice(group.start + begin, group.start + begin + q)
            group.keys[:, :, new] = key if everyone else key[group.rows]
            group.values[:, :, new] = value if everyone else value[group.rows]
            stored = group.keys.shape[1]
            # The query heads of a KV head are queries of one attention problem: keys are never repeated.
            queries = query if everyone else query[group.rows]
            queries = queries.reshape(-1, stored, heads // stored * q, d)
            result = scaled_dot_product_attention(
                queries,
                group.keys[:, :, : new.stop],
                group.values[:, :, : new.stop],
                attn_mask=self._mask(group, q, new.stop, heads // stored),
                scale=scaling,
            ).view(-1, heads, q, d)
            if everyone:
                return result
            output[group.rows] = result
        return output

    @staticmethod
    def _mask(group: _Group, q: int, columns: int, repeat: int) -> Tensor | None:
        if q == 1:
            return None if group.visible is None else group.visible[..., :columns]
        causal = torch.ones(q, columns, dtype=torch.bool, device=group.keys.device).tril(columns - q)
        if group.visible is not None:
            causal = causal & group.visible[..., :columns]
        return causal.repeat(*[1] * (causal.dim() - 2), repeat, 1)

    def advance(self, q: int) -> None:
        """Count `q` tokens as appended, after every layer has seen them."""
        self.appended += q

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but `rows` (ascending), which are renumbered from 0."""
        renumbered = {row: new for new, row in enumerate(rows)}
        for layer, groups in enumerate(self.layers):
            kept = []
            for group in groups:
                numbers = group.rows.tolist()
                index = [slot for slot, row in enumerate(numbers) if row in renumbered]
                if len(index) == len(numbers):
                    group.rows = torch.tensor([renumbered[row] for row in numbers], device=group.rows.device)
                    kept.append(group)
                elif index:
                    new = torch.tensor([renumbered[numbers[slot]] for slot in index], device=group.rows.device)
                    kept.append(group.select(new, torch.tensor(index, device=group.rows.device)))
            self.layers[layer] = kept
        self.n_rows = len(rows)


def _similar(lengths: list[int]) -> list[list[int]]:
    """Partition rows into groups of similar length, longest group first, row order kept inside a group."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if groups and lengths[row] >= _GROUP_SHARE * lengths[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(group) for group in groups]
