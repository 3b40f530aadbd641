"""Scores of a prompt's layers: computed once a scorer, when a cell asks for them or while the prompt is read."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from eval.errors import UserError, without_frames
from graphkv import budgets
from graphkv.config import CellSettings
from graphkv.prefill import Prefill, Scoring, synchronize
from scorers import ALL_QUERIES, LayerView, Needs, Scorer


def key_of(settings: CellSettings) -> tuple[Scorer, str]:
    """What scores depend on, beside the prompt."""
    return settings.scorer, settings.granularity


def view_of(view: LayerView, granularity: str) -> LayerView:
    """A layer with the heads that are stored."""
    return view.per_query_head() if granularity == "query_head" else view


def scores_of(prefill: Prefill, settings: CellSettings) -> list[Tensor]:
    """Scores of all layers, [heads, n - window] each.

    Raises
    ------
    ValueError
        If a score is not finite.
    """
    key = key_of(settings)
    scorer, granularity = key
    if key in prefill.scoring.failures:
        raise copy.copy(prefill.scoring.failures[key])
    if key not in prefill.scoring.scores:
        scores = [scorer.score(view_of(view, granularity)) for view in prefill.layers]
        if not torch.stack([s.isfinite().all().to(prefill.device) for s in scores]).all():
            raise ValueError(f"{scorer} gave a score that is not finite")
        prefill.scoring.scores[key] = scores
    return prefill.scoring.scores[key]


def check_needs(prefill: Prefill, settings: CellSettings) -> None:
    """Refuse a cell whose scores need what was not recorded.

    Raises
    ------
    UserError
        The message says what to prefill with.
    """
    scorer = settings.scorer
    if key_of(settings) in prefill.scoring:
        return
    view, needs = prefill.layers[0], scorer.needs
    recorded = view.queries.shape[1]
    if min(needs.queries, prefill.n) > recorded:
        wanted = f"window={needs.queries}" if needs.queries <= prefill.n else "needs=Needs(queries=ALL_QUERIES)"
        raise UserError(f"{scorer} needs more than the {recorded} queries that were recorded: prefill with {wanted}")
    if needs.mass and view.mass is None:
        raise UserError(f"{scorer} needs the attention mass of every key: prefill with needs=Needs(mass=True)")
    if needs.answer and view.answer_queries is None:
        raise UserError(f"{scorer} needs the queries of the answer: pass the prefill through Engine.look_ahead first")


class WhileReading:
    """Scores a layer as soon as it is read, for scorers whose needs grow with the prompt, and frees what they needed.

    All queries of a prompt are as large as its keys and values times half the query heads a KV head: kept for every
    layer they would decide how long a prompt can be.

    Parameters
    ----------
    cells
        All cells that will be cut.
    later
        What is needed beside them.
    n
        Prompt length in tokens; a cell whose budget holds all of it needs no scores.
    """

    def __init__(self, cells: Sequence[CellSettings], later: Needs, n: int) -> None:
        scored = [cell for cell in cells if n > budgets.resolve(cell.budget, n, cell.scorer.window)]
        self.keys = list(dict.fromkeys(key_of(settings) for settings in scored if _grows(settings.scorer.needs)))
        self.later = reduce(or_, (_needs_later(settings) for settings in cells), later)

    def __call__(self, view: LayerView, done: Scoring) -> LayerView:
        """Add the scores of a layer to `done`; returns what stays of it. What a scorer raises is kept for its cells."""
        for key in self.keys:
            scorer, granularity = key
            if key in done.failures:
                continue
            synchronize(view.keys.device)
            begin = time.perf_counter()
            try:
                scores = scorer.score(view_of(view, granularity))
                if not scores.isfinite().all():  # waits for the device, which the clock needs anyway
                    raise ValueError(f"{scorer} gave a score that is not finite")
                done.scores.setdefault(key, []).append(scores)
            except Exception as error:
                done.failures[key] = without_frames(error)  # every cell of this scorer raises it
                done.scores.pop(key, None)
            done.seconds[key] = done.seconds.get(key, 0.0) + time.perf_counter() - begin
        tail = view.queries[:, max(0, view.queries.shape[1] - self.later.queries) :]
        if tail.shape[1] < view.queries.shape[1]:
            tail = tail.clone()  # not a view: the other queries are freed
        return replace(view, queries=tail, mass=view.mass if self.later.mass else None)


def _grows(needs: Needs) -> bool:
    return (needs.queries == ALL_QUERIES or needs.mass) and not needs.answer


def _needs_later(settings: CellSettings) -> Needs:
    """What a cell needs once its scores are there."""
    graph = settings.graph
    raw = graph is not None and graph.space == "before"  # raw scores are computed anew
    return settings.needs if raw or not _grows(settings.scorer.needs) else settings.needs_beside_scores
