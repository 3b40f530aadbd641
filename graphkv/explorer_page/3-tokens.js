// The prompt as coloured text, with a map of all layers above it.

/** Lower ends of the levels of colour: level 1 is anything above 0, level 8 is everything. */
const SHARES = [0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1];
const CHANGES = [0.01, 0.05, 0.15, 0.4, 0.8];

/** Classes of colour by level; the style sheet has them from graphkv/page.py. */
const SHARE_LEVELS = ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "k8"];
const A_LEVELS = ["k0", "a1", "a2", "a3", "a4", "a5"];
const B_LEVELS = ["k0", "b1", "b2", "b3", "b4", "b5"];
const BOTH_LEVELS = ["k0", "g1", "g2", "g3"];

/** Level 0 (none) to 8 of a share. */
function shareLevel(share) {
  if (share <= 0) return 0;
  let level = 1;
  while (level < SHARES.length && share >= SHARES[level]) level++;
  return level;
}

/** Level 0 to 5 of the size of a change. */
function changeLevel(change) {
  let level = 0;
  while (level < CHANGES.length && change >= CHANGES[level]) level++;
  return level;
}

/** Colour of what shares of the rows keep in a difference: mostly A ("a…") or B ("b…"), or both alike ("g…"). */
function differenceClass(onlyA, onlyB, both) {
  const level = changeLevel(Math.abs(onlyA - onlyB));
  if (level) return onlyA > onlyB ? A_LEVELS[level] : B_LEVELS[level];
  const shared = both + Math.min(onlyA, onlyB);
  return shared > 0 ? BOTH_LEVELS[Math.ceil(shared * 3)] : "k0";
}

/** Colour of what the graph did to a score: lowered ("a…") or raised ("b…"). */
function factorClass(factor) {
  const level = changeLevel(Math.abs(1 - factor));
  return factor < 1 ? A_LEVELS[level] : B_LEVELS[level];
}

/** For each token its colour in one cell, over some rows: what is kept, what is a source, or the change of the score. */
function cellColour(cell, rows, paint) {
  if (paint === "factor") {
    const factors = cell.meanFactors(rows);
    return (from, to) => factorClass(sum(factors, from, to) / (to - from));
  }
  const counts = paint === "source" ? cell.sourceCounts(rows) : cell.keptCounts(rows);
  return (from, to) => SHARE_LEVELS[shareLevel(sum(counts, from, to) / (to - from) / rows.length)];
}

/** For each token its marks in one cell: always kept; source or neighbour in at least half of the rows. */
function cellMarks(cell, rows) {
  const half = rows.length / 2;
  const [sources, neighbors] = cell.factors ? [cell.sourceCounts(rows), cell.neighborCounts(rows)] : [null, null];
  return (token) => {
    let marks = cell.always(token) ? " w" : "";
    if (sources && sources[token] >= half) marks += " s";
    if (neighbors && neighbors[token] >= half) marks += " t";
    return marks;
  };
}

/** For each token its colour in the difference of two cells. */
function differenceColour({ onlyA, onlyB, both, rows }) {
  return (from, to) => {
    const pairs = rows * (to - from);
    return differenceClass(sum(onlyA, from, to) / pairs, sum(onlyB, from, to) / pairs, sum(both, from, to) / pairs);
  };
}

/** Text in which white space can be seen. */
function visible(text) {
  if (text === "") return "◦";
  return text
    .replace(/\r/g, "␍")
    .replace(/\n/g, "↵\n")
    .replace(/\t/g, "→\t")
    .replace(/(?<= ) +/g, (blanks) => "·".repeat(blanks.length))
    .replace(/[\u200B-\u200F\u2028-\u202E\u2066-\u2069\uFEFF]/g, (c) => `⟨${c.codePointAt(0).toString(16).toUpperCase()}⟩`);
}

/** A token in one line, for the details and for screen readers. */
function quoted(text) {
  if (text === "") return "(part of a character)";
  return `“${visible(text).replace(/↵\n/g, "↵").replace(/^ | $/g, "·")}”`;
}

