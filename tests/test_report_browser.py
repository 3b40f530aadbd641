"""The report in headless Chromium, opened from disk: filters, order, samples, keyboard; screenshots are kept.

The browser is that of GRAPHKV_CHROMIUM, else `chromium` on the PATH, else Playwright's own. Screenshots go to
results/report/screens, or where GRAPHKV_SCREENS says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from browser import chromium
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from report_results import HOSTILE, cell, failure, record, write_cell

from eval.report.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
SCREENS = Path(os.environ.get("GRAPHKV_SCREENS", ROOT / "results" / "report" / "screens"))
LONG = "A long answer, word after word. " * 400
SAMPLES = 120  # of one task, so that the list has three pages


# Pairs of texts that lie on each other, as far as they are visible.
OVERLAPS = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const boxes = [];
  while (walker.nextNode()) {
    const text = walker.currentNode;
    if (!text.data.trim() || !text.parentElement.checkVisibility({ opacityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    for (const { left, top, right, bottom } of range.getClientRects()) {
      const box = { left, top, right, bottom, text: text.data.trim() };
      for (let node = text.parentElement; node !== document.body; node = node.parentElement) {
        const { overflowX, overflowY } = getComputedStyle(node);
        if (overflowX === "visible" && overflowY === "visible") continue;
        const edge = node.getBoundingClientRect();
        box.left = Math.max(box.left, edge.left);
        box.top = Math.max(box.top, edge.top);
        box.right = Math.min(box.right, edge.right);
        box.bottom = Math.min(box.bottom, edge.bottom);
      }
      if (box.right > box.left && box.bottom > box.top) boxes.push(box);
    }
  }
  const across = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const down = (a, b) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  const pairs = boxes.flatMap((a, i) => boxes.slice(i + 1).map((b) => [a, b]));
  return pairs.filter(([a, b]) => across(a, b) > 1 && down(a, b) > 5).map(([a, b]) => [a.text, b.text]);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Two models, two tasks, hostile and long answers, a failure, a missing sample, a damaged cell, files."""
    root = tmp_path_factory.mktemp("report") / "results"
    rng = np.random.default_rng(0)
    settings = [cell("full"), *(cell(name, graph) for name in ("snapkv", "pyramidkv") for graph in (False, True))]
    for model in ("tiny", "smollm2"):
        for number, one in enumerate(settings):
            scores = rng.random(8).round(3)
            records = [record(f"needle-{i}", float(score)) for i, score in enumerate(scores)]
            if model == "tiny" and number == 4:
                records[6:] = [failure("needle-6", f"RuntimeError: {HOSTILE[0]}")]
            write_cell(root, one, records, model=model)
    texts = {0: LONG, **{i + 1: text for i, text in enumerate(HOSTILE)}}
    for one in settings[:3]:
        records = [
            record(f"trec/{i:03d}", float(i == 77 and one["graphkv"] is None), text=texts.get(i, f"Type {i}"))
            for i in range(SAMPLES)
        ]
        write_cell(root, one, records, task="trec")
    (write_cell(root, cell("knorm"), [record("a", 1.0)]) / "manifest.json").write_text("{")
    for folder in ("figures", "tables", "explorer"):
        (root / folder).mkdir()
    Image.fromarray(rng.integers(0, 256, (60, 90, 3), dtype=np.uint8)).save(root / "figures" / "fig4-tiny.png")
    (root / "tables" / "table1.md").write_text("### Table 1. A test\n\n| Method | TREC |\n| - | -: |\n| Full | 1.0 |\n")
    (root / "explorer" / "kept.html").write_text("<title>What SnapKV kept</title>")
    assert main([str(root)]) == 0
    return root


@pytest.fixture
def open_page(browser, results) -> Iterator:
    """Opens the report; whatever the console says, or the page asks of the network, fails the test."""
    contexts, complaints = [], []

    def call(hash_: str = "", width: int = 1360, height: int = 900, **options) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url + hash_)
        return page

    asked: list[str] = []
    url = (results / "report" / "index.html").as_uri()
    yield call
    for context in contexts:
        context.close()
    assert not complaints
    assert [one for one in asked if not one.startswith((url, "data:", "blob:"))] == []


