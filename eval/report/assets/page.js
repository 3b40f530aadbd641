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

for (const name of TABS) {
  tab(name).addEventListener("click", () => (location.hash = `/${name}`));
  tab(name).addEventListener("keydown", (event) => {
    const last = TABS.length - 1;
    const at = TABS.indexOf(name);
    const to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    tab(TABS[to]).focus();
    location.hash = `/${TABS[to]}`;
  });
}

window.addEventListener("hashchange", go);
drawCells();
go();