/** One text of tokens. Of a listbox's keys it handles those that stay inside; the others go to `onKey`. */
class Pane {
  constructor(host, name, texts, marks, { onHover, onChoose, onKey }) {
    this.element = build("section", { className: "pane" });
    this.heading = build("h3", {});
    this.canvas = build("canvas", {});
    this.here = build("div", { className: "here" });
    this.map = build("div", { className: "map", role: "img" }, this.canvas, this.here);
    this.list = build("div", { className: "tokens", tabIndex: 0, role: "listbox", id: name });
    const marked = new Set(marks.flatMap(({ begin, end }) => range(begin, end)));
    this.fixed = texts.map((_, token) => (marked.has(token) ? "m " : ""));
    this.nodes = texts.map((text, token) => {
      const node = build("span", { textContent: visible(text), role: "option", id: `${name}-${token}` });
      node.token = token;
      return node;
    });
    this.classes = texts.map(() => null);
    this.linked = [];
    this.list.append(...this.nodes);
    this.element.append(this.heading, this.map, this.list);
    host.append(this.element);
    this.#listen(onHover, onChoose, onKey);
  }

  #listen(onHover, onChoose, onKey) {
    const tokenOf = (event) => event.target.token ?? null;
    this.list.addEventListener("mouseover", (event) => onHover(tokenOf(event)));
    this.list.addEventListener("mouseleave", () => onHover(null));
    this.list.addEventListener("click", (event) => tokenOf(event) !== null && onChoose(tokenOf(event), this));
    this.list.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (onKey(event.key, this)) event.preventDefault();
    });
  }

  /** Give every token its classes; the browser hears only of those that change. */
  paint(classOf) {
    for (let token = 0; token < this.nodes.length; token++) {
      const name = this.fixed[token] + classOf(token);
      if (name === this.classes[token]) continue;
      this.classes[token] = name;
      this.nodes[token].className = name;
    }
    this.linked = [];
    if (this.chosen !== undefined) this.nodes[this.chosen].classList.add("chosen");
  }

  /** Outline tokens that are linked to the one that is looked at. */
  link(tokens) {
    for (const token of this.linked) this.nodes[token].classList.remove("linked");
    for (const token of tokens) this.nodes[token].classList.add("linked");
    this.linked = tokens;
  }

  /** Mark a token as the chosen one, and bring it into sight. */
  choose(token, scroll) {
    if (this.chosen !== undefined) {
      this.nodes[this.chosen].classList.remove("chosen");
      this.nodes[this.chosen].removeAttribute("aria-selected");
    }
    this.chosen = token;
    const node = this.nodes[token];
    node.classList.add("chosen");
    node.setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", node.id);
    if (scroll) this.reveal(token);
  }

  /** Scroll the list, and not the page, until a token is in it. */
  reveal(token) {
    const [node, list] = [this.nodes[token], this.list];
    const top = node.offsetTop; // from the top of the list, which is positioned
    const margin = 2 * node.offsetHeight;
    if (top < list.scrollTop + margin || top + node.offsetHeight > list.scrollTop + list.clientHeight - margin) {
      list.scrollTop = top - list.clientHeight / 3;
    }
  }

  /** The next (1) or last (-1) token in a colour that means "kept by somebody" or "by one of them". */
  nextColoured(token, direction) {
    for (let i = token + direction; i >= 0 && i < this.nodes.length; i += direction) {
      if (!/\b(k0|g\d)\b/.test(this.classes[i])) return i;
    }
    return token;
  }

  /** The token above (-1) or below (1) another one in the text as it is laid out. */
  vertical(token, direction) {
    const box = (i) => this.nodes[i].getClientRects()[0];
    const from = box(token);
    let best = token;
    let line = null;
    for (let i = token + direction; i >= 0 && i < this.nodes.length; i += direction) {
      const there = box(i);
      if (!there || Math.abs(there.top - from.top) < from.height / 2) continue;
      line ??= there.top;
      if (Math.abs(there.top - line) >= from.height / 2) break;
      if (best === token || Math.abs(there.left - from.left) < Math.abs(box(best).left - from.left)) best = i;
    }
    return best;
  }
}