def names(page: Page) -> list[str]:
    """Cells of the table from top to bottom."""
    return page.locator(".cells tbody tr:not(.details) .label > span:last-child").evaluate_all(
        "nodes => nodes.map(node => node.firstChild.data)"
    )


def choose(page: Page, menu: str, *values: str) -> None:
    page.locator(f"[data-filter={menu}] summary").click()
    for value in values:
        page.locator(f"[data-filter={menu}]").get_by_label(value, exact=True).check()
    page.keyboard.press("Escape")


def test_it_opens_with_everything_on_it(open_page):
    page = open_page()
    expect(page).to_have_title("GraphKV results: results")
    expect(page.locator(".cells tbody tr:not(.details)")).to_have_count(13)
    expect(page.locator(".notice")).to_contain_text("1 damaged cell")
    expect(page.locator("figure img")).to_have_js_property("naturalWidth", 90)
    expect(page.get_by_role("cell", name="1.0", exact=True)).to_be_visible()
    page.get_by_role("tab", name="Retention").click()
    expect(page.get_by_role("link", name="What SnapKV kept")).to_have_attribute("href", "../explorer/kept.html")
    expect(page.locator("#filters")).to_be_hidden()


def test_filters_leave_what_was_chosen(open_page):
    page = open_page()
    choose(page, "model", "tiny")
    choose(page, "scorer", "snapkv", "pyramidkv")
    choose(page, "graph", "on")
    assert names(page) == ["SnapKV+GraphKV", "PyramidKV+GraphKV", "SnapKV+GraphKV"]
    expect(page.locator("#cells .status")).to_contain_text("3 of 13 cells; 1 without a score")
    choose(page, "task", "needle")
    assert names(page) == ["SnapKV+GraphKV", "PyramidKV+GraphKV"]
    page.get_by_role("tab", name="Samples").click()
    expect(page.locator("#samples .status")).to_have_text("8 samples, 14 results")
    page.get_by_role("button", name="Reset").click()
    expect(page.locator("#samples .status")).to_have_text(f"{8 + 8 + SAMPLES} samples, {79 + 3 * SAMPLES - 1} results")


def test_columns_sort_both_ways_with_what_is_missing_last(open_page):
    page = open_page()
    heading = page.get_by_role("columnheader", name="Score")
    for direction, reverse in [("descending", True), ("ascending", False)]:
        heading.get_by_role("button").click()
        expect(heading).to_have_attribute("aria-sort", direction)
        shown = page.locator(".cells tbody td.strong").all_inner_texts()
        assert shown[-1] == "—"
        assert shown[:-1] == sorted(shown[:-1], key=float, reverse=reverse)
    page.get_by_role("columnheader", name="Cell").get_by_role("button").click()
    assert names(page) == sorted(names(page), key=str.lower)


def test_details_tell_provenance_and_files(open_page, results):
    page = open_page()
    page.locator(".cells tbody button").nth(1).press("Enter")
    details = page.locator("tr.details:visible")
    expect(details).to_contain_text("c0ffeec0ffee, with changes")
    expect(details).to_contain_text("e3b0e3b0e3b0…")
    for href in details.locator(".links a").evaluate_all("links => links.map(link => link.getAttribute('href'))"):
        assert (results / "report" / href).is_file()
    page.locator(".cells tbody button").nth(1).press("Enter")
    expect(details).to_have_count(0)


