"""The heat map: what it shows, what it says of missing scores, and the files that it leaves. No pixels."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from eval.errors import UserError
from eval.figures import SCORE_MAX, needle_figure, needle_heatmap
from eval.needles import SCORES

LENGTHS, DEPTHS = [1000, 2000, 3000], [0, 25, 50, 75, 100]
LONG_NAME = "SnapKV + GraphKV (k=0.1, m=3, T=2, key-key cosine, decay=1-sim), B=128, granularity=kv_head"


def frame(score=None, lengths=LENGTHS, depths=DEPTHS) -> pd.DataFrame:
    """A full grid; by default the score tells length and depth."""
    score = score or (lambda length, depth: length / 4000 + depth / 1000)
    rows = [(length, depth, score(length, depth)) for length in lengths for depth in depths]
    return pd.DataFrame(rows, columns=["length", "depth", "score"])


def panels_of(figure: Figure) -> list:
    return figure.axes[:-1]


def image_of(ax) -> np.ma.MaskedArray:
    return ax.get_images()[0].get_array()


def labels_of(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_length_runs_across_and_depth_down():
    ax = panels_of(needle_figure([("full", frame().sample(frac=1, random_state=0))]))[0]
    image = image_of(ax)
    assert image.shape == (5, 3)
    expected = [[length / 4000 + depth / 1000 for length in LENGTHS] for depth in DEPTHS]
    np.testing.assert_allclose(image.filled(np.nan), expected)
    assert ax.yaxis_inverted()
    assert labels_of(ax.xaxis) == ["1000", "2000", "3000"]
    assert labels_of(ax.yaxis) == ["0", "25", "50", "75", "100"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("prompt length (tokens)", "needle depth (%)")


def test_values_are_printed_in_small_grids_only():
    texts = [text.get_text() for text in panels_of(needle_figure([("full", frame())]))[0].texts]
    assert len(texts) == 15 and "0.25" in texts
    large = frame(lengths=range(500, 8000, 500), depths=range(0, 100, 10))
    assert not panels_of(needle_figure([("full", large.assign(score=0.5))]))[0].texts


@pytest.mark.parametrize("score", SCORE_MAX)
def test_all_panels_share_the_scale_of_the_score(score):
    low, high = frame(lambda *_: 0.1), frame(lambda *_: SCORE_MAX[score])
    figure = needle_figure([("low", low), ("high", high)], score=score)
    limits = {ax.get_images()[0].get_clim() for ax in panels_of(figure)}
    assert limits == {(0, SCORE_MAX[score])}
    assert {ax.get_images()[0].get_cmap().name for ax in panels_of(figure)} == {"cividis"}
    assert figure.axes[-1].get_ylabel() == f"{score} score"


def test_scores_have_a_scale():
    assert SCORE_MAX.keys() == SCORES.keys()


def test_title_of_a_panel_has_the_mean():
    figure = needle_figure([("full cache", frame(lambda length, _: length / 4000))])
    assert panels_of(figure)[0].get_title() == "full cache\nmean 0.50"


@pytest.mark.parametrize("how", ["row absent", "NaN"])
def test_a_missing_square_is_hatched_and_told(how):
    scores = frame(lambda *_: 0.8)
    at = (scores["length"] == 2000) & (scores["depth"] == 75)
    partial = scores[~at] if how == "row absent" else scores.assign(score=scores["score"].mask(at))
    figure = needle_figure([("a", scores), ("b", partial)], caption="One needle.")
    whole, holed = panels_of(figure)
    assert whole.get_title() == "a\nmean 0.80" and not whole.patches
    assert holed.get_title() == "b\nmean 0.80 of 14/15"
    (patch,) = holed.patches
    assert patch.get_hatch() and (patch.get_x(), patch.get_y()) == (0.5, 2.5)
    assert image_of(holed).mask[3, 1] and image_of(holed).mask.sum() == 1
    assert len(holed.texts) == 14
    assert "Hatched: scores are missing." in figure.get_supxlabel()


def test_a_square_that_lacks_a_needle_is_hatched_too():
    """Two needles a square, one score lost: the other is drawn, but not passed off as the mean of both."""
    both = pd.concat([frame(lambda *_: 1.0), frame(lambda *_: 0.5)], ignore_index=True)
    ax = panels_of(needle_figure([("a", both.drop(index=20))]))[0]
    assert ax.get_title().endswith("of 29/30")
    (patch,) = ax.patches
    assert patch.get_hatch() and patch.get_facecolor()[3] == 0, "the colour of the square shows through"
    assert image_of(ax)[0, 1] == 1.0
    assert image_of(ax)[0, 0] == 0.75


def test_a_panel_without_any_score():
    empty = pd.DataFrame(columns=["length", "depth", "score"])
    figure = needle_figure([("a", frame()), ("b", empty)])
    assert panels_of(figure)[1].get_title() == "b\nno score of 15"
    assert len(panels_of(figure)[1].patches) == 15


@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("grid", [(3, 5), (15, 10)])
def test_no_text_overlaps(n, grid):
    scores = frame(lambda *_: 0.5, range(500, 500 * (grid[0] + 1), 500), np.linspace(0, 100, grid[1]).round())
    names = [LONG_NAME, "full cache", LONG_NAME.replace(" ", "/")] * 3
    caption = "A caption that says model, budget, window, number of needles and the hash of the haystack. " * 2
    title = "A title that is longer than a figure with a single panel in it is wide"
    figure = needle_figure([(name, scores) for name in names[:n]], title, caption=caption)
    figure.draw_without_rendering()

    axes = panels_of(figure)
    assert len(axes) == n
    texts = [text for ax in axes for text in (ax.title, ax.xaxis.label, ax.yaxis.label) if text.get_text()]
    texts += [label for ax in axes for label in [*ax.get_xticklabels(), *ax.get_yticklabels()]]
    texts += [figure._suptitle, figure._supxlabel, figure.axes[-1].yaxis.label]
    boxes = [text.get_window_extent() for text in texts if text.get_text() and text.get_visible()]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.padded(-0.5).overlaps(other.padded(-0.5))
    for box in boxes:
        assert figure.bbox.padded(1).contains(box.x0, box.y0) and figure.bbox.padded(1).contains(box.x1, box.y1)


def test_files(tmp_path):
    stem = tmp_path / "figures" / "fig4.b128"
    paths = needle_heatmap([("full", frame())], stem, "Needle in a haystack", caption="One needle.")
    assert paths == (tmp_path / "figures" / "fig4.b128.png", tmp_path / "figures" / "fig4.b128.pdf")
    assert paths[0].read_bytes().startswith(b"\x89PNG") and paths[1].read_bytes().startswith(b"%PDF")
    before = [path.read_bytes() for path in paths]
    needle_heatmap([("full", frame())], stem, "Needle in a haystack", caption="One needle.")
    assert [path.read_bytes() for path in paths] == before


def test_nothing_global_is_touched(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    pyplot_was_there = "matplotlib.pyplot" in sys.modules
    needle_heatmap([("full", frame())], tmp_path / "a")
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_was_there


@pytest.mark.parametrize(
    ("panels", "score", "message"),
    [
        ([], "overlap", "no score to draw"),
        ([("a", frame().head(0))], "overlap", "no score to draw"),
        ([("a", frame().drop(columns="depth"))], "overlap", "'a' lack the column depth"),
        (
            [("a", frame(lambda *_: 7.5))],
            "overlap",
            "'a' has the score 7.5, but overlap lies between 0 and 1",
        ),
        ([("a", frame(lambda *_: -1.0))], "rouge1", "has the score -1"),
        ([("a", frame())], "accuracy", "score is 'accuracy', but must be one of overlap, contains, rouge1"),
    ],
)
def test_user_errors(panels, score, message):
    with pytest.raises(UserError, match=message):
        needle_figure(panels, score=score)
