"""The grid: what a batch of cells stores is what each cell alone would, whatever is split, shared or fails."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st

from eval.needle import NeedleTask
from eval.records import RECORDS, read_records
from graphkv import grid, memory
from graphkv.cache import RaggedCache
from graphkv.config import CONF, CellSettings, DecodeConfig, RunConfig, cell_settings, parse
from graphkv.engine import Engine
from scorers import ALL_QUERIES, Needs

LASTING = (
    *("sample", "task", "status", "text", "empty", "scores", "ids", "finish", "n_prompt", "prompt_sha256"),
    *("truncated", "notes", "kept", "kept_per_head", "bytes", "references", "meta"),
)
GRAPH = {"neighbors": 3}
FIVE = [
    cell_settings("snapkv", 64),
    cell_settings("snapkv", 64, GRAPH),
    cell_settings("pyramidkv", 64, {"rounds": 2}),
    cell_settings("knorm", 200),
    cell_settings("full", 1.0),
]


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Tables and figures have tests of their own."""
    monkeypatch.setattr(grid, "report", lambda groups: None)


def composed(*overrides: str) -> RunConfig:
    """What a command line says."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return parse(compose("config", overrides=list(overrides)))


@pytest.fixture(scope="module")
def base() -> RunConfig:
    """Three samples of different length on the tiny model."""
    return composed("model=tiny", "task.lengths=[300,420,421]", "task.depths=[50]", "task.max_new_tokens=6")


@pytest.fixture(scope="module")
def smol_base() -> RunConfig:
    """Two samples on the real model, one of them shorter than some budgets."""
    return composed("model=smollm2", "task.lengths=[160,420]", "task.depths=[10]", "task.max_new_tokens=14")


def run(base: RunConfig, cells: Sequence[CellSettings], folder: Path, **changes) -> int:
    """`grid.run` of some cells; what is missing afterwards."""
    return grid.run([replace(base, cell=cell, results_dir=str(folder), **changes) for cell in cells])


def name(cell: CellSettings) -> str:
    """What the folder of a cell is called, without the hash."""
    return re.sub(r"[(),@]+", "_", cell.label)


def records(folder: Path, fields: Sequence[str] = LASTING) -> dict[str, dict[str, dict]]:
    """Fields of the records below a folder, by name of the cell and sample."""
    found = {}
    for path in folder.rglob(RECORDS):
        by_sample = read_records(path)
        label = path.parent.name.rsplit("-", 1)[0]
        found[label] = {key: {f: record.get(f) for f in fields} for key, record in by_sample.items()}
    return found


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """How many rows each call of `Engine.decode` had."""
    rows, decode = [], Engine.decode

    def spy(self, prefill, cells, **options):
        rows.append(len(cells))
        return decode(self, prefill, cells, **options)

    monkeypatch.setattr(Engine, "decode", spy)
    return rows


def test_grid_equals_the_cells_one_by_one_on_the_real_model(smol, smol_base, tmp_path, monkeypatch, decoded):
    # The key property of a shared prefill; also cases C9, C11 and T1.
    monkeypatch.setitem(grid._engines, smol.info.config, smol)
    cells = [
        cell_settings("full", 1.0),
        cell_settings("snapkv", 40),
        cell_settings("snapkv", 40, {"rounds": 2, "neighbors": 3, "source_ratio": 0.5}),
        cell_settings("pyramidkv", 48, GRAPH),
        cell_settings("h2o", 0.2),
        cell_settings("knorm", 200, {"edge": "vv", "rounds": 3}),
        cell_settings("snapkv", 96, GRAPH, granularity="query_head", head_budget="ada"),
    ]
    assert run(smol_base, cells, tmp_path / "grid") == 0
    assert decoded == [6, 7]  # of the short prompt, full and knorm keep the same
    for cell in cells:
        assert run(smol_base, [cell], tmp_path / "solo", decode=DecodeConfig(mode="solo")) == 0
    together, alone = records(tmp_path / "grid"), records(tmp_path / "solo")
    assert together.keys() == alone.keys() == {name(cell) for cell in cells}
    for cell in cells:
        assert together[name(cell)] == alone[name(cell)]
    short, long = ({key: by_sample[sample] for key, by_sample in together.items()} for sample in together["full"])
    for found, n in ((short, 160), (long, 420)):
        assert len({record["ids"][0] for record in found.values()}) == 1
        assert {record["n_prompt"] for record in found.values()} == {n}
        assert found[name(cells[1])]["kept"] == found[name(cells[2])]["kept"] == [40] * 30
        assert found[name(cells[5])]["kept"] == [min(n, 200)] * 30
    # Cells differ in what they write, or nothing would tell them apart.
    assert len({tuple(record["ids"]) for record in long.values()}) > 3
    assert {record["finish"] for record in long.values()} == {"stop", "length"}


def test_the_same_work_is_done_once_and_shared(base, tmp_path, decoded):
    cells = [
        cell_settings("snapkv", 310),
        cell_settings("snapkv", 310, {"rounds": 0}),
        cell_settings("full", 1.0),
        cell_settings("knorm", 310, GRAPH),
    ]
    assert run(base, cells, tmp_path / "shared") == 0
    assert decoded == [1, 3, 3]  # the first prompt has 300 tokens and is kept whole by all
    found = records(tmp_path / "shared", ["shared_with", "decode_batch"])
    first, second, third = (
        {key: tuple(by_sample[sample].values()) for key, by_sample in found.items()} for sample in found["full"]
    )
    off, zero, full, knorm = map(name, cells)
    assert first == {off: (None, 1), zero: (off, 1), full: (off, 1), knorm: (off, 1)}
    assert second == third == {off: (None, 3), zero: (off, 3), full: (None, 3), knorm: (None, 3)}
    for cell in cells:
        run(base, [cell], tmp_path / "alone")
    assert records(tmp_path / "shared") == records(tmp_path / "alone")


def test_nothing_is_shared_where_cells_go_on_evicting(base, tmp_path, decoded):
    # What scorers evict later differs, even if they keep the same prompt.
    cells = [cell_settings("tova", 310), cell_settings("h2o", 310), cell_settings("full", 1.0)]
    assert run(base, cells, tmp_path, decode=DecodeConfig(evict_every=2)) == 0
    assert decoded == [3, 3, 3]


def test_batches_of_at_most_max_cells(base, tmp_path, decoded):
    assert run(base, FIVE, tmp_path / "whole") == 0
    assert run(base, FIVE, tmp_path / "split", decode=DecodeConfig(max_cells=2)) == 0
    assert decoded == [5, 5, 5, *[2, 2, 1] * 3]
    assert records(tmp_path / "split") == records(tmp_path / "whole")


def test_batches_that_fit_the_memory(base, tmp_path, decoded, monkeypatch):
    assert run(base, FIVE, tmp_path / "whole") == 0
    # Two rows of 64 tokens fit; one of 200 and the full cache go over, and get a batch of their own.
    two_small_rows = 2 * (2 * 64 + 6) * 2 * 2 * 2 * 16 * 4  # padding and growth; layers, heads, K and V, size, float32
    monkeypatch.setattr(memory, "available", lambda device: two_small_rows / 0.8)
    assert run(base, FIVE, tmp_path / "split") == 0
    assert decoded == [5, 5, 5, *[2, 1, 1, 1] * 3]
    assert records(tmp_path / "split") == records(tmp_path / "whole")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")], ids=["cpu", "cuda"])
def test_out_of_memory_halves_the_batch_visibly(base, tmp_path, monkeypatch, capsys, error):
    assert run(base, FIVE, tmp_path / "whole") == 0
    decode, rows = Engine.decode, []

    def little(self, prefill, cells, **options):
        rows.append(len(cells))
        if len(cells) > 2:
            raise error
        return decode(self, prefill, cells, **options)

    monkeypatch.setattr(Engine, "decode", little)
    assert run(base, FIVE, tmp_path / "halved") == 0
    # 5 fail, then 2, and 3 fail, then 1 and 2. The next samples begin with what fitted.
    assert rows == [5, 2, 3, 1, 2, *[2, 2, 1] * 2]
    said = capsys.readouterr().err
    assert "out of memory with 5 cells: going on with at most 3" in said
    assert "out of memory with 3 cells: going on with at most 2" in said
    assert records(tmp_path / "halved") == records(tmp_path / "whole")


def test_one_cell_too_large_for_the_memory_fails_alone(base, tmp_path, monkeypatch, capsys):
    decode = Engine.decode

    def no_full_cache(self, prefill, cells, **options):
        if any(cell.settings.name == "full" for cell in cells):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return decode(self, prefill, cells, **options)

    monkeypatch.setattr(Engine, "decode", no_full_cache)
    assert run(base, FIVE, tmp_path) == 3
    status = {label: [r["status"] for r in cell.values()] for label, cell in records(tmp_path).items()}
    assert status.pop("full") == ["failed"] * 3 and set(map(tuple, status.values())) == {("ok",) * 3}
    assert "failed: needle-dolores-300-50, full: RuntimeError: DefaultCPUAllocator" in capsys.readouterr().err


def test_an_error_that_is_not_of_memory_is_not_tried_in_halves(base, tmp_path, monkeypatch):
    rows = []

    def fail(self, prefill, cells, **options):
        rows.append(len(cells))
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(Engine, "decode", fail)
    assert run(base, FIVE, tmp_path) == 15
    assert rows == [5, 5, 5]


def test_a_sample_that_cannot_be_read_fails_and_the_rest_goes_on(base, tmp_path, monkeypatch, capsys):
    encode = NeedleTask.encode

    def fail_on_420(self, sample):
        if sample.meta["length"] == 420:
            raise ValueError("no such token")
        return encode(self, sample)

    monkeypatch.setattr(NeedleTask, "encode", fail_on_420)
    assert run(base, FIVE[:2], tmp_path) == 2
    assert capsys.readouterr().err.count(": ValueError: no such token") == 2
    for cell in records(tmp_path, ["status", "error"]).values():
        assert [r["status"] for r in cell.values()] == ["ok", "failed", "ok"]
        assert cell["needle-dolores-420-50"]["error"] == "ValueError: no such token"


def test_a_prompt_that_does_not_fit_says_what_helps(base, tmp_path, monkeypatch, capsys):
    def no_room(self, ids, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "prefill", no_room)
    assert run(base, FIVE[:1], tmp_path) == 3
    assert capsys.readouterr().err.count("CUDA out of memory; prefill.chunk=2048 reads") == 3
    chunked = replace(base.prefill, chunk=100)
    assert run(base, FIVE[:1], tmp_path, prefill=chunked) == 3
    assert "prefill.chunk" not in capsys.readouterr().err


def test_a_cell_that_cannot_be_cut_fails_alone(base, tmp_path, monkeypatch):
    cut = Engine.cut

    def fail_on_knorm(self, prefill, settings):
        if settings.name == "knorm":
            raise ValueError("a score is not finite")
        return cut(self, prefill, settings)

    monkeypatch.setattr(Engine, "cut", fail_on_knorm)
    assert run(base, FIVE, tmp_path) == 3
    status = {label: {r["status"] for r in cell.values()} for label, cell in records(tmp_path).items()}
    assert status == {name(cell): {"failed" if cell.name == "knorm" else "ok"} for cell in FIVE}


def test_on_error_stop_ends_at_the_first_failure(base, tmp_path, monkeypatch, capsys):
    decode = Engine.decode

    def fail_on_420(self, prefill, cells, **options):
        if prefill.n == 420:
            raise ValueError("no such token")
        return decode(self, prefill, cells, **options)

    monkeypatch.setattr(Engine, "decode", fail_on_420)
    with pytest.raises(SystemExit) as stopped:
        grid.end(lambda: run(base, FIVE[:2], tmp_path, on_error="stop"))
    assert stopped.value.code == 1
    assert capsys.readouterr().err.endswith("4 results failed or are missing; the same command tries them again\n")
    status = {label: [r["status"] for r in cell.values()] for label, cell in records(tmp_path).items()}
    assert status == {name(FIVE[0]): ["ok", "failed"], name(FIVE[1]): ["ok"]}

    monkeypatch.setattr(Engine, "decode", decode)
    assert run(base, FIVE[:2], tmp_path) == 0
    assert "3 samples × 2 cells, 2 samples to do" in capsys.readouterr().err


def test_the_order_of_samples_changes_nothing(base, tmp_path):
    # Case T3.
    lengths = [300, 420, 421, 350]
    for order in range(3):
        random.Random(order).shuffle(lengths)
        task = {**base.task, "lengths": list(lengths), "depths": [50, 0]}
        assert run(base, FIVE[:3], tmp_path / str(order), task=task) == 0
    first, *others = (records(tmp_path / str(order)) for order in range(3))
    assert all(len(cell) == 8 for cell in first.values())
    assert others == [first, first]
    assert list(first[name(FIVE[0])]) != list(others[0][name(FIVE[0])])


def fingerprint(prefill) -> str:
    """sha256 of all that a prefill holds of its prompt."""
    digest = hashlib.sha256(prefill.logits.numpy().tobytes())
    for view in prefill.layers:
        for tensor in (view.keys, view.values, view.queries, *([] if view.mass is None else [view.mass])):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("evict_every", [None, 2])
def test_each_sample_is_read_once_and_its_base_cache_stays(base, tmp_path, monkeypatch, evict_every):
    # Case T6, with eviction in decode too, where rows change what they store.
    prefill, seen = Engine.prefill, []

    def remember(self, *arguments, **options):
        made = prefill(self, *arguments, **options)
        seen.append((made, fingerprint(made)))
        return made

    monkeypatch.setattr(Engine, "prefill", remember)
    cells = [cell_settings(name, budget) for name in ("h2o", "tova") for budget in (48, 64)]
    assert run(base, cells, tmp_path, decode=DecodeConfig(evict_every=evict_every, max_cells=3)) == 0
    assert [made.n for made, _ in seen] == [300, 420, 421]
    assert all(fingerprint(made) == before for made, before in seen)
    # What is evicted in decode is scored again, from the mass; without, it is freed while the prompt is read.
    assert all((made.layers[0].mass is None) == (evict_every is None) for made, _ in seen)


def test_the_wall_time_is_split_without_counting_the_model_twice():
    wall = grid.Wall(load=3.0, prefill=1.0, select=0.5, measure=2.0)
    assert wall.describe(4.0) == "model 3.0 s, prefill 1.0 s, selection 0.5 s, decode 2.0 s, other 0.5 s"


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(1, 8), st.integers(1, 300))
def test_batches_hold_every_row_once_within_the_limits(sizes, max_rows, room):
    made = memory.batches(sizes, max_rows, room)
    assert [row for batch in made for row in batch] == list(range(len(sizes)))
    for batch in made:
        assert 1 <= len(batch) <= max_rows
        assert len(batch) == 1 or sum(sizes[row] for row in batch) <= 0.8 * room
    for batch, following in zip(made, made[1:], strict=False):  # nothing would have fitted too
        assert len(batch) == max_rows or sum(sizes[row] for row in (*batch, following[0])) > 0.8 * room


def test_a_batch_takes_no_more_memory_than_was_estimated(tiny, essay):
    prompt = tiny.prefill(essay[:399], needs=Needs(queries=ALL_QUERIES, mass=True))
    settings = [*FIVE, cell_settings("snapkv", 90, granularity="query_head", head_budget="ada", head_floor=0.1)]
    cells = [tiny.cut(prompt, each) for each in settings]
    cache = RaggedCache(prompt, [cell.kept for cell in cells], capacity=20)
    stored = sum(group.keys.nbytes + group.values.nbytes for groups in cache.layers for group in groups)
    assert stored <= sum(memory.row_bytes(prompt, cell, 20) for cell in cells) < 3 * stored
