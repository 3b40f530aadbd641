"""The experiments on the tiny model: what they sweep, what they draw, and that it is what the records hold."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from scipy import stats

import run as entry
from eval import templates
from eval.ablations import DESIGNS
from eval.longbench import LongBenchTask
from eval.records import RECORDS, read_records
from graphkv.config import CONF, parse
from graphkv.engine import Engine
from graphkv.reports import ARTIFACTS, MADE_OF

QA = ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"]
TASKS = {
    "fig5": QA,
    "table6": QA,
    "fig6": ["hotpotqa"],
    "fig8": ["hotpotqa", "2wikimqa", "musique", "lcc", "repobench-p"],
    "table2": [*QA, "gov_report", "passage_retrieval_en", "lcc", "repobench-p"],
}
N_CELLS = {"fig5": 13, "table6": 13, "fig6": 16, "fig8": 6, "table2": 4}
OPTION = {"fig6": "rounds", "fig8": "edge", "table2": "signal"}
FEW = {
    "fig5": "qasper,hotpotqa",
    "table6": "qasper,hotpotqa",
    "fig6": "hotpotqa",
    "fig8": "lcc",
    "table2": "qasper,lcc",
}


@pytest.fixture(autouse=True)
def short_answers_with_scores(monkeypatch):
    """Answers of 4 tokens, each with a score of its own: the tiny model never answers rightly."""
    monkeypatch.setattr(templates, "MAX_NEW_TOKENS", dict.fromkeys(templates.MAX_NEW_TOKENS, 4))
    monkeypatch.setattr(LongBenchTask, "score", lambda self, sample, text: {"score": zlib.crc32(text.encode()) / 2**32})


@pytest.fixture
def experiment(monkeypatch, capfd, tmp_path):
    """`python run.py -m experiment=…` on two samples a task, in this process; returns exit code, output and errors."""

    def call(name: str, *arguments: str) -> tuple[int, str, str]:
        data = [] if name == "fig4" else ["task.data=mini", f"task.tasks=[{FEW[name]}]"]
        options = ["model=tiny", "limit=2", f"results_dir={tmp_path}", *data, *arguments]
        monkeypatch.setattr(sys, "argv", ["run.py", "-m", f"experiment={name}", *options])
        capfd.readouterr()
        code = 0
        try:
            entry.main()
        except SystemExit as end:
            code = end.code
        finally:
            GlobalHydra.instance().clear()
        return code, *capfd.readouterr()

    return call


def stored(folder: Path) -> list[tuple[dict, str, dict[str, dict]]]:
    """Cell, task and records by sample of every folder with results."""
    found = []
    for path in folder.rglob(RECORDS):
        identity = json.loads((path.parent / "manifest.json").read_text())["identity"]
        found.append((identity["cell"], identity["task"]["name"], read_records(path)))
    return found


def table_of(folder: Path, name: str, suffixes: list[str]) -> pd.DataFrame:
    """The one CSV of an experiment, after a look at the files beside it."""
    files = sorted(folder.glob(f"*/{name}-tiny-*"))
    assert sorted(file.suffix for file in files) == suffixes
    return pd.read_csv(next(file for file in files if file.suffix == ".csv"), dtype={"setting": str})


@pytest.mark.parametrize("name", DESIGNS)
def test_what_is_asked_for(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = parse(compose("config", overrides=[f"experiment={name}"]))
    assert (config.name, config.artifact, config.task["name"]) == (name, name, "longbench")
    assert config.task["tasks"] == TASKS[name]
    assert config.cell.budget == (128 if name == "table2" else 512)
    assert config.cell.name == "snapkv"


def test_every_artifact_of_a_table_or_figure_has_its_task():
    assert set(MADE_OF) <= set(ARTIFACTS) and set(DESIGNS) <= set(MADE_OF)


@pytest.mark.parametrize("name", ["fig6", "fig8", "table2"])
def test_one_pass_and_the_csv_is_what_the_records_hold(name, experiment, tmp_path):
    code, out, err = experiment(name)
    assert code == 0, err
    n_samples = 2 * len(FEW[name].split(","))
    assert f"{n_samples} samples × {N_CELLS[name]} cells, {n_samples} samples to do" in err
    assert err.count("samples to do") == 1
    table = table_of(tmp_path, name, [".csv", ".md"] if name == "table2" else [".csv", ".pdf", ".png"])
    assert set(table["option"]) == {OPTION[name]}
    check(table, stored(tmp_path))
    assert "mini: a test bed, NOT LongBench" in out


def test_fig5_and_table6_share_what_either_has_done(experiment, tmp_path):
    code, _, err = experiment("fig5")
    assert code == 0 and "4 samples × 13 cells, 4 samples to do" in err
    code, _, err = experiment("table6")
    assert code == 0 and "4 samples × 13 cells, 0 samples to do" in err
    by_kind, by_task = (
        table_of(tmp_path, "fig5", [".csv", ".pdf", ".png"]),
        table_of(tmp_path, "table6", [".csv", ".md"]),
    )
    assert set(by_kind["panel"]) == {"single-document QA", "multi-document QA"}
    assert set(by_task["panel"]) == {"qasper", "hotpotqa", "mean"}
    for table in (by_kind, by_task):
        check(table, stored(tmp_path))


def check(table: pd.DataFrame, cells: list[tuple[dict, str, dict[str, dict]]]) -> None:
    """Every row of a CSV against the records: scores and achieved budgets, differences, scipy's intervals."""
    n_intervals = 0
    for _, point in table.iterrows():
        tasks = point["tasks"].split()
        mine = [(cell, task, rows) for cell, task, rows in cells if cell["scorer"]["name"] == point["scorer"]]
        after = {task: rows for cell, task, rows in mine if task in tasks and is_point(cell, point)}
        before = {task: rows for cell, task, rows in mine if task in tasks and cell["graphkv"] is None}
        assert len(after) == len(before) == len(tasks)
        means = [round(float(np.mean(values(after[task]))), 2) for task in tasks]
        assert point["score"] == pytest.approx(np.mean(means), abs=0.0051)
        assert (point["n"], point["asked"]) == (2 * len(tasks), 2 * len(tasks))
        kept = [np.mean(record["kept"]) for task in tasks for record in after[task].values()]
        assert point["kept"] == pytest.approx(np.mean(kept), rel=1e-5)
        if point["setting"] == "none":
            assert np.isnan(point["difference"])
            continue
        changes = [values(after[task]) - values(before[task]) for task in tasks]
        assert point["difference"] == pytest.approx(np.mean([rows.mean() for rows in changes]), rel=1e-4, abs=1e-9)
        if len(tasks) == 1 and np.ptp(changes[0]) > 0:
            rng = np.random.default_rng(0)
            expected = stats.bootstrap((changes[0],), np.mean, method="percentile", n_resamples=10_000, rng=rng)
            assert (point["low"], point["high"]) == pytest.approx(tuple(expected.confidence_interval), rel=1e-4)
            n_intervals += 1
    assert n_intervals


