"""The report without a browser: its numbers are those of the records, its texts stay texts, and it stays small."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import scipy.stats
from PIL import Image
from report_results import HOSTILE, RUN, cell, failure, record, small, write_cell

from eval.errors import UserError
from eval.report import files
from eval.report.__main__ import main
from eval.report.page import LIMIT, build

ASSETS = Path(files.__file__).parent / "assets"


class Parsed(HTMLParser):
    """Elements of a page, the text of its scripts by id, and everything that a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.text = ""
        self._inside: str | None = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[self.elements[-1][1].get("id")] = data
        elif self._inside is None:
            self.text += data

    @property
    def index(self) -> dict:
        return json.loads(self.scripts["index"])

    def answers(self, group: int = 0) -> dict:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[f"answers-{group}"])))

    def values(self, tag: str, name: str) -> list[str]:
        return [attributes[name] for element, attributes in self.elements if element == tag and name in attributes]


def report(root: Path, **options) -> Parsed:
    return Parsed(build(root, root / "report" / "index.html", **options).html)


def rows(page: Parsed) -> dict[tuple[str, bool], dict]:
    return {(row["scorer"], row["graph"]): row for row in page.index["cells"]}


def stored(root: Path) -> dict[tuple[str, bool], list[dict]]:
    """Records by scorer and graph, read without the project."""
    found = {}
    for path in root.rglob("records.jsonl"):
        settings = json.loads((path.parent / "manifest.json").read_text())["identity"]["cell"]
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[settings["scorer"]["name"], settings["graphkv"] is not None] = lines
    return found


# Numbers


