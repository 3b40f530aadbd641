"""The retention explorer: its page holds what cells keep, nothing of a prompt is markup, mistakes are told."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from eval.errors import UserError
from graphkv import explore, grid
from graphkv.packing import unpack
from graphkv.page import FOLDER, colours, contrast, render
from graphkv.retention import retention

HOSTILE = "</script><script>boom()</script> <!-- <script> ]]> & \"' \u2028 \x7f {{data}} \\u003c"


# The document and the page


@pytest.fixture(scope="module")
def document(tiny, tmp_path_factory):
    """The data of a page of a hostile text under three cells."""
    grid._engines.clear()
    grid._engines[tiny.info.config] = tiny
    file = tmp_path_factory.mktemp("text") / "notes.txt"
    file.write_text("The harbour bell rings at nine. " * 9 + HOSTILE, encoding="utf-8")
    folder = file.parent
    arguments = ["model=tiny", "budget=48", "--cell", "scorer=snapkv +graphkv=off,on", "--cell", "scorer=full"]
    arguments += ["--text", str(file), "--question", "When?", "--mark", "bell rings", "task.max_new_tokens=5"]
    explore.main([*arguments, f"results_dir={folder}"])
    (data,) = (folder / "explorer").glob("*.json")
    return json.loads(data.read_text()), data.with_suffix(".html").read_text(encoding="utf-8")


def test_the_document_holds_what_the_cells_did(tiny, document):
    data, _ = document
    assert list(data)[:2] == ["title", "cells"]
    assert data["cells"] == ["snapkv-48", "snapkv-48+graphkv", "full"]
    text = "".join(data["prompt"]["texts"])
    assert HOSTILE in text and text.endswith("\n\nQuestion: When?\nAnswer:")
    (mark,) = data["prompt"]["marks"]
    assert "".join(data["prompt"]["texts"][mark["begin"] : mark["end"]]) == "bell rings"

    prompt = tiny.prefill(text.removeprefix("<s>"))
    arrays = {name: unpack(entry) for name, entry in data["arrays"].items()}
    graphs = [None, {}, None]
    for facts, label, graph in zip(data["retention"], data["cells"], graphs, strict=True):
        cell = tiny.compress(prompt, label.split("-")[0], 48, graph)
        expected = retention(prompt, cell)
        assert facts["label"] == label == cell.settings.label
        assert np.array_equal(arrays[facts["kept"]], expected.kept)
        assert np.array_equal(arrays[facts["ranks"]], expected.ranks)
        assert np.allclose(np.array(facts["similarity"], float), expected.similarity, atol=1e-5, equal_nan=True)
        assert facts["answer"] == tiny.text(tiny.decode(prompt, [cell], max_new_tokens=5)[0].ids)
        assert facts["kept_per_layer"] == cell.kept_per_layer and facts["bytes"] == cell.bytes
        assert (facts["edges"] is None) == (graph is None) == (facts["factors"] is None)
        if graph is not None:
            assert np.array_equal(arrays[facts["plain_ranks"]], expected.plain_ranks)
            assert np.array_equal(arrays[facts["factors"]], expected.factors)
            check_packed_edges(facts["edges"], arrays, expected.edges)
    full = data["retention"][2]
    assert data["full"]["answer"] == full["answer"]
    assert data["full"]["similarity"] == pytest.approx(np.mean(full["similarity"], axis=1), abs=1e-4)


def check_packed_edges(facts, arrays, layers) -> None:
    """Flat arrays of edges against the edges of each layer, head and choice."""
    sources, neighbors, similarity = (arrays[facts[name]] for name in ("sources", "neighbors", "similarity"))
    at, edge = 0, 0
    for layer, choices in enumerate(layers):
        k, m = facts["k"][layer], facts["m"][layer]
        assert facts["choices"][layer] == len(choices)
        for head in range(2):
            for choice in choices:
                assert sources[at : at + k].tolist() == choice.sources[head].tolist()
                assert neighbors[edge : edge + k * m].tolist() == choice.neighbors[head].flatten().tolist()
                assert np.array_equal(similarity[edge : edge + k * m], choice.similarity[head].flatten().numpy())
                at, edge = at + k, edge + k * m
    assert (at, edge) == (len(sources), len(neighbors))


class Elements(HTMLParser):
    """Start tags with their attributes, and the text of scripts, styles and the title."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.setdefault(self.tags[-1][0] if self.tags else "", []).append(data)


