"""The ragged cache: the kept keys and values of many cells of one prompt, decoded as rows of one batch.

Lengths differ by row, by layer and, with per-head budgets, by head. An *entry* is one stored head of one row. In each
layer, entries of similar length form a group that is padded on the left, so that the next token of each lands in
the same column, and attention runs once a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from graphkv.correction import Correction
from graphkv.prefill import Prefill
from graphkv.selection import keep
from scorers import LayerView, Scorer

Kept = Tensor | list[Tensor]
"""Kept positions of one layer: [heads, kept] int64, or a [kept] tensor a head where heads keep different numbers."""

# Entries at least this share of a group's longest join it: padding costs at most the inverse, and a full-cache row
# does not blow up the compressed rows beside it.
_GROUP_SHARE = 0.5


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


@dataclass(frozen=True)
class _Group:
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


class RaggedCache:
    """Keys and values of several cells, with room for the tokens to come; an attention `State`.

    Parameters
    ----------
    prefill
        The prompt; it is read, never changed.
    kept
        One entry a row: what it keeps of each layer.
    capacity
        How many tokens will be appended at most.
    policies
        For each row how `trim` evicts, or None for a row that only grows; None for no row.
    corrections
        For each row what is added to its attention, or None; None for no row. Not together with policies.
    """

    def __init__(
        self,
        prefill: Prefill,
        kept: Sequence[Sequence[Kept]],
        capacity: int,
        policies: Sequence[Policy | None] | None = None,
        corrections: Sequence[Correction | None] | None = None,
    ) -> None:
        self.prompt_length, self.capacity = prefill.n, capacity
        self.appended = self.trimmed = 0  # tokens so far, and how many of them there were at the last trim
        self.policies = list(policies or ())
        self.layers: list[list[_Group]] = []
        for layer, view in enumerate(prefill.layers):
            rows = [row[layer] for row in kept]
            stored = [(row, head) for row, positions in enumerate(rows) for head in range(len(positions))]
            lengths = [rows[row][head].shape[0] for row, head in stored]
            kinds = [len(rows[row]) for row, _ in stored]
            groups = [
                _gather(view, rows, [stored[entry] for entry in entries], capacity)
                for entries in _similar(lengths, kinds)
            ]
            if corrections is not None and any(corrections):
                groups = [_corrected(group, layer, corrections) for group in groups]
            self.layers.append([replace(group, whole=len(groups) == 1) for group in groups])
        needs = [policy.scorer.needs for policy in self.policies if policy is not None]
        self._n_recent = max((need.queries for need in needs), default=0)
        self.views = prefill.layers if needs else []
        self.recent = [
            view.queries[None, :, view.queries.shape[1] - min(self._n_recent, view.n) :].repeat(len(kept), 1, 1, 1)
            for view in self.views
        ]
        if any(need.mass for need in needs):
            for layer, view in enumerate(prefill.layers):
                rows = [row[layer] for row in kept]
                self.layers[layer] = [_with_mass(group, view, rows, capacity) for group in self.layers[layer]]

    @property
    def position(self) -> int:
        """True position of the next token, whatever was evicted."""
        return self.prompt_length + self.appended

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of `q` new tokens of every row over that row's cache and, causally, over each other."""
        rows, heads, q, d = query.shape
        key, value = (new.reshape(rows * key.shape[1], q, d) for new in (key, value))
        output = torch.empty(rows, heads, q, d, dtype=query.dtype, device=query.device)
        for group in self.layers[module.layer_idx]:
            begin = group.start + self.appended - self.trimmed
            group.keys[:, begin : begin + q] = key[group.sources]
            group.values[:, begin : begin + q] = value[group.sources]
            # The query heads of an entry are queries of one attention problem: keys are never repeated.
            shared = heads // group.heads
            queries = query.reshape(rows * group.heads, shared * q, d)
            result = scaled_dot_product_attention(
                (queries if group.whole else queries[group.entries])[:, None],
                group.keys[:, None, : begin + q],
                group.values[:, None, : begin + q],
                attn_mask=_mask(group, q, begin + q, shared),
                scale=scaling,
            )[:, 0]
            if group.mass is not None:
                _add_mass(group, queries[group.entries], begin + q, scaling)
            if group.whole:
                output = result.view(rows, heads, q, d)
            else:
                output.view(rows * group.heads, shared * q, d)[group.entries] = result
        if self._n_recent:
            layer = module.layer_idx
            self.recent[layer] = torch.cat([self.recent[layer], query], 2)[:, :, -self._n_recent :]
        return output

    def advance(self, q: int) -> None:
        """Count `q` tokens as appended, after every layer has seen them."""
        self.appended += q

    def trim(self) -> None:
        """Evict from every row with a policy what exceeds its budget, by the scores that its cache has now."""
        since = self.appended - self.trimmed
        for layer, view in enumerate(self.views):
            entries = [entry for group in self.layers[layer] for entry in _unpack(group, since)]
            rows: dict[int, list[_Entry]] = {}
            for entry in sorted(entries, key=lambda entry: entry.pair):
                rows.setdefault(entry.pair[0], []).append(entry)
            for row, stored in rows.items():
                policy = self.policies[row]
                if policy is not None and stored[0].keys.shape[0] > policy.budgets[layer]:
                    rows[row] = _evict(stored, view, self.recent[layer][row], policy, policy.budgets[layer])
            entries = [entry for stored in rows.values() for entry in stored]
            lengths = [entry.keys.shape[0] for entry in entries]
            kinds = [len(rows[entry.pair[0]]) for entry in entries]
            groups = [
                _pack([entries[i] for i in group], kinds[group[0]], view, self.capacity - self.appended)
                for group in _similar(lengths, kinds)
            ]
            self.layers[layer] = [replace(group, whole=len(groups) == 1) for group in groups]
        self.trimmed = self.appended

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but `rows` (ascending), which are renumbered from 0."""
        if self.policies:
            self.policies = [self.policies[row] for row in rows]
            self.recent = [recent[list(rows)] for recent in self.recent]
        for layer, groups in enumerate(self.layers):
            kept = [smaller for group in groups if (smaller := _keep_rows(group, rows)) is not None]
            self.layers[layer] = [replace(group, whole=len(kept) == 1) for group in kept]


def _similar(lengths: Sequence[int], kinds: Sequence[int] | None = None) -> list[list[int]]:
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


def _gather(view: LayerView, rows: Sequence[Kept], stored: Sequence[tuple[int, int]], capacity: int) -> _Group:
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
    entries, sources = _numbers(stored, heads, kv_heads, device)
    flat = (index + (sources % kv_heads * n)[:, None]).flatten()

    def copy(cached: Tensor) -> Tensor:
        padded = cached.new_empty(len(stored), start + capacity, d)
        padded[:, :start] = cached.reshape(kv_heads * n, d)[flat].view(-1, start, d)
        return padded

    keys, values = copy(view.keys), copy(view.values)
    return _Group(stored, heads, kv_heads, entries, sources, keys, values, start, visible, False, lengths)


def _corrected(group: _Group, layer: int, corrections: Sequence[Correction | None]) -> _Group:
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


def _numbers(
    pairs: Sequence[tuple[int, int]], heads: int, kv_heads: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`entries` and `sources` of a group."""
    row, head = torch.tensor(pairs, device=device).unbind(1)
    return row * heads + head, row * kv_heads + head * kv_heads // heads


