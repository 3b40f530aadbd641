"""The ablations' figures: panels, axes, ticks, marks and data, what is missing, and the files. No pixels."""

from __future__ import annotations

import itertools
import sys

import matplotlib
import numpy as np
import pandas as pd
import pytest
from made_up import FIG5, cells_of, results
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from eval import ablation_figures, ablations
from eval.style import COLOURS, MARKERS

QA = ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"]
ROUNDS = [{"rounds": t} for t in (1, 2, 3)]
EDGES = [{"edge": edge} for edge in ("qq", "qk", "kk", "kv", "vv")]
CODE = ["hotpotqa", "2wikimqa", "musique", "lcc", "repobench-p"]


def built(name: str, gain: float = 0.0, **options) -> ablations.Ablation:
    cells, tasks = {
        "fig5": (cells_of(["snapkv"], FIG5), QA),
        "fig6": (cells_of(["cake", "h2o", "pyramidkv", "snapkv"], ROUNDS), ["hotpotqa"]),
        "fig8": (cells_of(["snapkv"], EDGES), CODE),
    }[name]
    (found,) = ablations.build(results(cells, tasks, gain=gain, **options), name, resamples=200)
    return found


def ticks_of(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_xticklabels()]


def bars_of(ax: Axes) -> dict[float, tuple[float, float, float]]:
    """Place along the axis → score and both ends of its bar."""
    found = {}
    for bar in ax.containers:
        assert isinstance(bar, ErrorbarContainer)
        line, _, (columns,) = bar.lines
        for (x, score), ends in zip(line.get_xydata(), columns.get_segments(), strict=True):
            if len(ends):  # matplotlib has no segment for what is NaN
                found[float(x)] = (float(score), *(float(y) for y in ends[:, 1]))
    return found


def dashed_of(ax: Axes) -> list[float]:
    return [line.get_ydata()[0] for line in ax.lines if line.is_dashed() and len(set(line.get_ydata())) == 1]


def test_fig5_has_a_row_an_option_and_a_column_a_category():
    figure = ablation_figures.draw(built("fig5"))
    assert [ax.get_title().split("\n")[0] for ax in figure.axes] == ["single-document QA", "multi-document QA"] * 2
    assert figure.axes[0].get_title().endswith("\nNrtvQA, Qasper, MF-en")
    assert [ticks_of(ax) for ax in figure.axes[::2]] == [
        ["0.1", "0.3", "0.5", "0.7", "1"],
        ["1", "3", "5", "8", "16", "32"],
    ]
    labels = [(ax.get_xlabel(), ax.get_ylabel()) for ax in figure.axes]
    assert labels[:2] == [("sources k (share of the budget)", "score"), ("sources k (share of the budget)", "")]
    assert labels[2:] == [("neighbours m of a source", "score"), ("neighbours m of a source", "")]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["no graph", "GraphKV", "min(m, L)", "fixed m"]


def test_fig6_has_a_panel_a_scorer_on_one_scale():
    figure = ablation_figures.draw(built("fig6"))
    assert [ax.get_title() for ax in figure.axes] == [
        f"{name}\nHotpotQA" for name in ("SnapKV", "PyramidKV", "H2O", "CAKE")
    ]
    assert {tuple(ticks_of(ax)) for ax in figure.axes} == {("0", "1", "2", "3")}
    assert len({ax.get_ylim() for ax in figure.axes}) == 1
    assert {ax.get_xlabel() for ax in figure.axes} == {"rounds T"}


def test_fig8_has_a_panel_a_task_on_scales_of_their_own():
    figure = ablation_figures.draw(built("fig8"))
    assert [ax.get_title() for ax in figure.axes] == ["HotpotQA", "2WikiMQA", "Musique", "LCC", "RB-P"]
    assert {tuple(ticks_of(ax)) for ax in figure.axes} == {("q–q", "q–k", "k–k", "k–v", "v–v")}
    assert len({ax.get_ylim() for ax in figure.axes}) == 5


