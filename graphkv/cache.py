"""The ragged cache: the kept keys and values of many cells of one prompt, decoded as rows of one batch.

Lengths differ by row, by layer and, with per-head budgets, by head. An *entry* is one stored head of one row. In each
layer, entries of similar length form a group that is padded on the left, so that the next token of each lands in
the same column, and attention runs once a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from graphkv.correction import Correction
from graphkv.decode_eviction import Entry, Policy, add_mass, evict, pack, unpack, with_mass
from graphkv.groups import Group, Kept, corrected, gather, keep_rows, mask_of, mask_up_to, similar
from graphkv.prefill import Prefill


@dataclass(frozen=True)
class Frame:
    """The columns that steps of one token read and write while shapes stay the same.

    Attributes
    ----------
    appended
        [1] int64 on the device: how many tokens were appended before the step, so where its token goes.
    reach
        Columns after `Group.start` that a step reads; those not written yet are masked.
    """

    appended: Tensor
    reach: int


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
        self.frame: Frame | None = None
        self.layers: list[list[Group]] = []
        for layer, view in enumerate(prefill.layers):
            rows = [row[layer] for row in kept]
            stored = [(row, head) for row, positions in enumerate(rows) for head in range(len(positions))]
            lengths = [rows[row][head].shape[0] for row, head in stored]
            kinds = [len(rows[row]) for row, _ in stored]
            groups = [
                gather(view, rows, [stored[entry] for entry in entries], capacity)
                for entries in similar(lengths, kinds)
            ]
            if corrections is not None and any(corrections):
                groups = [corrected(group, layer, corrections) for group in groups]
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
                self.layers[layer] = [with_mass(group, view, rows, capacity) for group in self.layers[layer]]

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
            # The query heads of an entry are queries of one attention problem: keys are never repeated.
            shared = heads // group.heads
            queries = query.reshape(rows * group.heads, shared * q, d)
            columns, mask = self._append(group, key[group.sources], value[group.sources], shared)
            result = scaled_dot_product_attention(
                (queries if group.whole else queries[group.entries])[:, None],
                group.keys[:, None, :columns],
                group.values[:, None, :columns],
                attn_mask=mask,
                scale=scaling,
            )[:, 0]
            if group.mass is not None:
                add_mass(group, queries[group.entries], columns, scaling)
            if group.whole:
                output = result.view(rows, heads, q, d)
            else:
                output.view(rows * group.heads, shared * q, d)[group.entries] = result
        if self._n_recent:
            layer = module.layer_idx
            self.recent[layer] = torch.cat([self.recent[layer], query], 2)[:, :, -self._n_recent :]
        return output

    def _append(self, group: Group, key: Tensor, value: Tensor, shared: int) -> tuple[int, Tensor | None]:
        """Write new keys and values [e, q, d]; how many columns their queries read, and the mask."""
        q = key.shape[1]
        if self.frame is not None:
            column = self.frame.appended + group.start
            group.keys.index_copy_(1, column, key)
            group.values.index_copy_(1, column, value)
            columns = group.start + self.frame.reach
            return columns, mask_up_to(group, column, columns)
        begin = group.start + self.appended - self.trimmed
        group.keys[:, begin : begin + q] = key
        group.values[:, begin : begin + q] = value
        return begin + q, mask_of(group, q, begin + q, shared)

    def fix(self, steps: int) -> Frame:
        """Give the next `steps` tokens the same shapes; they come one at a time, and no row may have a policy."""
        if self.policies:
            raise ValueError("shapes change when rows are evicted while they are written")
        reach = min(self.appended + steps, self.capacity)
        for group in (group for groups in self.layers for group in groups):
            for cached in (group.keys, group.values):  # what is masked is multiplied by 0 and must be finite
                cached[:, group.start + self.appended : group.start + reach] = 0
        device = self.layers[0][0].keys.device
        self.frame = Frame(torch.tensor([self.appended], device=device), reach)
        return self.frame

    def advance(self, q: int) -> None:
        """Count `q` tokens as appended, after every layer has seen them."""
        self.appended += q

    def trim(self) -> None:
        """Evict from every row with a policy what exceeds its budget, by the scores that its cache has now."""
        since = self.appended - self.trimmed
        for layer, view in enumerate(self.views):
            entries = [entry for group in self.layers[layer] for entry in unpack(group, since)]
            rows: dict[int, list[Entry]] = {}
            for entry in sorted(entries, key=lambda entry: entry.pair):
                rows.setdefault(entry.pair[0], []).append(entry)
            for row, stored in rows.items():
                policy = self.policies[row]
                if policy is not None and stored[0].keys.shape[0] > policy.budgets[layer]:
                    rows[row] = evict(stored, view, self.recent[layer][row], policy, policy.budgets[layer])
            entries = [entry for stored in rows.values() for entry in stored]
            lengths = [entry.keys.shape[0] for entry in entries]
            kinds = [len(rows[entry.pair[0]]) for entry in entries]
            groups = [
                pack([entries[i] for i in group], kinds[group[0]], view, self.capacity - self.appended)
                for group in similar(lengths, kinds)
            ]
            self.layers[layer] = [replace(group, whole=len(groups) == 1) for group in groups]
        self.trimmed = self.appended

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but `rows` (ascending), which are renumbered from 0; ends what `fix` began."""
        self.frame = None
        if self.policies:
            self.policies = [self.policies[row] for row in rows]
            self.recent = [recent[list(rows)] for recent in self.recent]
        for layer, groups in enumerate(self.layers):
            kept = [smaller for group in groups if (smaller := keep_rows(group, rows)) is not None]
            self.layers[layer] = [replace(group, whole=len(kept) == 1) for group in kept]
