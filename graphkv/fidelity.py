"""How far cells are from the full cache over one continuation: the measure of `task=fidelity`.

Every cell is teacher-forced over what the full cache wrote, all of them in one batch, and its next-token distributions
are compared with the full cache's. Token 0 is left out: it comes from the prefill and is the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphkv import decode
from graphkv.engine import Cell
from graphkv.measures import Context
from graphkv.prefill import Prefill, synchronize
from scorers import LayerView

_LOGITS = 1 << 28  # numbers of logits that exist at once
_ROWS = 16  # queries a head whose attention exists at once


@dataclass(frozen=True)
class Reference:
    """What the full cache does over the continuation.

    Attributes
    ----------
    ids
        The continuation, as long as the distributions.
    log_probs
        [tokens, vocabulary] float32: entry `t` is the distribution after `ids[: t + 1]`.
    queries
        One [H, tokens, d] tensor a layer: the rotated queries of the continuation.
    mass
        One [H, n] float32 tensor a layer: mean attention of these queries to each prompt token, among prompt tokens.
    """

    ids: tuple[int, ...]
    log_probs: Tensor
    queries: list[Tensor]
    mass: list[Tensor]


def fidelity(context: Context, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Compare cells with the full cache; one part of a record a cell.

    `scores` holds `kl` (mean over tokens of KL(full ‖ cell), nats), `agreement` (share of tokens with the same most
    probable next token), `first_disagreement` (how many tokens agree before one does not), `kept_mass` (share of the
    continuation's attention to the prompt that falls on kept tokens, mean over layers and heads), `key_cosine` (mean
    cosine of two different kept keys of a head) and, if asked for, `output_error` (mean of ‖o - o_S‖ / ‖o‖ over
    layers, heads and queries; attention to the prompt alone). `kl_per_token` and `output_error_per_layer` go beside.
    """
    begin = time.perf_counter()
    if "reference" not in context.memo:
        context.memo["reference"] = _reference(context)
    reference: Reference = context.memo["reference"]
    prefill = context.prefill
    divergence, same = _compare(context, cells, reference)
    text = context.task.text(reference.ids)
    synchronize(prefill.device)
    seconds = (time.perf_counter() - begin) / len(cells)
    parts = []
    for row, cell in enumerate(cells):
        agrees = same[row]
        scores = {
            "kl": divergence[row].mean().item(),
            "agreement": agrees.float().mean().item(),
            "first_disagreement": int(agrees.long().cumprod(0).sum()),
            "kept_mass": kept_mass(cell, reference.mass),
            "key_cosine": key_cosine(cell, prefill),
        }
        part = {
            "text": text,
            "empty": not text.strip(),
            "ids": list(reference.ids),
            "finish": "given",
            "kl_per_token": [round(value, 6) for value in divergence[row].tolist()],
            "seconds": {"decode": seconds},
            "decode_batch": len(cells),
        }
        if context.task.output_error:
            errors = output_error(cell, prefill, reference.queries)
            scores["output_error"] = sum(errors) / len(errors)
            part["output_error_per_layer"] = errors
        parts.append({**part, "scores": scores})
    return parts


def _reference(context: Context) -> Reference:
    engine, prefill, encoded = context.engine, context.prefill, context.encoded
    full = engine.compress(prefill, "full")
    if encoded.continuation is not None:
        ids = list(encoded.continuation)
    else:
        (written,) = engine.decode(
            prefill,
            [full],
            max_new_tokens=context.sample.max_new_tokens,
            stop_ids=encoded.stop_ids,
            min_new_tokens=encoded.min_new_tokens,
            beyond_positions=encoded.notes.get("overflow", 0) > 0,
            cuda_graph=context.config.decode.cuda_graph,
        )
        ids = written.ids[:-1] or written.ids  # nothing is predicted after the last token
    logits, queries = decode.read_on(engine.model, prefill, full.kept, ids)
    mass = [
        sum(part.sum(1) for part in attention(view, asked)) / len(ids)
        for view, asked in zip(prefill.layers, queries, strict=True)
    ]
    return Reference(tuple(ids), logits.float().log_softmax(-1), queries, mass)


