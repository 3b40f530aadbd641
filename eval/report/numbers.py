"""From records to the numbers of the page: means, intervals, differences, budgets, bytes, seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from eval.catalogue import Record, StoredCell
from eval.stats import Difference, mean_interval, paired_difference

Records = Mapping[str, Record]

_MAIN = ("score", "overlap", "kl")
"""Main scores of the tasks: LongBench, needle (unless its configuration names another), fidelity."""


def main_score(cells: Sequence[StoredCell], records: Sequence[Records]) -> str | None:
    """The score that a group of cells is compared by: what the runs ask for, else the task's own; None without any."""
    found = list(dict.fromkeys(name for by_id in records for record in by_id.values() for name in scores_of(record)))
    asked = [run.get("config", {}).get("task", {}).get("score") for cell in cells for run in cell.runs]
    return next((name for name in [*asked[-1:], *_MAIN, *found] if name in found), None)


def scores_of(record: Record) -> Mapping[str, float]:
    """Scores of a finished record; a failed one has none."""
    return record["scores"] if record["status"] == "ok" else {}


def numbers(records: Records, asked: Collection[str], score: str | None) -> dict[str, Any]:
    """What a row of the table of cells shows; JSON values.

    Parameters
    ----------
    records
        Of the cell, by sample id.
    asked
        Ids of all samples of its group.
    score
        The main score.

    Returns
    -------
    dict
        `n` finished samples of `asked`, `failed`; `scores` by name, and `low` and `high`, the 95 % interval of the main
        one: None or empty where a sample is missing, since nothing is averaged over what is left. Means over the
        finished samples: `kept` tokens a layer, their `share` of the prompt, `layers` (kept tokens, layer by layer),
        `bytes`, `tokens` of the answer, `seconds` a sample by part. Counts: `finish`, `empty` answers.
    """
    done = [records[sample] for sample in asked if sample in records and records[sample]["status"] == "ok"]
    row: dict[str, Any] = {
        "n": len(done),
        "asked": len(asked),
        "failed": sum(record["status"] == "failed" for record in records.values()),
        "scores": {},
        "low": None,
        "high": None,
    }
    if not done:
        return row
    if len(done) == len(asked):
        names = set.intersection(*(set(record["scores"]) for record in done))
        row["scores"] = {name: fmean(record["scores"][name] for record in done) for name in sorted(names)}
    if score in row["scores"]:
        interval = mean_interval([[record["scores"][score] for record in done]])
        row["low"], row["high"] = interval or (None, None)
    kept = [fmean(record["kept"]) for record in done]
    return row | {
        "kept": fmean(kept),
        "share": fmean(tokens / record["n_prompt"] for tokens, record in zip(kept, done, strict=True)),
        "layers": [round(fmean(layer), 1) for layer in zip(*(record["kept"] for record in done), strict=True)],
        "bytes": fmean(record["bytes"] for record in done),
        "tokens": fmean(len(record.get("ids", ())) for record in done),
        "seconds": {
            part: fmean(record["seconds"].get(part, 0.0) for record in done)
            for part in dict.fromkeys(part for record in done for part in record["seconds"])
        },
        "finish": dict(Counter(record["finish"] for record in done if "finish" in record)),
        "empty": sum(bool(record.get("empty")) for record in done),
    }


def change(records: Records, base: Records, asked: Collection[str], score: str) -> Difference | None:
    """Main score minus that of the same cell without graph, paired by sample; None where either lacks a sample."""
    rows = [[scores_of(side[sample]).get(score) for side in (records, base) if sample in side] for sample in asked]
    if any(len(pair) < 2 or None in pair for pair in rows):
        return None
    return paired_difference([[ours - theirs for ours, theirs in rows]])
