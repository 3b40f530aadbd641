"""Table 3: what a method costs. Prefill, selection and decoding apart, at a fixed and at natural length.

The paper's Table 3 (PDF p. 8) gives total seconds of answers of natural length, in which shorter answers pass for
faster decoding. Here a token's time comes from answers of one fixed length with stop tokens off; natural length stands
beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch

from eval.errors import UserError
from graphkv import fixed_step
from graphkv.config import CellSettings, RunConfig
from graphkv.decode import Generation
from graphkv.engine import Cell, Engine
from graphkv.prefill import Prefill, Scoring
from graphkv.studies import latency_table
from graphkv.studies.output import output
from graphkv.studies.prompts import PromptOptions, read
from graphkv.studies.timing import (
    Clock,
    Measured,
    Spread,
    decode_weights,
    memory_is,
    peak_bytes,
    read_once,
    take_turns,
)

PAPER = {
    ("pyramidkv", False): 5.133,
    ("pyramidkv", True): 5.265,
    ("snapkv", False): 5.474,
    ("snapkv", True): 4.912,
    ("knorm", False): 6.031,
    ("knorm", True): 5.095,
}
"""Decode seconds of the paper's Table 3 by scorer and whether GraphKV re-ranks: QMSum, 512 tokens kept."""

BATCH = "all cells as one batch"
READ = "read once"


@dataclass(frozen=True)
class Table3(PromptOptions):
    """Latency of every cell of the command, alone and all of them as one batch.

    Parameters
    ----------
    new_tokens
        Length of the answers of fixed length, stop tokens off.
    longest
        Limit of the answers of natural length.
    repeats
        How often everything is timed.
    warmup
        How often it is done before that without being timed.
    """

    new_tokens: int = 32
    longest: int = 128
    repeats: int = 5
    warmup: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.new_tokens, self.longest) < 2:
            raise ValueError(f"new_tokens and longest must be 2 or more, not {self.new_tokens} and {self.longest}")
        if self.repeats < 1 or self.warmup < 0:
            raise ValueError(f"repeats must be 1 or more and warmup 0 or more, not {self.repeats} and {self.warmup}")

    def check(self, configs: Sequence[RunConfig]) -> None:
        """Refuse eviction while decoding, which the limits do not describe."""
        if any(config.decode.evict_every is not None for config in configs):
            raise UserError("study table3 times eviction after the prefill only: leave decode.evict_every=null")

    def run(self, engine: Engine, configs: Sequence[RunConfig]) -> Iterator[Path]:
        """Measure, then write and print the table; see `graphkv.studies.Study`."""
        settings = list(dict.fromkeys(config.cell for config in configs))
        ids = self.ids(engine.info, self.tokens, max(self.new_tokens, self.longest))
        config = configs[0]
        bench = Bench(engine, self, Clock(engine.model.device), config.prefill.chunk, config.decode.cuda_graph)
        cells, batch, repeats = bench.measure(ids, settings)
        out = output(configs[0], engine.info, "tables", settings, [ids])
        facts = bench.facts(len(ids))
        print(latency_table.as_text(cells, batch))
        yield out.text(latency_table.as_markdown(cells, batch, facts), ".md")
        yield out.csv(cells)
        yield out.csv(batch, "batch")
        yield out.csv(repeats, "repeats")
        yield out.facts(**facts)


