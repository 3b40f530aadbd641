// What the colours and marks mean, for what is looked at.

const WHOLE = (share) => `${Math.round(100 * share)}%`;

/** Groups of swatches, each [words before, [class, text in the swatch] …, words after]. */
function legendGroups({ view, paint }, cells, single, marks) {
  const graph = view !== "diff" && cells.some((cell) => cell.factors);
  const groups = [];
  if (view === "diff") groups.push(...differenceLegend(single));
  else if (graph && paint === "factor") groups.push(...factorLegend());
  if (view !== "diff" && (!graph || paint !== "factor" || cells.some((cell) => !cell.factors))) {
    groups.push(...shareLegend(single, graph && paint === "source"));
  }
  if (view !== "diff" && cells.some((cell) => !cell.keeps_all && cell.window + cell.sinks > 0)) {
    groups.push([[["k8 w", "abc"]], "window and sinks, always kept"]);
  }
  for (const name of new Set(marks.map((mark) => mark.name))) groups.push([[["m", "abc"]], name]);
  if (graph) {
    const where = single ? "" : " in at least half of the heads";
    groups.push([[["s", "abc"]], `source${where}`], [[["t", "abc"]], `neighbour${where}`], [[["s t", "abc"]], "both"]);
  }
  return groups;
}

function ramp(letter, thresholds) {
  return thresholds.map((low, i) => [`${letter}${i + 1}`, low ? WHOLE(low) : ">0"]);
}

function shareLegend(single, sources) {
  if (single) return sources ? [[[["k8", "abc"]], "source"]] : [[[["k0", "abc"]], "evicted"], [[["k8", "abc"]], "kept"]];
  return [[[["k0", "0"], ...ramp("k", SHARES)], sources ? "of the heads have it as a source" : "of the heads keep it"]];
}

function differenceLegend(single) {
  if (single) {
    return [
      [[["a5", "abc"]], "only A keeps it"],
      [[["b5", "abc"]], "only B keeps it"],
      [[["g3", "abc"]], "both keep it"],
      [[["k0", "abc"]], "neither"],
    ];
  }
  return [
    [ramp("a", CHANGES), "more heads of A keep it"],
    [ramp("b", CHANGES), "more heads of B keep it"],
    [[["g1", "few"], ["g2", "some"], ["g3", "all"]], "heads of both"],
    [[["k0", "abc"]], "neither"],
  ];
}

function factorLegend() {
  return [[ramp("a", CHANGES), "score lowered by"], [ramp("b", CHANGES), "raised by"], [[["k0", "abc"]], "unchanged"]];
}

/** Show the groups. */
function drawLegend(host, groups) {
  const swatch = ([className, textContent]) => build("i", { className: `swatch ${className}`, textContent });
  host.replaceChildren(
    ...groups.map(([swatches, words]) =>
      build("span", {}, build("span", { className: "ramp" }, ...swatches.map(swatch)), build("span", {}, words)),
    ),
  );
}
