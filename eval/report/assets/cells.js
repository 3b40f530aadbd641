"use strict";

// The table of cells.

const ROWS = 150; // shown at once; a button shows as many more

const SEVERAL_MODELS = new Set(INDEX.groups.map((group) => group.model)).size > 1;

const groupOf = (cell) => INDEX.groups[cell.group];
const mean = (cell) => cell.scores[groupOf(cell).score] ?? null;
const total = (cell) => (cell.seconds ? Object.values(cell.seconds).reduce((sum, part) => sum + part, 0) : null);

const COLUMNS = [
  { label: "Cell", key: (cell) => cell.name, class: "name" },
  { label: "Model", key: (cell) => groupOf(cell).model, class: SEVERAL_MODELS ? "wide group" : "never" },
  { label: "Task", key: (cell) => groupOf(cell).task, show: taskOf, class: "wide group" },
  {
    label: "Budget",
    key: (cell) => cell.budget ?? Infinity,
    show: (cell) => budgetWords(cell.budget),
    class: "number roomy",
  },
  { label: "n", key: (cell) => cell.n, show: countOf, class: "number roomy", title: "Finished samples" },
  {
    label: "Score",
    key: mean,
    show: (cell) => fixed(mean(cell), 3),
    class: "number strong",
    title: "Mean of the task's main score; none where a sample is missing",
  },
  {
    label: "95 % interval",
    key: (cell) => cell.low,
    show: intervalOf,
    class: "interval roomy",
    title: "Bootstrap over samples",
  },
  { label: "Δ GraphKV", key: (cell) => cell.change?.difference ?? null, show: changeOf, class: "number" },
  {
    label: "Kept",
    key: (cell) => cell.kept,
    show: (cell) => fixed(cell.kept, 1),
    class: "number roomy",
    title: "Tokens a layer",
  },
  { label: "Of prompt", key: (cell) => cell.share, show: (cell) => percent(cell.share), class: "number wide" },
  { label: "KV MiB", key: (cell) => cell.bytes, show: (cell) => fixed(mebibytes(cell), 2), class: "number wide" },
  { label: "s / sample", key: total, show: (cell) => fixed(total(cell), 2), class: "number wide" },
];

/** Build the table; returns a function that draws it anew. */
function buildCells() {
  const head = element("tr", null, COLUMNS.map(heading));
  const body = element("tbody");
  const status = element("p", { class: "status", role: "status" });
  const more = element("button", { type: "button", class: "plain", onclick: showMore }, "Show more cells");
  const table = element("table", { class: "cells" }, element("thead", null, head), body);
  document
    .getElementById("cells")
    .append(
      element("div", { class: "title" }, element("h2", null, "Cells"), status),
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of cells" }, table),
      more,
    );
  let sort = { column: null, direction: 1 };
  let limit = ROWS;

  function heading(column) {
    const button = element(
      "button",
      { type: "button", title: column.title ?? null, onclick: () => by(column) },
      column.label,
    );
    return element("th", { scope: "col", class: column.class ?? null, "aria-sort": "none" }, button);
  }
  function by(column) {
    const first = column.class?.includes("number") ? -1 : 1;
    sort = { column, direction: sort.column === column ? -sort.direction : first };
    draw();
  }
  function showMore() {
    limit += ROWS;
    draw();
  }
  function draw() {
    const shown = INDEX.cells.filter(isShown);
    if (sort.column) shown.sort((a, b) => compare(sort.column.key(a), sort.column.key(b), sort.direction));
    COLUMNS.forEach((column, i) => {
      const direction = sort.direction > 0 ? "ascending" : "descending";
      head.children[i].setAttribute("aria-sort", sort.column === column ? direction : "none");
    });
    const scale = scaleOf(shown);
    const rows = shown.slice(0, limit);
    body.replaceChildren(...rows.flatMap((cell, i) => rowsOf(cell, scale, sort.column ? null : rows[i - 1])));
    more.hidden = shown.length <= limit;
    const lacking = shown.filter((cell) => cell.n < cell.asked).length;
    const incomplete = lacking ? `; ${lacking} without a score, since samples are missing` : "";
    status.textContent = `${shown.length} of ${counted(INDEX.cells.length, "cell")}${incomplete}`;
  }
  return draw;
}

