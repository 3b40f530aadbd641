"use strict";

// One sample: what is stored of it, and what each cell answered.

const LONG = 1200; // characters of a text that are shown before it is opened

/** The nodes of sample number `i` of a group, whose unpacked answers are given. */
function sampleOf(group, i, answers) {
  const { sample, references = [], prompt, meta, notes, ...numbers } = answers.facts[i];
  const { model, task, place, note } = INDEX.groups[group];
  const stored = Object.entries({ ...numbers, ...meta, ...notes }).map(([name, value]) => [name, words(value)]);
  return [
    element("p", { class: "note" }, [model, task, place, note].filter(Boolean).join(" · ")),
    element("h2", null, sample),
    ...(prompt ? [element("h3", null, "Prompt"), longText(prompt)] : []),
    element("h3", null, references.length > 1 ? "References" : "Reference"),
    ...references.map((text) => longText(text)),
    element("details", { class: "stored" }, element("summary", null, "What is stored of the prompt"), facts(stored)),
    ...answersOf(group, i, answers),
  ];
}

/** The different answers, the best first, each with the cells that gave it; then who failed, and who was not run. */
function answersOf(group, i, { texts, cut, cells }) {
  const byText = new Map();
  const failures = [];
  const absent = [];
  INDEX.cells.forEach((cell, number) => {
    if (cell.group !== group || !isShown(cell)) return;
    const columns = cells[number];
    if (i in columns.error) failures.push(failureOf(cell, columns.error[i]));
    else if (columns.kept[i] === null) absent.push(labelOf(cell));
    else byText.set(columns.text[i], [...(byText.get(columns.text[i]) ?? []), { cell, columns }]);
  });
  const score = INDEX.groups[group].score;
  const cards = [...byText].map(([text, by]) => answerOf(texts[text] ?? null, cut[text], by, i, score));
  cards.sort((a, b) => compare(a.best, b.best, -1));
  const answered = [...byText.values()].flat().length;
  const nodes = cards.map((card) => card.node);
  return [
    element("h3", null, `${counted(cards.length, "different answer")} of ${counted(answered, "cell")}`),
    element("div", { class: "answers" }, nodes),
    ...failures,
    ...(absent.length ? [element("p", { class: "note" }, `Not run: ${absent.join(", ")}.`)] : []),
  ];
}

function failureOf(cell, error) {
  return element("p", { class: "failure" }, element("strong", null, `${labelOf(cell)} failed: `), error);
}

/** What a cell is called beside others of its group: with its budget where they have several. */
function labelOf(cell) {
  const siblings = INDEX.cells.filter((other) => other.group === cell.group && other.budget !== null);
  const several = new Set(siblings.map((other) => other.budget)).size > 1;
  return cell.budget !== null && several ? `${cell.name}, ${budgetWords(cell.budget)}` : cell.name;
}

/** An answer with the cells that gave it, and `best`, their highest main score. */
function answerOf(text, length, by, i, score) {
  const names = [...new Set(by.flatMap(({ columns }) => Object.keys(columns.scores)))];
  names.sort((a, b) => (b === score) - (a === score));
  const head = ["cell", ...names, "kept"].map((name) => element("th", { scope: "col" }, name));
  const rows = by.map(({ cell, columns }) => {
    const scores = names.map((name) => fixed(columns.scores[name]?.[i], 3));
    const label = element("span", { class: "label" }, markOf(cell), labelOf(cell));
    const values = [...scores, fixed(columns.kept[i], 0)].map((value, column) =>
      element("td", { class: names[column] === score ? "strong" : null }, value),
    );
    return element("tr", null, element("th", { scope: "row" }, label), values);
  });
  const [{ cell, columns }] = by;
  const tokens = columns.tokens[i];
  const notes = [];
  if (text === null) notes.push(["No text is stored."]);
  if (length) notes.push([`The beginning of ${length} characters: `, cell.links.slice(1).map(linkOf)]);
  if (tokens !== null) notes.push([`${counted(tokens, "token")}, ended by ${columns.finish[i]}`]);
  const table = element("table", null, element("thead", null, element("tr", null, head)), element("tbody", null, rows));
  const node = element(
    "section",
    { class: names.length > 3 ? "answer broad" : "answer" },
    text === null ? null : longText(text),
    notes.map((note) => element("p", { class: "note" }, note)),
    element("div", { class: "scroll" }, table),
  );
  const scores = by.map((one) => one.columns.scores[score]?.[i] ?? null).filter((value) => value !== null);
  return { node, best: scores.length ? Math.max(...scores) : null };
}

/** A text as it is; a long one opens at the press of a button. */
function longText(text) {
  const block = element("blockquote", null, text || element("em", null, "empty"));
  if (text.length <= LONG) return element("div", { class: "text" }, block);
  block.textContent = `${text.slice(0, LONG)}…`;
  const label = `Show all ${text.length.toLocaleString("en")} characters`;
  const button = element("button", { type: "button", class: "plain", onclick: open }, label);
  function open() {
    block.textContent = text;
    button.remove();
  }
  return element("div", { class: "text" }, block, button);
}