def _compare(context: Context, cells: Sequence[Cell], reference: Reference) -> tuple[Tensor, Tensor]:
    """KL(full ‖ cell) [rows, tokens] float32, and whether the most probable token is the same [rows, tokens]."""
    vocabulary = reference.log_probs.shape[-1]
    chunk = max(1, _LOGITS // (len(cells) * vocabulary))
    logits = decode.teacher_forced(
        context.engine.model,
        context.prefill,
        [cell.kept for cell in cells],
        reference.ids,
        [cell.correction for cell in cells],
        chunk,
    )
    divergence, same, begin = [], [], 0
    for part in logits:
        full = reference.log_probs[begin : begin + part.shape[1]]
        begin += part.shape[1]
        for row in part:  # one row at a time: log-softmax makes copies
            own = row.float().log_softmax(-1)
            divergence.append(functional.kl_div(own, full, reduction="none", log_target=True).sum(-1).clamp_min(0))
            same.append(own.argmax(-1) == full.argmax(-1))
    rows = len(cells)
    return tuple(
        torch.stack([torch.cat(found[row::rows]) for row in range(rows)]).cpu() for found in (divergence, same)
    )


def attention(view: LayerView, queries: Tensor) -> Iterator[Tensor]:
    """Attention of [H, t, d] queries to the prompt's tokens alone, in blocks [H, at most 16, n] float32."""
    kv_heads, n, d = view.keys.shape
    keys = view.keys.float().mT
    for part in queries.split(_ROWS, 1):
        logits = part.float().reshape(kv_heads, -1, d) @ keys * view.scaling
        yield logits.view(part.shape[0], -1, n).softmax(-1)


def kept_mass(cell: Cell, mass: Sequence[Tensor]) -> float:
    """Share of [H, n] attention masses that falls on what a cell keeps, mean over layers and stored heads."""
    shares = []
    for layer, kept in zip(mass, cell.kept, strict=True):
        by_head = layer.unflatten(0, (len(kept), -1)).mean(1)
        shares += [row[positions].sum() / row.sum() for row, positions in zip(by_head, kept, strict=True)]
    return torch.stack([share.cpu() for share in shares]).mean().item()


def key_cosine(cell: Cell, prefill: Prefill) -> float:
    """Mean cosine of two different kept keys, mean over layers and stored heads: (|Σ k|² - Σ |k|²) / (b (b - 1))."""
    means = []
    for view, kept in zip(prefill.layers, cell.kept, strict=True):
        unit = functional.normalize(view.keys.float(), dim=-1)
        for head, positions in enumerate(kept):
            own, count = unit[head * len(unit) // len(kept)][positions], len(positions)
            pairs = own.sum(0).square().sum() - own.square().sum()
            means.append((pairs / max(1, count * (count - 1))).cpu())
    return torch.stack(means).mean().item()


def output_error(cell: Cell, prefill: Prefill, queries: Sequence[Tensor]) -> list[float]:
    """Mean ‖o - o_S‖ / ‖o‖ of each layer, o the attention output of the continuation's queries over the prompt."""
    errors = []
    for layer, (view, asked, kept) in enumerate(zip(prefill.layers, queries, cell.kept, strict=True)):
        heads, stored = asked.shape[0], len(kept)
        values, found = view.values.float(), []
        for probabilities in attention(view, asked):
            for head, positions in enumerate(kept):
                own = probabilities[head * heads // stored : (head + 1) * heads // stored]
                value = values[head * len(values) // stored]
                part = own[..., positions]
                held = value[positions]
                if cell.correction is not None:
                    part = part * cell.correction.bias[layer][head].exp()
                    if cell.correction.values is not None:
                        held = cell.correction.values[layer][head].float()
                whole, rest = own @ value, (part / part.sum(-1, keepdim=True)) @ held
                found.append(((whole - rest).norm(dim=-1) / whole.norm(dim=-1)).flatten())
        errors.append(torch.cat(found).mean().item())
    return errors
