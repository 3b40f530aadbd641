"""Fig. 4: panels by what cells are, differences over the same samples, the paper's means, and what is missing."""

from __future__ import annotations

import random

import numpy as np
import pandas as pd
import pytest
from made_up import cell_of

from eval import fig4
from eval.figures import needle_figure
from eval.stats import holm, paired_difference, sign_test

FACTS = {"model": "smollm2", "dtype": "float32", "data_hash": "0123456789abcdef", "needles": "dolores"}
SAMPLES = [(f"needle-{length}-{depth}", length, depth) for length in (1000, 2000) for depth in range(0, 101, 10)]


def cell(scorer: str, graph: bool, seed: int, gain: float = 0.0, budget: int = 128) -> fig4.NeedleCell:
    scores = np.random.default_rng(seed).uniform(0.2, 0.7, len(SAMPLES)) + gain
    frame = pd.DataFrame(SAMPLES, columns=["sample", "length", "depth"]).assign(score=scores, kept=float(budget))
    return fig4.NeedleCell(f"cell {seed}", cell_of(scorer, {} if graph else None, budget), frame)


def cells(**options) -> list[fig4.NeedleCell]:
    return [
        cell("pyramidkv", True, 3, **options),
        cell("snapkv", False, 0, **options),
        cell("snapkv", True, 1, gain=0.3, **options),
        cell("pyramidkv", False, 2, **options),
    ]


def build(found: list[fig4.NeedleCell], score: str = "overlap") -> fig4.Fig4:
    return fig4.build(found, score, FACTS, resamples=300)


def test_panels_have_the_scorers_with_and_without_graph_beside_the_paper():
    figure = build(cells())
    assert [name for name, _ in figure.panels] == [
        "SnapKV (paper 0.88)",
        "SnapKV+GraphKV (paper 0.96)",
        "PyramidKV (paper 0.90)",
        "PyramidKV+GraphKV (paper 0.97)",
    ]
    titles = [ax.get_title() for ax in needle_figure(figure.panels).axes[:-1]]
    assert titles[0] == f"SnapKV (paper 0.88)\nmean {cells()[1].scores['score'].mean():.2f}"
    assert figure.title == "Fig. 4. Needle in a haystack: 128 tokens a layer"
    assert "paper: Fig. 4, p. 6 (Llama3-8B, up to 8,000 tokens, 128 kept)" in figure.caption


def test_order_of_cells_and_samples_does_not_matter():
    shuffled = [
        fig4.NeedleCell("x", found.cell, found.scores.sample(frac=1, random_state=i))
        for i, found in enumerate(random.Random(0).sample(cells(), 4))
    ]
    one, other = build(cells()), build(shuffled)
    assert one.caption == other.caption
    pd.testing.assert_frame_equal(one.means, other.means)


def test_differences_are_paired_and_corrected_over_the_figure():
    base, graph = cells()[1].scores["score"], cells()[2].scores["score"]
    expected = paired_difference([graph - base], resamples=300)
    p_values = [
        sign_test([a.scores["score"] - b.scores["score"]]).p
        for a, b in ((cells()[2], cells()[1]), (cells()[0], cells()[3]))
    ]
    figure = build(cells())
    told = figure.means.set_index("cell")["Δ"]
    mark = "**" if holm(p_values)[0] < 0.05 else "*"
    assert told["SnapKV+GraphKV"] == f"{expected.difference:+.2f} [{expected.low:+.2f}, {expected.high:+.2f}] {mark}"
    assert told["SnapKV"] == told["PyramidKV"] == ""
    assert f"SnapKV+GraphKV {told['SnapKV+GraphKV']}; PyramidKV+GraphKV" in figure.caption
    assert mark == "**" and "300 resamples, seed 0" in figure.caption


def test_a_missing_sample_leaves_no_mean_and_no_difference():
    # Case H12.
    found = cells()
    found[1].scores.loc[3, ["score", "kept"]] = np.nan
    figure = build(found)
    means = figure.means.set_index("cell")
    assert means.loc["SnapKV", ["mean", "samples", "kept"]].tolist() == ["—", "21/22", "—"]
    assert means.loc["SnapKV+GraphKV", "Δ"] == "" and means.loc["PyramidKV+GraphKV", "Δ"] != ""
    assert "Difference of the mean to no graph: PyramidKV+GraphKV" in figure.caption
    assert len(needle_figure(figure.panels).axes[0].patches) == 1  # hatched


@pytest.mark.parametrize(("score", "budget"), [("overlap", 256), ("contains", 128)])
def test_other_scores_and_budgets_are_not_the_papers(score, budget):
    figure = build(cells(budget=budget), score)
    assert [name for name, _ in figure.panels][:2] == ["SnapKV", "SnapKV+GraphKV"]
    assert figure.points["paper"].isna().all() and "paper" not in figure.caption
    assert f"{budget} tokens a layer" in figure.title


def test_files_hold_every_score(tmp_path):
    figure = build(cells())
    paths = fig4.write(figure, tmp_path / "fig4")
    assert [path.suffix for path in paths] == [".png", ".pdf", ".csv"]
    table = pd.read_csv(paths[2])
    assert len(table) == 4 * len(SAMPLES) and set(table["needles"]) == {"dolores"}
    by_panel = table.groupby("panel")["score"].mean()
    for name, found in (("SnapKV", cells()[1]), ("SnapKV+GraphKV", cells()[2])):
        assert by_panel[name] == pytest.approx(found.scores["score"].mean(), rel=1e-5)
    assert table.groupby("panel")["paper"].first()["PyramidKV+GraphKV"] == 0.969
