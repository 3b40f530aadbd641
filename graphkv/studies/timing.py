"""Times and memory that mean something: the device is waited for, repeats take turns, medians come with a spread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from graphkv.prefill import synchronize

Key = TypeVar("Key", bound=Hashable)

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux, proc(5)


@dataclass(frozen=True)
class Clock:
    """Wall time of steps on a device.

    Attributes
    ----------
    device
        It is waited for before each reading, since a GPU returns before its work is done.
    now
        Seconds since some moment.
    wait
        Waits for the device.
    """

    device: torch.device
    now: Callable[[], float] = time.perf_counter
    wait: Callable[[torch.device], None] = synchronize

    def time(self, step: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds that `step` takes, and what it returns."""
        self.wait(self.device)
        begin = self.now()
        result = step()
        self.wait(self.device)
        return self.now() - begin, result


class Spread(NamedTuple):
    """Median and quartiles of repeated measurements; quartiles are interpolated linearly between the values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        low, median, high = np.percentile(values, (25, 50, 75))
        return cls(float(median), float(low), float(high))

    def times(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(*(factor * value for value in self))


class Measured(NamedTuple):
    """Seconds of each repeat of a step, and what its last one returned."""

    seconds: list[float]
    result: Any


def take_turns(steps: Mapping[Key, Callable[[], Any]], clock: Clock, repeats: int, warmup: int) -> dict[Key, Measured]:
    """Time steps in rounds, every step once a round, so that a disturbance hits all of them alike.

    Parameters
    ----------
    steps
        What to time, by name.
    clock
        How.
    repeats
        Timed rounds.
    warmup
        Rounds before them that are not counted.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in steps}
    results: dict[Key, Any] = {}
    for number in range(warmup + repeats):
        for name, step in steps.items():
            elapsed, results[name] = clock.time(step)
            if number >= warmup:
                seconds[name].append(elapsed)
    return {name: Measured(seconds[name], results[name]) for name in steps}


def decode_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """The weights that a decode step reads: all of them, but of an input embedding that is not also the output's.

    A step looks up one row of an input embedding.
    """
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return [weight.data for weight in model.parameters() if tied or weight is not embedding]


def read_once(weights: Sequence[torch.Tensor]) -> None:
    """Read every weight from memory, to sum it up: no decode step that reads them can be much faster."""
    for weight in weights:
        weight.sum()


def memory_is(device: torch.device) -> str:
    """In words, what `peak_bytes` gives on a device."""
    if device.type == "cuda":
        return "most bytes that torch's allocator held during the phase, weights included"
    if os.access(_RESET, os.W_OK):
        return (
            "highest resident memory of the whole process during the phase (Linux VmHWM, reset before it), weights, "
            "Python and libraries included; freed memory that the allocator keeps counts too"
        )
    return "not measured on this system"


def peak_bytes(device: torch.device, step: Callable[[], Any]) -> int | None:
    """Most memory in use while `step` runs; see `memory_is` for what that is, None where it cannot be measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    if not os.access(_RESET, os.W_OK):
        return None
    _RESET.write_text("5")  # resets the high-water mark
    step()
    lines = _STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))  # it is in KiB
