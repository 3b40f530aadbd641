"use strict";

// The list of samples, of which one page is drawn at a time.

const PAGE = 50;

/** Read a group's answers out of the page: base64, gzip, JSON. */
async function unpack(group) {
  const packed = atob(document.getElementById(`answers-${group}`).textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const ORDERS = {
  "Largest disagreement": { key: (row) => row.spread, direction: -1 },
  "Lowest mean score": { key: (row) => row.mean, direction: 1 },
  "Highest mean score": { key: (row) => row.mean, direction: -1 },
  Name: { key: (row) => row.id, direction: 1 },
};

/** Build the tab; returns `draw` after filters changed, and `open(group, sample)`. */
function buildSamples() {
  const answers = []; // by group, as they are read
  let rows = []; // what the filters leave, in order
  let page = 0;
  let opened = null;
  let reading = null;

  const query = element("input", { type: "search", id: "search", autocomplete: "off", oninput: delayed(search, 200) });
  const order = element(
    "select",
    { id: "order", onchange: search },
    Object.keys(ORDERS).map((name) => element("option", null, name)),
  );
  const status = element("p", { class: "status", role: "status" });
  const items = element("ol", { class: "items", onkeydown: step });
  const place = element("span");
  const previous = element("button", { type: "button", onclick: () => turn(-1) }, "Previous");
  const next = element("button", { type: "button", onclick: () => turn(1) }, "Next");
  const detail = element("article", { class: "sample", tabindex: -1, "aria-live": "polite" });
  const side = element(
    "div",
    { class: "side" },
    element("div", { class: "controls" }, labelled(query, "Search"), labelled(order, "Order")),
    status,
    items,
    element("nav", { class: "pager", "aria-label": "Pages of samples" }, previous, place, next),
  );
  document.getElementById("samples").append(element("div", { class: "panes" }, side, detail));

  /** Read all groups, one after the other, once; whoever needs them waits for it. */
  function read() {
    reading ??= (async () => {
      for (let group = 0; group < INDEX.groups.length; group++) {
        status.textContent = `Reading ${group + 1} of ${INDEX.groups.length} …`;
        answers[group] = await unpack(group);
      }
    })();
    return reading;
  }

  async function search() {
    await read();
    list();
  }

  async function draw() {
    await search();
    if (opened) show(opened.group, opened.id, false);
  }

  /** Samples that the filters and the search leave, in the chosen order; begins at the first page. */
  function list() {
    const needle = query.value.trim().toLowerCase();
    const cells = new Map(INDEX.groups.map((_, group) => [group, []]));
    INDEX.cells.forEach((cell, number) => isShown(cell) && cells.get(cell.group).push(number));
    rows = [...cells]
      .filter(([, numbers]) => numbers.length)
      .flatMap(([group, numbers]) => rowsOfGroup(group, numbers, needle));
    const { key, direction } = ORDERS[order.value];
    rows.sort((a, b) => compare(key(a), key(b), direction));
    page = 0;
    const results = rows.reduce((sum, row) => sum + row.scores.length, 0);
    const cut =
      INDEX.length === null ? "" : `; texts are cut to ${INDEX.length} characters, so that the page stays small`;
    status.textContent = rows.length
      ? `${counted(rows.length, "sample")}, ${counted(results, "result")}${cut}`
      : "No sample matches.";
    turn(0);
  }

  function rowsOfGroup(group, numbers, needle) {
    const { facts, texts, cells } = answers[group];
    const score = INDEX.groups[group].score;
    const hits = needle ? texts.map((text) => text.toLowerCase().includes(needle)) : null;
    const found = [];
    facts.forEach((fact, i) => {
      const hit =
        !needle || JSON.stringify(fact).toLowerCase().includes(needle) || numbers.some((n) => hits[cells[n].text[i]]);
      if (!hit) return;
      const scores = numbers.map((n) => cells[n].scores[score]?.[i] ?? null).filter((value) => value !== null);
      const spread = scores.length > 1 ? Math.max(...scores) - Math.min(...scores) : null;
      const average = scores.length ? scores.reduce((sum, value) => sum + value, 0) / scores.length : null;
      found.push({ group, i, id: fact.sample, scores, spread, mean: average });
    });
    return found;
  }

  /** Draw the items of a page. */
  function turn(by) {
    const last = Math.max(0, Math.ceil(rows.length / PAGE) - 1);
    page = Math.min(last, Math.max(0, page + by));
    items.replaceChildren(...rows.slice(page * PAGE, (page + 1) * PAGE).map(item));
    items.start = page * PAGE + 1;
    place.textContent = `${page + 1} of ${last + 1}`;
    previous.disabled = page === 0;
    next.disabled = page === last;
  }

  function item(row) {
    const { model, task, note } = INDEX.groups[row.group];
    const here = opened && opened.group === row.group && opened.id === row.id;
    const where = [SEVERAL_MODELS && model, !row.id.startsWith(task) && task, note].filter(Boolean).join(" · ");
    return element(
      "li",
      null,
      element(
        "a",
        { href: `#/samples/${row.group}/${encodeURIComponent(row.id)}`, "aria-current": here ? "true" : null },
        element("span", { class: "id" }, row.id),
        element("span", { class: "note" }, where),
        stripOf(row.scores),
        element("span", { class: "spread", title: "Largest minus smallest score" }, fixed(row.spread, 2)),
      ),
    );
  }

  /** Arrow keys go through the list. */
  function step(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    const anchors = [...items.querySelectorAll("a")];
    const target = anchors[anchors.indexOf(document.activeElement) + by];
    if (!target) return;
    event.preventDefault();
    target.focus();
  }

  function show(group, id, focus) {
    opened = { group, id };
    for (const anchor of items.querySelectorAll("a")) {
      const here = anchor.hash === `#/samples/${group}/${encodeURIComponent(id)}`;
      if (here) anchor.setAttribute("aria-current", "true");
      else anchor.removeAttribute("aria-current");
    }
    const found = answers[group]?.facts.findIndex((fact) => fact.sample === id) ?? -1;
    if (found < 0) detail.replaceChildren(element("p", null, "There is no such sample."));
    else detail.replaceChildren(...sampleOf(group, found, answers[group]));
    if (!focus) return;
    detail.focus({ preventScroll: true });
    const { top } = detail.getBoundingClientRect();
    if (top < 0 || top > window.innerHeight / 2) detail.scrollIntoView();
  }

  async function open(group, id) {
    await read();
    show(group, id, true);
  }
  return { draw, open };
}

function labelled(input, label) {
  return element("label", { for: input.id }, element("span", null, label), input);
}

/** The scores of a sample's cells as ticks between 0 and the largest, or 1. */
function stripOf(scores) {
  const top = Math.max(1, ...scores);
  const ticks = [...new Set(scores)].map((score) => {
    const x = 1 + (58 * score) / top;
    return drawing("line", { x1: x, x2: x, y1: 2, y2: 12 });
  });
  return drawing(
    "svg",
    { viewBox: "0 0 60 14", width: 60, height: 14, class: "strip", "aria-hidden": "true" },
    drawing("line", { x1: 0, x2: 60, y1: 13, y2: 13, class: "axis" }),
    ticks,
  );
}
