// Small helpers: elements, numbers.

const SVG = "http://www.w3.org/2000/svg";

/** A new element; names with a dash and `role` are attributes, others properties. Text is only ever set as text. */
function build(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "role" || name.includes("-")) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** The letter of a cell in its colour. */
function badge(letter) {
  return build("b", { className: `badge ${letter.toLowerCase()}`, textContent: letter });
}

/** Rows of a description list: a term, then what is said of it, each a text or a node. */
function description(rows) {
  return build("dl", {}, ...rows.flatMap(([term, ...values]) => [
    build("dt", {}, term),
    build("dd", {}, ...values),
  ]));
}

/** 0.123 → "0.123", null → "–". */
function decimals(value, digits = 3) {
  return value === null ? "–" : value.toFixed(digits);
}

function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}

function whole(number) {
  return Math.round(number).toLocaleString("en");
}

/** Sum of the values from one index up to another. */
function sum(values, from, to) {
  let total = 0;
  for (let i = from; i < to; i++) total += values[i];
  return total;
}

/** Mean of the values that are known, or null. */
function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((total, value) => total + value, 0) / known.length : null;
}

/** Whole numbers from one up to another. */
function range(from, to) {
  return Array.from({ length: to - from }, (_, i) => from + i);
}

/** The choices of a menu, as values and texts. */
function fill(select, choices) {
  select.replaceChildren(...choices.map(([value, textContent]) => build("option", { value, textContent })));
}