def test_more_panels_than_fit_a_row_make_rows():
    tasks = [*CODE, "qasper", "trec"]
    (found,) = ablations.build(results(cells_of(["snapkv"], EDGES), tasks, n=3), "fig8", resamples=100)
    figure = ablation_figures.draw(found)
    assert len(figure.axes) == 7
    assert [ax.get_ylabel() for ax in figure.axes] == ["score", "", "", "", "", "score", ""]


@pytest.mark.parametrize("name", ["fig6", "fig8"])
def test_points_bars_and_dashed_line_are_the_data(name):
    found = built(name)
    figure = ablation_figures.draw(found)
    for ax, (_, points) in zip(figure.axes, found.points.groupby("panel", sort=False), strict=True):
        variants = points[points["series"] != "no graph"].sort_values("position")
        bars = bars_of(ax)
        assert sorted(bars) == variants["position"].tolist()
        drawn = np.array([bars[x] for x in sorted(bars)])
        np.testing.assert_allclose(drawn[:, 0], variants["score"])
        # A bar is the interval of the difference, measured from the dashed line (but for the rounding of scores).
        (baseline,) = dashed_of(ax)
        assert baseline == points["baseline"].iloc[0]
        np.testing.assert_allclose(drawn[:, 1] - baseline, variants["low"], atol=0.011)
        np.testing.assert_allclose(drawn[:, 2] - baseline, variants["high"], atol=0.011)


def test_a_bar_crosses_the_dashed_line_where_the_difference_is_not_clear():
    found = built("fig8", gain=0.06)
    crosses, marks = [], []
    for ax, (_, points) in zip(
        ablation_figures.draw(found).axes, found.points.groupby("panel", sort=False), strict=True
    ):
        (baseline,), bars = dashed_of(ax), bars_of(ax)
        crosses += [bars[x][1] <= baseline <= bars[x][2] for x in sorted(bars)]
        marks += points[points["series"] != "no graph"].sort_values("position")["mark"].tolist()
    assert crosses == [mark == "≈" for mark in marks] and {True, False} == set(crosses)


def test_points_are_filled_where_the_difference_survives():
    found = built("fig8", gain=0.15)
    filled = 0
    for ax in ablation_figures.draw(found).axes:
        for bar in ax.containers:
            line = bar.lines[0]
            assert line.get_marker() == MARKERS[0] and line.get_color() == COLOURS[0]
            face = to_rgba(line.get_markerfacecolor())
            assert face in (to_rgba("white"), to_rgba(COLOURS[0]))
            filled += len(line.get_xdata()) * (face != to_rgba("white"))
    assert filled == (found.points["mark"] == "**").sum() > 0


def test_series_side_by_side_have_markers_of_their_own():
    ax = ablation_figures.draw(built("fig5")).axes[2]
    looks = {(bar.lines[0].get_marker(), bar.lines[0].get_color()) for bar in ax.containers}
    assert looks == {(MARKERS[1], COLOURS[1]), (MARKERS[2], COLOURS[2])}
    assert len(bars_of(ax)) == 8  # nothing stands on the same place


def test_the_papers_differences_are_drawn_from_our_line():
    found = built("fig6")
    figure = ablation_figures.draw(found)
    ax = figure.axes[0]
    (baseline,) = dashed_of(ax)
    diamonds = np.concatenate([line.get_ydata() for line in ax.lines if line.get_marker() == "D"])
    np.testing.assert_allclose(diamonds - baseline, [0.43, 0.44, 0.78], atol=1e-9)
    assert figure.legends[0].get_texts()[-1].get_text() == "paper's difference"
    assert "paper's difference" not in [
        t.get_text() for t in ablation_figures.draw(built("fig8")).legends[0].get_texts()
    ]


