"""Fig. 2 and Fig. 7 through the command: their numbers against slow ones, and drawings without overlapping text."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
import pytest
import torch

from graphkv.config import cell_settings
from graphkv.studies import key_figures
from graphkv.studies.prompts import TextOptions

GRAPH = {"neighbors": 3}
SMALL = ["study.tokens=300", "study.shown=20", "graphkv.neighbors=3", "budget=64"]


def mean_cosine(keys: torch.Tensor, positions) -> float:
    """Mean over all pairs of some tokens, from the matrix of their cosines."""
    chosen = keys[list(positions)].double()
    cosines = chosen @ chosen.T / torch.outer(chosen.norm(dim=-1), chosen.norm(dim=-1))
    return float(cosines[torch.triu(torch.ones_like(cosines, dtype=torch.bool), 1)].mean())


def scored(tiny, scorer: str, graph, granularity: str = "kv_head", head_budget: str = "uniform"):
    """The prompt of the command, keys as stored, and past positions that the engine keeps."""
    prompt = tiny.prefill(TextOptions().ids(tiny.info, 300), window=32)
    cell = tiny.cut(prompt, cell_settings(scorer, 64, graph, None, granularity, head_budget))
    views = [view.per_query_head() if granularity == "query_head" else view for view in prompt.layers]
    return views, [[[p for p in head.tolist() if p < 268] for head in kept] for kept in cell.kept]


@pytest.mark.parametrize(
    ("granularity", "head_budget"), [("kv_head", "uniform"), ("query_head", "uniform"), ("kv_head", "ada")]
)
def test_mean_cosines_of_every_layer_and_head(run, tiny, tmp_path, granularity, head_budget):
    heads = [f"granularity={granularity}", f"head_budget={head_budget}"]
    done = run("experiment=fig2", *SMALL, *heads, "study.layers=[1]", results=tmp_path)
    assert done.returncode == 0, done.stderr
    means = pd.read_csv(done.files["-means.csv"]).set_index(["layer", "head", "set"])["mean_cosine"]
    views, before = scored(tiny, "snapkv", None, granularity, head_budget)
    _, after = scored(tiny, "snapkv", GRAPH, granularity, head_budget)
    assert len(means) == 2 * len(before[0]) * 5
    for layer, view in enumerate(views):
        for head, keys in enumerate(view.keys):
            assert means[layer, head, "all"] == pytest.approx(mean_cosine(keys, range(268)), abs=1e-9)
            for name, kept in (("before", before), ("after", after)):
                found = mean_cosine(keys, kept[layer][head])
                assert means[layer, head, f"kept {name}"] == pytest.approx(found, abs=1e-9)
    assert any(before[layer][head] != after[layer][head] for layer in range(2) for head in range(2))


def test_figure_2_shows_its_numbers(run, tiny, tmp_path):
    done = run("experiment=fig2", *SMALL, "study.layers=[1]", "study.head=1", "study.top=7", results=tmp_path)
    assert done.returncode == 0, done.stderr
    found = done.files
    assert list(found) == [".png", ".pdf", ".csv", "-pairs.csv", "-means.csv", ".json"]
    maps, pairs = pd.read_csv(found[".csv"]), pd.read_csv(found["-pairs.csv"])
    views, before = scored(tiny, "snapkv", None)
    keys = views[1].keys[1].double()
    unit = keys / keys.norm(dim=-1, keepdim=True)
    for row in maps.itertuples():
        assert row.cosine == pytest.approx(float(unit[row.row] @ unit[row.column]), abs=1e-9)
    assert maps.groupby("panel").size().to_dict() == {"all": 210, "top after": 28, "top before": 28}
    scores = cell_settings("snapkv", 64).scorer.score(views[1])[1]
    highest = sorted(range(268), key=lambda position: (-float(scores[position]), position))[:7]
    assert set(maps[maps["panel"] == "top before"]["row"]) == set(highest)

    chosen = unit[before[1][1]]
    cosines = (chosen @ chosen.T)[np.triu_indices(32, 1)]
    bins = pairs[pairs["set"] == "kept before"]
    expected, _ = np.histogram(cosines, np.append(bins["low"], bins["high"].iloc[-1]))
    np.testing.assert_array_equal(bins["pairs"], expected)
    np.testing.assert_allclose(pairs.groupby("set")["share"].sum(), 1)

    facts = json.loads(found[".json"].read_text())
    assert facts["code"]["packages"]["torch"] and facts["settings"]["study"]["head"] == 1
    assert facts["settings"]["prompts"][0]["tokens"] == 300


def test_figure_7_shows_its_numbers(run, tiny, tmp_path):
    done = run("experiment=fig7", *SMALL[0:1], *SMALL[2:], "study.rounds=[0,2]", "study.head=1", results=tmp_path)
    assert done.returncode == 0, done.stderr
    found = done.files
    points, panels = pd.read_csv(found[".csv"]), pd.read_csv(found["-panels.csv"]).set_index("rounds")
    views, before = scored(tiny, "snapkv", None)
    _, after = scored(tiny, "snapkv", {**GRAPH, "rounds": 2})
    keys = views[1].keys[1, :268].double().numpy()
    centered = keys - keys.mean(0)
    _, s, directions = np.linalg.svd(centered, full_matrices=False)
    np.testing.assert_allclose(panels["explained"], (s[:2] ** 2).sum() / (s**2).sum(), rtol=1e-9)
    for rounds, kept in ((0, before[1][1]), (2, after[1][1])):
        here = points[points["rounds"] == rounds]
        for column, direction in zip(("component_1", "component_2"), directions, strict=False):
            expected = centered @ direction * np.sign(direction[np.abs(direction).argmax()])
            np.testing.assert_allclose(here[column], expected, atol=1e-9)
        assert here["position"][here["kept"]].tolist() == kept
        assert here["top"].sum() == 10
        assert here["score"][here["top"]].min() >= here["score"][~here["top"]].max()
        assert panels.loc[rounds, "kept_cosine"] == pytest.approx(mean_cosine(views[1].keys[1], kept), abs=1e-9)
        assert panels.loc[rounds, "new"] == len(set(kept) - set(before[1][1]))
    assert panels.loc[2, "new"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scorer=full"], "study fig2 compares rankings, and full ranks nothing"),
        (["+graphkv=off"], r"study fig2 looks at re-ranking: it needs +graphkv=on"),
        (["graphkv.rounds=0"], "it needs +graphkv=on with rounds ≥ 1"),
        (["budget=300", "study.tokens=300"], "snapkv-300+graphkv keeps all of a prompt of 300 tokens"),
        (["study.tokens=300", "study.layers=[7]"], "study.layers=7 is not there: the model has 2"),
        (["study.tokens=300", "study.head=2"], "study.head=2 is not there: the model has 2"),
        (["study.layers=[1,1]"], "study: layers must differ, not [1, 1]"),
        (["study.top=many"], "study.top must be a whole number, not 'many'"),
        (["+study.tops=3"], "study.tops is not a setting (did you mean top?)"),
        (["study.name=fig3"], "study is 'fig3': choose experiment=fig2|fig7|table3|table5, or null"),
        (["study.text=/nowhere.txt"], "study.text=/nowhere.txt cannot be read"),
        (["study.tokens=9000"], "exceed the 4096 positions of tiny"),
    ],
)
def test_mistakes_write_nothing(run, tmp_path, arguments, message):
    done = run("experiment=fig2", *arguments, results=tmp_path / "results")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def numbers(layers: int, top: int):
    """Frames of the shape that Fig. 2 is drawn from, with positions of four digits."""
    generator = np.random.default_rng(0)
    maps, pairs, means = [], [], []
    for layer in range(layers):
        for panel, n in (("all", 40), ("top before", top), ("top after", top)):
            positions = np.sort(generator.choice(np.arange(1000, 8000), n, replace=False))
            row, column = np.triu_indices(n)
            cosine = np.where(row == column, 1, generator.uniform(-0.3, 0.9, len(row)))
            frame = pd.DataFrame({"row": positions[row], "column": positions[column], "cosine": cosine})
            maps.append(frame.assign(layer=layer, panel=panel))
        means += [(layer, name, 0.5) for name in ("all", "kept before", "kept after", "top before", "top after")]
        for name in ("all", "kept before", "kept after"):
            low = np.linspace(-1, 0.95, 40)
            frame = pd.DataFrame({"low": low, "high": low + 0.05, "pairs": 5, "share": 1 / 40})
            pairs.append(frame.assign(layer=layer, set=name))
    return pd.concat(maps), pd.concat(pairs), pd.DataFrame(means, columns=["layer", "set", "mean_cosine"])


def scattered(rounds: int):
    """Frames of the shape that Fig. 7 is drawn from."""
    generator = np.random.default_rng(0)
    frames = [
        pd.DataFrame(generator.normal(size=(60, 2)) * 100, columns=["component_1", "component_2"]).assign(
            rounds=number, kept=np.arange(60) < 20, top=np.arange(60) < 10
        )
        for number in range(rounds)
    ]
    panels = pd.DataFrame({"rounds": range(rounds), "kept": 480, "kept_cosine": 0.5, "top_cosine": -0.123456})
    return pd.concat(frames), panels.assign(new=123, explained=0.456), np.array([0.3, 0.156])


def test_heat_maps_show_the_frames():
    maps, pairs, means = numbers(2, 10)
    figure = key_figures.heat_maps(maps, pairs, means, 10, "A caption.")
    axes = figure.axes[:-1]
    assert len(axes) == 8
    for index, (layer, panel) in enumerate(itertools.product((0, 1), ("all", "top before", "top after"))):
        ax = axes[layer * 4 + index % 3]
        image = ax.get_images()[0].get_array()
        np.testing.assert_array_equal(image, image.T)
        here = maps[(maps["layer"] == layer) & (maps["panel"] == panel)]
        np.testing.assert_allclose(image[np.triu_indices(len(image))], here["cosine"])
        assert ax.get_images()[0].get_clim()[1] == 1
    assert axes[0].get_ylabel() == "layer 0\nposition" and axes[4].get_ylabel() == "layer 1\nposition"
    assert axes[2].get_title().startswith("top 10 after, 0 stay\nmean cosine")
    legend = [text.get_text() for text in axes[3].get_legend().get_texts()]
    assert legend == ["all, mean 0.500", "kept before, mean 0.500", "kept after, mean 0.500"]


def test_the_scatter_marks_what_is_kept():
    points, panels, explained = scattered(4)
    figure = key_figures.scatter(points, panels, explained, 10, "A caption.")
    assert [len(collection.get_offsets()) for collection in figure.axes[0].collections] == [40, 20, 10]
    assert figure.axes[1].get_title().endswith("123 of 480 kept are new")
    assert "T = 0; 46% of the variance" in figure.axes[0].get_title()
    assert figure.axes[2].get_xlabel() == "component 1 (30%)"


CAPTION = "A caption that names the model, the cell, the prompt and the means over all layers and heads. " * 4


@pytest.mark.parametrize(
    ("kind", "size"), [("maps", 1), ("maps", 2), ("maps", 3), *(("scatter", n) for n in range(1, 6))]
)
def test_no_text_overlaps(kind, size):
    if kind == "maps":
        top = 25 if size == 3 else 10
        figure = key_figures.heat_maps(*numbers(size, top), top, CAPTION)
    else:
        figure = key_figures.scatter(*scattered(size), 10, CAPTION)
    figure.draw_without_rendering()
    texts = [text for ax in figure.axes for text in (ax.title, ax.xaxis.label, ax.yaxis.label)]
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        texts += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high and t.label1.get_visible()]
    legends = [legend for ax in figure.axes if (legend := ax.get_legend())] + figure.legends
    texts += [text for legend in legends for text in legend.get_texts()]
    texts.append(figure._supxlabel)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text() and text.get_visible()]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.padded(-0.5).overlaps(b.padded(-0.5)), (one, other)
    for name, box in boxes:
        assert figure.bbox.padded(1).contains(box.x0, box.y0) and figure.bbox.padded(1).contains(box.x1, box.y1), name
