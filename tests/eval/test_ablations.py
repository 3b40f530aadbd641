"""The ablations' points: found by what cells are, equal to the records, compared with their base, never over gaps."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from made_up import FIG5, cell_of, cells_of, results

from eval import ablation_tables, ablations
from eval.averages import mean_of_tasks
from eval.cell_results import ModelResults
from eval.errors import UserError
from eval.stats import holm, paired_difference

QA = ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"]
ROUNDS = [{"rounds": t} for t in (1, 2, 3)]
EDGES = [{"edge": edge} for edge in ("qq", "qk", "kk", "kv", "vv")]


def build(result: ModelResults, name: str) -> list[ablations.Ablation]:
    return ablations.build(result, name, resamples=200)


def only(result: ModelResults, name: str) -> pd.DataFrame:
    (found,) = build(result, name)
    return found.points


def scores_of(result: ModelResults, cell: dict, task: str) -> np.ndarray:
    """Scores of a cell in 0..100, by sample id, straight from the records."""
    (found,) = [other for other in result.cells if other.cell == cell]
    samples = sorted(sample for sample, of in result.samples if of == task)
    return np.array([100 * found.records[sample]["scores"]["score"] for sample in samples])


def row_of(points: pd.DataFrame, **where: str) -> pd.Series:
    found = points[np.logical_and.reduce([points[key] == value for key, value in where.items()])]
    assert len(found) == 1
    return found.iloc[0]


# Points


def test_points_are_those_of_the_records():
    result = results(cells_of(["snapkv"], EDGES), ["hotpotqa", "lcc"], gain=0.05)
    points = only(result, "fig8")
    assert len(points) == 2 * 6
    for task in ("hotpotqa", "lcc"):
        base = scores_of(result, cell_of(), task)
        at_base = row_of(points, panel=task, series="no graph")
        assert at_base["score"] == round(base.mean(), 2) and np.isnan(at_base["difference"])
        for graph in EDGES:
            rows = scores_of(result, cell_of(graph=graph), task)
            point = row_of(points, panel=task, setting=graph["edge"])
            assert point["score"] == round(rows.mean(), 2) and point["baseline"] == round(base.mean(), 2)
            expected = paired_difference([rows - base], resamples=200)
            assert (point["difference"], point["low"], point["high"]) == pytest.approx(
                (expected.difference, expected.low, expected.high)
            )
            assert (point["n"], point["asked"], point["kept"]) == (12, 12, 512)
            assert point["of_prompt"] == pytest.approx(0.256)
            assert (point["better"], point["worse"]) == ((rows > base).sum(), (rows < base).sum())


def test_a_panel_of_several_tasks_is_the_mean_of_their_scores():
    result = results(cells_of(["snapkv"], FIG5), QA)
    points = only(result, "fig5")
    assert set(points["panel"]) == {"single-document QA", "multi-document QA"}
    single = QA[:3]
    point = row_of(points, panel="single-document QA", setting="0.7")
    by_task = [scores_of(result, cell_of(graph={"source_ratio": 0.7}), task) for task in single]
    base = [scores_of(result, cell_of(), task) for task in single]
    assert point["score"] == round(np.mean([round(rows.mean(), 2) for rows in by_task]), 2)
    expected = paired_difference([a - b for a, b in zip(by_task, base, strict=True)], resamples=200)
    assert (point["difference"], point["low"]) == pytest.approx((expected.difference, expected.low))
    assert (point["tasks"], point["n"]) == (" ".join(single), 36)


def test_holms_family_is_a_line_in_a_panel():
    points = only(results(cells_of(["snapkv"], FIG5), QA), "fig5")
    variants = points[points["series"] != "no graph"]
    for _, line in variants.groupby(["option", "panel"]):
        assert len(line) in (5, 8)
        assert line["p_holm"].tolist() == pytest.approx(holm(line["p_sign"].tolist()))


def test_a_table_has_a_column_a_task_and_their_mean():
    signals = [{"signal": signal} for signal in ("decay", "enhance", "evict")]
    result = results(cells_of(["snapkv"], signals, budget=128), ["qasper", "musique", "lcc"])
    points = only(result, "table2")
    assert list(dict.fromkeys(points["panel"])) == ["qasper", "musique", "lcc", "mean"]
    assert list(dict.fromkeys(points["row"])) == ["no graph", "decay", "enhance", "evict"]
    scores = points[points["row"] == "evict"].set_index("panel")["score"]
    assert scores["mean"] == round(scores[["qasper", "musique", "lcc"]].mean(), 2)
    assert set(only(results(cells_of(["snapkv"], signals), ["lcc"]), "table2")["panel"]) == {"lcc"}


# What a cell is decides where it stands


def test_a_union_of_two_sweeps_shares_one_cell():
    cells = cells_of(["snapkv"], FIG5)
    assert len(cells) == 13  # k = 0.3 B and m = min(3, L) are the default, once
    points = only(results(cells, QA), "fig5")
    by_option = {option: rows for option, rows in points[points["panel"] == "multi-document QA"].groupby("option")}
    ratios, neighbours = by_option["source_ratio"], by_option["neighbors"]
    assert ratios["x"].tolist() == ["", "0.1", "0.3", "0.5", "0.7", "1"]
    assert neighbours["x"].tolist() == ["", "1", "3", "5", "8", "3", "8", "16", "32"]
    assert neighbours["series"].tolist() == ["no graph"] + ["min(m, L)"] * 4 + ["fixed m"] * 4
    shared = [row_of(ratios, setting="0.3"), row_of(neighbours, setting="auto3")]
    assert shared[0]["label"] == shared[1]["label"] and shared[0]["score"] == shared[1]["score"]


@pytest.mark.parametrize(
    ("name", "cells", "tasks"),
    [
        ("fig5", cells_of(["snapkv"], FIG5), QA),
        ("fig6", cells_of(["cake", "h2o", "pyramidkv", "snapkv"], ROUNDS), ["hotpotqa"]),
        ("fig8", cells_of(["snapkv"], EDGES), ["hotpotqa", "lcc"]),
    ],
)
def test_order_and_labels_of_cells_do_not_matter(name, cells, tasks):
    result = results(cells, tasks)
    named = [replace(cell, label=f"x{i}") for i, cell in enumerate(random.Random(1).sample(result.cells, len(cells)))]
    shuffled = replace(result, cells=named, samples=random.Random(2).sample(result.samples, len(result.samples)))
    (one,), (other,) = build(result, name), build(shuffled, name)
    pd.testing.assert_frame_equal(one.points.drop(columns="label"), other.points.drop(columns="label"))
    assert one.caption == other.caption


def test_rounds_begin_with_the_scorer_without_graph():
    points = only(results(cells_of(["snapkv", "cake"], ROUNDS), ["hotpotqa"]), "fig6")
    for scorer in ("SnapKV", "CAKE"):
        line = points[points["panel"] == scorer]
        assert line["position"].tolist() == [0, 1, 2, 3] and line["x"].tolist() == ["0", "1", "2", "3"]
        assert line["series"].tolist() == ["no graph"] + ["GraphKV"] * 3


def test_other_budgets_and_scorers_make_figures_of_their_own():
    cells = [*cells_of(["snapkv", "pyramidkv"], EDGES), *cells_of(["snapkv"], EDGES, budget=128)]
    found = build(results(cells, ["lcc"]), "fig8")
    assert [one.title for one in found] == [
        "Fig. 8. What a source and its neighbours are compared by: SnapKV, 128 tokens a layer. A part of LongBench's "
        "rows",
        "Fig. 8. What a source and its neighbours are compared by: SnapKV, 512 tokens a layer. A part of LongBench's "
        "rows",
        "Fig. 8. What a source and its neighbours are compared by: PyramidKV, 512 tokens a layer. A part of "
        "LongBench's rows",
    ]
    assert [set(one.points["scorer"]) for one in found] == [{"snapkv"}, {"snapkv"}, {"pyramidkv"}]
    two = build(results([*cells_of(["snapkv"], ROUNDS), *cells_of(["cake"], ROUNDS, budget=64)], ["lcc"]), "fig6")
    assert [list(one.points["panel"].unique()) for one in two] == [["SnapKV"], ["CAKE"]]


def test_lines_that_differ_in_another_option_are_told_apart():
    graphs = [{"edge": edge, "rounds": t} for edge in ("kk", "vv") for t in (1, 2)]
    points = only(results(cells_of(["snapkv"], graphs), ["lcc"]), "fig8")
    assert set(points["series"]) == {"no graph", "GraphKV (rounds 1)", "GraphKV (rounds 2)"}
    assert set(points["row"]) == {"no graph", "k–k (rounds 1)", "k–k (rounds 2)", "v–v (rounds 1)", "v–v (rounds 2)"}


def test_variants_of_a_scorer_have_a_panel_each():
    cells = [*cells_of(["snapkv"], ROUNDS), *cells_of(["snapkv"], ROUNDS, kernel=5)]
    assert list(only(results(cells, ["lcc"]), "fig6")["panel"].unique()) == ["SnapKV", "SnapKV (kernel 5)"]


def test_where_nothing_varies_there_is_nothing_to_show():
    with pytest.raises(UserError, match="artifact=fig6 shows what rounds of the graph change, but no two cells differ"):
        build(results(cells_of(["snapkv"], EDGES), ["lcc"]), "fig6")
    with pytest.raises(UserError, match="source_ratio and neighbors"):
        build(results([cell_of()], ["lcc"]), "fig5")


# Gaps: case H12


@pytest.mark.parametrize("failed", [False, True])
def test_a_missing_sample_is_missing_and_not_averaged_over(failed):
    result = results(cells_of(["snapkv"], EDGES), ["hotpotqa", "lcc"])
    (cell,) = [found for found in result.cells if found.cell == cell_of(graph={"edge": "kv"})]
    if failed:
        cell.records["lcc/3"] = {"sample": "lcc/3", "task": "lcc", "status": "failed", "error": "no room"}
    else:
        del cell.records["lcc/3"]
    (found,) = build(result, "fig8")
    point = row_of(found.points, panel="lcc", setting="kv")
    assert (point["n"], point["asked"], point["mark"]) == (11, 12, "")
    assert point[["score", "difference", "low", "high", "p_sign", "p_holm", "kept"]].isna().all()
    others = found.points.drop(index=point.name)
    assert others["score"].notna().all() and others["p_holm"].count() == 9
    told = f"{cell.label}: LCC 1 of 12{' (1 failed)' if failed else ''}."
    assert f"Missing samples (hatched; nothing is averaged over what is left): {told}" in found.caption
    assert f"of 144 results {int(failed)} failed" in found.caption


def test_a_gap_of_the_base_leaves_scores_without_differences():
    result = results(cells_of(["snapkv"], EDGES), ["lcc"])
    (base,) = [found for found in result.cells if found.cell == cell_of()]
    del base.records["lcc/0"]
    points = only(result, "fig8")
    variants = points[points["series"] != "no graph"]
    assert variants["score"].notna().all() and points["baseline"].isna().all()
    assert variants["difference"].isna().all() and (variants["mark"] == "").all()
    without = replace(result, cells=[cell for cell in result.cells if cell is not base])
    assert only(without, "fig8")["difference"].isna().all() and len(only(without, "fig8")) == 5


def test_a_mean_over_tasks_has_all_of_them_or_is_missing():
    result = results(cells_of(["snapkv"], [{"signal": "decay"}, {"signal": "evict"}]), ["qasper", "lcc"])
    (evict,) = [found for found in result.cells if found.cell == cell_of(graph={"signal": "evict"})]
    del evict.records["lcc/0"]
    row = only(result, "table2").query("row == 'evict'").set_index("panel")
    assert row["score"].notna().to_dict() == {"qasper": True, "lcc": False, "mean": False}
    assert np.isnan(row.loc["mean", "difference"])


def test_the_mean_of_some_tasks():
    assert mean_of_tasks({"qasper": 10.0, "lcc": 21.111}, ["qasper", "lcc"]) == 15.56
    assert mean_of_tasks({"qasper": 10.0}, ["qasper", "lcc"]) is None


def test_a_caption_names_a_few_gaps_and_counts_the_rest():
    result = results(cells_of(["snapkv"], FIG5), ["lcc"])
    for cell in result.cells:
        cell.records.clear()
    (found,) = build(result, "fig5")
    assert found.caption.endswith("; and 9 more cells.")
    assert "kv head), window included: SnapKV —." in found.caption.lower().replace("snapkv", "SnapKV")
    assert found.points["score"].isna().all()


def test_a_single_sample_has_no_interval():
    (found,) = build(results(cells_of(["snapkv"], EDGES), ["lcc"], n=1), "fig8")
    variants = found.points[found.points["series"] != "no graph"]
    assert variants["difference"].notna().all() and variants[["low", "high", "detectable"]].isna().all(axis=None)
    assert set(variants["mark"]) == {"≈"}
    assert "No intervals: a task has a single sample" in found.caption and "four times in five" not in found.caption


# The paper's numbers, and the words


def test_the_papers_numbers_stand_by_scorer_and_rounds():
    points = only(results(cells_of(["cake", "snapkv"], ROUNDS), ["hotpotqa"], model="smollm2"), "fig6")
    point = row_of(points, panel="SnapKV", setting="3")
    assert (point["paper"], point["paper_difference"]) == (43.38, pytest.approx(0.78))
    assert row_of(points, panel="CAKE", setting="2")["paper_difference"] == pytest.approx(-0.02)
    assert row_of(points, panel="CAKE", setting="none")["paper"] == 46.49
    assert only(results(cells_of(["snapkv"], ROUNDS), ["lcc"]), "fig6")["paper"].isna().all()
    assert only(results(cells_of(["snapkv"], ROUNDS), ["lcc", "hotpotqa"]), "fig6")["paper"].isna().all()


def test_the_papers_average_stands_beside_ten_tasks_only():
    signals = [{"signal": "decay"}, {"signal": "evict"}]
    ten = [*QA, "gov_report", "passage_retrieval_en", "lcc", "repobench-p"]
    for tasks, average in ((ten, 39.84), (QA, np.nan)):
        points = only(results(cells_of(["snapkv"], signals, budget=128), tasks, n=2), "table2")
        assert row_of(points, panel="mean", row="decay")["paper"] == pytest.approx(average, nan_ok=True)
        assert row_of(points, panel="musique", row="decay")["paper"] == 19.68
    points = only(results(cells_of(["snapkv"], FIG5), QA, n=2), "table6")
    assert points.dropna(subset="paper").set_index(["panel", "row"])["paper"].to_dict() == {
        ("hotpotqa", "k = 0.1 B"): 43.91,
        ("qasper", "k = 0.7 B"): 25.20,
        ("multifieldqa_en", "k = 1 B"): 36.82,
    }


def test_the_caption_says_how_the_numbers_were_made():
    (found,) = build(results(cells_of(["snapkv", "pyramidkv"], ROUNDS), ["hotpotqa"], data="mini"), "fig6")
    assert found.title == "Fig. 6. Rounds of propagation: 512 tokens a layer. mini: a test bed, NOT LongBench"
    for part in [
        "llama3 (float16): of 12 prompts 0 truncated",
        "Protocol official; edit similarity difflib; data mini, sha256 0123456789ab; 12 samples a task.",
        "mean of the samples of HotpotQA",
        "per KV head), window included: SnapKV 512.0, PyramidKV 512.0.",
        "Dashed: no graph. Bars: the 95 % interval of the paired difference to the dashed line",
        "200 resamples, seed 0",
        "survives Holm's correction over the settings of a line",
        "would be found four times in five (80 % power",
        "Fig. 6, p. 7 (F1; HotpotQA and Llama3-8B at 512 tokens",
        "not comparable with mini",
    ]:
        assert part in found.caption
    low, high = re.search(r"true difference of ([\d.]+) to ([\d.]+) points", found.caption).groups()
    detectable = found.points["detectable"].dropna()
    assert (float(low), float(high)) == pytest.approx((detectable.min(), detectable.max()), abs=0.005)


# As tables


def test_the_table_has_every_number():
    (found,) = build(results(cells_of(["snapkv"], FIG5), QA, gain=0.1), "table6")
    frame = ablation_tables.as_frame(found)
    assert list(frame) == ["setting", "NrtvQA", "Qasper", "MF-en", "HotpotQA", "2WikiMQA", "Musique", "mean", "kept"]
    names = frame["setting"].tolist()
    assert names.count("no graph") == 1 and names[0] == "no graph" and "Δ" not in names[1]
    assert [name for name in names if not name.startswith(" ")][1:] == [
        *(f"k = {ratio} B" for ratio in ("0.1", "0.3", "0.5", "0.7", "1")),
        *(f"m = min({m}, L)" for m in (1, 3, 5, 8)),
        *(f"m = {m}" for m in (3, 8, 16, 32)),
    ]
    at = names.index("k = 0.7 B")
    assert names[at + 1 : at + 3] == ["  Δ", "  paper"]
    point = row_of(found.points, panel="qasper", row="k = 0.7 B")
    assert frame.loc[at, "Qasper"] == f"{point['score']:.2f}" and frame.loc[at + 2, "Qasper"] == "25.20"
    assert frame.loc[at + 1, "Qasper"] == f"{point['difference']:+.2f} {point['mark']}"
    mean = row_of(found.points, panel="mean", row="k = 0.7 B")
    interval = f"{mean['difference']:+.2f} [{mean['low']:+.2f}, {mean['high']:+.2f}] {mean['mark']}"
    assert frame.loc[at + 1, "mean"] == interval and mean["mark"] == "**"
    assert frame.loc[at, "kept"] == "512.0"


def test_files_of_a_table(tmp_path):
    result = results(cells_of(["snapkv"], [{"signal": "decay"}, {"signal": "evict"}]), ["qasper", "lcc"])
    del result.cells[1].records["lcc/0"]
    (found,) = build(result, "table2")
    paths = ablation_tables.write(found, tmp_path / "new" / "table2-v0.1")
    assert [path.name for path in paths] == ["table2-v0.1.md", "table2-v0.1.csv"]
    text = paths[0].read_text("utf-8")
    assert text.startswith("### Table 2. What neighbours receive: SnapKV, 512 tokens a layer")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.split(r"(?<!\\)\|", line)) for line in lines} == {7}
    assert re.search(r"\| decay \| [\d.]+ \| — \| — \|", text)
    assert r"\*: the interval excludes 0; \*\*: and" in text
    table = pd.read_csv(paths[1])
    assert len(table) == len(found.points) and set(table["data_hash"]) == {result.facts["data_hash"]}
    np.testing.assert_allclose(table["score"], found.points["score"])
    np.testing.assert_allclose(table["low"], found.points["low"], rtol=1e-5)


def test_a_figure_on_the_screen_has_its_intervals():
    (found,) = build(results(cells_of(["snapkv"], ROUNDS), ["hotpotqa"]), "fig6")
    text = ablation_tables.as_text(found)
    point = row_of(found.points, setting="2")
    assert f"{point['difference']:+.2f} [{point['low']:+.2f}, {point['high']:+.2f}] {point['mark']}" in text
    assert "≈: not distinguishable from 0" in text and "Dashed" not in text
