"""Which tokens a cell kept of a prompt, how it had ranked them, and what the graph did to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphkv.edges import mean_cosine, unit
from graphkv.engine import Cell
from graphkv.graph import Edges, Trace, trace_layer
from graphkv.groups import Kept
from graphkv.prefill import Prefill
from scorers import LayerView


@dataclass(frozen=True)
class Retention:
    """What a cell did with each token of a prompt: `L` layers, `H` stored heads, `n` tokens.

    Attributes
    ----------
    kept
        [L, H, n] bool.
    ranks
        [L, H, n] int64 place of its score, re-ranked if there is a graph, 1 = best: what the selector went by. 0 for
        window and sinks, which are kept whatever their scores are, and throughout a layer that keeps everything.
    plain_ranks
        The same before the re-ranking; None without a graph.
    factors
        [L, H, n] float32: what the graph multiplied each score by, see `graphkv.graph.Trace`; None without a graph.
    edges
        For each layer, one `Edges` for each choice of sources; None without a graph.
    similarity
        [L, H] float64 mean cosine of two different kept keys of the past, as the paper's Fig. 2 compares them; NaN
        below two.
    """

    kept: np.ndarray
    ranks: np.ndarray
    plain_ranks: np.ndarray | None
    factors: np.ndarray | None
    edges: list[tuple[Edges, ...]] | None
    similarity: np.ndarray


def retention(prefill: Prefill, cell: Cell) -> Retention:
    """Everything about the tokens of a prompt that one cell decided.

    Parameters
    ----------
    prefill
        The prompt that `cell` was cut from; it holds the scores.
    cell
        From `Engine.cut`.
    """
    settings, n = cell.settings, prefill.n
    kept = np.stack([_mask(layer, n) for layer in cell.kept])
    all_scores = prefill.scoring.scores.get((settings.scorer, settings.granularity), [None] * len(prefill.layers))
    has_graph = settings.graph is not None
    ranks, plain, factors = np.zeros(kept.shape, np.int64), np.zeros(kept.shape, np.int64), np.ones(kept.shape, "f4")
    edges, similarity = [], []
    for layer, (view, scores) in enumerate(zip(prefill.layers, all_scores, strict=True)):
        if settings.granularity == "query_head":
            view = view.per_query_head()
        similarity.append(_similarity(view, kept[layer], n - settings.scorer.window))
        if scores is None or kept[layer].all():
            edges.append(())
            continue
        budget = int(kept[layer].sum()) // len(scores)  # of a head; with budgets by head, their mean
        n_past, sinks = scores.shape[-1], min(settings.scorer.sinks, budget - settings.scorer.window)
        plain[layer, :, :n_past] = _ranks(scores, sinks)
        traced = Trace(scores, torch.ones_like(scores), ())
        if has_graph:
            traced = trace_layer(scores, settings.scorer, view, settings.graph, budget)
        ranks[layer, :, :n_past] = _ranks(traced.scores, sinks)
        factors[layer, :, :n_past] = traced.factors.cpu()
        edges.append(traced.edges)
    return Retention(
        kept,
        ranks,
        plain if has_graph else None,
        factors if has_graph else None,
        edges if has_graph else None,
        np.array(similarity),
    )


def _mask(kept: Kept, n: int) -> np.ndarray:
    """[H, n] bool of the kept positions of a layer."""
    mask = np.zeros((len(kept), n), bool)
    for head, positions in enumerate(kept):
        mask[head, positions.cpu()] = True
    return mask


def _ranks(scores: Tensor, sinks: int) -> np.ndarray:
    """[H, n_past] places from 1, equal scores in order of position as `graphkv.selection` has it; sinks have none."""
    order = scores[:, sinks:].argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
    ranks = torch.zeros(scores.shape, dtype=torch.int64, device=order.device)
    ranks[:, sinks:].scatter_(-1, order, places)
    return ranks.cpu().numpy()


def _similarity(view: LayerView, kept: np.ndarray, n_past: int) -> list[float]:
    """Mean cosine of the kept past keys of each head."""
    means = []
    for keys, mask in zip(view.keys, kept, strict=True):
        positions = torch.from_numpy(np.flatnonzero(mask[: max(n_past, 0)])).to(keys.device)
        chosen = unit(keys[positions])
        means.append(float(mean_cosine(chosen, chosen)) if len(positions) > 1 else float("nan"))
    return means
