"""The public API: prefill a prompt once, cut cells out of it, let all of them answer."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.errors import UserError
from graphkv import budgets, decode
from graphkv.config import CellSettings, cell_settings, model_preset
from graphkv.decode import Generation
from graphkv.graph import rerank
from graphkv.models import LoadedModel, inspect, load
from graphkv.prefill import Prefill, prefill, synchronize
from graphkv.selection import keep
from scorers import Scorer


@dataclass(frozen=True)
class Cell:
    """What one setting keeps of one prompt.

    Attributes
    ----------
    settings
        Scorer, budget, graph.
    kept
        One [kv_heads, kept] int64 tensor a layer: ascending prompt positions.
    bytes
        Size of the kept keys and values.
    seconds
        Wall time of scoring (nothing if another cell had scored before), re-ranking and selection.
    """

    settings: CellSettings
    kept: list[Tensor] = field(repr=False)
    bytes: int
    seconds: float

    @property
    def kept_per_layer(self) -> list[int]:
        """Achieved budget: tokens stored per KV head in each layer."""
        return [kept.shape[-1] for kept in self.kept]

    @property
    def achieved(self) -> float:
        """Mean of `kept_per_layer`."""
        return sum(self.kept_per_layer) / len(self.kept)


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

    def prefill(self, prompt: str | Sequence[int], *, window: int = 64, chunk: int | None = None) -> Prefill:
        """Read a prompt through full attention.

        Parameters
        ----------
        prompt
            A text, tokenised with special tokens and without a chat template, or token ids as they are.
        window
            How many of the last queries are kept for scorers; the largest window of the cells to come.
        chunk
            Tokens read at a time, None for all at once; the result is the same.

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
        return prefill(self.model, ids, window=window, backend=backend, chunk=chunk)

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
        per_layer = budgets.per_layer(scorer, settings.budget, n, len(prefill.layers))
        if min(per_layer) == n:
            kept = [torch.arange(n, device=view.keys.device).expand(view.keys.shape[0], -1) for view in prefill.layers]
        else:
            kept = []
            for view, scores, budget in zip(prefill.layers, _scores(prefill, scorer), per_layer, strict=True):
                if settings.graph is not None and budget > scorer.window:
                    past = view.keys[:, : scores.shape[-1]]
                    scores = rerank(scores, past, settings.graph, n, budget - scorer.window)
                kept.append(keep(scores, budget, n))
        size = sum(
            positions.numel() * view.keys.shape[-1] * (view.keys.element_size() + view.values.element_size())
            for positions, view in zip(kept, prefill.layers, strict=True)
        )
        synchronize(prefill.device)
        return Cell(settings, kept, size, time.perf_counter() - begin)

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
        """
        if not beyond_positions and prefill.n + max_new_tokens > self.info.max_positions:
            raise UserError(
                f"a prompt of {prefill.n} tokens and an answer of {max_new_tokens} exceed the "
                f"{self.info.max_positions} positions of {self.info.label}"
            )
        run = {"batch": decode.greedy, "solo": decode.solo}[mode]
        return run(
            self.model,
            prefill,
            [cell.kept for cell in cells],
            max_new_tokens=max_new_tokens,
            stop_ids=self.info.stop_ids if stop_ids is None else frozenset(stop_ids),
            min_new_tokens=min_new_tokens,
        )

    def text(self, ids: Sequence[int]) -> str:
        """Text of generated ids without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def _scores(prefill: Prefill, scorer: Scorer) -> list[Tensor]:
    """Scores of all layers, computed once a prompt and scorer."""
    if scorer not in prefill.scores:
        recorded = prefill.layers[0].queries.shape[1]
        if min(scorer.needs.queries, prefill.n) > recorded:
            raise UserError(
                f"{scorer} needs the last {scorer.needs.queries} queries, but the prefill recorded {recorded}: "
                f"prefill with window={scorer.needs.queries}"
            )
        scores = [scorer.score(view) for view in prefill.layers]
        if not torch.stack([s.isfinite().all().to(prefill.device) for s in scores]).all():
            raise ValueError(f"{scorer} gave a score that is not finite")
        prefill.scores[scorer] = scores
    return prefill.scores[scorer]
