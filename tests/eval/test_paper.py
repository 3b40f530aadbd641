"""The paper's Table 1 as data: complete, found by name, and honest about its own averages."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from eval import paper
from eval.errors import UserError
from eval.metrics import LONGBENCH

ROOT = Path(__file__).resolve().parents[2]
TRANSCRIPT = Path(os.environ.get("GRAPHKV_SHARED", ROOT.parent / "shared")) / "research/paper_table1.csv"


def test_every_model_has_every_method_and_every_task():
    table = paper.table1()
    assert set(table) == {(model, method) for model in paper.MODELS for method in paper.METHODS}
    assert len(table) == 21
    assert all(tuple(row.scores) == LONGBENCH for row in table.values())
    assert all(0 < score < 100 for row in table.values() for score in row.scores.values())


@pytest.mark.parametrize(
    ("model", "method", "task", "score"),
    [
        ("llama2", "full", "narrativeqa", 18.39),
        ("llama3", "snapkv", "qasper", 23.37),
        ("llama3", "snapkv+graphkv", "repobench-p", 56.10),
        ("llama3", "pyramidkv+graphkv", "hotpotqa", 44.13),
        ("mistral", "knorm", "passage_retrieval_en", 6.42),
    ],
)
def test_scores_are_the_printed_ones(model, method, task, score):
    row = paper.table1_row(model, method)
    assert (row.model, row.method, row.scores[task]) == (model, method, score)


def test_averages_are_the_printed_ones():
    gains = {model: paper.table1_row(model, "snapkv+graphkv").average for model in paper.MODELS}
    assert gains == {"llama2": 32.35, "llama3": 40.35, "mistral": 40.60}


def test_two_printed_averages_differ_from_their_columns():
    found = {key for key, row in paper.table1().items() if paper.printed_average_differs(row)}
    assert found == {("llama3", "pyramidkv"), ("mistral", "snapkv+graphkv")}


def test_up_to_a_hundredth_is_rounding():
    row = paper.PaperRow("m", "full", dict.fromkeys(LONGBENCH, 50.0), 50.01)
    assert not paper.printed_average_differs(row)
    assert paper.printed_average_differs(replace(row, average=50.02))
    assert paper.printed_average_differs(replace(row, average=49.98))


@pytest.mark.parametrize(("model", "method"), [("qwen", "full"), ("llama3", "h2o"), ("llama3", "SnapKV")])
def test_an_unknown_row_names_the_known_ones(model, method):
    with pytest.raises(UserError, match=r"no row .*models are llama2, .*methods full, knorm,"):
        paper.table1_row(model, method)


def test_the_table_cannot_be_changed_from_outside():
    paper.table1().clear()
    assert len(paper.table1()) == 21


# Ablations


@pytest.mark.parametrize(
    ("artifact", "scorer", "value", "task", "score"),
    [
        ("fig4", "snapkv", "none", "needle", 87.7),
        ("fig4", "pyramidkv", "graphkv", "needle", 96.9),
        ("fig6", "cake", "2", "hotpotqa", 46.47),
        ("fig6", "pyramidkv", "none", "hotpotqa", 42.51),
        ("table2", "snapkv", "evict", "avg", 18.80),  # its scorer is not known: beside any
        ("table2", "knorm", "enhance", "musique", 19.78),
        ("table6", "snapkv", "0.7", "qasper", 25.20),
        ("table6", "snapkv", "0.3", "qasper", None),
        ("fig6", "knorm", "1", "hotpotqa", None),
        ("fig6", "cake", "1", "qasper", None),
        ("fig8", "snapkv", "kk", "hotpotqa", None),
    ],
)
def test_numbers_of_the_ablations(artifact, scorer, value, task, score):
    assert paper.ablation(artifact, scorer, value, task) == score


def test_fig_6_begins_with_table_1():
    # Why the figure is taken for HotpotQA of Llama3-8B at 512 tokens.
    for scorer in ("snapkv", "pyramidkv"):
        printed = paper.table1_row("llama3", scorer).scores["hotpotqa"]
        assert paper.ablation("fig6", scorer, "none", "hotpotqa") == printed


def test_the_first_round_helps_all_four_and_the_second_not_cake():
    for scorer in ("cake", "h2o", "pyramidkv", "snapkv"):
        none, one, two, three = (paper.ablation("fig6", scorer, t, "hotpotqa") for t in ("none", "1", "2", "3"))
        assert one > none and three > none
        assert (two > none) is (scorer != "cake")


@pytest.mark.skipif(not TRANSCRIPT.is_file(), reason=f"no transcript of the paper's table at {TRANSCRIPT}")
def test_the_file_is_the_transcript():
    expected = pd.read_csv(TRANSCRIPT).set_index(["model", "method"])
    assert set(expected.index) == set(paper.table1())
    for key, row in paper.table1().items():
        assert {**row.scores, "avg": row.average} == expected.loc[key].to_dict()
