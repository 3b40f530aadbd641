"""The public API: prefill a prompt once, cut cells out of it, let all of them answer."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.errors import UserError
from graphkv import budgets, coverage, decode
from graphkv.config import CellSettings, cell_settings, model_preset
from graphkv.correction import Correction, correct
from graphkv.decode import Generation
from graphkv.decode_eviction import Policy
from graphkv.graph import rerank_layer
from graphkv.groups import Kept
from graphkv.models import LoadedModel, inspect, load
from graphkv.prefill import Prefill, prefill, synchronize
from graphkv.scoring import WhileReading, check_needs, key_of, scores_of, view_of
from graphkv.selection import keep
from scorers import LayerView, Needs


@dataclass(frozen=True)
class Cell:
    """What one setting keeps of one prompt.

    Attributes
    ----------
    settings
        Scorer, budget, graph.
    kept
        One [heads, kept] int64 tensor a layer: ascending prompt positions of each KV head, or of each query head with
        `granularity=query_head`. With per-head budgets a list of [kept] tensors, one a head, instead.
    bytes
        Size of the kept keys and values.
    seconds
        Wall time of scoring (nothing if another cell had scored before), re-ranking, selection and correction.
    correction
        What is added to the attention over the kept tokens, with `settings.bias`; None for nothing.
    """

    settings: CellSettings
    kept: list[Kept] = field(repr=False)
    bytes: int
    seconds: float
    correction: Correction | None = field(default=None, repr=False)

    @property
    def kept_per_head(self) -> list[list[int]]:
        """Achieved budget: tokens that each stored head of each layer keeps."""
        return [[head.shape[0] for head in kept] for kept in self.kept]

    @property
    def kept_per_layer(self) -> list[float]:
        """Achieved budget: tokens a stored head keeps in each layer, the mean where heads differ."""
        return [sum(heads) / len(heads) for heads in self.kept_per_head]

    @property
    def achieved(self) -> float:
        """Mean of `kept_per_layer`."""
        return sum(self.kept_per_layer) / len(self.kept)

    def keeps_same(self, other: Cell) -> bool:
        """Whether both keep the same tokens of the same stored heads, so that they write the same."""
        if (self.settings.bias, self.settings.fold) != (other.settings.bias, other.settings.fold):
            return False
        return self.kept_per_head == other.kept_per_head and all(
            torch.equal(mine, its)
            for layer, others in zip(self.kept, other.kept, strict=True)
            for mine, its in zip(*(([x] if isinstance(x, Tensor) else x) for x in (layer, others)), strict=True)
        )


class Engine:
    """A model whose prompts are prefilled once and answered under many cache settings.

    >>> engine = Engine.from_pretrained("tiny")
    >>> prompt = engine.prefill("The harbour bell rings at nine. " * 20)
    >>> cell = engine.compress(prompt, scorer="snapkv", budget=64, graphkv={"rounds": 1})
    >>> len(engine.generate(prompt, [cell], max_new_tokens=4))
    1
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.model, self.info = loaded.model, loaded.info

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> Engine:
        """Load a model by the name of a file in `conf/model/` or from a folder that holds a saved one.

        `options` are fields of `ModelConfig`, such as `dtype="bfloat16"` or `device="cuda"`.
        """
        if Path(name).expanduser().is_dir():
            return cls(load(inspect(model_preset("local", path=name, **options))))
        return cls(load(inspect(model_preset(name, **options))))

    @property
    def tokenizer(self):
        """The model's transformers tokenizer."""
        return self.info.tokenizer

    def prefill(
        self,
        prompt: str | Sequence[int],
        *,
        window: int = 64,
        needs: Needs | None = None,
        chunk: int | None = None,
        cells: Sequence[CellSettings] | None = None,
    ) -> Prefill:
        """Read a prompt through full attention.

        Parameters
        ----------
        prompt
            A text, tokenised with special tokens and without a chat template, or token ids as they are.
        window
            How many of the last queries are kept for scorers; the largest window of the cells to come.
        needs
            What scorers need that look at more than keys, values and the window, such as `scorers.get("h2o")().needs`.
        chunk
            Tokens read at a time, None for all at once; the result is the same.
        cells
            If given, no other cells will be cut: what they `need` is recorded, and what grows with the prompt (all its
            queries, the attention mass) is scored and freed layer by layer as the last chunk of the prompt is read,
            where neither they nor `window` and `needs` ask for it later.

        Raises
        ------
        UserError
            If the prompt is empty or leaves no room for an answer within the model's positions.
        """
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UserError("the prompt has no tokens: give a text or at least one token id")
        if len(ids) >= self.info.max_positions:
            raise UserError(
                f"the prompt has {len(ids)} tokens, but {self.info.label} has {self.info.max_positions} "
                "positions for prompt and answer: shorten it"
            )
        backend = self.info.config.attention
        asked = Needs(queries=window) | (needs or Needs())
        needs = reduce(or_, (settings.needs for settings in cells or ()), asked)
        early = None if cells is None else WhileReading(cells, asked, len(ids))
        return prefill(self.model, ids, needs, backend=backend, chunk=chunk, early=early)

    def look_ahead(
        self,
        prefill: Prefill,
        max_new_tokens: int,
        stop_ids: Collection[int] | None = None,
        min_new_tokens: int = 0,
        cuda_graph: bool = True,
    ) -> Prefill:
        """The same prompt with the queries that the full cache's answer uses, for scorers that `needs.answer`.

        The answer is written once with everything kept; parameters as for `decode`.
        """
        full = self.compress(prefill, "full")
        options = {"stop_ids": stop_ids, "min_new_tokens": min_new_tokens, "cuda_graph": cuda_graph}
        (answer,) = self.decode(prefill, [full], max_new_tokens=max_new_tokens, beyond_positions=True, **options)
        ids = answer.ids[:-1] or answer.ids  # what the last token asks is not asked any more
        _, queries = decode.read_on(self.model, prefill, full.kept, ids)
        layers = [replace(view, answer_queries=q) for view, q in zip(prefill.layers, queries, strict=True)]
        return replace(prefill, layers=layers)

    def compress(
        self,
        prefill: Prefill,
        scorer: str = "snapkv",
        budget: int | float = 512,
        graphkv: Mapping[str, Any] | bool | None = None,
        scorer_options: Mapping[str, Any] | None = None,
    ) -> Cell:
        """Decide what one setting keeps; parameters as for `graphkv.config.cell_settings`."""
        return self.cut(prefill, cell_settings(scorer, budget, graphkv, scorer_options))

    def cut(self, prefill: Prefill, settings: CellSettings) -> Cell:
        """Decide what `settings` keep of a prompt; nothing is copied and `prefill` stays as it is."""
        begin = time.perf_counter()
        scorer, n = settings.scorer, prefill.n
        if n > budgets.resolve(settings.budget, n, scorer.window):
            check_needs(prefill, settings)
        per_layer = budgets.per_layer(scorer, settings.budget, n, prefill.layers)
        for layer in scorer.skip_layers:
            if layer < len(per_layer):
                per_layer[layer] = n
        scores = [None] * len(per_layer) if min(per_layer) == n else scores_of(prefill, settings)
        kept = [
            _keep(view_of(view, settings.granularity), score, settings, budget)
            for view, score, budget in zip(prefill.layers, scores, per_layer, strict=True)
        ]
        size = sum(
            sum(len(head) for head in positions) * view.keys.shape[-1] * view.keys.element_size() * 2
            for positions, view in zip(kept, prefill.layers, strict=True)
        )
        correction = None
        if settings.bias != "none":
            views = [view_of(view, settings.granularity) for view in prefill.layers]
            correction = correct(views, kept, settings.bias, settings.fold)
        synchronize(prefill.device)
        seconds = time.perf_counter() - begin + prefill.scoring.seconds.pop(key_of(settings), 0.0)
        return Cell(settings, kept, size, seconds, correction)

    def generate(self, prefill: Prefill, cells: Sequence[Cell], max_new_tokens: int = 64) -> list[str]:
        """Answers of `cells`, one text each; stops at the model's own stop tokens."""
        answers = self.decode(prefill, cells, max_new_tokens=max_new_tokens)
        return [self.text(answer.ids) for answer in answers]

    def decode(
        self,
        prefill: Prefill,
        cells: Sequence[Cell],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] | None = None,
        min_new_tokens: int = 0,
        mode: str = "batch",
        beyond_positions: bool = False,
        evict_every: int | None = None,
        cuda_graph: bool = True,
    ) -> list[Generation]:
        """Token ids that `cells` write, greedily.

        Parameters
        ----------
        prefill
            The prompt that the cells were cut from.
        cells
            Rows of the batch.
        max_new_tokens
            Longest answer in tokens.
        stop_ids
            Tokens that end an answer; None takes the model's own, an empty collection none.
        min_new_tokens
            Stop tokens are forbidden before so many tokens.
        mode
            `batch`, or `solo` for the reference that decodes one cell after the other.
        beyond_positions
            Let prompt and answer exceed the model's positions; rotary embeddings extrapolate silently.
        evict_every
            After every so many tokens, cut cells back to their budget, by what their scorers say of the cache as it
            is then; None evicts after the prefill only.
        cuda_graph
            See `graphkv.decode.greedy`.

        Raises
        ------
        UserError
            If prompt and answer exceed the positions, or if a cell cannot evict while decoding.
        """
        if not beyond_positions and prefill.n + max_new_tokens > self.info.max_positions:
            raise UserError(
                f"a prompt of {prefill.n} tokens and an answer of {max_new_tokens} exceed the "
                f"{self.info.max_positions} positions of {self.info.label}"
            )
        policies = None if evict_every is None else [_policy(cell, prefill) for cell in cells]
        run = {"batch": decode.greedy, "solo": decode.solo}[mode]
        return run(
            self.model,
            prefill,
            [cell.kept for cell in cells],
            max_new_tokens=max_new_tokens,
            stop_ids=self.info.stop_ids if stop_ids is None else frozenset(stop_ids),
            min_new_tokens=min_new_tokens,
            policies=policies,
            evict_every=evict_every,
            cuda_graph=cuda_graph,
            corrections=[cell.correction for cell in cells],
        )

    def text(self, ids: Sequence[int]) -> str:
        """Text of generated ids without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def _policy(cell: Cell, prefill: Prefill) -> Policy | None:
    """How a cell goes on evicting; None for the full cache."""
    settings = cell.settings
    settings.check_decode_eviction()
    if settings.scorer.needs.mass and prefill.layers[0].mass is None:
        raise UserError(f"{settings.name} goes on from the attention mass of the prompt: prefill without cells=")
    return None if settings.scorer.keeps_all else Policy(settings.scorer, [len(kept[0]) for kept in cell.kept])


def _keep(view: LayerView, scores: Tensor | None, settings: CellSettings, budget: int) -> Kept:
    """What a layer keeps within its budget, window included."""
    n, scorer, graph = view.n, settings.scorer, settings.graph
    if budget >= n:
        return torch.arange(n, device=view.keys.device).expand(view.keys.shape[0], -1)
    if graph is not None:
        scores = rerank_layer(scores, scorer, view, graph, budget)
    if settings.head_budget == "uniform":
        return _best(scores, view.keys, view.values, settings, budget)
    past = budgets.per_head(scores, budget - scorer.window, settings.head_floor)
    heads = zip(scores[:, None], view.keys[:, None], view.values[:, None], past, strict=True)
    return [_best(*head, settings, own + scorer.window)[0] for *head, own in heads]


def _best(scores: Tensor, keys: Tensor, values: Tensor, settings: CellSettings, budget: int) -> Tensor:
    """What each head keeps within the same budget by the selector, [heads, budget]."""
    n, sinks = keys.shape[1], settings.scorer.sinks
    if settings.selector.name == "topk" or budget >= n:
        return keep(scores, budget, n, sinks)
    return coverage.select(scores, keys, values, settings.selector, budget, sinks)
