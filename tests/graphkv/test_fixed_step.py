"""The decode step of fixed shapes: it writes what the plain step writes, and a recording of it stays valid."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphkv import decode, fixed_step
from graphkv.attention import forward
from graphkv.cache import RaggedCache
from graphkv.config import cell_settings
from graphkv.fixed_step import FixedStep

KINDS = ["plain", "ragged heads", "corrected", "query heads"]


@pytest.fixture(scope="module")
def read(tiny):
    return tiny.prefill(" ".join(f"The barge of {word} came late." for word in "abcdefgh" * 4))


def cells_of(engine, read, kind: str):
    """Rows of different lengths, in layers that differ too."""
    options = {
        "plain": {},
        "ragged heads": {"head_budget": "ada"},
        "corrected": {"bias": "mass", "fold": True},
        "query heads": {"granularity": "query_head"},
    }[kind]
    names = [("full", 64), ("snapkv", 48), ("pyramidkv", 100), ("knorm", 200), ("snapkv", 49)]
    return [engine.cut(read, cell_settings(name, budget, **options)) for name, budget in names]


@contextmanager
def fixed(monkeypatch, steps: int):
    with monkeypatch.context() as patch:
        patch.setattr(fixed_step, "possible", lambda model, cache, steps: not cache.policies)
        patch.setattr(fixed_step, "STEPS", steps)
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 5, 128])
def test_fixed_shapes_write_what_growing_ones_write(tiny, read, kind, steps, monkeypatch):
    cells = cells_of(tiny, read, kind)
    free = tiny.decode(read, cells, max_new_tokens=20, stop_ids=())
    stop = {free[1].ids[3], free[3].ids[9]}  # rows are done in the middle
    plain = tiny.decode(read, cells, max_new_tokens=20, stop_ids=stop, min_new_tokens=2)
    with fixed(monkeypatch, steps):
        same = tiny.decode(read, cells, max_new_tokens=20, stop_ids=stop, min_new_tokens=2)
    assert [(a.ids, a.finish) for a in same] == [(a.ids, a.finish) for a in plain]
    assert len({len(a.ids) for a in plain}) > 1


def test_on_the_real_model(smol, smol_prompt, monkeypatch):
    names = [("full", 64), ("snapkv", 96), ("pyramidkv", 128)]
    cells = [smol.compress(smol_prompt, *name) for name in names]
    plain = smol.decode(smol_prompt, cells, max_new_tokens=12)
    with fixed(monkeypatch, 7):
        same = smol.decode(smol_prompt, cells, max_new_tokens=12)
    assert [a.ids for a in same] == [a.ids for a in plain]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_plain_step(tiny, read, kind):
    cells = cells_of(tiny, read, kind)
    kept, corrections = [cell.kept for cell in cells], [cell.correction for cell in cells]
    caches = [RaggedCache(read, kept, 8, corrections=corrections) for _ in range(2)]
    step = FixedStep(tiny.model, caches[0])
    with torch.inference_mode():
        for token in range(5, 13):
            tokens = [token + row for row in range(len(cells))]
            plain = forward(tiny.model, torch.tensor(tokens)[:, None], caches[1].position, caches[1])[:, -1].float()
            caches[1].advance(1)
            torch.testing.assert_close(step(tokens), plain, rtol=1e-4, atol=1e-5)


class Operations(TorchDispatchMode):
    """Notes every operation with its shapes and numbers, as a CUDA graph would freeze them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        self.seen.append((str(func), *(tuple(x.shape) if isinstance(x, torch.Tensor) else str(x) for x in leaves)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_of_one_step_serves_the_next_ones(tiny, read, kind):
    cells = cells_of(tiny, read, kind)
    cache = RaggedCache(read, [c.kept for c in cells], 40, corrections=[c.correction for c in cells])
    step = FixedStep(tiny.model, cache)
    recordings = []
    with torch.inference_mode():
        for token in range(3, 9):
            step([token] * len(cells))
            if token in (4, 8):
                with Operations() as operations:
                    step._run()
                recordings.append(operations.seen)
    assert len(recordings[0]) > 50 and recordings[0] == recordings[1]
    reads = [name for name, *_ in recordings[0] if "_local_scalar_dense" in name or "nonzero" in name]
    assert not reads, "the step waits for the device"
    # The check sees what it is there for: the plain step's shapes grow.
    with torch.inference_mode():
        cache.frame, plain = None, []
        for _ in range(2):
            with Operations() as operations:
                decode._step(tiny.model, cache, [3] * len(cells))
            plain.append(operations.seen)
    assert plain[0] != plain[1]


def test_a_plain_forward_reads_nothing_back_from_the_device(tiny, read):
    with torch.inference_mode(), Operations() as operations:
        tiny.prefill(list(read.ids))
        read_back = [name for name, *_ in operations.seen if "_local_scalar_dense" in name]
    assert not read_back


def test_no_recording_where_it_cannot_be_or_does_not_pay(tiny, read):
    cache = RaggedCache(read, [tiny.compress(read, "snapkv", 48).kept], 100)
    assert not fixed_step.possible(tiny.model, cache, 100)  # no CUDA device


def test_rows_that_are_evicted_have_no_fixed_shapes(tiny, read):
    cell = tiny.compress(read, "tova", 48)
    policies = [decode.Policy(cell.settings.scorer, [48] * len(cell.kept))]
    with pytest.raises(ValueError, match="evicted"):
        RaggedCache(read, [cell.kept], 10, policies).fix(4)


class Recorder:
    """Stands in for `torch.cuda`: streams, and graphs that note how they are recorded and replayed."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.failure = failure
        self.stream_now = "here"

    @contextmanager
    def device(self, device):
        self.calls.append(f"device {device}")
        yield

    def current_stream(self):
        return self

    def wait_stream(self, other):
        self.calls.append("wait")

    def set_stream(self, stream):
        self.calls.append("set_stream")

    @contextmanager
    def stream(self, stream):
        yield

    def CUDAGraph(self):
        return self

    def replay(self):
        self.calls.append("replay")
        self.replayed()

    @contextmanager
    def graph(self, graph, stream):
        self.calls.append("record")
        try:
            yield
        except RuntimeError:
            raise RuntimeError("failed due to a previous error during capture") from None


@pytest.fixture
def cuda(monkeypatch):
    """A FixedStep that believes in CUDA, on the CPU: a replay runs the step, as a graph would."""
    fake = Recorder()
    for name in ("device", "current_stream", "set_stream", "stream", "graph", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(fixed_step, "_stream", lambda device: fake)
    monkeypatch.setattr(fixed_step, "possible", lambda model, cache, steps: model not in fixed_step._REFUSED)
    monkeypatch.setattr(fixed_step, "_REFUSED", set())
    monkeypatch.setattr(fixed_step, "WORTH", 4)
    begin = FixedStep.__init__

    def believe(self, model, cache):
        begin(self, model, cache)
        self.record = True
        fake.replayed = lambda: self.logits.copy_(self._run())

    monkeypatch.setattr(FixedStep, "__init__", believe)
    return fake


def test_a_step_is_recorded_once_for_many_tokens_and_anew_when_rows_leave(tiny, read, cuda, monkeypatch):
    monkeypatch.setattr(fixed_step, "STEPS", 10)
    cells = cells_of(tiny, read, "plain")
    plain = tiny.decode(read, cells, max_new_tokens=30, stop_ids=(), cuda_graph=False)
    assert not cuda.calls
    same = tiny.decode(read, cells, max_new_tokens=30, stop_ids=())
    assert [a.ids for a in same] == [a.ids for a in plain]
    # 29 steps in frames of 10, all of which have 4 tokens or more to come.
    assert cuda.calls.count("record") == 3 and cuda.calls.count("replay") == 29
    cuda.calls.clear()
    stop = {answer.ids[5] for answer in plain[:4]}
    ends = tiny.decode(read, cells, max_new_tokens=30, stop_ids=stop, cuda_graph=False)
    assert [a.ids for a in tiny.decode(read, cells, max_new_tokens=30, stop_ids=stop)] == [a.ids for a in ends]


def test_a_step_that_cannot_be_recorded_runs_without_and_says_why(tiny, read, cuda, monkeypatch, capsys):
    run, calls = FixedStep._run, []

    def fail(self):
        calls.append(1)
        if len(calls) == 2:  # the first run is the warm-up
            raise RuntimeError("this kernel waits for the host\nand more")
        return run(self)

    monkeypatch.setattr(FixedStep, "_run", fail)
    cells = cells_of(tiny, read, "plain")
    plain = tiny.decode(read, cells, max_new_tokens=12, stop_ids=(), cuda_graph=False)
    same = tiny.decode(read, cells, max_new_tokens=12, stop_ids=())
    assert [a.ids for a in same] == [a.ids for a in plain]
    said = capsys.readouterr().err
    assert said == "decoding goes on without a CUDA graph: this kernel waits for the host\n"
    assert cuda.calls.count("set_stream") == 1
    tiny.decode(read, cells, max_new_tokens=12, stop_ids=())  # tried once for a model
    assert capsys.readouterr().err == "" and cuda.calls.count("record") == 1
