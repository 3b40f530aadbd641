"""Table 3 with a clock that is told the time: what is charged to what, and what the table says of it."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from graphkv.config import cell_settings
from graphkv.engine import Engine
from graphkv.studies import latency_table
from graphkv.studies.latency import PAPER, Bench, Table3
from graphkv.studies.timing import Clock

STEP, COPY, CUT, READ, LOOK = 0.1, 0.5, 0.25, 2.0, 0.001
CELLS = [cell_settings("full", 1.0), cell_settings("snapkv", 64), cell_settings("h2o", 64, {})]


@pytest.fixture
def bench(tiny, monkeypatch):
    """A bench on the tiny model whose phases take known seconds; each look at the clock takes LOOK."""
    now, log = [0.0], []

    def takes(name: str, seconds) -> None:
        done = getattr(Engine, name)

        def slow(self, *arguments, **options):
            result = done(self, *arguments, **options)
            now[0] += seconds(result)
            log.append(name)
            return result

        monkeypatch.setattr(Engine, name, slow)

    takes("prefill", lambda prefill: READ)
    takes("cut", lambda cell: CUT * (2 if cell.settings.graph else 1))
    takes("decode", lambda answers: COPY + STEP * (max(len(answer.ids) for answer in answers) - 1))

    def look() -> float:
        log.append("now")
        now[0] += LOOK
        return now[0]

    clock = Clock(tiny.model.device, now=look, wait=lambda device: log.append("wait"))
    made = Bench(tiny, Table3(tokens=300, new_tokens=8, longest=12, repeats=3, warmup=1), clock)
    made.log = log
    return made


def test_each_phase_is_charged_its_own_time(bench, tiny):
    ids = bench.options.ids(tiny.info, 300)
    cells, batch, repeats = bench.measure(ids, CELLS)
    cells = cells.set_index("cell")
    assert list(cells.index) == ["full", "snapkv-64", "h2o-64+graphkv"]
    for name, cuts in zip(cells.index, (1, 1, 2), strict=True):
        row = cells.loc[name]
        assert row["prefill_ms"] == pytest.approx(1e3 * (READ + LOOK))
        assert row["select_ms"] == pytest.approx(1e3 * (cuts * CUT + LOOK))
        assert row["copy_ms"] == pytest.approx(1e3 * (COPY + LOOK))
        # Case F3: a token's time has neither the copy nor the length of the answer in it.
        assert row["fixed_ms_per_token"] == pytest.approx(1e3 * STEP)
        assert row["natural_ms_per_token"] == pytest.approx(1e3 * STEP)
        assert row["natural_s"] == pytest.approx(COPY + STEP * (row["natural_tokens"] - 1) + LOOK)
        assert row["fixed_ms_per_token_q1"] == pytest.approx(row["fixed_ms_per_token_q3"])
        # Case F1: what the bytes allow stands beside what was measured.
        weights = sum(p.nbytes for p in tiny.model.parameters()) - tiny.model.get_input_embeddings().weight.nbytes
        token = 2 * 2 * 2 * 16 * 4
        moved = weights + token * (300 if name == "full" else 64)
        assert row["moved_bytes_per_token"] == moved
        assert row["limit_ms_per_token"] == pytest.approx(1e3 * moved * LOOK / weights)
        assert row["share_of_limit"] == pytest.approx(row["limit_ms_per_token"] / (1e3 * STEP))
        assert row["speedup"] == pytest.approx(1)
        assert row["speedup_limit"] == pytest.approx((weights + 300 * token) / moved)
    together = batch.iloc[0]
    assert together["rows"] == 3
    assert together["fixed_ms_per_step"] == pytest.approx(1e3 * STEP)
    assert together["fixed_ms_per_token"] == pytest.approx(1e3 * STEP / 3)
    assert together["kv_bytes"] == cells["kv_bytes"].sum()
    assert together["natural_tokens"] == cells["natural_tokens"].sum()
    counts = repeats.groupby(["cell", "phase"]).size()
    assert (counts == 3).all() and len(counts) == 3 * 5 + 4 + 1


def test_the_device_is_waited_for_before_each_reading(bench, tiny):
    # Case F2.
    bench.measure(bench.options.ids(tiny.info, 300), CELLS[:2])
    looks = [index for index, entry in enumerate(bench.log) if entry == "now"]
    assert looks and all(bench.log[index - 1] == "wait" for index in looks)


def test_scores_of_one_cell_do_not_speed_up_another(bench, tiny):
    prompt = tiny.prefill(bench.options.ids(tiny.info, 300), window=32)
    bench._cut(prompt, CELLS[1])
    assert not prompt.scoring.scores


def test_the_table_says_what_its_numbers_are(bench, tiny):
    settings = [*CELLS, cell_settings("snapkv", 64, {})]
    cells, batch, _ = bench.measure(bench.options.ids(tiny.info, 300), settings)
    facts = {**bench.facts(300), "cpus": 4, "load_before": 0.5}
    page = latency_table.as_markdown(cells, batch, facts)
    assert "busy" not in page and "busy" in latency_table.as_markdown(cells, batch, {**facts, "load_before": 3.0})
    assert "Medians of 3 repeats with their quartiles, after 1 for warm-up" in page
    assert "a method that answers in fewer tokens looks faster" in page
    alone, limits, natural, together = (part.splitlines() for part in page.split("\n## ")[1:5])
    assert next(line for line in natural if "snapkv-64 |" in line).endswith("| 5.474 |")
    assert next(line for line in natural if "snapkv-64+graphkv |" in line).endswith("| 4.912 |")
    assert next(line for line in natural if "full |" in line).endswith("| — |")
    assert next(line for line in alone if "snapkv-64 |" in line).split(" | ")[4] == "100 [100, 100]"
    assert len(limits) == len(alone) == 3 + 1 + len(settings)
    assert together[2].startswith("| cells |")


def test_without_the_full_cache_there_is_no_measured_speedup(bench, tiny):
    cells, batch, _ = bench.measure(bench.options.ids(tiny.info, 300), CELLS[1:2])
    assert cells["speedup"].isna().all() and cells["speedup_limit"].notna().all()
    assert "| — |" in latency_table.as_markdown(cells, batch, bench.facts(300))


def test_the_paper_is_quoted_by_name():
    assert PAPER["knorm", True] / PAPER["knorm", False] - 1 == pytest.approx(-0.155, abs=5e-4)
    assert PAPER["pyramidkv", True] / PAPER["pyramidkv", False] - 1 == pytest.approx(0.025, abs=1e-3)


def test_the_command(run, tmp_path):
    sizes = ["study.tokens=200", "study.new_tokens=3", "study.longest=4", "study.repeats=2", "study.warmup=0"]
    done = run("-m", "experiment=table3", *sizes, "budget=64", results=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(done.files) == [".md", ".csv", "-batch.csv", "-repeats.csv", ".json"]
    cells = pd.read_csv(done.files[".csv"])
    names = ("knorm", "snapkv", "pyramidkv", "h2o", "cake")
    assert cells["cell"].tolist() == ["full", *(f"{name}-64{graph}" for name in names for graph in ("", "+graphkv"))]
    repeats = pd.read_csv(done.files["-repeats.csv"])
    for row in cells.itertuples():
        own = repeats[repeats["cell"] == row.cell].groupby("phase")["seconds"].median()
        assert row.prefill_ms == pytest.approx(1e3 * own["prefill"])
        assert row.fixed_ms_per_token == pytest.approx(1e3 * (own["fixed"] - own["copy"]) / 2)
    facts = json.loads(done.files[".json"].read_text())
    assert facts["repeats"] == 2 and len(facts["settings"]["cells"]) == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study.repeats=0"], "repeats must be 1 or more and warmup 0 or more, not 0 and 3"),
        (["study.new_tokens=1"], "new_tokens and longest must be 2 or more, not 1 and 64"),
        (["decode.evict_every=8", "scorer=h2o"], "study table3 times eviction after the prefill only"),
        (["study.tokens=4090"], "a prompt of 4090 tokens and an answer of 64 exceed the 4096 positions"),
        (["shards=2", "hydra.launcher.executor=submitit_local"], "a study is not cut into shards"),
    ],
)
def test_mistakes_write_nothing(run, tmp_path, arguments, message):
    done = run("experiment=table3", *arguments, results=tmp_path / "results")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "results").exists()
