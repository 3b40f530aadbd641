"""What a measure of the cells of a sample works on, and the usual one: let them answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.samples import Encoded, Sample, Task
from graphkv.config import RunConfig
from graphkv.engine import Cell, Engine
from graphkv.prefill import Prefill


@dataclass(frozen=True)
class Context:
    """A sample that was read: what a measure works on, beside the cells.

    `memo` holds what a measure computes once a sample, for all batches of cells.
    """

    engine: Engine
    config: RunConfig
    task: Task
    sample: Sample
    encoded: Encoded
    prefill: Prefill
    memo: dict[str, Any] = field(default_factory=dict)


def answer(context: Context, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Let every cell answer, and score the texts; one part of a record a cell."""
    config, task, sample, encoded = context.config, context.task, context.sample, context.encoded
    answers = context.engine.decode(
        context.prefill,
        cells,
        max_new_tokens=sample.max_new_tokens,
        stop_ids=encoded.stop_ids,
        min_new_tokens=encoded.min_new_tokens,
        mode=config.decode.mode,
        evict_every=config.decode.evict_every,
        cuda_graph=config.decode.cuda_graph,
        beyond_positions=encoded.notes.get("overflow", 0) > 0,
    )
    parts = []
    for found in answers:
        text = task.text(found.ids)
        parts.append(
            {
                "text": text,
                "empty": not text.strip(),
                "scores": task.score(sample, text),
                "ids": found.ids,
                "finish": found.finish,
                "seconds": {"decode": found.seconds},
                "decode_batch": found.batch,
            }
        )
    return parts
