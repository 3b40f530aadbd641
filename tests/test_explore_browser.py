"""The retention explorer in headless Chromium, opened from disk: views, layers, heads, cells, pointer, keyboard.

Screenshots go to results/explorer/screens, or where GRAPHKV_SCREENS says.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from browser import chromium
from playwright.sync_api import Page, expect

from graphkv import explore, grid
from graphkv.packing import unpack

ROOT = Path(__file__).resolve().parents[1]
SCREENS = Path(os.environ.get("GRAPHKV_SCREENS", ROOT / "results" / "explorer" / "screens"))
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)> \u202e 漢字 🦊\n\n\tend  "
CELLS = ["scorer=snapkv +graphkv=off,on graphkv.neighbors=2", "scorer=knorm granularity=query_head", "scorer=full"]
PLAIN, GRAPH, QUERY, FULL = range(4)


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def made(tiny, essay, tmp_path_factory) -> Path:
    """A page of four cells: without and with the graph, with a set a query head, and the full cache."""
    grid._engines.clear()
    grid._engines[tiny.info.config] = tiny
    folder = tmp_path_factory.mktemp("explorer")
    (folder / "text.txt").write_text(HOSTILE + essay[:500], encoding="utf-8")
    cells = [part for cell in CELLS for part in ("--cell", cell)]
    asked = ["--text", str(folder / "text.txt"), "--mark", "漢字", "--out", str(folder / "page.html")]
    explore.main(["model=tiny", "budget=64", "task.max_new_tokens=4", *cells, *asked])
    return folder / "page.html"


@pytest.fixture(scope="module")
def data(made) -> dict:
    """What the page holds, with its arrays unpacked."""
    found = json.loads(made.with_suffix(".json").read_text())
    arrays = {name: unpack(entry) for name, entry in found["arrays"].items()}
    for facts in found["retention"]:
        facts.update({name: arrays.get(facts[name]) for name in ("kept", "ranks", "plain_ranks", "factors")})
    return found


@pytest.fixture
def open_page(browser, made):
    """Opens the page; whatever the console says, or the page asks of the network, fails the test."""
    contexts, complaints, requests = [], [], []

    def call(place: str = "", width: int = 1360, height: int = 900, **options) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"{made.as_uri()}{place}")
        expect(page.locator("#app")).to_be_visible()
        return page

    yield call
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url.partition("#")[0] for url in requests} <= {made.as_uri()}


def colours(page: Page, pane: str = "text-a") -> list[str]:
    """The colour class of each token of a text."""
    script = "nodes => nodes.map(node => node.className.match(/\\b[kabg]\\d\\b/)[0])"
    return page.locator(f"#{pane} > span").evaluate_all(script)


def details(page: Page) -> dict[str, str]:
    """Terms and texts of the details of a token, those of the last cell where terms repeat."""
    script = "nodes => nodes.map(node => [node.textContent, node.nextElementSibling.textContent])"
    return dict(page.locator("#details dt").evaluate_all(script))


def expected(data: dict, cell: int, layer: int, head: int) -> list[bool]:
    """Which tokens a head keeps."""
    return data["retention"][cell]["kept"][layer, head].tolist()


def test_the_page_shows_the_prompt_as_text(open_page, data):
    page = open_page()
    shown = page.locator("#text-a > span").all_text_contents()
    assert len(shown) == len(data["prompt"]["texts"])
    said = "".join(shown)
    assert "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>" in said
    assert "⟨202E⟩" in said and "漢" in said and "🦊" in said and "↵\n↵\n→\tend" in said and "◦" in said
    assert page.title() == data["title"] == page.locator("h1").text_content()
    assert page.locator("#app img, #app script").count() == 0
    answers = page.locator("#cells blockquote").all_text_contents()
    assert answers == [facts["answer"].strip() or "(an empty answer)" for facts in data["retention"]]


def test_a_head_of_a_layer(open_page, data):
    page = open_page("#view=one")
    for cell, layer, head in [(PLAIN, 0, 1), (GRAPH, 1, 0), (FULL, 1, 1)]:
        page.get_by_label("A Cell", exact=True).select_option(str(cell))
        page.get_by_label("Layer", exact=True).select_option(str(layer))
        page.get_by_label("Head", exact=True).select_option(f"k{head}")
        assert [name == "k8" for name in colours(page)] == expected(data, cell, layer, head)


def test_query_heads_belong_to_kv_heads(open_page, data):
    page = open_page(f"#view=one&a={QUERY}&layer=1&head=q3")
    assert [name == "k8" for name in colours(page)] == expected(data, QUERY, 1, 3)
    page.get_by_label("A Cell", exact=True).select_option(str(PLAIN))
    assert [name == "k8" for name in colours(page)] == expected(data, PLAIN, 1, 1)
    page = open_page(f"#view=one&a={QUERY}&layer=1&head=k1")
    both = data["retention"][QUERY]["kept"][1, 2:].mean(0)
    assert [{"k0": 0, "k6": 0.5, "k8": 1}[name] for name in colours(page)] == both.tolist()


def test_shares_of_all_layers_and_heads(open_page, data):
    page = open_page("#view=one")
    shares = data["retention"][PLAIN]["kept"].reshape(4, -1).mean(0)
    levels = {0: "k0", 0.25: "k4", 0.5: "k6", 0.75: "k7", 1: "k8"}
    assert colours(page) == [levels[share] for share in shares]


def test_the_difference_of_two_cells(open_page, data):
    page = open_page(f"#view=diff&a={PLAIN}&b={GRAPH}&layer=1&head=k0")
    one, other = (np.array(expected(data, cell, 1, 0)) for cell in (PLAIN, GRAPH))
    names = np.where(one & other, "g3", np.where(one, "a5", np.where(other, "b5", "k0")))
    assert colours(page) == names.tolist() and {"a5", "b5"} <= set(names)
    n_past = len(one) - 32
    shared, union = (one & other)[:n_past].sum(), (one | other)[:n_past].sum()
    assert page.locator("#jaccard").text_content() == f"{shared / union:.3f}"
    bars = page.locator("#overlap-chart title").all_text_contents()
    assert bars[1] == f"layer 1: overlap {shared / union:.3f}" and len(bars) == 2
    page.get_by_text("Numbers by layer").click()
    row = page.locator("#layers tbody tr").nth(1).locator("td").all_text_contents()
    assert row[:3] == ["64", "64", f"{shared / union:.3f}"]


def test_similarity_of_kept_keys(open_page, data):
    page = open_page(f"#view=side&a={PLAIN}&b={GRAPH}&layer=1&head=k0")
    shown = page.locator("#similarity-numbers b:not(.badge)").all_text_contents()
    assert shown == [f"{data['retention'][cell]['similarity'][1][0]:.3f}" for cell in (PLAIN, GRAPH)]


def test_side_by_side_texts_scroll_together(open_page, data):
    page = open_page(f"#view=side&a={PLAIN}&b={GRAPH}&layer=0&head=k1", height=500)
    assert [name == "k8" for name in colours(page, "text-b")] == expected(data, GRAPH, 0, 1)
    page.locator("#text-a").evaluate("node => node.scrollTop = 20")
    page.wait_for_function("() => document.querySelector('#text-b').scrollTop === 20")


def test_the_pointer_shows_a_token(open_page, data):
    page = open_page(f"#view=one&a={GRAPH}&layer=1&head=k0")
    facts = data["retention"][GRAPH]
    n = len(data["prompt"]["texts"])
    token = int(facts["factors"][1, 0].argmin())
    page.locator(f"#text-a-{token}").scroll_into_view_if_needed()
    page.locator(f"#text-a-{token}").hover()
    expect(page.locator("#details .where")).to_have_text(f"position {token} of {n}, counted from 0")
    said = details(page)
    assert said["Kept"] == ("yes" if facts["kept"][1, 0, token] else "no")
    assert said["Score rank"] == f"{facts['ranks'][1, 0, token]} of {n - 32}"
    assert said["Before graph"] == f"{facts['plain_ranks'][1, 0, token]} of {n - 32}"
    assert f"score × {facts['factors'][1, 0, token]:.3f}" in said["Discount"]
    assert page.locator("#text-a .linked").count() == page.locator("#details button").count() > 0
    page.locator(f"#text-a-{token}").click()  # holds it: the pointer may leave the text
    page.locator("#details button").first.click()
    source = int(page.locator("#text-a .chosen").get_attribute("id").rsplit("-", 1)[1])
    assert source != token and "s" in page.locator("#text-a .chosen").get_attribute("class").split()
    assert any(f"#{token} " in text for text in page.locator("#details button").all_text_contents())

    page.locator(f"#text-a-{n - 1}").hover()
    expect(page.locator("#details dd").first).to_have_text("yes: window, whatever its score")


def test_sources_and_discounts_in_colour(open_page, data):
    page = open_page(f"#view=one&a={GRAPH}&layer=0&head=k0")
    marked = page.locator("#text-a .s").count()
    page.get_by_label("Colour").select_option("source")
    assert colours(page).count("k8") == marked == int(0.3 * 32)
    page.get_by_label("Colour").select_option("factor")
    factors = data["retention"][GRAPH]["factors"][0, 0]
    assert [name[0] == "a" for name in colours(page)] == (factors <= 0.99).tolist()
    page.get_by_label("A Cell", exact=True).select_option(str(PLAIN))
    expect(page.get_by_label("Colour")).to_be_hidden()
    assert [name == "k8" for name in colours(page)] == expected(data, PLAIN, 0, 0)


def test_the_keyboard_alone(open_page, data):
    page = open_page(f"#view=one&a={PLAIN}&layer=0&head=k0&token=0")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "text-a":
            break
    chosen = page.locator("#text-a .chosen")
    expect(chosen).to_have_id("text-a-0")
    for key, place in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("PageDown", 101), ("PageUp", 1)]:
        page.keyboard.press(key)
        expect(chosen).to_have_id(f"text-a-{place}")
        assert page.locator("#text-a").get_attribute("aria-activedescendant") == f"text-a-{place}"
    expect(page.locator("#announce")).to_contain_text("position 1. A: kept")
    page.keyboard.press("n")
    kept = expected(data, PLAIN, 0, 0)
    expect(chosen).to_have_id(f"text-a-{kept.index(True, 2)}")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    box, first = chosen.bounding_box(), page.locator("#text-a-0").bounding_box()
    assert first["y"] < box["y"] <= first["y"] + 2.5 * first["height"]
    page.keyboard.press("ArrowUp")
    expect(chosen).to_have_id("text-a-0")
    page.keyboard.press("End")
    expect(chosen).to_have_id(f"text-a-{len(kept) - 1}")
    expect(chosen).to_be_in_viewport()
    for key, layer in [("]", "1"), ("[", "0"), ("[", "-1"), ("[", "-1")]:
        page.keyboard.press(key)
        expect(page.get_by_label("Layer", exact=True)).to_have_value(layer)
    page.keyboard.press("}")
    expect(page.get_by_label("Head", exact=True)).to_have_value("k1")


def test_the_map_leads_to_layer_and_token(open_page):
    page = open_page("#view=diff")
    box = page.locator(".map").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.75)
    expect(page.get_by_label("Layer", exact=True)).to_have_value("1")
    token = int(page.locator("#text-a .chosen").get_attribute("id").rsplit("-", 1)[1])
    n = page.locator("#text-a > span").count()
    assert abs(token - n / 2) <= 2
    painted = page.locator(".map canvas").first.evaluate(
        "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    )
    assert painted > 2


def test_the_address_holds_what_is_shown(open_page):
    page = open_page("#view=side&a=9&layer=nonsense&token=3")
    expect(page.locator("#text-b")).to_be_visible()
    page.get_by_label("Head", exact=True).select_option("k1")
    page.wait_for_function("() => location.hash.includes('head=k1')")
    address = page.evaluate("location.hash")
    again = open_page(address)
    expect(again.get_by_label("Head", exact=True)).to_have_value("k1")
    expect(again.get_by_label("Side by side")).to_be_checked()
    expect(again.locator("#text-a .chosen")).to_have_id("text-a-3")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "width"), [("desktop", 1360), ("tablet", 800), ("phone", 360)])
@pytest.mark.parametrize("view", ["one", "side", "diff"])
def test_nothing_leaves_the_window(open_page, scheme, name, width, view):
    page = open_page(f"#view={view}&a=1&b=0&layer=1", width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    overlaps = """() => {
      const boxes = [...document.querySelectorAll('#controls > *, .pane, #cells')].filter(node => node.offsetParent)
        .map(node => node.getBoundingClientRect());
      return boxes.some((a, i) => boxes.some((b, j) => i < j && a.left < b.right - 1 && b.left < a.right - 1
        && a.top < b.bottom - 1 && b.top < a.bottom - 1));
    }"""
    assert not page.evaluate(overlaps)
    SCREENS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENS / f"explorer-{name}-{scheme}-{view}.png", full_page=True)
