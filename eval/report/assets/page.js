"use strict";

// Tabs, and the part of the address behind # that names what is open: #/samples/GROUP/SAMPLE.

const TABS = ["overview", "samples", "retention"];
const tab = (name) => document.getElementById(`tab-${name}`);

const drawCells = buildCells();
const samples = buildSamples();
let current = null;

buildFilters(() => {
  drawCells();
  if (current === "samples") samples.draw();
});

function go() {
  const [name, group, sample] = location.hash.slice(2).split("/");
  const target = TABS.includes(name) ? name : "overview";
  if (target !== current) select(target);
  if (target === "samples" && sample) samples.open(Number(group), decodeURIComponent(sample));
}

function select(name) {
  current = name;
  for (const other of TABS) {
    tab(other).setAttribute("aria-selected", String(other === name));
    tab(other).tabIndex = other === name ? 0 : -1;
    document.getElementById(other).hidden = other !== name;
  }
  document.getElementById("filters").hidden = name === "retention" || !INDEX.cells.length;
  if (name === "samples") samples.draw();
}

/** Arrow keys, Home and End go from tab to tab. */
function step(event) {
  const at = TABS.indexOf(current);
  const count = TABS.length;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: count - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const name = TABS[(to + count) % count];
  tab(name).focus();
  location.hash = `/${name}`;
}

for (const name of TABS) {
  tab(name).addEventListener("click", () => (location.hash = `/${name}`));
  tab(name).addEventListener("keydown", step);
}

window.addEventListener("hashchange", go);
drawCells();
go();
