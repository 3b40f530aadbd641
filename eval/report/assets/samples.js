"use strict";

// The samples: a list that holds one page of them at a time, and what each cell answered to the open one.

const PAGE = 50;
const LONG = 1200; // characters of an answer that are shown before it is opened

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
  "Name": { key: (row) => row.id, direction: 1 },
};

/** Build the tab; returns `draw` after filters changed, and `open(group, sample)`. */
function buildSamples() {
  const answers = []; // by group, as they are read
  let rows = []; // what the filters leave, in order
  let page = 0;
  let opened = null;
  let reading = null;

  const search = element("input", { type: "search", id: "search", autocomplete: "off", oninput: delayed(list, 200) });
  const order = element("select", { id: "order", onchange: list }, Object.keys(ORDERS).map((name) => element("option", null, name)));
  const status = element("p", { class: "status", role: "status" });
  const items = element("ol", { class: "items", onkeydown: step });
  const place = element("span");
  const previous = element("button", { type: "button", onclick: () => turn(-1) }, "Previous");
  const next = element("button", { type: "button", onclick: () => turn(1) }, "Next");
  const detail = element("article", { class: "sample", tabindex: -1, "aria-live": "polite" });
  const side = element(
    "div",
    { class: "side" },
    element("div", { class: "controls" }, labelled(search, "Search"), labelled(order, "Order")),
    status,
    items,
    element("nav", { class: "pager", "aria-label": "Pages of samples" }, previous, place, next),
  );
  document.getElementById("samples").append(element("div", { class: "panes" }, side, detail));

  /** Read all groups, one after the other, once. */
  async function read() {
    for (let group = 0; group < INDEX.groups.length; group++) {
      status.textContent = `Reading ${group + 1} of ${INDEX.groups.length} …`;
      answers[group] = await unpack(group);
    }
  }

  async function draw() {
    reading ??= read();
    await reading;
    list();
    if (opened) show(opened.group, opened.id, false);
  }

  /** Samples that the filters and the search leave, in the chosen order; begins at the first page. */
  function list() {
    const needle = search.value.trim().toLowerCase();
    const cells = new Map(INDEX.groups.map((_, group) => [group, []]));
    INDEX.cells.forEach((cell, number) => isShown(cell) && cells.get(cell.group).push(number));
    rows = [...cells].filter(([, numbers]) => numbers.length).flatMap(([group, numbers]) => rowsOfGroup(group, numbers, needle));
    const { key, direction } = ORDERS[order.value];
    rows.sort((a, b) => compare(key(a), key(b), direction));
    page = 0;
    const results = rows.reduce((sum, row) => sum + row.scores.length, 0);
    const cut = INDEX.length === null ? "" : `; texts are cut to ${INDEX.length} characters, so that the page stays small`;
    status.textContent = rows.length ? `${counted(rows.length, "sample")}, ${counted(results, "result")}${cut}` : "No sample matches.";
    turn(0);
  }

  function rowsOfGroup(group, numbers, needle) {
    const { facts, texts, cells } = answers[group];
    const score = INDEX.groups[group].score;
    const hits = needle ? texts.map((text) => text.toLowerCase().includes(needle)) : null;
    const found = [];
    facts.forEach((fact, i) => {
      const hit = !needle || JSON.stringify(fact).toLowerCase().includes(needle) || numbers.some((n) => hits[cells[n].text[i]]);
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
    if (detail.getBoundingClientRect().top > window.innerHeight / 2 || detail.getBoundingClientRect().top < 0) detail.scrollIntoView();
  }

  async function open(group, id) {
    reading ??= read();
    await reading;
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
  return drawing("svg", { viewBox: "0 0 60 14", width: 60, height: 14, class: "strip", "aria-hidden": "true" }, drawing("line", { x1: 0, x2: 60, y1: 13, y2: 13, class: "axis" }), ticks);
}

/** The nodes of one sample: what is stored of it, then the answers, each with the cells that gave it. */
function sampleOf(group, i, { facts: all, texts, cut, cells }) {
  const { sample, references = [], prompt, meta, notes, ...numbers } = all[i];
  const { model, task, place, note, score } = INDEX.groups[group];
  const shown = INDEX.cells.map((cell, number) => ({ cell, number })).filter(({ cell }) => cell.group === group && isShown(cell));
  const byText = new Map();
  const failed = [];
  const absent = [];
  for (const { cell, number } of shown) {
    const columns = cells[number];
    if (i in columns.error) failed.push({ cell, error: columns.error[i] });
    else if (columns.kept[i] === null) absent.push(cell);
    else byText.set(columns.text[i], [...(byText.get(columns.text[i]) ?? []), { cell, columns }]);
  }
  const stored = [...Object.entries(numbers), ...Object.entries(meta ?? {}), ...Object.entries(notes ?? {})];
  const cards = [...byText].map(([text, by]) => answerOf(text, texts[text] ?? null, cut[text], by, i, score));
  const best = (card) => card.best;
  cards.sort((a, b) => compare(best(a), best(b), -1));
  const heading = [model, task, place, note].filter(Boolean).join(" · ");
  return [
    element("p", { class: "note" }, heading),
    element("h2", null, sample),
    prompt ? element("section", null, element("h3", null, "Prompt"), longText(prompt)) : "",
    element("section", null, element("h3", null, references.length > 1 ? "References" : "Reference"), references.map((text) => longText(text))),
    element("details", { class: "stored" }, element("summary", null, "What is stored of the prompt"), facts(stored.map(([name, value]) => [name, words(value)]))),
    element("h3", null, `${counted(cards.length, "different answer")} of ${counted(shown.length - failed.length - absent.length, "cell")}`),
    element("div", { class: "answers" }, cards.map((card) => card.node)),
    failed.map(({ cell, error }) => element("p", { class: "failure" }, element("strong", null, `${labelOf(cell)} failed: `), error)),
    absent.length ? element("p", { class: "note" }, `Not run: ${absent.map(labelOf).join(", ")}.`) : "",
  ].flat();
}

/** What a cell is called beside others of its group: with its budget where they have several. */
function labelOf(cell) {
  const budgets = INDEX.cells.filter((other) => other.group === cell.group && other.budget !== null).map((other) => other.budget);
  return cell.budget === null || new Set(budgets).size === 1 ? cell.name : `${cell.name}, ${budgetWords(cell.budget)}`;
}

/** An answer with the cells that gave it, and `best`, their highest main score. */
function answerOf(number, text, length, by, i, score) {
  const names = [...new Set(by.flatMap(({ columns }) => Object.keys(columns.scores)))];
  names.sort((a, b) => (b === score) - (a === score));
  const lines = by.map(({ cell, columns }) =>
    element(
      "tr",
      null,
      element("th", { scope: "row" }, element("span", { class: "label" }, markOf(cell), labelOf(cell))),
      names.map((name) => element("td", { class: name === score ? "strong" : null }, fixed(columns.scores[name]?.[i], 3))),
      element("td", null, fixed(columns.kept[i], 0)),
    ),
  );
  const { tokens, finish } = { tokens: by[0].columns.tokens[i], finish: by[0].columns.finish[i] };
  const head = ["cell", ...names, "kept"].map((name) => element("th", { scope: "col" }, name));
  const body = text === null ? element("p", { class: "note" }, "No text is stored.") : longText(text, length);
  const node = element(
    "section",
    { class: names.length > 3 ? "answer broad" : "answer" },
    body,
    tokens ? element("p", { class: "note" }, `${counted(tokens, "token")}, ended by ${finish}`) : "",
    element("div", { class: "scroll" }, element("table", null, element("thead", null, element("tr", null, head)), element("tbody", null, lines))),
  );
  const scores = by.map(({ columns }) => columns.scores[score]?.[i] ?? null).filter((value) => value !== null);
  return { node, best: scores.length ? Math.max(...scores) : null };
}

/** A text as it is; a long one opens at the press of a button. `length` is given where the page holds a part of it. */
function longText(text, length) {
  const block = element("blockquote", null, text || element("em", null, "empty"));
  const parts = [block];
  if (text.length > LONG) {
    block.textContent = `${text.slice(0, LONG)}…`;
    const button = element("button", { type: "button", class: "plain" }, `Show all ${text.length.toLocaleString("en")} characters`);
    button.addEventListener("click", () => {
      block.textContent = text;
      button.remove();
    });
    parts.push(button);
  }
  if (length) parts.push(element("p", { class: "note" }, `The first ${text.length} of ${length.toLocaleString("en")} characters; the rest is in the records.`));
  return element("div", { class: "text" }, parts);
}
