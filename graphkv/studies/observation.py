"""Fig. 2 and Fig. 7: how alike the keys of high-scored and of kept tokens are, before and after re-ranking.

Only past tokens are looked at: those before the window, which is kept whatever its keys are. Layers and heads are
counted from 0. Beside the layer and head that are drawn, the mean cosines of all of them are written down.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.figures import save
from graphkv.config import RunConfig
from graphkv.engine import Engine
from graphkv.prefill import Prefill
from graphkv.studies import key_figures
from graphkv.studies.cosines import histogram, mean_cosine, principal_components, unit
from graphkv.studies.output import output
from graphkv.studies.prompts import PromptOptions, read
from graphkv.studies.ranking import Ranking, check, check_choice, deep_layer, rank, similarities

BINS = np.linspace(-1, 1, 81)


@dataclass(frozen=True)
class _Figure(PromptOptions, abc.ABC):
    """A figure of one layer's keys for each cell that re-ranks; see `graphkv.studies.Study`."""

    def check(self, configs: Sequence[RunConfig]) -> None:
        """Refuse cells that do not re-rank."""
        check(configs)

    def run(self, engine: Engine, configs: Sequence[RunConfig]) -> Iterator[Path]:
        """Read the prompt once and draw one figure a cell."""
        cells, ids = [config.cell for config in configs], self.ids(engine.info, self.tokens)
        prefill = read(engine, ids, cells, configs[0].prefill.chunk)
        for config in configs:
            yield from self._draw(engine, prefill, config)

    @abc.abstractmethod
    def _draw(self, engine: Engine, prefill: Prefill, config: RunConfig) -> Iterator[Path]:
        """Draw the figure of one cell, and write its numbers."""


