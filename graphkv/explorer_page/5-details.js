// What there is to say about one token.

const MOST_LINKS = 8;

/** "in 12 of 90 heads (13 %)", or "yes" and "no" for a single head. */
function keptWords(cell, rows, token) {
  const count = rows.filter((row) => cell.keeps(row, token)).length;
  if (rows.length === 1) return count ? "yes" : "no";
  return `in ${whole(count)} of ${whole(rows.length)} heads (${percent(count / rows.length)})`;
}

/** Middle rank over `rows`, "37 of 3,968", or nothing where no ranking decided. */
function rankWords(cell, ranks, rows, token) {
  const known = rows.map((row) => ranks[row * cell.n + token]).filter((rank) => rank > 0).sort((a, b) => a - b);
  if (!known.length) return null;
  const nodes = cell.n - cell.window - cell.sinks;
  return `${rows.length > 1 ? "median " : ""}${whole(known[known.length >> 1])} of ${whole(nodes)}`;
}

/** The tokens that a token is linked with over `rows`: those it gets decay from, and those it sends decay to. */
function linksOf(cell, rows, token) {
  const [from, to] = [new Map(), new Map()];
  const note = (map, other, similarity) => {
    const known = map.get(other) ?? { token: other, heads: 0, similarity: 0 };
    map.set(other, { ...known, heads: known.heads + 1, similarity: Math.max(known.similarity, similarity) });
  };
  let everyOther = false;
  for (const row of rows) {
    const links = cell.links(row);
    everyOther ||= links.everyOther;
    for (let i = 0; i < links.neighbors.length; i++) {
      const source = links.sources[Math.floor(i / links.m)];
      if (links.neighbors[i] === source) continue;
      if (links.neighbors[i] === token) note(from, source, links.similarity[i]);
      if (source === token) note(to, links.neighbors[i], links.similarity[i]);
    }
  }
  const sorted = (map) => [...map.values()].sort((a, b) => b.heads - a.heads || b.similarity - a.similarity);
  return { from: sorted(from), to: sorted(to), everyOther };
}

function linkWords(token, heads, similarity, single) {
  return single
    ? `token ${token}, similarity ${decimals(similarity)}`
    : `token ${token}, linked in ${heads} heads, similarity up to ${decimals(similarity)}`;
}

/** Buttons that lead to linked tokens. */
function linkButtons(links, texts, single, onToken) {
  const buttons = links.slice(0, MOST_LINKS).map(({ token, heads, similarity }) =>
    build(
      "button",
      { type: "button", className: "link", title: linkWords(token, heads, similarity, single), onclick: () => onToken(token) },
      build("span", { textContent: quoted(texts[token]) }),
      build("small", { textContent: ` #${token} ${single ? "" : `${heads}× `}${decimals(similarity, 2)}` }),
    ),
  );
  const rest = links.length - buttons.length;
  if (rest > 0) buttons.push(build("small", { textContent: `and ${whole(rest)} more` }));
  return buttons;
}

/** "2.8% (score × 0.972)", or how much a score is raised. */
function discountWords(factor) {
  if (Math.abs(factor - 1) < 1e-6) return "none";
  const change = factor < 1 ? percent(1 - factor) : `raised by ${percent(factor - 1)}`;
  return `${change} (score × ${Math.abs(factor) < 1e-3 ? factor.toExponential(1) : decimals(factor)})`;
}

/** The rows of a graph cell: source, neighbour, discount, links. */
function graphRows(cell, rows, token, texts, onToken) {
  const single = rows.length === 1;
  const sources = rows.filter((row) => cell.sources(row).some((chosen) => chosen.includes(token))).length;
  const { from, to, everyOther } = linksOf(cell, rows, token);
  const factor = mean(rows.map((row) => cell.factors[row * cell.n + token]));
  const said = [];
  if (sources) {
    const rounds = single && cell.sources(rows[0]).map((chosen, i) => (chosen.includes(token) ? i + 1 : 0)).filter(Boolean);
    const which = single && cell.sources(rows[0]).length > 1 ? ` (round ${rounds.join(", ")})` : "";
    said.push(["Source", single ? `yes${which}` : `in ${whole(sources)} of ${whole(rows.length)} heads`]);
  }
  said.push(["Discount", discountWords(factor)]);
  if (everyOther) said.push(["Neighbours", "of each source: every other token"]);
  if (from.length) said.push(["Neighbour of", ...linkButtons(from, texts, single, onToken)]);
  if (to.length) said.push(["Its neighbours", ...linkButtons(to, texts, single, onToken)]);
  return said;
}

/** Everything about a token in one cell. */
function cellDetails(cell, badge, rows, token, texts, onToken) {
  const always = cell.always(token);
  const said = [["Kept", keptWords(cell, rows, token) + (always ? `: ${always}, whatever its score` : "")]];
  const rank = rankWords(cell, cell.ranks, rows, token);
  if (rank) said.push(["Score rank", rank]);
  if (rank && cell.plain_ranks) said.push(["Before graph", rankWords(cell, cell.plain_ranks, rows, token)]);
  if (cell.factors && !always) said.push(...graphRows(cell, rows, token, texts, onToken));
  const heading = build("h4", {}, badge, build("span", { textContent: cell.label }));
  return build("div", {}, heading, description(said));
}

/** One sentence about a token for screen readers. */
function spoken(cells, layer, head, token, texts) {
  const parts = cells.map(([name, cell]) => {
    const rows = cell.rows(layer, head);
    const rank = rankWords(cell, cell.ranks, rows, token);
    return `${name}: kept ${keptWords(cell, rows, token)}${rank ? `, rank ${rank}` : ""}`;
  });
  return `${quoted(texts[token])}, position ${token}. ${parts.join(". ")}`;
}
