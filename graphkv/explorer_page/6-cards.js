// Tables of facts: a card for each cell with its answer, and the numbers of each layer.

function scoreRows(scores) {
  return Object.entries(scores).map(([name, value]) => [name, decimals(value, 2)]);
}

/** What a card says of a cell. */
function cardRows(cell, n, marks) {
  const rows = cell.rows(-1, "all");
  const [low, high] = [Math.min(...cell.kept_per_layer), Math.max(...cell.kept_per_layer)];
  const range = low === high ? "" : `, ${whole(low)} to ${whole(high)} by layer`;
  const kept = mean(cell.kept_per_layer);
  const facts = [["Kept", `${whole(kept)} of ${whole(n)} tokens a head (${percent(kept / n)})${range}`]];
  for (const { name, begin, end } of marks) {
    const counts = cell.keptCounts(rows);
    facts.push([name[0].toUpperCase() + name.slice(1), `${percent(sum(counts, begin, end) / (end - begin) / rows.length)} kept`]);
  }
  facts.push(["Similarity", `${decimals(cell.meanSimilarity(rows))} of kept keys`]);
  return [...scoreRows(cell.scores), ...facts];
}

function card(label, answer, rows) {
  const badges = build("span", { className: "badges" });
  const text = build("blockquote", { textContent: answer.trim() || "(an empty answer)" });
  const element = build("article", {}, build("h3", {}, badges, build("span", { textContent: label })), text, description(rows));
  return { element, badges };
}

/** A table with a row a layer; `columns` are names and functions of the layer. */
function drawTable(table, layers, columns) {
  const heading = columns.map(([name]) => build("th", { textContent: name, scope: "col" }));
  const lines = range(0, layers).map((layer) =>
    build("tr", {}, ...columns.map(([, value], i) => build(i ? "td" : "th", { textContent: value(layer) }))),
  );
  table.replaceChildren(build("thead", {}, build("tr", {}, ...heading)), build("tbody", {}, ...lines));
}