def test_the_table_of_cells_is_what_the_records_say(tmp_path):
    page = report(small(tmp_path))
    assert set(rows(page)) == set(stored(tmp_path))
    for key, records in stored(tmp_path).items():
        row = rows(page)[key]
        scores = np.array([one["scores"]["overlap"] for one in records])
        assert (row["n"], row["asked"], row["failed"]) == (4, 4, 0)
        assert row["scores"] == pytest.approx({"overlap": scores.mean(), "rouge1": 10 * scores.mean()})
        assert (row["kept"], row["share"], row["bytes"], row["layers"]) == (128, 0.128, 2**20, [100, 156])
        assert row["seconds"] == {"prefill": 0.5, "select": 0.25, "decode": 1.0}
        assert (row["tokens"], row["finish"], row["empty"]) == (3, {"stop": 4}, 0)
        expected = scipy.stats.bootstrap(
            (scores,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(0)
        ).confidence_interval
        assert (row["low"], row["high"]) == pytest.approx((expected.low, expected.high))


def test_what_the_graph_changes_is_paired_by_sample(tmp_path):
    found = rows(report(small(tmp_path)))
    assert found["full", False]["change"] is found["snapkv", False]["change"] is None
    change = found["snapkv", True]["change"]
    differences = np.array([-0.25, 0.25, -0.25, -0.125])
    assert change["difference"] == pytest.approx(differences.mean()) and change["n"] == 4
    assert change["low"] <= differences.mean() <= change["high"] and not change["clear"]


def test_the_base_is_the_same_cell_and_not_a_similar_one(tmp_path):
    for settings in [cell(budget=256), cell(kernel=7), cell(graph=True)]:
        write_cell(tmp_path, settings, [record("a", 0.5), record("b", 1.0)])
    assert all(row["change"] is None for row in report(tmp_path).index["cells"])


def test_samples_hold_every_score_text_and_fact(tmp_path):
    page = report(small(tmp_path))
    answers = page.answers()
    for number, row in enumerate(page.index["cells"]):
        records = stored(tmp_path)[row["scorer"], row["graph"]]
        columns = answers["cells"][str(number)]
        assert [answers["texts"][text] for text in columns["text"]] == [one["text"] for one in records]
        for name in ("overlap", "rouge1"):
            assert columns["scores"][name] == pytest.approx([one["scores"][name] for one in records], abs=1e-6)
        assert columns["kept"] == [128.0] * 4 and columns["tokens"] == [3] * 4 and columns["finish"] == ["stop"] * 4
    for fact, one in zip(answers["facts"], records, strict=True):
        assert fact["sample"] == one["sample"]
        assert all(fact[name] == one[name] for name in ("references", "meta", "n_prompt", "notes", "prompt_sha256"))


@pytest.mark.parametrize("last", [[], [failure("c", "OutOfMemoryError: no room")]])
def test_nothing_is_averaged_over_a_missing_sample(tmp_path, last):
    # Case H12.
    write_cell(tmp_path, cell(), [record("a", 1.0), record("b", 1.0), record("c", 0.0)])
    write_cell(tmp_path, cell(graph=True), [record("a", 1.0), record("b", 0.0), *last])
    page = report(tmp_path)
    row = rows(page)["snapkv", True]
    assert (row["n"], row["asked"], row["failed"]) == (2, 3, len(last))
    assert row["scores"] == {} and row["low"] is row["high"] is row["change"] is None
    assert row["kept"] == 128
    assert rows(page)["snapkv", False]["scores"]["overlap"] == pytest.approx(2 / 3)
    columns = page.answers()["cells"][str(page.index["cells"].index(row))]
    assert columns["scores"]["overlap"] == [1.0, 0.0, None] and columns["text"][2] is None
    assert columns["error"] == ({"2": "OutOfMemoryError: no room"} if last else {})


def test_a_cell_with_a_single_sample_or_none_has_no_interval(tmp_path):
    write_cell(tmp_path, cell(), [record("a", 1.0)])
    write_cell(tmp_path, cell("knorm"), [])
    found = rows(report(tmp_path))
    assert found["snapkv", False]["scores"]["overlap"] == 1.0 and found["snapkv", False]["low"] is None
    assert (found["knorm", False]["n"], found["knorm", False]["scores"]) == (0, {})


def test_the_main_score_is_the_one_that_was_asked_for(tmp_path):
    rouge = RUN | {"run": "b", "config": {"task": {"score": "rouge1"}}}
    write_cell(tmp_path, cell(), [record("a", 0.5)], run=rouge)
    write_cell(tmp_path, cell(), [record("a", 0.5)], run={"git_commit": None}, model="older")
    write_cell(tmp_path, cell(), [record("a", 0.5, scores={"top1": 1.0, "kl": 0.1})], model="fidelity")
    write_cell(tmp_path, cell(), [failure("a")], model="failed")
    scores = {group["model"]: group["score"] for group in report(tmp_path).index["groups"]}
    assert scores == {"tiny": "rouge1", "older": "overlap", "fidelity": "kl", "failed": None}


def test_groups_never_mix_and_say_what_sets_them_apart(tmp_path):
    for protocol in ("paper", "official"):
        write_cell(tmp_path, cell(), [record("a", 0.5)], of_task={"protocol": {"name": protocol, "cut": 3500}})
    page = report(tmp_path)
    assert [group["samples"] for group in page.index["groups"]] == [1, 1]
    assert sorted(group["note"] for group in page.index["groups"]) == ["name official", "name paper"]
    assert [row["group"] for row in page.index["cells"]] == [0, 1]


def test_provenance_names_code_and_counts_records(tmp_path):
    write_cell(tmp_path, cell(), [record("a", 0.5), record("b", 0.5)])
    write_cell(tmp_path, cell(), [record("c", 0.5, run="other")], run=RUN | {"run": "other", "git_dirty": False})
    write_cell(tmp_path, cell("knorm"), [{**record("a", 0.5), "run": None}], run={"git_commit": None})
    page = report(tmp_path)
    found = rows(page)
    assert [(page.index["runs"][run]["git_dirty"], n) for run, n in found["snapkv", False]["runs"]] == [
        (True, 2),
        (False, 1),
    ]
    assert [count for _, count in found["knorm", False]["runs"]] == [None]
    assert all("config" not in run for run in page.index["runs"])
    assert page.index["groups"][0]["identity"]["model.weights"] == "e3b0" * 16


# Texts


def hostile(root: Path) -> Path:
    """Hostile texts wherever results may hold one."""
    ids = [f"s{i} {text}" for i, text in enumerate(HOSTILE)]
    records = [
        record(
            sample, 0.5, text=text, references=[text], meta={text: text}, notes={"note": text}, finish=text, run=text
        )
        for sample, text in zip(ids, HOSTILE, strict=True)
    ]
    run = RUN | {"run": HOSTILE[0], "machine": HOSTILE[1], "packages": {HOSTILE[0]: HOSTILE[1]}}
    write_cell(root, cell(pooling=HOSTILE[0]), records, run=run, of_task={"chat": HOSTILE[0], "cut": HOSTILE[1]})
    write_cell(root, cell("knorm"), [failure(ids[0], HOSTILE[0])], of_task={"chat": HOSTILE[0], "cut": HOSTILE[1]})
    for folder, name, text in [
        ("tables", "a & <b>.md", f"# {HOSTILE[0]}\n\n| {HOSTILE[1]} |\n| - |\n| [x](javascript:alert) |\n"),
        ("tables", "<i>.csv", '"</td><script>alert()</script>",b\n1,<b>2</b>\n'),
        ("explorer", "page.html", "<title>&lt;script&gt;alert()&lt;/script&gt;</title><title>no</title>"),
        ("figures", "<u>.pdf", ""),
    ]:
        (root / folder).mkdir(exist_ok=True)
        (root / folder / name).write_text(text, encoding="utf-8")
    (root / "figures" / "<u>.png").write_bytes(b"not a PNG <script>")
    return root


def test_no_text_becomes_an_element(tmp_path):
    page, plain = report(hostile(tmp_path / "hostile")), report(small(tmp_path / "plain"))

    def scripts(page: Parsed) -> list[dict]:
        return [attributes for tag, attributes in page.elements if tag == "script" and "id" not in attributes]

    assert len(scripts(page)) == len(scripts(plain)) == 1
    assert page.scripts[None] == plain.scripts[None]
    assert not {"img", "i", "b", "u", "textarea"} & {tag for tag, _ in page.elements}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "javascript:alert" in page.text and not any("javascript" in href for href in page.values("a", "href"))
    assert "<script>alert()</script>" in page.text


def test_every_hostile_text_arrives_whole(tmp_path):
    page = report(hostile(tmp_path))
    answers = page.answers()
    ours = next(str(i) for i, row in enumerate(page.index["cells"]) if row["scorer"] == "snapkv")
    assert [answers["texts"][text] for text in answers["cells"][ours]["text"]] == list(HOSTILE)
    assert [fact["references"] for fact in answers["facts"]] == [[text] for text in HOSTILE]
    assert HOSTILE[0] in rows(page)["snapkv", False]["name"]
    assert {HOSTILE[0]: HOSTILE[1]} in [run["packages"] for run in page.index["runs"]]


def test_the_index_holds_no_markup(tmp_path):
    html = build(hostile(tmp_path), tmp_path / "index.html").html
    index = re.search(r'<script type="application/json" id="index">(.*?)</script>', html, re.DOTALL).group(1)
    assert not set(index) & set("<>&\u2028\u2029")
    assert HOSTILE[0] in json.dumps(json.loads(index), ensure_ascii=False).replace("\\", "")


def test_ten_thousand_characters_are_whole(tmp_path):
    long = "".join(chr(0x4E00 + i % 5000) for i in range(10_000))
    write_cell(tmp_path, cell(), [record("a", 1.0, text=long)])
    page = report(tmp_path)
    assert page.index["length"] is None
    assert page.answers()["texts"] == [long] and page.answers()["cut"] == {}


def test_scripts_make_text_nodes_only():
    code = "".join(path.read_text() for path in ASSETS.glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser", code)


def test_the_page_is_alone(tmp_path):
    small(tmp_path)
    html = build(tmp_path, tmp_path / "index.html").html
    page = Parsed(html)
    assert not {"link", "iframe", "object", "base"} & {tag for tag, _ in page.elements}
    assert not page.values("script", "src") and all(uri.startswith("data:") for uri in page.values("img", "src"))
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org)", html)
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(page.scripts[None].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_stands_out_from_what_is_behind_it(scheme):
    """WCAG 2.2, 1.4.3: a contrast of at least 4.5 for every colour of text on every ground, light and dark."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        parts = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(parts @ (0.2126, 0.7152, 0.0722))

    schemes = (ASSETS / "base.css").read_text().split(":root {")[1:]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", schemes[scheme].split("}")[0]))
    pairs = [(text, ground) for text in ("ink", "muted", "accent") for ground in ("paper", "raised", "faint")]
    for text, ground in [*pairs, ("warning", "warning-paper"), ("ink", "warning-paper"), ("warning", "paper")]:
        low, high = sorted(luminance(colours[name]) for name in (text, ground))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


# Size


def noise(path: Path, width: int, height: int) -> None:
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def test_a_small_figure_is_embedded_as_it_is(tmp_path):
    noise(tmp_path / "figures" / "fig4.png", 40, 30)
    (tmp_path / "figures" / "fig4.csv").write_text("a,b\n")
    page = report(tmp_path)
    (image,) = [attributes for tag, attributes in page.elements if tag == "img"]
    data = base64.b64decode(image["src"].removeprefix("data:image/png;base64,"))
    assert data == (tmp_path / "figures" / "fig4.png").read_bytes()
    assert (image["width"], image["height"]) == ("40", "30")
    assert {"../figures/fig4.png", "../figures/fig4.csv"} <= set(page.values("a", "href"))


def test_large_figures_are_scaled_down_and_then_left_to_their_files(tmp_path):
    for name in ("a", "b"):
        noise(tmp_path / "figures" / f"{name}.png", 1800, 100)
    whole = [len(shown.image) for shown in files.figures(tmp_path, tmp_path / "index.html", LIMIT)]
    shown = files.figures(tmp_path, tmp_path / "index.html", sum(whole) // 2)
    assert [figure.width for figure in shown] == [1200, 1200] and [figure.height for figure in shown] == [67, 67]
    first, second = files.figures(tmp_path, tmp_path / "index.html", 40_000)
    assert first.image and first.width == 400
    assert second.image is None and "open the file" in second.note and second.links


def test_a_page_over_the_limit_cuts_texts_and_says_so(tmp_path):
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(0x4E00, 0x9000, 3000))) for _ in range(40)]
    records = [record(f"s{i}", i / 40, text=text, references=[text]) for i, text in enumerate(texts)]
    write_cell(tmp_path, cell(), records)
    noise(tmp_path / "figures" / "a.png", 300, 200)
    whole = build(tmp_path, tmp_path / "index.html")
    limit = len(whole.html.encode()) // 3
    page = build(tmp_path, tmp_path / "index.html", limit)
    assert len(page.html.encode()) <= limit
    parsed = Parsed(page.html)
    length, answers = parsed.index["length"], parsed.answers()
    assert 0 < length < 3000
    assert answers["texts"] == [text[:length] for text in texts]
    assert answers["cut"] == {str(i): 3000 for i in range(40)}
    assert [fact["references"] for fact in answers["facts"]] == [[f"{text[:length]}…"] for text in texts]
    assert parsed.index["cells"] == Parsed(whole.html).index["cells"]
    with pytest.raises(UserError, match="too many results for one page of 0.02 MB"):
        build(tmp_path, tmp_path / "index.html", 20_000)


def test_the_same_answer_is_there_once(tmp_path):
    for settings in (cell(), cell(graph=True), cell("knorm")):
        write_cell(tmp_path, settings, [record(f"s{i}", 0.5, text="the same") for i in range(9)])
    assert report(tmp_path).answers()["texts"] == ["the same"]


# Files


def test_links_lead_to_the_files(tmp_path):
    root = tmp_path / "odd é #%20 & name"
    small(root)
    for number in range(2):
        write_cell(root, cell("h2o"), [record(f"needle-{number}", 1.0)], shard=(number, 2))
    (root / "explorer").mkdir()
    (root / "explorer" / "a?.html").write_text("<html><title>Kept\n by SnapKV</title>")
    (root / "tables").mkdir()
    (root / "tables" / "table1-v0.1.md").write_text("### Table 1\n\n| a |\n| - |\n| b |\n")
    out = tmp_path / "elsewhere" / "page.html"
    page = Parsed(build(root, out).html)
    hrefs = [link["href"] for row in page.index["cells"] for link in row["links"]]
    hrefs += [href for href in page.values("a", "href") if not href.startswith("#")]
    assert len(hrefs) == 3 * 2 + 3 + 1 + 1
    out.parent.mkdir()
    assert all((out.parent / unquote(href)).resolve().is_file() for href in hrefs)
    assert "Kept by SnapKV" in page.text and "Table 1" in page.text


def test_tables_are_shown_from_markdown_else_from_csv(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "one.md").write_text("### Title | of one\n\n| **a** | b\\|c |\n| - | -: |\n| 1 | 2 |\n")
    (tmp_path / "tables" / "one.csv").write_text("not,shown\n")
    (tmp_path / "tables" / "two.csv").write_text("x,y\n" + '3,"4, 5"\n' * 300)
    (tmp_path / "tables" / "three.md").write_text("|a|\n" * 50_000)
    one, three, two = files.tables(tmp_path, tmp_path / "index.html")
    assert one.title == "Title | of one" and "<th><strong>a</strong></th>" in one.html and "b|c" in one.html
    assert [link.name for link in one.links] == ["one.csv", "one.md"]
    assert two.title == "two" and two.html.count("<td>4, 5</td>") == 200 and "100 more rows" in two.html
    assert three.html is None and "open the file" in three.note


def test_parts_of_a_figure_belong_to_it(tmp_path):
    noise(tmp_path / "figures" / "fig2-a.png", 4, 4)
    noise(tmp_path / "figures" / "fig2-a-layers.png", 4, 4)
    for name in ("fig2-a.pdf", "fig2-a.csv", "fig2-a-means.csv", "fig2-a-layers.csv", "fig2-ab.csv", "notes.txt"):
        (tmp_path / "figures" / name).write_text("")
    first, second = files.figures(tmp_path, tmp_path / "index.html", LIMIT)
    assert [link.name for link in first.links] == ["fig2-a-means.csv", "fig2-a.csv", "fig2-a.pdf", "fig2-a.png"]
    assert [link.name for link in second.links] == ["fig2-a-layers.csv", "fig2-a-layers.png"]


# Whatever is there


def test_damaged_cells_are_listed_and_the_rest_is_shown(tmp_path, capsys):
    small(tmp_path)
    broken = write_cell(tmp_path, cell("knorm"), [record("a", 1.0)])
    (broken / "manifest.json").write_text("{")
    torn = write_cell(tmp_path, cell("h2o"), [record("a", 1.0), record("b", 1.0)])
    path = torn / "records.jsonl"
    path.write_text("no record\n" + path.read_text())
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "3 cells, 12 results, 2 damaged" in out and err.count("warning: left out: ") == 2
    page = Parsed((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))
    assert len(page.index["cells"]) == 3
    assert "2 damaged cells" in page.text
    assert f"{path}:1 is not a record" in page.text and "manifest.json is damaged" in page.text


def test_an_empty_folder_says_so_and_how_to_make_results(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    page = Parsed((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))
    assert f"There are no results in {tmp_path.name} yet" in page.text and "make demo" in page.text
    assert page.index["cells"] == page.index["groups"] == []
    assert "0 cells" in capsys.readouterr().out


def test_the_command_writes_where_it_is_told(tmp_path, capsys):
    small(tmp_path / "results")
    out = tmp_path / "new" / "page.html"
    assert main([str(tmp_path / "results"), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == build(tmp_path / "results", out).html
    assert capsys.readouterr().out.startswith(f"{out}  1 model, 1 task, 3 cells, 12 results, 0.")


def test_mistakes_are_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path), "--out", str(tmp_path / "file" / "page.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot write") and error.count("\n") == 1
