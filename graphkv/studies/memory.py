"""Table 5: how large a cache is, by formula and as stored, for KV heads and for query heads.

The paper's Table 5 (PDF p. 11) states 32 attention heads, head size 128 and BF16, and neither layers nor KV heads. With
grouped queries a model stores one key and value a KV head; the paper's code base repeats them for every query head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from eval.errors import UserError
from eval.tables import as_markdown, as_text
from graphkv.cache import RaggedCache
from graphkv.config import GRANULARITIES, CellSettings, RunConfig, cell_settings
from graphkv.engine import Cell, Engine
from graphkv.prefill import Prefill
from graphkv.studies.output import output
from graphkv.studies.prompts import TextOptions, read


class Shape(NamedTuple):
    """What decides the size of a model's cache: layers, query heads, KV heads, head size, bytes a number."""

    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    itemsize: int

    def bytes(self, tokens: int, granularity: str = "kv_head") -> int:
        """Bytes of the keys and values of `tokens` tokens: 2 · layers · heads · tokens · head size · bytes a number."""
        heads = self.kv_heads if granularity == "kv_head" else self.query_heads
        return 2 * self.layers * heads * tokens * self.head_size * self.itemsize


PAPER_MODELS = {
    "Llama-2-7B-Chat": Shape(32, 32, 32, 128, 2),
    "Llama-3-8B-Instruct": Shape(32, 32, 8, 128, 2),
    "Mistral-7B-Instruct-v0.2": Shape(32, 32, 8, 128, 2),
}
"""The paper's models in BF16, from their configurations."""


@dataclass(frozen=True)
class Table5(TextOptions):
    """Bytes of the full and of compressed caches by prompt length; scorer and head budgets are the configuration's.

    Parameters
    ----------
    lengths
        Prompt lengths in tokens.
    budgets
        Tokens kept a layer, window included.
    """

    lengths: tuple[int, ...] = (500, 1000, 2000, 4000)
    budgets: tuple[int, ...] = (128, 512, 1024)

    def __post_init__(self) -> None:
        for name in ("lengths", "budgets"):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different positive numbers, not {list(values)}")

    def check(self, configs: Sequence[RunConfig]) -> None:
        """Refuse the full cache as a method, and budgets that are too small for it."""
        for config in configs:
            if config.cell.scorer.keeps_all:
                raise UserError("study table5 compares a method with the full cache: name another scorer than full")
            self._cells(config.cell)

    def run(self, engine: Engine, configs: Sequence[RunConfig]) -> Iterator[Path]:
        """Write and print one table a cell; see `graphkv.studies.Study`."""
        prompts = [self.ids(engine.info, length) for length in self.lengths]
        found: list[list[pd.DataFrame]] = [[] for _ in configs]
        for ids in prompts:
            prefill = read(engine, ids, [config.cell for config in configs], configs[0].prefill.chunk)
            for frames, config in zip(found, configs, strict=True):
                frames.append(measure(engine, prefill, self._cells(config.cell)))
        for frames, config in zip(found, configs, strict=True):
            frame = pd.concat(frames, ignore_index=True)
            cells, formulas = self._cells(config.cell), self._formulas()
            out = output(config, engine.info, "tables", cells, prompts)
            print(as_text(_by_length(frame)))
            yield out.text(_page(frame, formulas, shape_of(prefill), engine, config), ".md")
            yield out.csv(frame)
            yield out.csv(formulas, "paper-models")
            yield out.facts(shape=shape_of(prefill)._asdict())

    def _cells(self, cell: CellSettings) -> list[CellSettings]:
        """The full cache, then every budget in both granularities; the graph changes no size."""
        cells = [cell_settings("full", 1.0)]
        try:
            for budget in self.budgets:
                cells += [replace(cell, graph=None, budget=budget, granularity=kind) for kind in GRANULARITIES]
        except ValueError as error:
            raise UserError(f"study.budgets: {error}") from error
        return cells

    def _formulas(self) -> pd.DataFrame:
        rows = [
            (model, granularity, tokens, shape.bytes(tokens, granularity))
            for model, shape in PAPER_MODELS.items()
            for granularity in GRANULARITIES
            for tokens in sorted({*self.budgets, *self.lengths})
        ]
        return pd.DataFrame(rows, columns=["model", "granularity", "tokens", "formula_bytes"])