def test_nothing_of_the_prompt_is_markup(document):
    data, page = document
    elements = Elements(page)
    assert [attributes for tag, attributes in elements.tags if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    packed, script = (text for text in elements.texts["script"] if text.strip())
    assert json.loads(packed) == data
    assert "boom()" not in page.replace(packed, "")
    (policy,) = (a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "unsafe" not in policy
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)[1]
    for source in (script, style):
        assert base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() in policy


def test_a_hostile_title_is_text():
    page = render({"title": "<b>&{{data}}</title>", "cells": []})
    assert "<title>&lt;b&gt;&amp;{{data}}&lt;/title&gt;</title>" in page


def test_the_page_asks_nothing_of_the_network():
    text = "".join(file.read_text(encoding="utf-8") for file in FOLDER.iterdir())
    addresses = re.findall(r"https?://[^\s\"']+", text)
    assert addresses == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


def test_colours_can_be_read_and_rise_away_from_the_background():
    css = (FOLDER / "page.css").read_text(encoding="utf-8")
    generated, written = (re.findall(r":root\s*{(.*?)}", sheet, re.DOTALL) for sheet in (colours(), css))
    assert len(generated) == len(written) == 2  # light and dark
    for scheme in map("".join, zip(generated, written, strict=True)):
        found = {name: np.array(to_rgb(value)) for name, value in re.findall(r"--([\w-]+):\s*(#\w+)", scheme)}
        inks = [name for name in found if name.endswith("-ink")]
        assert len(inks) == 21
        for name in inks:
            assert contrast(found[name], found[name.removesuffix("-ink")]) >= 4.5, name
        for name in ("text", "muted", "focus", "notice"):
            assert min(contrast(found[name], found[behind]) for behind in ("panel", "back")) >= 4.5, name
        assert (found["panel"] == found["k0"]).all()
        for letter, levels in (("k", 9), ("a", 6), ("b", 6), ("g", 4)):
            steps = [contrast(found[f"{letter}{i}" if i else "k0"], found["panel"]) for i in range(levels)]
            assert steps == sorted(set(steps)), letter


# The command line


def labels(*overrides: str, cells=()) -> list[str]:
    """Labels of the cells of a command."""
    return [cell.label for cell in explore.settings(["model=tiny", *overrides], cells)[1]]


def test_lists_of_values_are_cells():
    assert labels("scorer=full,snapkv", "+graphkv=off,on", "budget=64") == ["full", "snapkv-64", "snapkv-64+graphkv"]


def test_cells_replace_settings_of_the_command():
    cells = ["", "scorer=snapkv budget=32,48", "+graphkv=on graphkv.rounds=2"]
    found = labels("budget=64", "scorer=knorm", cells=cells)
    assert found == ["knorm-64", "snapkv-32", "snapkv-48", "knorm-64+graphkv(rounds=2)"]


def test_the_example_is_replaced_by_what_is_asked_for():
    assert explore.settings(["model=tiny"])[0].task["lengths"] == [2000]
    assert explore.settings(["model=tiny", "task.lengths=[500]"])[0].task["lengths"] == [500]
    assert explore.settings(["model=tiny", "task=needle"])[0].task["lengths"] == [1000, 2000, 3000]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["scorer=snapvk"], "snapvk"),
        (["budget=8"], "budget=8 is below the window"),
        (["scorer=snapkv", "scorer=knorm"], "scorer is given twice"),
        (["bugdet=64"], "bugdet"),
        (["scorer.kernel=[1"], "the command: no viable alternative at input '[1'"),
        (["budget=range(64,128)", "budget.x=1"], "budget"),
        (["--cell", "scorer='snapkv"], "--cell number 1 cannot be read"),
        (["--cell", "", "--cell", "model.dtype=bfloat16"], "share model, prompt and decoding"),
        (["decode.evict_every=4", "scorer=h2o"], "after the prefill"),
        (["--text", "/nowhere/a.txt"], "cannot be read: No such file"),
        (["--text", "TEXT", "task=needle"], "--text is the prompt"),
        (["--text", "TEXT", "--sample", "x"], "name two prompts"),
        (["--text", "EMPTY"], "is empty"),
        (["--text", "LATIN"], "is not UTF-8 (byte 1)"),
        (["--text", "LONG"], "has 4096 positions"),
        (["--text", "TEXT", "--mark", "not there"], "does not contain 'not there'"),
        (["--text", "TEXT", "--out", "page.htm"], "must end in .html"),
        (["--text", "TEXT", "--out", "FILE/page.html"], "cannot write"),
        (["--question", "Why?"], "give one with --text"),
        (["--sample", "needle-x"], "needle-x is not a sample of this task, which has needle-dolores-2000-50"),
        (["model.path=/nowhere"], "config.json"),
        (["task=fidelity"], "no cell answer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_sentence(tmp_path, capsys, arguments, says):
    files = {"TEXT": b"The bell rings.", "EMPTY": b" \n", "LATIN": b"t\xe9", "LONG": b"x" * 4096, "FILE": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = [re.sub("^(TEXT|EMPTY|LATIN|LONG|FILE)", lambda match: str(tmp_path / match[0]), one) for one in arguments]
    with pytest.raises(SystemExit) as stopped:
        explore.main(["model=tiny", f"results_dir={tmp_path}", *found])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and says in said
    assert not (tmp_path / "explorer").exists()


def test_a_page_that_would_be_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(explore, "LARGEST", 20_000)
    file = tmp_path / "a.txt"
    file.write_text("The harbour bell rings. " * 20)
    options = explore._parser().parse_intermixed_args(["model=tiny", "budget=64", "--text", str(file)])
    with pytest.raises(UserError, match=r"the page would have 0\.\d MB"):
        explore.run(options)


def test_a_sample_of_a_task_is_shown_with_its_needle_and_scores(tmp_path, capsys):
    out = tmp_path / "deep" / "page.html"
    explore.main(["model=tiny", "task.lengths=[400]", "task.max_new_tokens=4", "budget=64", "--out", str(out)])
    assert capsys.readouterr().out.split() == [str(out), str(out.with_suffix(".json"))]
    data = json.loads(out.with_suffix(".json").read_text())
    assert data["prompt"]["sample"] == "needle-dolores-400-50" and len(data["prompt"]["texts"]) == 400
    (mark,) = data["prompt"]["marks"]
    passage = "".join(data["prompt"]["texts"][mark["begin"] : mark["end"]])
    assert mark["name"] == "needle" and passage.strip().startswith("The best thing to do in San Francisco is")
    assert set(data["retention"][0]["scores"]) == {"overlap", "rouge1", "contains"}
    assert data["prompt"]["question"] == "What is the best thing to do in San Francisco?"
