"use strict";

// What is looked at: the choices hold for the table of cells and for the samples.

const FILTERS = {
  model: { label: "Model", of: (cell) => INDEX.groups[cell.group].model },
  task: { label: "Task", of: (cell) => INDEX.groups[cell.group].task },
  scorer: { label: "Scorer", of: (cell) => cell.scorer },
  budget: { label: "Budget", of: (cell) => budgetWords(cell.budget) },
  graph: { label: "GraphKV", of: (cell) => (cell.graph ? "on" : "off") },
};

const chosen = Object.fromEntries(Object.keys(FILTERS).map((key) => [key, new Set()]));

/** Whether a cell is among those that are looked at; where nothing is chosen, everything is. */
function isShown(cell) {
  return Object.entries(FILTERS).every(([key, filter]) => !chosen[key].size || chosen[key].has(filter.of(cell)));
}

/** Fill the bar; `changed` is called after every choice. */
function buildFilters(changed) {
  const bar = document.getElementById("filters");
  const menus = Object.keys(FILTERS).map((key) => filterMenu(key, choose));
  const reset = element("button", { type: "button", class: "plain", hidden: true, onclick: clear }, "Reset");
  bar.append(...menus.map((menu) => menu.node), reset);

  function choose() {
    reset.hidden = !Object.values(chosen).some((values) => values.size);
    changed();
  }
  function clear() {
    menus.forEach((menu) => menu.clear());
    choose();
  }
  document.addEventListener("click", (event) => {
    menus.filter((menu) => !menu.node.contains(event.target)).forEach((menu) => (menu.node.open = false));
  });
}

function filterMenu(key, changed) {
  const { label, of } = FILTERS[key];
  const values = [...new Set(INDEX.cells.map(of))].sort((a, b) => compare(a, b, 1));
  const state = element("span");
  const summary = element("summary", null, `${label} `, state);
  const boxes = values.map((value) => element("input", { type: "checkbox", value, onchange: choose }));
  const choices = boxes.map((box, i) => element("label", null, box, ` ${values[i]}`));
  const node = element("details", { class: "menu", "data-filter": key, onkeydown: leave, onfocusout: close }, summary);
  node.append(element("fieldset", null, element("legend", null, label), choices));
  tell();

  function tell() {
    const names = [...chosen[key]];
    state.textContent = names.length > 2 ? `${names.length} of ${values.length}` : names.join(", ") || "all";
    node.classList.toggle("active", names.length > 0);
  }
  function choose() {
    chosen[key] = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    tell();
    changed();
  }
  function leave(event) {
    if (event.key !== "Escape") return;
    node.open = false;
    summary.focus();
  }
  function close(event) {
    if (event.relatedTarget && !node.contains(event.relatedTarget)) node.open = false;
  }
  function clear() {
    boxes.forEach((box) => (box.checked = false));
    chosen[key] = new Set();
    tell();
  }
  return { node, clear };
}