@dataclass
class Bench:
    """The measurements of one table.

    Attributes
    ----------
    engine
        The model.
    options
        Lengths and repeats.
    clock
        Times steps on the model's device.
    chunk
        Tokens that a prefill reads at a time.
    cuda_graph
        Replay the step of decoding as a CUDA graph, where answers of both lengths are long enough for one.
    weights, weight_bytes
        What a decode step reads beside the cache.
    bandwidth
        Bytes a second at which `measure` read the weights.
    load
        The machine's load average of one minute, before anything was done.
    """

    engine: Engine
    options: Table3
    clock: Clock
    chunk: int | None = None
    cuda_graph: bool = True

    def __post_init__(self) -> None:
        shorter = min(self.options.new_tokens, self.options.longest)
        self.cuda_graph = self.cuda_graph and self.clock.device.type == "cuda" and shorter > fixed_step.WORTH
        self.load = psutil.getloadavg()[0]
        self.weights = decode_weights(self.engine.model)
        self.weight_bytes = sum(weight.nbytes for weight in self.weights)
        self.bandwidth = float("nan")

    def measure(
        self, ids: Sequence[int], settings: Sequence[CellSettings]
    ) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """Time everything.

        Returns
        -------
        tuple of pandas.DataFrame
            One row a cell, one row for the batch of all cells, and the seconds of every repeat.
        """
        readings, read_peaks = self._phase({cell.needs: partial(self._read_and_drop, ids, cell) for cell in settings})
        shared = self._turns({"prefill": partial(read, self.engine, ids, settings, self.chunk)})
        prefill = shared["prefill"].result
        selections, select_peaks = self._phase({cell: partial(self._cut, prefill, cell) for cell in settings})
        cells = [selections[cell].result for cell in settings]
        steps = {cell.settings: self._steps(prefill, [cell]) for cell in cells}
        turns = {(cell, kind): step for cell in settings for kind, step in steps[cell].items()}
        # The weights have a turn among the answers, so that what slows these slows their limit too.
        answers = self._turns({READ: partial(read_once, self.weights), **turns})
        self.bandwidth = self.weight_bytes / Spread.of(answers[READ].seconds).median

        rows, repeats = [], []
        for cell in cells:
            key = cell.settings
            phases = {"prefill": readings[key.needs], "select": selections[key]}
            phases |= {kind: answers[key, kind] for kind in steps[key]}
            peaks = {"prefill": read_peaks[key.needs], "select": select_peaks[key]}
            peaks["decode"] = peak_bytes(self.clock.device, steps[key]["fixed"])
            rows.append(self._row(cell, phases) | {f"peak_{phase}_bytes": size for phase, size in peaks.items()})
            repeats.append((key.label, phases))
        self._compare(rows, cells, sum(view.keys.nbytes + view.values.nbytes for view in prefill.layers))
        together = shared | self._turns(self._steps(prefill, cells))
        repeats += [(BATCH, together), ("weights", {READ: answers[READ]})]
        return pd.DataFrame(rows), pd.DataFrame([self._batch_row(cells, together)]), _repeats(repeats)

    def _phase(self, steps: Mapping[Any, Callable[[], Any]]) -> tuple[dict[Any, Measured], dict[Any, int | None]]:
        """Times of steps, and the peak memory of each."""
        return self._turns(steps), {name: peak_bytes(self.clock.device, step) for name, step in steps.items()}

    def _turns(self, steps: Mapping[Any, Callable[[], Any]]) -> dict[Any, Measured]:
        return take_turns(steps, self.clock, self.options.repeats, self.options.warmup)

    def _read_and_drop(self, ids: Sequence[int], cell: CellSettings) -> None:
        """Read a prompt for one cell; nothing of it stays, so that it does not count as another's memory."""
        read(self.engine, ids, [cell], self.chunk)

    def _cut(self, prefill: Prefill, cell: CellSettings) -> Cell:
        """Score, re-rank and select; scores that another cell left behind are not used."""
        return self.engine.cut(replace(prefill, scoring=Scoring()), cell)

    def _steps(self, prefill: Prefill, cells: Sequence[Cell]) -> dict[str, Callable[[], list[Generation]]]:
        """Answers of one token, for which what is kept is copied and nothing else, of fixed and of natural length."""
        decode = partial(self.engine.decode, prefill, cells, cuda_graph=self.cuda_graph)
        return {
            "copy": partial(decode, max_new_tokens=1, stop_ids=()),
            "fixed": partial(decode, max_new_tokens=self.options.new_tokens, stop_ids=()),
            "natural": partial(decode, max_new_tokens=self.options.longest),
        }

    def _row(self, cell: Cell, phases: Mapping[str, Measured]) -> dict[str, Any]:
        (answer,) = phases["natural"].result
        row = {"cell": cell.settings.label, "kept_per_layer": cell.achieved, "kv_bytes": cell.bytes}
        for phase in ("prefill", "select", "copy"):
            row |= _columns(f"{phase}_ms", Spread.of(phases[phase].seconds).times(1e3))
        row |= self._decoding(phases, self.options.new_tokens - 1, len(answer.ids) - 1)
        row |= {"natural_tokens": len(answer.ids), "natural_finish": answer.finish}
        return row | {"paper_s": PAPER.get((cell.settings.name, cell.settings.graph is not None))}

    def _decoding(self, phases: Mapping[str, Measured], fixed: int, natural: int) -> dict[str, float | None]:
        """Milliseconds a token, the copy taken off, over the tokens after the first; and whole seconds."""
        copied = Spread.of(phases["copy"].seconds).median
        columns = {}
        for kind, tokens in (("fixed", fixed), ("natural", natural)):
            each = [(seconds - copied) / tokens if tokens else float("nan") for seconds in phases[kind].seconds]
            columns |= _columns(f"{kind}_ms_per_token", Spread.of(each).times(1e3))
        return columns | _columns("natural_s", Spread.of(phases["natural"].seconds))

    def _compare(self, rows: Sequence[dict[str, Any]], cells: Sequence[Cell], full_bytes: int) -> None:
        """Add limits: reading weights and kept cache once a token, and what that allows against the full cache."""
        pairs = zip(rows, cells, strict=True)
        full = [row["fixed_ms_per_token"] for row, cell in pairs if cell.settings.scorer.keeps_all]
        for row, cell in zip(rows, cells, strict=True):
            moved = self.weight_bytes + cell.bytes
            limit = moved / self.bandwidth * 1e3
            row |= {"moved_bytes_per_token": moved, "limit_ms_per_token": limit}
            row["share_of_limit"] = limit / row["fixed_ms_per_token"]
            row["speedup_limit"] = (self.weight_bytes + full_bytes) / moved
            row["speedup"] = full[0] / row["fixed_ms_per_token"] if full else None

    def _batch_row(self, cells: Sequence[Cell], phases: Mapping[str, Measured]) -> dict[str, Any]:
        """The batch: a step writes one token of every cell and reads the weights once."""
        lengths = [len(answer.ids) for answer in phases["natural"].result]
        row = {"rows": len(cells), "kv_bytes": sum(cell.bytes for cell in cells)}
        for phase in ("prefill", "copy"):
            row |= _columns(f"{phase}_ms", Spread.of(phases[phase].seconds).times(1e3))
        row |= self._decoding(phases, len(cells) * (self.options.new_tokens - 1), sum(lengths) - len(cells))
        row["fixed_ms_per_step"] = row["fixed_ms_per_token"] * len(cells)
        limit = (self.weight_bytes + row["kv_bytes"]) / self.bandwidth * 1e3
        return row | {
            "limit_ms_per_step": limit,
            "share_of_limit": limit / row["fixed_ms_per_step"],
            "natural_tokens": sum(lengths),
        }

    def facts(self, n: int) -> dict[str, Any]:
        """What the table's notes mention, as JSON values."""
        config = self.engine.info.config
        return {
            "model": f"{self.engine.info.label}, {config.dtype}, {config.attention} prefill, on {self.clock.device}",
            "threads": torch.get_num_threads(),
            "cpus": psutil.cpu_count(),
            "load_before": self.load,
            "prompt_tokens": n,
            "new_tokens": self.options.new_tokens,
            "longest": self.options.longest,
            "repeats": self.options.repeats,
            "warmup": self.options.warmup,
            "cuda_graph": self.cuda_graph,
            "weight_bytes": self.weight_bytes,
            "bandwidth_bytes_per_s": self.bandwidth,
            "peak_memory_is": memory_is(self.clock.device),
        }


def _columns(name: str, spread: Spread) -> dict[str, float]:
    """Median and quartiles as three columns."""
    return {name: spread.median, f"{name}_q1": spread.low, f"{name}_q3": spread.high}


def _repeats(phases: Sequence[tuple[str, Mapping[str, Measured]]]) -> pd.DataFrame:
    rows = [
        (cell, phase, number, seconds)
        for cell, measured in phases
        for phase, found in measured.items()
        for number, seconds in enumerate(found.seconds)
    ]
    return pd.DataFrame(rows, columns=["cell", "phase", "repeat", "seconds"])
