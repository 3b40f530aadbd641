"use strict";

// Elements, numbers and words. Texts reach the page as text nodes only: nothing here parses HTML.

const INDEX = JSON.parse(document.getElementById("index").textContent);
const NONE = "—";

/** An element; attributes that start with "on" are listeners, null and false ones are left out. */
function element(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawing(tag, attributes, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null));
  return node;
}

function fixed(value, digits) {
  return value === null || value === undefined ? NONE : value.toFixed(digits).replace(/^-/, "−");
}

function signed(value, digits) {
  return value === null ? NONE : (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
}

function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function percent(share, digits = 1) {
  return share === null || share === undefined ? NONE : `${(100 * share).toFixed(digits)} %`;
}

/** A budget as it was asked for: tokens, or a share of the prompt. */
function budgetWords(budget) {
  if (budget === null) return "all";
  return Number.isInteger(budget) && budget > 1 ? String(budget) : `${+(100 * budget).toPrecision(4)} %`;
}

/** Orders values; what is missing comes last in both directions. */
function compare(a, b, direction) {
  const missing = (value) => value === null || value === undefined;
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  if (typeof a === "string") return direction * a.localeCompare(b, "en", { numeric: true });
  return direction * (a - b);
}

/** A list of names with values. */
function facts(entries) {
  return element(
    "dl",
    null,
    entries.map(([name, value]) => element("div", null, element("dt", null, name), element("dd", null, value))),
  );
}

/** A value in words; a hash by its beginning. */
function words(value) {
  if (value === null) return "none";
  if (typeof value === "object") return JSON.stringify(value);
  return /^[0-9a-f]{40,}$/.test(value) ? `${value.slice(0, 12)}…` : String(value);
}

function delayed(action, milliseconds) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
}