/** For each main score where 0 and the right end of its intervals are; scores in 0…1 keep that scale. */
function scaleOf(cells) {
  const ends = {};
  for (const cell of cells) {
    const score = groupOf(cell).score;
    ends[score] = Math.max(ends[score] ?? 1, mean(cell) ?? 0, cell.high ?? 0);
  }
  return ends;
}

/** The row of a cell, and below it one for its details, which is filled when it is opened. */
function rowsOf(cell, scale, previous) {
  const below = element("tr", { class: "details", hidden: true });
  const button = element("button", { type: "button", "aria-expanded": "false", onclick: toggle }, nameOf(cell));
  const place = previous && (previous.group === cell.group ? "same" : "apart");
  const row = element(
    "tr",
    { class: place },
    COLUMNS.map((column, i) => {
      if (i === 0) return element("th", { scope: "row", class: column.class }, button);
      return element("td", { class: column.class ?? null }, (column.show ?? column.key)(cell, scale));
    }),
  );
  function toggle() {
    if (!below.firstChild) below.append(element("td", { colspan: COLUMNS.length }, detailsOf(cell)));
    below.hidden = !below.hidden;
    button.setAttribute("aria-expanded", String(!below.hidden));
  }
  return [row, below];
}

function markOf(cell) {
  return element("span", { class: cell.graph ? "mark on" : "mark", "aria-hidden": "true" });
}

function nameOf(cell) {
  const group = groupOf(cell);
  const where = [SEVERAL_MODELS && group.model, group.task, group.score].filter(Boolean).join(" · ");
  const much = ` · ${budgetWords(cell.budget)} · n ${cell.n}${cell.n < cell.asked ? ` of ${cell.asked}` : ""}`;
  const below = element("span", { class: "narrow" }, where, element("span", { class: "tiny" }, much));
  return element("span", { class: "label" }, markOf(cell), element("span", null, cell.name, below));
}

function taskOf(cell) {
  const { task, place, note, score } = groupOf(cell);
  const more = [place, note, score].filter(Boolean).join(", ");
  return [`${task} `, element("small", null, more)];
}

function countOf(cell) {
  const count = cell.n === cell.asked ? String(cell.n) : `${cell.n}/${cell.asked}`;
  return cell.failed ? [count, element("span", { class: "warning" }, ` ${cell.failed} failed`)] : count;
}

const mebibytes = (cell) => (cell.bytes === undefined ? null : cell.bytes / 2 ** 20);

/** Mean and interval as a drawing on the scale of its score; the numbers are its description. */
function intervalOf(cell, scale) {
  if (mean(cell) === null) return NONE;
  const width = 120;
  const at = (value) => (4 + (width - 8) * Math.max(0, value / scale[groupOf(cell).score])).toFixed(1);
  const text = cell.low === null ? "no interval" : `${fixed(cell.low, 3)} to ${fixed(cell.high, 3)}`;
  const range =
    cell.low === null ? null : drawing("line", { x1: at(cell.low), x2: at(cell.high), y1: 8, y2: 8, class: "range" });
  return drawing(
    "svg",
    { viewBox: `0 0 ${width} 16`, width, height: 16, role: "img", "aria-label": text },
    drawing("title", null, text),
    drawing("line", { x1: 4, x2: width - 4, y1: 8, y2: 8, class: "axis" }),
    range,
    drawing("circle", { cx: at(mean(cell)), cy: 8, r: 3.5, class: cell.graph ? "on" : "off" }),
  );
}

