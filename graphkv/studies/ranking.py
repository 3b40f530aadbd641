"""What a cell makes of the past of each layer: scores before and after re-ranking, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from eval.errors import UserError
from graphkv.config import CellSettings, RunConfig
from graphkv.engine import Engine
from graphkv.graph import rerank_layer
from graphkv.prefill import Prefill
from graphkv.studies.cosines import mean_cosine, unit


@dataclass(frozen=True)
class Ranking:
    """The past tokens of one layer, those before the window, as a cell ranks them.

    Shapes: `R` stored heads (KV heads, or query heads with `granularity=query_head`), `p` past tokens, `d` head size.

    Attributes
    ----------
    keys
        [R, p, d] with rotary embeddings, in the model's dtype.
    scores
        [R, p] float32, after re-ranking if the cell has a graph.
    kept
        For each head the ascending positions that the cell keeps of the past.
    """

    keys: Tensor
    scores: Tensor
    kept: list[np.ndarray]

    def top(self, head: int, count: int) -> np.ndarray:
        """Positions of the `count` highest scores of a head, highest first; ties to the lower position."""
        return torch.sort(self.scores[head], descending=True, stable=True).indices[:count].cpu().numpy()


def rank(engine: Engine, prefill: Prefill, settings: CellSettings) -> list[Ranking]:
    """How a cell ranks each layer of a prompt; `kept` is what `Engine.cut` keeps.

    Raises
    ------
    UserError
        If the cell keeps the whole prompt in every layer, so that nothing was ranked.
    """
    cell = engine.cut(prefill, settings)
    scorer, n_past = settings.scorer, prefill.n - settings.scorer.window
    if min(cell.kept_per_layer) == prefill.n:
        raise UserError(
            f"study: {settings.label} keeps all of a prompt of {prefill.n} tokens: lower budget or raise study.tokens"
        )
    found = []
    for view, kept, scores, tokens in zip(
        prefill.layers,
        cell.kept,
        prefill.scoring.scores[scorer, settings.granularity],
        cell.kept_per_layer,
        strict=True,
    ):
        view = view.per_query_head() if settings.granularity == "query_head" else view
        if settings.graph is not None and tokens < prefill.n:
            scores = rerank_layer(scores, scorer, view, settings.graph, round(tokens))
        past = [head[head < n_past].cpu().numpy() for head in kept]
        found.append(Ranking(view.keys[:, :n_past], scores, past))
    return found


def check(configs: Sequence[RunConfig]) -> None:
    """Refuse cells that do not re-rank.

    Raises
    ------
    UserError
        For the full cache, and for a cell without a graph or with no round of it.
    """
    for config in configs:
        cell = config.cell
        if cell.scorer.keeps_all:
            raise UserError(f"study {config.study['name']} compares rankings, and {cell.name} ranks nothing")
        if cell.graph is None or cell.graph.rounds == 0:
            raise UserError(f"study {config.study['name']} looks at re-ranking: it needs +graphkv=on with rounds ≥ 1")


def similarities(rankings: Sequence[tuple[str, Sequence[Ranking]]], top: int) -> pd.DataFrame:
    """Mean pairwise cosine of keys in every layer and head.

    Parameters
    ----------
    rankings
        Names and rankings of the same past, such as before and after re-ranking.
    top
        How many of the highest scores are `top <name>`; what a cell keeps is `kept <name>`.

    Returns
    -------
    pandas.DataFrame
        layer, head, set (`all`, `kept <name>`, `top <name>`), tokens, mean_cosine.
    """
    rows = []
    for layer, of_layer in enumerate(zip(*(found for _, found in rankings), strict=True)):
        for head, keys in enumerate(of_layer[0].keys):
            vectors = unit(keys)
            rows.append((layer, head, "all", len(vectors), mean_cosine(vectors)))
            for (name, _), ranking in zip(rankings, of_layer, strict=True):
                for kind, chosen in (("kept", ranking.kept[head]), ("top", ranking.top(head, top))):
                    rows.append((layer, head, f"{kind} {name}", len(chosen), mean_cosine(vectors[chosen])))
    return pd.DataFrame(rows, columns=["layer", "head", "set", "tokens", "mean_cosine"])


def deep_layer(n_layers: int) -> int:
    """The layer that stands where the 25th of the paper's 32 does."""
    return min(n_layers - 1, 25 * n_layers // 32)


def check_choice(name: str, value: int, count: int) -> None:
    """Refuse a layer or head that the model does not have."""
    if not 0 <= value < count:
        raise UserError(f"study.{name}={value} is not there: the model has {count}, counted from 0")