def test_what_is_missing_is_hatched():
    # Case H12.
    result = results(cells_of(["snapkv"], EDGES), ["hotpotqa", "lcc"])
    del result.cells[2].records["lcc/0"]
    (found,) = ablations.build(result, "fig8", resamples=100)
    whole, holed = ablation_figures.draw(found).axes
    assert not whole.patches and len(bars_of(whole)) == 5
    (patch,) = holed.patches
    assert patch.get_hatch() and patch.get_x() + patch.get_width() / 2 == pytest.approx(1.0)  # q–k
    assert sorted(bars_of(holed)) == [0, 2, 3, 4]
    assert ticks_of(holed) == ticks_of(whole)


@pytest.mark.parametrize(("name", "hatched"), [("fig6", 1), ("fig8", 0)])
def test_a_missing_base_is_told(name, hatched):
    cells = cells_of(["snapkv"], ROUNDS if name == "fig6" else EDGES)
    result = results(cells, ["lcc"])
    del result.cells[0].records["lcc/0"]
    (found,) = ablations.build(result, name, resamples=100)
    (ax,) = ablation_figures.draw(found).axes
    assert ax.get_title().endswith("\n(no graph: missing)")
    assert not dashed_of(ax) and len(ax.patches) == hatched


def test_equal_scores_do_not_look_different():
    result = results(cells_of(["snapkv"], ROUNDS), ["lcc"], spread=0.0)
    (found,) = ablations.build(result, "fig6", resamples=100)
    low, high = ablation_figures.draw(found).axes[0].get_ylim()
    assert high - low >= 2


def test_everything_lies_within_a_shared_scale():
    # The first panel's paper differences need less room than those of others.
    figure = ablation_figures.draw(built("fig6", spread=0.0, n=1))
    for ax in figure.axes:
        low, high = ax.get_ylim()
        values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in ax.lines])
        assert np.isfinite(values).sum() >= 9
        assert low < np.nanmin(values) and np.nanmax(values) < high


@pytest.mark.parametrize("name", ["fig5", "fig6", "fig8"])
def test_no_text_overlaps(name):
    figure = ablation_figures.draw(built(name, data="a_rather_long/folder name/of somebody"))
    figure.draw_without_rendering()
    assert_no_overlap(figure)


def assert_no_overlap(figure: Figure) -> None:
    texts = [text for ax in figure.axes for text in (ax.title, ax.xaxis.label, ax.yaxis.label)]
    texts += [label for ax in figure.axes for label in ax.get_xticklabels()]
    texts += [label for ax in figure.axes for label in ax.get_yticklabels() if inside(label, ax)]
    texts += [figure._supxlabel, figure.legends[0].get_title(), *figure.legends[0].get_texts()]
    boxes = [text.get_window_extent() for text in texts if text.get_text() and text.get_visible()]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.padded(-0.5).overlaps(other.padded(-0.5))
    for box in boxes:
        assert figure.bbox.padded(1).contains(box.x0, box.y0) and figure.bbox.padded(1).contains(box.x1, box.y1)


def inside(label, ax: Axes) -> bool:
    """Whether a tick label is drawn: matplotlib keeps some beyond the limits."""
    low, high = ax.get_ylim()
    return low <= label.get_position()[1] <= high


def test_files(tmp_path):
    found = built("fig6")
    stem = tmp_path / "figures" / "fig6-v0.1"
    paths = ablation_figures.write(found, stem)
    assert [path.name for path in paths] == ["fig6-v0.1.png", "fig6-v0.1.pdf", "fig6-v0.1.csv"]
    assert paths[0].read_bytes().startswith(b"\x89PNG") and paths[1].read_bytes().startswith(b"%PDF")
    table = pd.read_csv(paths[2])
    assert len(table) == 16 and set(table["artifact"]) == {"fig6"} and set(table["protocol"]) == {"official"}
    for column in ("score", "difference", "low", "high", "p_holm", "kept", "paper", "paper_difference"):
        np.testing.assert_allclose(table[column], found.points[column], rtol=1e-5)
    before = [path.read_bytes() for path in paths]
    ablation_figures.write(found, stem)
    assert [path.read_bytes() for path in paths] == before


def test_nothing_global_is_touched(tmp_path):
    before, pyplot_was_there = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    ablation_figures.write(built("fig6"), tmp_path / "a")
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_was_there