def measure(engine: Engine, prefill: Prefill, cells: Sequence[CellSettings]) -> pd.DataFrame:
    """Sizes of caches of one prompt.

    Returns
    -------
    pandas.DataFrame
        A row a cell: label, granularity, budget (None: all), length, formula_bytes (the nominal budget, or the prompt
        if it is shorter), cell_bytes (kept positions, `Cell.bytes`), stored_bytes (the tensors of a decoding cache with
        no room for new tokens; more than cell_bytes where heads are padded to each other's length).
    """
    shape, rows = shape_of(prefill), []
    for settings in cells:
        cell, all_kept = engine.cut(prefill, settings), settings.scorer.keeps_all
        tokens = prefill.n if all_kept else min(settings.budget, prefill.n)
        rows.append(
            {
                "cell": settings.label,
                "granularity": settings.granularity,
                "budget": None if all_kept else settings.budget,
                "length": prefill.n,
                "formula_bytes": shape.bytes(tokens, settings.granularity),
                "cell_bytes": cell.bytes,
                "stored_bytes": stored_bytes(prefill, cell),
            }
        )
    return pd.DataFrame(rows).astype({"budget": "Int64"})


def stored_bytes(prefill: Prefill, cell: Cell) -> int:
    """Bytes of the key and value tensors that a cell decodes with."""
    cache = RaggedCache(prefill, [cell.kept], capacity=0)
    return sum(group.keys.nbytes + group.values.nbytes for layer in cache.layers for group in layer)


def shape_of(prefill: Prefill) -> Shape:
    """The shape of a prefilled model's cache."""
    view = prefill.layers[0]
    kv_heads, _, head_size = view.keys.shape
    return Shape(len(prefill.layers), view.queries.shape[0], kv_heads, head_size, view.keys.element_size())


def _by_length(frame: pd.DataFrame) -> pd.DataFrame:
    """Texts: a row a cell, a column a length; formula and stored bytes where they differ."""
    full = frame[frame["budget"].isna()].set_index("length")["stored_bytes"]

    def size(row: pd.Series) -> str:
        text = _mib(row["stored_bytes"])
        if row["stored_bytes"] != row["formula_bytes"]:
            text += f" (formula {_mib(row['formula_bytes'])})"
        return f"{text}, {row['stored_bytes'] / full[row['length']]:.0%}"

    texts = frame.assign(text=frame.apply(size, axis=1))
    table = texts.pivot(index="cell", columns="length", values="text").reindex(frame["cell"].unique())
    table.columns = [f"{length:,} tokens" for length in table.columns]
    return table.reset_index().rename(columns={"cell": "MiB, share of full"})


def _page(frame: pd.DataFrame, formulas: pd.DataFrame, shape: Shape, engine: Engine, config: RunConfig) -> str:
    """The tables in markdown, with notes."""
    wide = formulas.assign(text=formulas["formula_bytes"].map(_mib), row=_row_names(formulas))
    table = wide.pivot(index="row", columns="tokens", values="text").reindex(wide["row"].unique())
    table.columns = [f"{tokens:,} tokens" for tokens in table.columns]
    group = shape.query_heads // shape.kv_heads
    notes = [
        f"{engine.info.label}, {config.model.dtype}: {shape.layers} layers, {shape.query_heads} query heads, "
        f"{shape.kv_heads} KV heads ({group} query heads share one), head size {shape.head_size}, "
        f"{shape.itemsize} bytes a number: {shape.bytes(1):,} bytes a token.",
        "Formula: 2 (key and value) · layers · heads · tokens · head size · bytes a number, with KV heads, or query "
        "heads for @query_head; tokens are the prompt's or the budget, whichever is less. Stored: the tensors that the "
        "cell decodes with, counted. One number stands where both agree.",
        "A budget is spent a head: with @query_head, as in the paper's code base, the same budget takes as many times "
        "the memory as query heads share a KV head, and may exceed the full cache.",
        "The paper's Table 5 (p. 11) names 32 heads, head size 128 and BF16, but neither layers nor KV heads. With 32 "
        "layers that is Llama-2-7B above, and four times what the other two models hold with KV heads. Its printed "
        "sizes are not repeated here: without layers and KV heads they cannot be held against a formula.",
    ]
    return "\n\n".join(
        [
            "# Size of the cache",
            as_markdown(_by_length(frame)),
            "## The paper's models, by formula, MiB in BF16",
            as_markdown(table.reset_index().rename(columns={"row": "model"})),
            "## Notes",
            "\n".join(f"- {note}" for note in notes) + "\n",
        ]
    )


def _row_names(formulas: pd.DataFrame) -> pd.Series:
    return formulas["model"] + formulas["granularity"].map({"kv_head": ", KV heads", "query_head": ", query heads"})


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"