function changeOf(cell) {
  if (!cell.change) return "";
  const { difference, low, high, clear } = cell.change;
  const interval = low === null ? "no interval" : `95 % interval ${signed(low, 3)} to ${signed(high, 3)}`;
  const text = signed(difference, 3) + (clear ? "" : " ≈");
  return element("span", { title: interval, class: clear ? "clear" : null }, text);
}

/** All that is known of a cell: scores, kept tokens by layer, time, settings, what made it, and its files. */
function detailsOf(cell) {
  const group = groupOf(cell);
  const change = cell.change;
  const scores = Object.entries(cell.scores).map(([name, value]) => [name, fixed(value, 4)]);
  if (cell.low !== null) scores.push([`95 % of ${group.score}`, `${fixed(cell.low, 4)} to ${fixed(cell.high, 4)}`]);
  if (change) {
    const interval = change.low === null ? "no interval" : `${signed(change.low, 4)} to ${signed(change.high, 4)}`;
    scores.push(["Δ GraphKV", `${signed(change.difference, 4)} (${interval}, n ${change.n})`]);
  }
  const answers = [
    ["tokens", fixed(cell.tokens, 1)],
    ...Object.entries(cell.finish ?? {}).map(([reason, count]) => [`ended by ${reason}`, count]),
    ["empty", cell.empty ?? NONE],
    ...Object.entries(cell.seconds ?? {}).map(([part, seconds]) => [`${part}, s`, fixed(seconds, 3)]),
  ];
  const blocks = [
    ["Scores", scores.length ? facts(scores) : element("p", null, "None: samples are missing.")],
    ["Kept tokens a layer", cell.layers ? layersOf(cell) : element("p", null, NONE)],
    ["Answers and seconds, a sample", facts(answers)],
    ["Settings of the cell", facts(Object.entries(cell.settings).map(([name, value]) => [name, words(value)]))],
    [
      "Shared by the cells of its group",
      facts(
        Object.entries(group.identity)
          .filter(isBrief)
          .map(([name, value]) => [name, words(value)]),
      ),
    ],
    ["Made by", cell.runs.map(([number, count]) => runOf(INDEX.runs[number], count))],
    [
      "Files",
      element(
        "ul",
        { class: "links" },
        cell.links.map((link) => element("li", null, linkOf(link))),
      ),
    ],
  ];
  return element(
    "div",
    { class: "blocks" },
    blocks.map(([title, ...body]) => element("section", null, element("h3", null, title), body)),
  );
}

/** Whether a part of an identity is short enough to be shown; the manifest has them all. */
function isBrief([name, value]) {
  return (name.split(".").length < 3 || name === "task.protocol.name") && String(value).length < 80;
}

function linkOf({ name, href }) {
  return element("a", { href }, name);
}

/** A bar a layer. */
function layersOf(cell) {
  const top = Math.max(...cell.layers);
  const bars = cell.layers.map((tokens, i) => {
    const height = (32 * tokens) / top;
    return drawing(
      "rect",
      { x: 6 * i, y: 32 - height, width: 4, height },
      drawing("title", null, `layer ${i}: ${tokens}`),
    );
  });
  const width = 6 * cell.layers.length;
  const text = `from ${Math.min(...cell.layers)} to ${top} tokens, ${counted(cell.layers.length, "layer")}`;
  const chart = drawing(
    "svg",
    { viewBox: `0 0 ${width} 32`, width, height: 32, role: "img", "aria-label": text, class: "layers" },
    bars,
  );
  return element("div", null, chart, element("p", null, text));
}

/** Provenance of records. */
function runOf(run, count) {
  const { git_commit: commit, git_dirty: dirty, packages, run: name, ...rest } = run;
  const state = dirty === null ? "" : dirty ? ", with changes" : ", clean";
  const entries = [["commit", commit ? commit.slice(0, 12) + state : "not in git"]];
  if (count !== null) entries.push(["records", count]);
  entries.push(...Object.entries(rest).map(([key, value]) => [key.replaceAll("_", " "), words(value)]));
  entries.push(...Object.entries(packages ?? {}));
  return facts(entries);
}
