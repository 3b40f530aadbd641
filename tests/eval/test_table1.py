"""Table 1: numbers from the records, rows by what they are, nothing averaged over a gap, three layouts that parse."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from eval import paper, table1_words
from eval.errors import UserError
from eval.metrics import LONGBENCH
from eval.stats import holm
from eval.table1 import CellResult, ModelResults, Row, Table1, build
from eval.table1_render import as_text, write
from eval.table1_words import AVERAGE, SHORT
from graphkv.config import cell_settings

GRAPH = {"source_ratio": 0.3, "neighbors": "auto3", "rounds": 1}
OPTIONS = {
    "full": {"window": 0},
    "knorm": {"window": 0},
    "snapkv": {"window": 32, "kernel": 7, "pooling": "avg", "group": "mean"},
    "pyramidkv": {"window": 32, "kernel": 7, "pooling": "avg", "group": "mean", "beta": 20, "schedule": "official"},
    "cake": {"window": 32},
    "lagkv": {"lag": 128},
}
FACTS = {
    "protocol": "official",
    "data": "hub",
    "data_hash": "0123456789abcdef" * 4,
    "dtype": "float16",
    "similarity": "difflib",
}
METHODS = [
    ("full", False, {}),
    ("knorm", False, {}),
    ("knorm", True, {}),
    ("knorm", False, {"window": 32}),
    ("knorm", True, {"window": 32}),
    ("snapkv", False, {}),
    ("snapkv", True, {}),
    ("pyramidkv", False, {}),
    ("pyramidkv", True, {}),
]
HEADINGS = [SHORT[task] for task in LONGBENCH]
NAMES = [
    "Full",
    "KNorm",
    "KNorm+GraphKV",
    "KNorm (window 32)",
    "KNorm (window 32)+GraphKV",
    "SnapKV",
    "SnapKV+GraphKV",
    "PyramidKV",
    "PyramidKV+GraphKV",
]


def cell_of(scorer: str, graph: bool | dict = False, budget: int | float = 512, **options: Any) -> dict[str, Any]:
    """A cell as `CellSettings.describe` writes it."""
    return {
        "scorer": {"name": scorer, **OPTIONS[scorer], **options},
        "budget": 1.0 if scorer == "full" else budget,
        "graphkv": GRAPH if graph is True else graph or None,
        "granularity": "kv_head",
    }


def results(
    model: str = "smollm2",
    cells: Sequence[dict[str, Any]] = tuple(cell_of(name, graph, **options) for name, graph, options in METHODS),
    tasks: Sequence[str] = LONGBENCH,
    n: int = 4,
    seed: int = 0,
    **facts: Any,
) -> ModelResults:
    """A complete run with made-up scores, different for every cell and sample."""
    rng = np.random.default_rng(seed)
    samples = [(f"{task}/{i}", task) for task in tasks for i in range(n)]
    made = []
    for number, cell in enumerate(cells):
        records = {
            sample: {
                "sample": sample,
                "task": task,
                "status": "ok",
                "scores": {"score": float(rng.random()), "score_true": 1.0},
                "kept": [1000, 1000] if cell["scorer"]["name"] == "full" else [700, 324],
                "n_prompt": 1000 if i % 2 else 2000,
                "bytes": 1,
                "truncated": i % 8 == 0,
                "notes": {"overflow": 5 if i % 16 == 0 else 0},
            }
            for i, (sample, task) in enumerate(samples)
        }
        made.append(CellResult(f"cell {number}", cell, records))
    return ModelResults(model, {**FACTS, **facts}, samples, made)


def table_of(*runs: ModelResults) -> Table1:
    return build(runs or [results()], resamples=200)


def row_of(table: Table1, name: str, model: str = "smollm2") -> Row:
    (row,) = [row for row in table.blocks[model] if row.name == name]
    return row


def scores_of(run: ModelResults, name: str) -> pd.Series:
    """Scores by task and sample, straight from the records; rows of `results()` have the order of `NAMES`."""
    records = run.cells[NAMES.index(name)].records.values()
    return pd.DataFrame(
        {"task": record["task"], "sample": record["sample"], "score": record["scores"]["score"]} for record in records
    ).set_index(["task", "sample"])["score"]


# Numbers


def test_scores_and_average_are_those_of_the_records():
    run = results(n=7)
    table = table_of(run)
    assert [row.name for row in table.blocks["smollm2"]] == NAMES
    for name in NAMES:
        means = (100 * scores_of(run, name).groupby("task").mean()).round(2)
        entries = row_of(table, name).entries
        assert list(entries) == [*LONGBENCH, AVERAGE]
        assert {task: entries[task].score for task in LONGBENCH} == pytest.approx(means.to_dict(), abs=1e-9)
        assert entries[AVERAGE].score == pytest.approx(round(means.mean(), 2), abs=0.0051)
        assert (entries["trec"].n, entries["trec"].asked, entries[AVERAGE].n) == (7, 7, 112)


def test_differences_are_paired_and_to_the_same_scorer_with_the_same_options():
    run = results()
    table = table_of(run)
    for name in NAMES:
        row = row_of(table, name)
        if not name.endswith("+GraphKV"):
            assert (row.difference, row.shared, row.entries["lcc"].difference) == (None, (), None)
            continue
        rows = 100 * (scores_of(run, name) - scores_of(run, name.removesuffix("+GraphKV")))
        by_task = rows.groupby("task").mean()
        assert {task: row.entries[task].difference.difference for task in LONGBENCH} == pytest.approx(by_task.to_dict())
        assert row.shared == LONGBENCH
        assert row.difference == row.entries[AVERAGE].difference
        assert row.difference.difference == pytest.approx(by_task.mean())
        assert row.difference.low < row.difference.difference < row.difference.high
        assert row.difference.n == 64


def test_samples_are_paired_by_id_and_not_by_order():
    run = results()
    shuffled = dict(random.Random(0).sample(list(run.cells[6].records.items()), 64))
    again = replace(run, cells=[*run.cells[:6], replace(run.cells[6], records=shuffled), *run.cells[7:]])
    assert row_of(table_of(again), "SnapKV+GraphKV") == row_of(table_of(run), "SnapKV+GraphKV")


def test_shuffled_cells_and_samples_make_the_same_table():
    run = results("llama3")
    shuffled = replace(
        run, cells=random.Random(1).sample(run.cells, 9), samples=random.Random(2).sample(run.samples, 64)
    )
    assert as_text(table_of(shuffled)) == as_text(table_of(run))


def test_kept_is_what_was_stored_and_its_share_of_each_prompt():
    entry = row_of(table_of(), "SnapKV").entries[AVERAGE]
    assert entry.kept == 512
    assert entry.share == pytest.approx((512 / 1000 + 512 / 2000) / 2)


def test_a_difference_that_is_there_is_told_from_one_that_is_not():
    run = results(cells=[cell_of("snapkv"), cell_of("snapkv", True)], n=20)
    for shift, marked in [(0.0, True), (0.3, False)]:
        for i, (sample, record) in enumerate(run.cells[1].records.items()):
            before = run.cells[0].records[sample]["scores"]["score"]
            record["scores"]["score"] = before + shift + 0.1 * (-1) ** i
        table = table_of(run)
        assert row_of(table, "SnapKV+GraphKV").difference.clear is not marked
        assert ("] ≈" in as_text(table)) is marked


def test_what_survives_holm_is_marked_and_the_family_is_the_whole_table():
    cells = [cell_of("snapkv"), cell_of("snapkv", True), cell_of("pyramidkv"), cell_of("pyramidkv", True)]
    one, two = results("llama3", cells, n=3), results("mistral", cells, n=3, seed=1)
    for run in (one, two):
        for sample, record in run.cells[1].records.items():  # better on all but one of 48 samples
            before = run.cells[0].records[sample]["scores"]["score"]
            record["scores"]["score"] = before + (-0.1 if sample == "lcc/0" else 0.1)
    table = table_of(one, two)
    rows = [row for block in table.blocks.values() for row in block if row.comparison]
    raw = [row.comparison.sign.p for row in rows]
    assert [row.comparison.p_holm for row in rows] == holm(raw) and len(raw) == 4
    for row in rows:
        assert row.comparison.survives is (row.name == "SnapKV+GraphKV")
    sign = row_of(table, "SnapKV+GraphKV", "mistral").comparison.sign
    assert (sign.better, sign.worse, sign.p) == (47, 1, pytest.approx(2 * 49 / 2**48))
    text = as_text(table)
    assert text.count("] **\n") == 2
    assert "**: and an exact sign test over the same samples" in table.caption
    assert "over the differences of this table" in table.caption


def test_the_caption_says_what_difference_the_samples_would_show():
    run = results(cells=[cell_of("snapkv"), cell_of("snapkv", True)], tasks=["trec"], n=4)
    for i, (sample, record) in enumerate(run.cells[1].records.items()):
        record["scores"]["score"] = run.cells[0].records[sample]["scores"]["score"] + 0.01 * (-1) ** i
    # Differences of 1, -1, 1, -1 points: s² = 4 / 3, (1.960 + 0.842) · sqrt(4 / 3 / 4) = 1.62.
    assert "a true difference of 1.62 points would be found four times in five" in table_of(run).caption
    assert "four times in five" not in table_of(results(n=1)).caption


def test_equal_methods_are_not_told_apart():
    run = results(cells=[cell_of("snapkv"), cell_of("snapkv", True)])
    equal = replace(run, cells=[run.cells[0], replace(run.cells[1], records=run.cells[0].records)])
    assert "16 tasks: +0.00 [+0.00, +0.00] ≈" in as_text(table_of(equal))


def test_a_single_sample_has_a_difference_without_an_interval():
    text = as_text(table_of(results(n=1)))
    assert re.search(r"16 tasks: [+-]\d+\.\d\d \[—\] ≈", text)
    assert "1 sample a task" in text


# What is missing


@pytest.mark.parametrize("failed", [False, True])
def test_a_missing_sample_is_shown_and_not_averaged_over(failed):
    # Case H12.
    run = results()
    records = run.cells[NAMES.index("SnapKV+GraphKV")].records
    if failed:
        records["hotpotqa/1"] = {"sample": "hotpotqa/1", "task": "hotpotqa", "status": "failed", "error": "no room"}
    else:
        del records["hotpotqa/1"]
    table = table_of(run)
    row = row_of(table, "SnapKV+GraphKV")
    entry, average = row.entries["hotpotqa"], row.entries[AVERAGE]
    assert (entry.n, entry.asked, entry.score, entry.difference, entry.kept) == (3, 4, None, None, None)
    assert (average.n, average.score, average.difference, average.kept, average.share) == (63, None, None, None, None)
    others = tuple(task for task in LONGBENCH if task != "hotpotqa")
    assert row.shared == others
    means = [row.entries[task].difference.difference for task in others]
    assert row.difference.difference == pytest.approx(np.mean(means))
    assert "15 tasks: " in as_text(table)
    assert table.notes == (
        f"smollm2, SnapKV+GraphKV: missing samples: HotpotQA 1 of 4{' (1 failed)' if failed else ''}",
    )
    assert f"of 576 results {int(failed)} failed" in table.caption
    assert row_of(table, "PyramidKV").entries[AVERAGE].score is not None


def test_a_gap_of_the_base_row_leaves_no_difference_there():
    run = results()
    del run.cells[NAMES.index("KNorm")].records["lcc/0"]
    row = row_of(table_of(run), "KNorm+GraphKV")
    assert row.entries["lcc"].score is not None and row.entries["lcc"].difference is None
    assert row.entries[AVERAGE].score is not None and row.entries[AVERAGE].difference is None
    assert len(row.shared) == 15


def test_a_cell_without_results_is_a_row_of_dashes():
    run = results(tasks=["trec", "lcc"])
    run.cells[5].records.clear()
    table = table_of(run)
    entries = row_of(table, "SnapKV").entries.values()
    assert all(entry.score is None and entry.n == 0 for entry in entries)
    assert row_of(table, "SnapKV+GraphKV").difference is None
    assert table.notes == ("smollm2, SnapKV: missing samples: TREC 4 of 4, LCC 4 of 4",)


def test_some_tasks_are_some_columns_and_have_no_average():
    table = table_of(results("llama3", tasks=["trec", "qasper", "hotpotqa"]))
    row = row_of(table, "SnapKV+GraphKV", "llama3")
    assert table.tasks == ("qasper", "hotpotqa", "trec")
    assert row.entries[AVERAGE].score is row.entries[AVERAGE].paper is row.entries[AVERAGE].difference is None
    assert row.entries[AVERAGE].kept == 512
    assert "3 tasks: " in as_text(table)
    with_graph, without = (paper.table1_row("llama3", f"snapkv{graph}").scores for graph in ("+graphkv", ""))
    assert row.printed_difference == pytest.approx(np.mean([with_graph[t] - without[t] for t in table.tasks]))


def test_longbench_e_has_columns_of_its_own_and_no_part_in_the_average():
    tasks = [*LONGBENCH, "qasper_e", "lcc_e"]
    alone, table = table_of(results("llama3", tasks=tasks[-2:])), table_of(results("llama3", tasks=tasks[::-1]))
    assert table.tasks == tuple(tasks)
    row = row_of(table, "SnapKV+GraphKV", "llama3")
    assert (row.entries["lcc_e"].n, row.entries["lcc_e"].paper) == (4, None)
    assert row.shared == LONGBENCH and row.entries[AVERAGE].difference == row.difference
    assert row.entries[AVERAGE].score == pytest.approx(np.mean([row.entries[t].score for t in LONGBENCH]), abs=0.0051)
    row = row_of(alone, "SnapKV+GraphKV", "llama3")
    assert row.shared == ("qasper_e", "lcc_e")
    assert row.printed_difference is row.entries[AVERAGE].score is row.entries[AVERAGE].paper is None
    assert "Qasper-E" in as_text(alone)


def test_a_graph_row_without_its_base_says_so():
    table = table_of(results(cells=[cell_of("snapkv", True), cell_of("snapkv", budget=256)]))
    assert row_of(table, "SnapKV (budget 512)+GraphKV").difference is None
    assert table.notes == ("smollm2, SnapKV (budget 512)+GraphKV: no Δ, since the row without GraphKV is not there",)


# Rows by what they are


def test_rows_are_named_by_what_sets_them_apart():
    cells = [
        cell_of("lagkv"),
        cell_of("snapkv", {**GRAPH, "rounds": 2}),
        cell_of("snapkv", True),
        cell_of("cake", budget=128),
        cell_of("snapkv", pooling="max"),
        cell_of("snapkv", kernel=5),
        cell_of("snapkv"),
        cell_of("full"),
    ]
    assert [row.name for row in table_of(results(cells=cells)).blocks["smollm2"]] == [
        "Full",
        "SnapKV (budget 512)",
        "SnapKV (budget 512)+GraphKV (rounds 1)",
        "SnapKV (budget 512)+GraphKV (rounds 2)",
        "SnapKV (kernel 5, budget 512)",
        "SnapKV (pooling max, budget 512)",
        "CAKE (budget 128)",
        "LagKV (budget 512)",
    ]


def test_options_of_another_scorer_are_named_where_they_vary():
    rows = table_of(results(cells=[cell_of("lagkv", lag=lag) for lag in (128, 64)])).blocks["smollm2"]
    assert [row.name for row in rows] == ["LagKV (lag 64)", "LagKV (lag 128)"]


def test_each_graph_variant_is_compared_with_the_one_base():
    cells = [cell_of("snapkv"), cell_of("snapkv", True), cell_of("snapkv", {**GRAPH, "neighbors": 8})]
    table = table_of(results(cells=cells))
    variants = [row for row in table.blocks["smollm2"] if row.difference]
    assert [row.name for row in variants] == ["SnapKV+GraphKV (neighbors 8)", "SnapKV+GraphKV (neighbors auto3)"]


def test_the_papers_rows_stand_by_the_cells_that_they_describe():
    table = table_of(results("llama3"))
    printed = {row.name: row.printed and row.printed.method for row in table.blocks["llama3"]}
    assert printed == {
        "Full": "full",
        "KNorm": "knorm",
        "KNorm+GraphKV": "knorm+graphkv",
        "KNorm (window 32)": None,
        "KNorm (window 32)+GraphKV": None,
        "SnapKV": "snapkv",
        "SnapKV+GraphKV": "snapkv+graphkv",
        "PyramidKV": "pyramidkv",
        "PyramidKV+GraphKV": "pyramidkv+graphkv",
    }
    row = row_of(table, "SnapKV+GraphKV", "llama3")
    assert row.entries["qasper"].paper == 25.37
    assert row.entries[AVERAGE].paper == 40.35
    assert row.printed_difference == pytest.approx(0.38, abs=0.005)
    assert "39.58†" in as_text(table) and "†: " in table.caption


@pytest.mark.parametrize(
    ("model", "cell"),
    [
        ("smollm2", cell_of("snapkv")),
        ("llama3", cell_of("snapkv", budget=128)),
        ("llama3", cell_of("snapkv", kernel=5)),
        ("llama3", cell_of("cake")),
    ],
)
def test_other_models_budgets_and_options_have_no_row_in_the_paper(model, cell):
    table = table_of(results(model, [cell]))
    assert [row.printed for row in table.blocks[model]] == [None]
    assert "paper" not in as_text(table)


# Title and caption


def test_the_caption_says_how_the_numbers_were_made():
    one, two = results("llama3"), results("mistral", dtype="bfloat16")
    two.cells[0].records["trec/0"] = {"status": "failed"}
    table = build([one, two], resamples=100, seed=3)
    for part in [
        "Protocol official",
        "edit similarity difflib",
        "data hub, sha256 0123456789ab;",
        "4 samples a task.",
        "llama3 (float16): of 64 prompts 8 truncated and 4 beyond the model's positions; of 576 results 0 failed.",
        "mistral (bfloat16): of 64 prompts 8 truncated",
        "of 576 results 1 failed.",
        "100 resamples, seed 3",
        "≈: not distinguishable from 0",
        "per KV head",
        "prompts, cut, stops and edit similarity of its own script",
        "KNorm with a window is not in the paper",
    ]:
        assert part in table.caption
    assert "0123456789abc" not in table.caption
    assert table.title == "Table 1. A part of LongBench's rows, budget 512 tokens a layer"


def test_mini_cannot_be_taken_for_longbench():
    table = table_of(results("llama3", data="mini"))
    assert "mini: a test bed, NOT LongBench" in table.title
    assert "not comparable with mini" in table.caption


def test_only_all_rows_are_longbench():
    run = results(cells=[cell_of("full")], tasks=["multifieldqa_en"], n=150)
    assert table_of(run).title == "Table 1. LongBench"
    assert "150 samples a task." in table_of(run).caption


def test_uneven_tasks_are_counted_one_by_one():
    run, left_out = results(n=4), ("lcc/0", "trec/0", "trec/1")
    table = table_of(replace(run, samples=[pair for pair in run.samples if pair[0] not in left_out]))
    assert "4 samples a task (TREC 2, LCC 3)." in table.caption


# Mistakes


@pytest.mark.parametrize("fact", ["protocol", "similarity", "data", "data_hash"])
def test_models_that_were_run_otherwise_are_refused(fact):
    with pytest.raises(UserError, match=f"cannot compare llama2 with llama3: {fact} is .* and other"):
        table_of(results("llama2"), results("llama3", **{fact: "other"}))


def test_other_samples_duplicates_and_unknown_tasks_are_refused():
    run = results(tasks=["trec"])
    with pytest.raises(UserError, match="their samples differ"):
        table_of(run, results("llama3", tasks=["trec"], n=5))
    with pytest.raises(UserError, match="smollm2 is there twice"):
        table_of(run, run)
    with pytest.raises(UserError, match="the cell cell 0 is there twice"):
        table_of(replace(run, cells=[run.cells[0], run.cells[0]]))
    with pytest.raises(UserError, match="the sample trec/0 is there twice"):
        table_of(replace(run, samples=[*run.samples, run.samples[0]]))
    with pytest.raises(UserError, match="no column needle"):
        table_of(results(tasks=["needle"]))
    for nothing in ([], [replace(run, cells=[])], [replace(run, samples=[])]):
        with pytest.raises(UserError, match="at least one"):
            build(nothing)


# Layouts


@pytest.fixture
def awkward() -> Table1:
    """Two models, one with a name full of markup; a gap, and a scorer without a display name."""
    cells = [*(cell.cell for cell in results().cells), cell_of("lagkv")]
    runs = [results(model, cells, data=r"a_b/50%_\{x}&|~^#$") for model in ("llama3", "a_b*c&d|%")]
    del runs[0].cells[6].records["hotpotqa/2"]
    return table_of(*runs)


def written(table: Table1, folder: Path) -> dict[str, str]:
    paths = write(table, folder / "new" / "table1-v0.1")
    assert [path.name for path in paths] == ["table1-v0.1.md", "table1-v0.1.csv", "table1-v0.1.tex"]
    return {path.suffix: path.read_text("utf-8") for path in paths}


def test_text_fits_the_terminal_and_holds_every_number(awkward):
    for width in (90, 120, 400):
        text = as_text(awkward, width)
        assert max(map(len, text.splitlines())) <= width
        assert all(heading in text for heading in [*HEADINGS, "Avg.", "kept", "of prompt"])
        for row in awkward.blocks["llama3"]:
            for entry in row.entries.values():
                assert entry.score is None or f"{entry.score:.2f}" in text
    lines = text.splitlines()
    (position,) = [i for i, line in enumerate(lines) if line.startswith("SnapKV+GraphKV")][:1]
    assert [lines[position + i].split()[0] for i in (1, 2)] == ["Δ", "paper"]


def test_narrow_columns_leave_room_for_the_category():
    lines = as_text(table_of(results(tasks=["qasper", "hotpotqa", "lcc"]))).splitlines()
    categories, headings = lines[2], lines[3]
    for category, task in [("Single-document QA", "Qasper"), ("Multi-document QA", "HotpotQA"), ("Code", "LCC")]:
        assert categories.index(category) <= headings.index(task)


def test_markdown_has_the_same_cells_in_every_line(awkward, tmp_path):
    text = written(awkward, tmp_path)[".md"]
    assert text.startswith("### Table 1. A part of LongBench's rows")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert {len(line) for line in cells} == {1 + 16 + 4}
    assert len({len(line) for line in lines}) == 1
    assert set(cells[1]) == {c for c in cells[1] if re.fullmatch(r"-+:?", c)}
    assert cells[0][1] == "Single-document QA" and cells[0][15] == "Code"
    headings = ["Method", *HEADINGS, "Avg.", "kept", "of prompt", "Δ of mean [95 %]"]
    assert cells[2] == [f"**{heading}**" for heading in headings]
    assert r"**a\_b\*c&d\|%**" in [line[0] for line in cells]
    names = [line[0] for line in cells]
    at = names.index("SnapKV+GraphKV")
    assert names[at + 1 : at + 3] == ["Δ", "*paper*"]
    assert cells[at][4] == cells[at][17] == cells[at + 1][4] == "—"
    assert cells[at + 2][4] == "*43.21*"
    assert text.splitlines()[-1] == "- llama3, SnapKV+GraphKV: missing samples: HotpotQA 1 of 4"


def test_csv_is_tidy(awkward, tmp_path):
    (tmp_path / "t.csv").write_text(written(awkward, tmp_path)[".csv"], encoding="utf-8")
    frame = pd.read_csv(tmp_path / "t.csv")
    keys = ["model", "row", "task"]
    assert not frame.duplicated(keys).any()
    frame = frame.set_index(keys).sort_index()
    for model, rows in awkward.blocks.items():
        for row in rows:
            for task, entry in row.entries.items():
                line = frame.loc[model, row.name, task]
                assert (line["n"], line["asked"], line["label"]) == (entry.n, entry.asked, row.label)
                found = line[["ours", "paper", "kept", "of_prompt"]].astype(float)
                expected = [entry.score, entry.paper, entry.kept, entry.share]
                np.testing.assert_allclose(found, [np.nan if x is None else x for x in expected], rtol=1e-5)
                if entry.difference:
                    ends = [entry.difference.difference, entry.difference.low, entry.difference.high]
                    np.testing.assert_allclose(line[["difference", "low", "high"]].astype(float), ends, rtol=1e-5)
                    assert line["distinguishable"] == entry.difference.clear
                    assert pd.isna(line["p_sign"]) == (entry.difference is not row.difference)
                else:
                    assert line[["difference", "low", "high"]].isna().all()
    gap = frame.loc["llama3", "SnapKV+GraphKV"]
    assert np.isnan(gap.loc["hotpotqa", "ours"]) and np.isnan(gap.loc[AVERAGE, "ours"])
    found = row_of(awkward, "SnapKV+GraphKV", "llama3").comparison
    expected = [found.difference.difference, found.sign.better, found.sign.worse, found.sign.p, found.p_holm]
    columns = ["difference", "better", "worse", "p_sign", "p_holm", "detectable"]
    line = gap.loc["mean of 15 tasks", columns].astype(float)
    np.testing.assert_allclose(line, [*expected, found.detectable], rtol=1e-5)
    assert set(frame["protocol"]) == {"official"} and set(frame["data_hash"]) == {FACTS["data_hash"]}


def test_latex_is_balanced_escaped_and_has_the_columns_that_it_announces(awkward, tmp_path):
    text = written(awkward, tmp_path)[".tex"]
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    bare = re.sub(r"\\[\\{}%&$#_]", "", body)  # without escaped characters and line ends
    depth = 0
    for char in bare:
        depth += (char == "{") - (char == "}")
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    assert not re.search(r"[%#_^~]", bare.replace("[3]{#3}", "").replace("{!}{%", "")) and bare.isascii()
    for name in ("table*", "tabular"):
        assert body.count(f"\\begin{{{name}}}") == body.count(f"\\end{{{name}}}") == 1
    columns = len(re.search(r"\\begin\{tabular\}\{([lr]+)\}", body)[1])
    assert columns == 21
    rows = [line for line in body.splitlines() if line.endswith(r" \\")]
    for row in rows:
        cells = re.split(r"(?<!\\)&", row.removesuffix(r" \\"))
        spans = [int(m[1]) if (m := re.match(r"\s*\\multicolumn\{(\d+)\}", cell)) else 1 for cell in cells]
        assert sum(spans) == columns
    assert body.count(r"\toprule") == body.count(r"\bottomrule") == 1
    assert r"\cmidrule(lr){2-4}" in body and r"\cmidrule(lr){16-17}" in body
    assert r"\textbf{a\_b*c\&d\textbar{}\%}" in body
    assert r"a\_b/50\%\_\textbackslash{}\{x\}\&\textbar{}\textasciitilde{}\textasciicircum{}\#\$" in body
    assert r"$\approx$" in body and r"\quad $\Delta$ &" in body and r"\quad \textit{paper} &" in body
    assert not re.search(r"(?<!\$)-\d", re.search(r"\\midrule.*", body, re.DOTALL)[0])
    assert body.count("Table 1") == 1  # of the paper; LaTeX numbers ours


def test_nothing_is_printed_as_minus_zero():
    run = results(cells=[cell_of("snapkv"), cell_of("snapkv", True)])
    for sample, record in run.cells[1].records.items():
        record["scores"]["score"] = run.cells[0].records[sample]["scores"]["score"] - 1e-6
    text = as_text(table_of(run))
    assert "-0.00" not in text and "+0.00" in text


@pytest.mark.parametrize(("sizes", "said"), [((2, 40), "as few as 2 samples"), ((10, 40), ""), ((1, 9), "")])
def test_few_samples_are_said_to_give_narrow_intervals(sizes, said):
    tasks = {name: [str(i) for i in range(n)] for name, n in zip(("qasper", "lcc"), sizes, strict=True)}
    assert said in " ".join(table1_words.few(tasks)) and bool(said) == bool(list(table1_words.few(tasks)))


def test_uniform_head_budgets_go_without_saying():
    cells = [cell_settings("snapkv", 128, head_budget=kind).describe() for kind in ("uniform", "ada")]
    assert [table1_words.name(cell, cells) for cell in cells] == [
        "SnapKV",
        "SnapKV (head budget ada, head floor 0.2)",
    ]
