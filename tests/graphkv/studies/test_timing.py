"""The latency helper with a clock that is told the time: what is read when, and what becomes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphkv.studies.timing import Clock, Spread, decode_weights, memory_is, peak_bytes, take_turns

CPU = torch.device("cpu")


class Fake:
    """A clock whose steps take the seconds that they name, and a log of what happened."""

    def __init__(self) -> None:
        self.seconds, self.log = 100.0, []
        self.clock = Clock(CPU, now=self._now, wait=lambda device: self.log.append("wait"))

    def _now(self) -> float:
        self.log.append("now")
        return self.seconds

    def step(self, name: str, *seconds: float):
        """A step that takes each of `seconds` in turn."""
        left = list(seconds)

        def run() -> str:
            self.log.append(name)
            self.seconds += left.pop(0)
            return f"{name}{len(left)}"

        return run


def test_the_device_is_waited_for_before_each_reading():
    # Case F2.
    fake = Fake()
    assert fake.clock.time(fake.step("work", 2.5)) == (2.5, "work0")
    assert fake.log == ["wait", "now", "work", "wait", "now"]


def test_steps_take_turns_after_the_warmup():
    fake = Fake()
    measured = take_turns({"a": fake.step("a", 9, 1, 2), "b": fake.step("b", 9, 5, 7)}, fake.clock, repeats=2, warmup=1)
    assert [entry for entry in fake.log if entry in "ab"] == ["a", "b", "a", "b", "a", "b"]
    assert measured["a"].seconds == [1, 2] and measured["b"].seconds == [5, 7]
    assert measured["b"].result == "b0"


@pytest.mark.parametrize(
    ("values", "expected"),
    [([5.0], (5, 5, 5)), ([4.0, 1.0, 3.0, 2.0], (2.5, 1.75, 3.25)), ([1.0, 2.0, 3.0, 4.0, 100.0], (3, 2, 4))],
)
def test_spreads_of_known_lists(values, expected):
    assert tuple(Spread.of(values)) == expected
    assert tuple(Spread.of(values).times(1e3)) == tuple(1e3 * value for value in expected)


def test_a_step_reads_an_embedding_only_if_it_is_the_output_too():
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    for tied in (True, False):
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
        layers = sum(parameter.numel() for parameter in model.model.layers.parameters()) + 16
        assert sum(weight.numel() for weight in decode_weights(model)) == layers + 50 * 16


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's resettable high-water mark")
def test_peak_memory_of_a_process_is_reset_before_each_step():
    def allocate() -> None:
        torch.ones(50_000_000)  # 200 MB, well above what the allocator keeps

    high = peak_bytes(CPU, allocate)
    low = peak_bytes(CPU, lambda: None)
    assert high - low > 150e6
    assert "VmHWM" in memory_is(CPU)


def test_memory_that_cannot_be_measured_is_not_invented(monkeypatch):
    monkeypatch.setattr("graphkv.studies.timing._RESET", Path("/nowhere"))
    assert peak_bytes(CPU, lambda: None) is None
    assert memory_is(CPU) == "not measured on this system"