def test_the_keyboard_alone_is_enough(open_page):
    page = open_page()
    page.get_by_role("tab", name="Overview").focus()
    for key, name in [
        ("ArrowRight", "Samples"),
        ("End", "Retention"),
        ("ArrowRight", "Overview"),
        ("ArrowLeft", "Retention"),
        ("ArrowLeft", "Samples"),
    ]:
        page.keyboard.press(key)
        tab = page.get_by_role("tab", name=name)
        expect(tab).to_be_focused()
        expect(tab).to_have_attribute("aria-selected", "true")
        expect(page.locator(f"#{name.lower()}")).to_be_visible()
        expect(page.get_by_role("tabpanel")).to_have_count(1)
    menu = page.locator("[data-filter=task]")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(menu.locator("summary")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(menu.locator("summary")).to_contain_text("needle")
    page.keyboard.press("Escape")
    expect(menu.locator("summary")).to_be_focused()
    page.locator(".items a").first.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".items a").nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("article.sample")).to_be_focused()
    expect(page.locator("article.sample h2")).to_have_text(page.locator(".items a[aria-current] .id").inner_text())


def test_samples_come_by_disagreement_a_page_at_a_time(open_page):
    page = open_page("#/samples")
    choose(page, "task", "trec")
    items = page.locator(".items li")
    expect(items).to_have_count(50)
    expect(items.first).to_contain_text("trec/077")
    expect(items.first.locator(".spread")).to_have_text("1.00")
    seen = page.locator(".items .id").all_inner_texts()
    for _ in range(2):
        page.get_by_role("button", name="Next").click()
        seen += page.locator(".items .id").all_inner_texts()
    assert sorted(seen) == [f"trec/{i:03d}" for i in range(SAMPLES)]
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    page.get_by_label("Order").select_option("Name")
    expect(items.first).to_contain_text("trec/000")


def test_search_looks_into_names_references_and_answers(open_page):
    page = open_page("#/samples")
    for query, count in [("TREC/11", 10), ("type 99", 1), ("sandwich", 136), ("no such words", 0)]:
        page.get_by_label("Search").fill(query)
        expect(page.locator("#samples .status")).to_contain_text(f"{count} sample" if count else "No sample matches")


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_answers_are_text(open_page, number):
    page = open_page(f"#/samples/2/{quote(f'trec/{number + 1:03d}', safe='')}")
    expect(page.locator("article.sample h2")).to_have_text(f"trec/{number + 1:03d}")
    text = page.locator(".answer blockquote").evaluate("node => node.textContent")
    assert text == (HOSTILE[number] or "empty")
    expect(page.locator(".answer blockquote *")).to_have_count(0 if HOSTILE[number] else 1)
    expect(page).to_have_title("GraphKV results: results")


def test_a_failure_shows_its_error_and_a_missing_result_is_named(open_page):
    group = 1  # smollm2 needle, tiny needle, tiny trec
    page = open_page(f"#/samples/{group}/needle-6")
    expect(page.locator(".failure")).to_have_text(f"PyramidKV+GraphKV failed: RuntimeError: {HOSTILE[0]}")
    page.goto(page.url.replace("needle-6", "needle-7"))
    expect(page.locator("article.sample")).to_contain_text("Not run: PyramidKV+GraphKV.")


def test_a_long_answer_opens_whole(open_page):
    page = open_page("#/samples/2/trec%2F000")
    answer = page.locator(".answer blockquote")
    assert len(answer.evaluate("node => node.textContent")) < 2000
    page.get_by_role("button", name=f"Show all {len(LONG):,} characters").click()
    assert answer.evaluate("node => node.textContent") == LONG


def test_motion_is_reduced_where_it_is_asked_for(open_page):
    page = open_page(reduced_motion="reduce")
    moving = page.evaluate("[...document.querySelectorAll('*')].map(n => getComputedStyle(n).transitionDuration)")
    assert set(moving) == {"0s"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("device", "width"), [("desktop", 1360), ("phone", 390)])
def test_it_fits_the_screen(open_page, scheme, device, width):
    page = open_page(width=width, color_scheme=scheme)
    SCREENS.mkdir(parents=True, exist_ok=True)
    page.locator(".cells tbody button").nth(2).click()
    for name in ("overview", "samples", "retention"):
        page.goto(f"{page.url.split('#')[0]}#/{name}")
        if name == "samples":
            page.locator(".items a").first.click()
            expect(page.locator(".answer").first).to_be_visible()
        page.screenshot(path=SCREENS / f"{name}-{device}-{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERLAPS) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) > 384) == (scheme == "light")