def _mask(group: _Group, q: int, columns: int, shared: int) -> Tensor | None:
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


def _keep_rows(group: _Group, rows: Sequence[int]) -> _Group | None:
    renumbered = {row: new for new, row in enumerate(rows)}
    slots = [slot for slot, (row, _) in enumerate(group.pairs) if row in renumbered]
    if not slots:
        return None
    pairs = [(renumbered[group.pairs[slot][0]], group.pairs[slot][1]) for slot in slots]
    entries, sources = _numbers(pairs, group.heads, group.kv_heads, group.keys.device)
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


# Eviction while decoding ---------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One stored head of one row without padding: keys, values [L, d], mass [shared query heads, L] or None."""

    pair: tuple[int, int]
    keys: Tensor
    values: Tensor
    mass: Tensor | None


def _with_mass(group: _Group, view: LayerView, rows: Sequence[Kept], capacity: int) -> _Group:
    """The group with the mass that its kept tokens had when the prompt was read."""
    if view.mass is None:
        return group
    by_head = view.mass.unflatten(0, (group.heads, -1))
    mass = view.mass.new_zeros(len(group.pairs), by_head.shape[1], group.start + capacity)
    for slot, ((row, head), length) in enumerate(zip(group.pairs, group.lengths, strict=True)):
        mass[slot, :, group.start - length : group.start] = by_head[head][:, rows[row][head]]
    return replace(group, mass=mass)


def _add_mass(group: _Group, queries: Tensor, columns: int, scaling: float) -> None:
    """Add the attention of one new token's [e, shared, d] queries to the mass of every column."""
    logits = queries.float() @ group.keys[:, :columns].float().mT * scaling
    if group.visible is not None:
        logits.masked_fill_(~group.visible[:, 0, :, :columns], float("-inf"))
    group.mass[..., :columns] += logits.softmax(-1)


def _unpack(group: _Group, since: int) -> list[_Entry]:
    end = group.start + since
    return [
        _Entry(
            pair,
            group.keys[slot, group.start - length : end],
            group.values[slot, group.start - length : end],
            None if group.mass is None else group.mass[slot, :, group.start - length : end],
        )
        for slot, (pair, length) in enumerate(zip(group.pairs, group.lengths, strict=True))
    ]


def _evict(stored: Sequence[_Entry], view: LayerView, recent: Tensor, policy: Policy, budget: int) -> list[_Entry]:
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
        _Entry(
            entry.pair,
            entry.keys[index],
            entry.values[index],
            None if entry.mass is None else entry.mass[:, index],
        )
        for entry, index in zip(stored, kept, strict=True)
    ]


def _pack(entries: Sequence[_Entry], heads: int, view: LayerView, capacity: int) -> _Group:
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
    numbers = _numbers(pairs, heads, kv_heads, device)
    return _Group(pairs, heads, kv_heads, *numbers, keys, values, start, visible, False, lengths, mass)