def values(records: dict[str, dict]) -> np.ndarray:
    """Scores in 0..100, sorted by sample."""
    return np.array([100 * records[sample]["scores"]["score"] for sample in sorted(records)])


def is_point(cell: dict, point: pd.Series) -> bool:
    """Whether a stored cell of the right scorer is what a row of the CSV shows, by its settings alone."""
    if cell["graphkv"] is None or point["setting"] == "none":
        return cell["graphkv"] is None and point["setting"] == "none"
    usual = {"source_ratio": 0.3, "neighbors": "auto3", "rounds": 1, "edge": "kk", "signal": "decay"}
    expected = {**usual, point["option"]: point["setting"]}
    return all(str(cell["graphkv"][key]) == str(value) for key, value in expected.items())


def test_a_reading_of_the_graph_holds_for_all_its_cells(experiment, tmp_path):
    code, _, err = experiment("fig6", "graphkv.accumulate=sum", "scorer=snapkv")
    assert code == 0 and "2 samples × 4 cells" in err
    graphs = [cell["graphkv"] for cell, _, _ in stored(tmp_path) if cell["graphkv"]]
    assert sorted(graph["rounds"] for graph in graphs) == [1, 2, 3]
    assert {graph["accumulate"] for graph in graphs} == {"sum"}


def test_a_failing_sample_is_missing_in_the_figure(experiment, tmp_path, monkeypatch):
    # Case H12.
    decode, calls = Engine.decode, []

    def fail_once(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("no such thing")
        return decode(self, *arguments, **options)

    monkeypatch.setattr(Engine, "decode", fail_once)
    code, out, err = experiment("fig8")
    assert code == 1 and "results failed or are missing" in err
    table = table_of(tmp_path, "fig8", [".csv", ".pdf", ".png"])
    failed = table[table["n"] < table["asked"]]
    assert len(failed) and failed["score"].isna().all() and failed["difference"].isna().all()
    assert "—" in out


def test_fig4_draws_what_the_records_hold(experiment, tmp_path):
    options = ["task.lengths=[400,700]", "task.depths=[50]", "task.max_new_tokens=4"]
    code, out, err = experiment("fig4", *options)
    assert code == 0 and "2 samples × 4 cells, 2 samples to do" in err
    table = table_of(tmp_path, "fig4", [".csv", ".pdf", ".png"])
    assert set(table["panel"]) == {"SnapKV", "SnapKV+GraphKV", "PyramidKV", "PyramidKV+GraphKV"}
    for cell, _, records in stored(tmp_path):
        scorer = {"snapkv": "SnapKV", "pyramidkv": "PyramidKV"}[cell["scorer"]["name"]]
        panel = scorer + ("+GraphKV" if cell["graphkv"] else "")
        drawn = table[table["panel"] == panel].set_index("sample")
        for sample, record in records.items():
            assert drawn.loc[sample, "score"] == pytest.approx(record["scores"]["overlap"], abs=1e-6)
            assert drawn.loc[sample, "kept"] == pytest.approx(np.mean(record["kept"]))
            assert drawn.loc[sample, "length"] == record["n_prompt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment=demo", "artifact=fig6"], "artifact=fig6 is made of task=longbench, not of task=needle"),
        (["experiment=fig4", "artifact=fig44"], "artifact=fig44 is unknown"),
    ],
)
def test_mistakes_are_told_before_anything_runs(arguments, message, monkeypatch, capfd, tmp_path):
    results = tmp_path / "results"
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *arguments, "model=tiny", f"results_dir={results}"])
    with pytest.raises(SystemExit) as end:
        entry.main()
    GlobalHydra.instance().clear()
    assert end.value.code == 2 and message in capfd.readouterr().err
    assert not results.exists()
