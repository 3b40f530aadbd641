"""Table 3 laid out: for the terminal, and in markdown with the notes that its numbers need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from eval import tables
from eval.tables import MISSING

_STEPS = {
    True: "replayed as a CUDA graph, the time of recording it included",
    False: "its operations one by one, without a CUDA graph",
}


def as_text(cells: pd.DataFrame, batch: pd.DataFrame) -> str:
    """Both lengths and the batch, one below the other."""
    return "\n\n".join(f"{title}\n{tables.as_text(table)}" for title, table in _tables(cells, batch).items())


def as_markdown(cells: pd.DataFrame, batch: pd.DataFrame, facts: Mapping[str, Any]) -> str:
    """The same in markdown, with notes."""
    parts = [f"# Latency\n\n{_protocol(facts)}"]
    parts += [f"## {title}\n\n{tables.as_markdown(table)}" for title, table in _tables(cells, batch).items()]
    parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in _notes(facts)))
    return "\n\n".join(parts) + "\n"


def _tables(cells: pd.DataFrame, batch: pd.DataFrame) -> dict[str, pd.DataFrame]:
    rows = cells.to_dict("records")
    return {
        "Alone, fixed length": pd.DataFrame([_alone(row) for row in rows]),
        "Alone, what limits it, and memory": pd.DataFrame([_limits(row) for row in rows]),
        "Alone, natural length": pd.DataFrame([_natural(row) for row in rows]),
        "All cells as one batch": pd.DataFrame([_together(row) for row in batch.to_dict("records")]),
    }


def _alone(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "cell": row["cell"],
        "prefill ms": _spread(row, "prefill_ms"),
        "selection ms": _spread(row, "select_ms"),
        "copy ms": _spread(row, "copy_ms"),
        "decode ms/token": _spread(row, "fixed_ms_per_token"),
        "speed-up measured": _number(row["speedup"], "×"),
        "by bytes at most": _number(row["speedup_limit"], "×"),
    }


def _limits(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "cell": row["cell"],
        "KV MiB": _mib(row["kv_bytes"]),
        "MB moved/token": _number(row["moved_bytes_per_token"] / 1e6),
        "limit ms/token": _number(row["limit_ms_per_token"]),
        "of the limit": f"{row['share_of_limit']:.0%}",
        "peak MiB: prefill": _mib(row["peak_prefill_bytes"]),
        "selection": _mib(row["peak_select_bytes"]),
        "decode": _mib(row["peak_decode_bytes"]),
    }


def _natural(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "cell": row["cell"],
        "tokens": str(row["natural_tokens"]),
        "ended by": row["natural_finish"],
        "decode s": _spread(row, "natural_s"),
        "ms/token": _spread(row, "natural_ms_per_token"),
        "paper's decode s": MISSING if pd.isna(row["paper_s"]) else f"{row['paper_s']:.3f}",
    }


def _together(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "cells": str(row["rows"]),
        "one prefill ms": _spread(row, "prefill_ms"),
        "copy ms": _spread(row, "copy_ms"),
        "fixed: ms/step": _number(row["fixed_ms_per_step"]),
        "ms/token": _spread(row, "fixed_ms_per_token"),
        "limit ms/step": _number(row["limit_ms_per_step"]),
        "of the limit": f"{row['share_of_limit']:.0%}",
        "natural: tokens": str(row["natural_tokens"]),
        "s": _spread(row, "natural_s"),
        "ms/token ": _spread(row, "natural_ms_per_token"),
    }


def _protocol(facts: Mapping[str, Any]) -> str:
    busy = " The machine was busy with other work: its times are not those of an idle one."
    return (
        f"{facts['model']}; threads: {facts['threads']}, CPUs: {facts['cpus']}, load average before the measurement: "
        f"{facts['load_before']:.1f}; a prompt of {facts['prompt_tokens']} tokens. Medians "
        f"of {facts['repeats']} repeats with their quartiles, after {facts['warmup']} for warm-up; in each round "
        "every cell has its turn, and the device is waited for before each reading of the clock. Cells whose quartiles "
        "overlap are not told apart." + (busy if facts["load_before"] > facts["cpus"] / 2 else "")
    )


def _notes(facts: Mapping[str, Any]) -> list[str]:
    rate, size = facts["bandwidth_bytes_per_s"], facts["weight_bytes"]
    return [
        "Prefill: the prompt read with only what this method needs recorded. Selection: scores, graph, choice. Copy: "
        "what is kept, gathered into a cache of its own. All three happen once a prompt and are no part of decode.",
        f"Fixed length: {facts['new_tokens']} tokens, stop tokens off; a token's time is the answer's without the "
        "copy, over the tokens after the first, which the prefill gives.",
        f"Limit: {size / 1e6:,.1f} MB of weights and the kept cache, read once a token at {rate / 1e9:,.2f} GB/s, "
        "which is what summing up every weight got in the same rounds. A share above 100 % means that decoding reads "
        "faster than that.",
        "By bytes at most: what they allow at batch 1, weights and full cache over weights and kept cache. A measured "
        "speed-up beyond it is noise, or work that is not reading.",
        f"Natural length: the model's stop tokens, at most {facts['longest']} tokens. The paper's Table 3 (p. 8; "
        "QMSum, 512 tokens kept, an H20) gives total decode seconds at natural length and nothing a token, so a method "
        "that answers in fewer tokens looks faster: compare the column of tokens. Its seconds are of another model, "
        "prompts and hardware, and no target here.",
        f"Peak memory: {facts['peak_memory_is']}. The whole prompt's cache stays while a cell decodes, since other "
        "cells are cut from it: KV MiB is what a cell alone would hold.",
        "As one batch: each step reads the weights once for all cells; at natural length cells leave the batch "
        "(with a CUDA graph, when half of them are done).",
        f"Step of decoding: {_STEPS[facts['cuda_graph']]}.",
    ]


def _spread(row: Mapping[str, Any], name: str) -> str:
    """`12.3 [11.9, 13.0]`, all three with the digits of the median."""
    values = [row[name], row[f"{name}_q1"], row[f"{name}_q3"]]
    if any(map(math.isnan, values)):
        return MISSING
    digits = _digits(values[0])
    median, low, high = (f"{value:,.{digits}f}" for value in values)
    return f"{median} [{low}, {high}]"


def _number(value: float | None, unit: str = "") -> str:
    return MISSING if pd.isna(value) else f"{value:,.{_digits(value)}f}{unit}"


def _digits(value: float) -> int:
    """Decimals that leave three significant digits."""
    return max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0


def _mib(size: float | None) -> str:
    return MISSING if pd.isna(size) else f"{size / 2**20:,.1f}"