@dataclass(frozen=True)
class Fig2(_Figure):
    """Key cosines of all tokens, of the highest scores before and after re-ranking, and of what is kept (Fig. 2).

    Parameters
    ----------
    layers
        Layers drawn, one row each; none: the second, and the one where the paper's 25th of 32 is.
    head
        The stored head.
    top
        How many of the highest scores are compared; the paper's 10.
    shown
        Tokens of the heat map of all tokens, evenly spaced; the paper's prompt has 128. Numbers are of all tokens.
    """

    layers: tuple[int, ...] = ()
    head: int = 0
    top: int = 10
    shown: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.top, self.shown) < 2:
            raise ValueError(f"top and shown must be 2 or more, not {self.top} and {self.shown}")
        if len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers must differ, not {list(self.layers)}")

    def _draw(self, engine: Engine, prefill: Prefill, config: RunConfig) -> Iterator[Path]:
        after, before = (rank(engine, prefill, cell) for cell in (config.cell, replace(config.cell, graph=None)))
        layers = self.layers or tuple(dict.fromkeys((min(1, len(after) // 2), deep_layer(len(after)))))
        for layer in layers:
            check_choice("layers", layer, len(after))
        check_choice("head", self.head, len(after[0].keys))
        means = similarities([("before", before), ("after", after)], self.top)
        maps, pairs = zip(*(self._layer(layer, before[layer], after[layer]) for layer in layers), strict=True)
        maps, pairs = pd.concat(maps, ignore_index=True), pd.concat(pairs, ignore_index=True)
        drawn = means[means["layer"].isin(layers) & (means["head"] == self.head)]
        everywhere = means.groupby("set")["mean_cosine"].mean()

        out = output(config, engine.info, "figures", [config.cell], [prefill.ids])
        n_past = after[0].keys.shape[1]
        caption = (
            f"{_where(engine, prefill, config)}; head {self.head}. Heat maps: {min(self.shown, n_past)} of the "
            f"{n_past} past tokens, evenly spaced, and the {self.top} highest scores before and after re-ranking. "
            "Right: all pairs of past tokens and of those kept. Mean cosine over "
            f"{len(after)} layers × {len(after[0].keys)} heads: all {everywhere['all']:.3f}; kept "
            f"{everywhere['kept before']:.3f} → {everywhere['kept after']:.3f}; highest {self.top} "
            f"{everywhere['top before']:.3f} → {everywhere['top after']:.3f}. In the paper's figure (Llama-3-8B, 128 "
            "tokens of HotpotQA, layers 1 and 25) 2 and 1 of the highest 10 stay."
        )
        yield from save(key_figures.heat_maps(maps, pairs, drawn, self.top, caption), out.stem)
        yield out.csv(maps)
        yield out.csv(pairs, "pairs")
        yield out.csv(means, "means")
        yield out.facts(layers=list(layers), caption=caption, mean_cosine=everywhere.to_dict())

    def _layer(self, layer: int, before: Ranking, after: Ranking) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Numbers of one row of the figure: cosines in the heat maps, and pairs in each bin."""
        vectors = unit(after.keys[self.head])
        even = np.linspace(0, len(vectors) - 1, min(self.shown, len(vectors))).round().astype(int)
        chosen = {
            "all": even,
            "top before": np.sort(before.top(self.head, self.top)),
            "top after": np.sort(after.top(self.head, self.top)),
        }
        maps = pd.concat(
            [_cosines(vectors, positions).assign(panel=panel) for panel, positions in chosen.items()],
            ignore_index=True,
        )
        sets = {
            "all": np.arange(len(vectors)),
            "kept before": before.kept[self.head],
            "kept after": after.kept[self.head],
        }
        pairs = pd.concat(
            [
                pd.DataFrame(
                    {"set": name, "low": BINS[:-1], "high": BINS[1:], "pairs": histogram(vectors[positions], BINS)}
                )
                for name, positions in sets.items()
            ],
            ignore_index=True,
        )
        pairs["share"] = pairs["pairs"] / pairs.groupby("set")["pairs"].transform("sum")
        maps.insert(0, "layer", layer)
        pairs.insert(0, "layer", layer)
        return maps[["layer", "panel", "row", "column", "cosine"]], pairs


@dataclass(frozen=True)
class Fig7(_Figure):
    """Principal components of a head's keys, with what is kept and what scores highest after each round (Fig. 7).

    Parameters
    ----------
    layer
        The layer; None: where the paper's 25th of 32 is.
    head
        The stored head.
    rounds
        One panel each.
    top
        How many of the highest scores are marked.
    """

    layer: int | None = None
    head: int = 0
    rounds: tuple[int, ...] = (0, 1, 2, 3)
    top: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 2:
            raise ValueError(f"top must be 2 or more, not {self.top}")
        if not self.rounds or min(self.rounds) < 0 or len(set(self.rounds)) < len(self.rounds):
            raise ValueError(f"rounds must be different numbers from 0 on, not {list(self.rounds)}")

    def _draw(self, engine: Engine, prefill: Prefill, config: RunConfig) -> Iterator[Path]:
        graph = config.cell.graph
        cells = [replace(config.cell, graph=replace(graph, rounds=rounds)) for rounds in self.rounds]
        rankings = [rank(engine, prefill, cell) for cell in cells]
        layer = deep_layer(len(rankings[0])) if self.layer is None else self.layer
        check_choice("layer", layer, len(rankings[0]))
        check_choice("head", self.head, len(rankings[0][layer].keys))
        points, panels, explained = self._panels([found[layer] for found in rankings])
        named = [(f"T={rounds}", found) for rounds, found in zip(self.rounds, rankings, strict=True)]
        means = similarities(named, self.top)
        everywhere = means.groupby("set", sort=False)["mean_cosine"].mean()

        out = output(config, engine.info, "figures", cells, [prefill.ids])
        of_kept = ", ".join(f"{everywhere[f'kept T={rounds}']:.3f} (T = {rounds})" for rounds in self.rounds)
        caption = (
            f"{_where(engine, prefill, config)}; layer {layer}, head {self.head}. Principal components of the keys of "
            f"all past tokens; keys never change, what is kept does. Mean cosine over {len(rankings[0])} layers × "
            f"{len(rankings[0][0].keys)} heads: all {everywhere['all']:.3f}; kept {of_kept}."
        )
        yield from save(key_figures.scatter(points, panels, explained, self.top, caption), out.stem)
        yield out.csv(points)
        yield out.csv(panels, "panels")
        yield out.csv(means, "means")
        yield out.facts(layer=layer, explained=list(explained), caption=caption, mean_cosine=everywhere.to_dict())

    def _panels(self, rankings: Sequence[Ranking]) -> tuple[pd.DataFrame, pd.DataFrame, np.ndarray]:
        """Points of all panels, what their titles say, and the share of variance of each component."""
        keys = rankings[0].keys[self.head]
        place, explained = principal_components(keys.double().cpu().numpy())
        vectors, first = unit(keys), set(rankings[0].kept[self.head])
        points, panels = [], []
        for rounds, ranking in zip(self.rounds, rankings, strict=True):
            kept, top = ranking.kept[self.head], ranking.top(self.head, self.top)
            frame = pd.DataFrame({"rounds": rounds, "position": np.arange(len(keys))})
            frame["component_1"], frame["component_2"] = place.T
            frame["score"] = ranking.scores[self.head].double().cpu().numpy()
            frame["kept"], frame["top"] = frame["position"].isin(kept), frame["position"].isin(top)
            points.append(frame)
            row: dict[str, Any] = {"rounds": rounds, "kept": len(kept), "explained": explained.sum()}
            row |= {"kept_cosine": mean_cosine(vectors[kept]), "top_cosine": mean_cosine(vectors[top])}
            panels.append(row | {"new": len(set(kept) - first)})
        return pd.concat(points, ignore_index=True), pd.DataFrame(panels), explained


def _cosines(vectors: np.ndarray, positions: np.ndarray) -> pd.DataFrame:
    """Every pair of some tokens once, and each with itself: row, column (prompt positions, row ≤ column), cosine."""
    cosine = vectors[positions] @ vectors[positions].T
    row, column = np.triu_indices(len(positions))
    return pd.DataFrame({"row": positions[row], "column": positions[column], "cosine": cosine[row, column]})


def _where(engine: Engine, prefill: Prefill, config: RunConfig) -> str:
    """What a caption says of every figure."""
    window = config.cell.scorer.window
    return (
        f"{engine.info.label}, {config.model.dtype}; {config.cell.label}; prompt of {prefill.n} tokens, the last "
        f"{window} of them, the window, left out"
    )
