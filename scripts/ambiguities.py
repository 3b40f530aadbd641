"""What the readings of the paper's open questions change: kept sets and needle scores on the embedded model.

    python scripts/ambiguities.py [--budget 256] [--lengths 1000 2000] [--depths 0 50 100] [--scorer snapkv]

For each reading of a question (docstring of `graphkv.graph.Graph`; `scorers/knorm.py` for KNorm's map) it prints, as a
markdown table: the share of the kept past tokens that the default reading keeps too (mean over layers and heads),
the share that no re-ranking would keep, and the mean needle score (overlap) over the prompts.
"""

from __future__ import annotations

import argparse
from functools import reduce
from operator import or_
from statistics import mean

import yaml

import graphkv
from eval import needle
from graphkv.config import CONF, CellSettings, cell_settings

# Question of the paper → readings: options of the graph, of the scorer, or of the cell.
GRAPH = {
    "default reading": [{}],
    "several sources": [{"accumulate": "sum"}, {"accumulate": "last"}],
    "sources receive decay": [{"source_immune": True}],
    "sources chosen anew": [{"rounds": 2}, {"rounds": 2, "reselect": True}],
    "rounds": [{"rounds": 3}],
    "k is a share of": [{"k_of": "budget"}],
    "m": [{"neighbors": 1}, {"neighbors": 3}, {"neighbors": 10}, {"neighbors": "all"}],
    "negative cosines": [{"clamp": False}],
    "rotary embedding": [{"rope": "pre"}],
    "centre": [{"center": "mean"}, {"center": "baseline"}],
    "pooling": [{"space": "before"}],
    "signal (Table 2)": [{"signal": "enhance"}, {"signal": "evict"}],
    "edge (Fig. 8)": [{"edge": edge} for edge in ("qk", "qq", "kv", "vv")],
    "Fig. 3": [{"accumulate": "sum", "source_immune": True}],
}
KNORM = ("inverse", "max_minus", "softmax", "rank")


def cells_of(scorer: str, budget: int) -> list[tuple[str, str, CellSettings]]:
    """(question, reading, cell): no graph first, then the default reading, then the others."""
    cells = [("no re-ranking", "", cell_settings(scorer, budget))]
    for question, readings in GRAPH.items():
        for options in readings:
            words = ", ".join(f"{key}={value}" for key, value in options.items())
            cells.append((question, words, cell_settings(scorer, budget, options)))
    cells.append(("granularity", "query_head", cell_settings(scorer, budget, {}, granularity="query_head")))
    for positive in KNORM:
        options = {"positive": positive, "window": 32}
        cells.append(("KNorm's map", positive, cell_settings("knorm", budget, {}, options)))
    cells.append(("KNorm's window", "none", cell_settings("knorm", budget, {})))
    cells.append(("KNorm's window", "32, no graph", cell_settings("knorm", budget, None, {"window": 32})))
    return cells


def shared(cell: graphkv.Cell, other: graphkv.Cell, n: int) -> float | None:
    """Share of the past tokens that `cell` keeps and `other` keeps too; None for different heads."""
    shares = []
    for mine, theirs in zip(cell.kept, other.kept, strict=True):
        if len(mine) != len(theirs):
            return None
        for a, b in zip(mine.tolist(), theirs.tolist(), strict=True):
            past = {position for position in a if position < n - cell.settings.scorer.window}
            shares.append(len(past & set(b)) / len(past))
    return mean(shares)


def main() -> None:
    """Run the readings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 50, 100])
    parser.add_argument("--scorer", default="snapkv")
    options = parser.parse_args()

    engine = graphkv.Engine.from_pretrained("smollm2")
    config = yaml.safe_load((CONF / "task/needle.yaml").read_text(encoding="utf-8"))
    config |= {"lengths": options.lengths, "depths": options.depths}
    task = needle.build(config, engine.tokenizer, engine.info.max_positions)
    readings = cells_of(options.scorer, options.budget)
    needs = reduce(or_, (settings.needs for _, _, settings in readings))
    rows: list[list[tuple[float | None, float | None, float]]] = [[] for _ in readings]
    for number, sample in enumerate(task.samples, 1):
        prompt = engine.prefill(task.encode(sample).ids, window=0, needs=needs)
        cells = [engine.cut(prompt, settings) for _, _, settings in readings]
        answers = engine.decode(prompt, cells, max_new_tokens=sample.max_new_tokens)
        plain, default = cells[0], cells[1]
        for row, cell, answer in zip(rows, cells, answers, strict=True):
            score = task.score(sample, engine.text(answer.ids))["overlap"]
            row.append((shared(cell, default, prompt.n), shared(cell, plain, prompt.n), score))
        print(f"<!-- {number}/{len(task.samples)} {sample.id} -->", flush=True)

    print(f"\nsmollm2, {options.scorer} at {options.budget} tokens, {len(task.samples)} prompts\n")
    print("| question | reading | kept as in the default | kept as without graph | needle overlap |")
    print("| --- | --- | ---: | ---: | ---: |")
    for (question, words, _), row in zip(readings, rows, strict=True):
        as_default, as_plain, scores = zip(*row, strict=True)
        shares = ["—" if None in column else f"{mean(column):.3f}" for column in (as_default, as_plain)]
        print(f"| {question} | {words} | {' | '.join(shares)} | {mean(scores):.3f} |")


if __name__ == "__main__":
    main()
