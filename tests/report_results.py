"""Folders of results for the tests of the report: cells written as a run writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.records import CellStore

RUN = {
    "run": "0a1b2c3d",
    "git_commit": "c0ffee" * 6 + "beef",
    "git_dirty": True,
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
    "config": {"task": {"name": "needle", "score": "overlap"}},
}
GRAPH = {"source_ratio": 0.3, "neighbors": "auto3", "rounds": 1}
HOSTILE = (
    "</script><script>document.title='owned'</script><!--<script>",
    "</textarea></style><img src=x onerror=\"document.title='owned'\">",
    "\u2028\u2029\u202e\x00 ' \" & &lt; `${1}` {{ 1 }} 漢字 🦊",
    "",
)


def cell(scorer: str = "snapkv", graph: bool = False, budget: int | float = 128, **options: Any) -> dict[str, Any]:
    """Settings of a cell as a manifest has them."""
    return {
        "scorer": {"name": scorer, "window": 32, **options},
        "budget": 1.0 if scorer == "full" else budget,
        "graphkv": GRAPH if graph else None,
        "granularity": "kv_head",
        "head_budget": "uniform",
        "head_floor": None,
    }


def record(sample: str, score: float, **more: Any) -> dict[str, Any]:
    """A finished record of the needle task."""
    return {
        "sample": sample,
        "task": "needle",
        "status": "ok",
        "text": f"answer {score:.2f}",
        "empty": False,
        "scores": {"overlap": score, "rouge1": 10 * score},
        "ids": [1, 2, 3],
        "finish": "stop",
        "n_prompt_raw": 1000,
        "n_prompt": 1000,
        "truncated": False,
        "notes": {},
        "prompt_sha256": hashlib.sha256(sample.encode()).hexdigest(),
        "kept": [100.0, 156.0],
        "kept_per_head": None,
        "bytes": 2**20,
        "seconds": {"prefill": 0.5, "select": 0.25, "decode": 1.0},
        "decode_batch": 2,
        "references": ["eat a sandwich"],
        "meta": {"length": 1000, "depth": 50},
        "run": RUN["run"],
    } | more


def failure(sample: str, error: str = "RuntimeError: out of memory") -> dict[str, Any]:
    """A record of a sample that failed."""
    return {"sample": sample, "task": "needle", "status": "failed", "error": error, "run": RUN["run"]}


def write_cell(
    root: Path,
    settings: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    *,
    model: str = "tiny",
    task: str = "needle",
    run: Mapping[str, Any] = RUN,
    shard: tuple[int, int] | None = None,
    **shared: Any,
) -> Path:
    """Store records of a cell; returns its folder."""
    identity = {
        "model": {"name": model, "weights": "e3b0" * 16, "dtype": "float32"},
        "task": {"name": task, "data": "da7a" * 16, **shared.pop("of_task", {})},
        "decode": {"mode": "batch"},
        "cell": dict(settings),
        **shared,
    }
    label = settings["scorer"]["name"] + ("+graphkv" if settings["graphkv"] else "")
    with CellStore(root / model / task, label, identity, shard) as store:
        store.note_run(run)
        for one in records:
            store.append(dict(one))
    return store.folder


def small(root: Path) -> Path:
    """Three cells on four samples: full, and SnapKV without and with graph."""
    ids = [f"needle-{i}" for i in range(4)]
    for settings, scores in [
        (cell("full"), [1.0, 1.0, 1.0, 1.0]),
        (cell(), [0.5, 0.75, 0.25, 0.125]),
        (cell(graph=True), [0.25, 1.0, 0.0, 0.0]),
    ]:
        write_cell(root, settings, [record(sample, score) for sample, score in zip(ids, scores, strict=True)])
    return root
