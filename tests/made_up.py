"""Results with made-up scores, for tables and figures: nothing here is a model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.cell_results import CellResult, ModelResults

GRAPH = {"source_ratio": 0.3, "neighbors": "auto3", "rounds": 1, "edge": "kk", "signal": "decay"}
OPTIONS = {
    "snapkv": {"window": 32, "kernel": 7, "pooling": "avg", "group": "mean", "sinks": 0},
    "pyramidkv": {
        "window": 32,
        "kernel": 7,
        "pooling": "avg",
        "group": "mean",
        "sinks": 0,
        "beta": 20,
        "schedule": "official",
    },
    "cake": {"window": 32},
    "h2o": {"window": 32},
}
FACTS = {
    "protocol": "official",
    "data": "hub",
    "data_hash": "0123456789abcdef" * 4,
    "dtype": "float16",
    "similarity": "difflib",
}
FIG5 = [{"source_ratio": ratio} for ratio in (0.1, 0.3, 0.5, 0.7, 1.0)] + [
    {"neighbors": m} for m in ("auto1", "auto3", "auto5", "auto8", 3, 8, 16, 32)
]
"""The graphs of `experiment=fig5`, as what differs from `GRAPH`."""


def cell_of(scorer: str = "snapkv", graph: dict | None = None, budget: int = 512, **options: Any) -> dict[str, Any]:
    """A cell as `CellSettings.describe` writes it; `graph` is what differs from `GRAPH`, None is no graph."""
    return {
        "scorer": {"name": scorer, **OPTIONS[scorer], **options},
        "budget": budget,
        "graphkv": None if graph is None else {**GRAPH, **graph},
        "granularity": "kv_head",
        "head_budget": "uniform",
    }


def cells_of(scorers: Sequence[str], graphs: Sequence[dict], **settings: Any) -> list[dict[str, Any]]:
    """Each scorer without graph and with each of some, every cell once."""
    cells = [cell_of(scorer, graph, **settings) for scorer in scorers for graph in (None, *graphs)]
    return [cell for i, cell in enumerate(cells) if cell not in cells[:i]]


def results(
    cells: Sequence[dict[str, Any]],
    tasks: Sequence[str],
    n: int = 12,
    *,
    model: str = "llama3",
    gain: float = 0.0,
    spread: float = 0.1,
    **facts: Any,
) -> ModelResults:
    """A complete run; cells with a graph score `gain` more than their scorer without, within `spread`."""
    rng = np.random.default_rng(0)
    samples = [(f"{task}/{i}", task) for task in tasks for i in range(n)]
    easy = rng.uniform(0.3, 0.6, len(samples))
    made = []
    for number, cell in enumerate(cells):
        scores = easy + rng.normal(0, spread, len(samples)) + (gain if cell["graphkv"] else 0)
        records = {
            sample: {
                "sample": sample,
                "task": task,
                "status": "ok",
                "scores": {"score": float(np.clip(score, 0, 1)), "score_true": 1.0},
                "kept": [cell["budget"] + 10, cell["budget"] - 10],
                "n_prompt": 2000,
                "truncated": False,
                "notes": {},
            }
            for (sample, task), score in zip(samples, scores, strict=True)
        }
        made.append(CellResult(f"cell {number}", cell, records))
    return ModelResults(model, {**FACTS, **facts}, samples, made)
