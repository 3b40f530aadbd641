// The page: what is chosen, and how everything follows from it.

const $ = (id) => document.getElementById(id);

class Page {
  constructor(data, arrays) {
    this.data = data;
    this.n = data.prompt.texts.length;
    this.texts = data.prompt.texts;
    this.layers = data.model.layers;
    this.cells = data.retention.map((facts) => new Cell(facts, arrays, data.model, this.n));
    const second = Math.min(1, this.cells.length - 1);
    const token = data.prompt.marks[0]?.begin ?? null;
    this.state = { view: second ? "diff" : "one", a: 0, b: second, layer: -1, head: "all", paint: "kept", token };
    this.hovered = null;
    this.memo = new Map();
    this.palette = palette();
    this.#controls();
    this.#panes();
    this.#facts();
    this.address = new Address({
      view: second ? ["one", "side", "diff"] : ["one"],
      a: range(0, this.cells.length),
      b: range(0, this.cells.length),
      layer: range(-1, this.layers),
      head: this.heads,
      paint: ["kept", "source", "factor"],
      token: range(0, this.n),
    });
    this.set(this.address.read());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#changeScheme());
    const observer = new ResizeObserver((entries) => this.#resized(entries));
    for (const pane of this.panes) observer.observe(pane.map);
  }

  get a() {
    return this.cells[this.state.a];
  }

  get b() {
    return this.cells[this.state.b];
  }

  /** The cells that are on the screen, by letter. */
  get shown() {
    return this.state.view === "one" ? [["A", this.a]] : [["A", this.a], ["B", this.b]];
  }

  /** Change what is chosen and draw what depends on it. */
  set(changes) {
    Object.assign(this.state, changes);
    if (this.state.view !== "one" && this.state.a === this.state.b) this.state.b = (this.state.a + 1) % this.cells.length;
    this.#showControls();
    this.#paint();
    this.#drawMaps();
    this.#frameLayer();
    this.#legend();
    this.#details();
    this.#charts();
    this.#cards();
    this.address.write(this.state);
  }

  // What is chosen

  #controls() {
    const { model } = this.data;
    const choices = this.cells.map((cell, i) => [i, cell.label]);
    fill($("cell-a"), choices);
    fill($("cell-b"), choices);
    fill($("layer"), [[-1, `all ${this.layers}`], ...range(0, this.layers).map((layer) => [layer, String(layer)])]);
    const heads = [["all", "all"], ...range(0, model.kv_heads).map((head) => [`k${head}`, `KV head ${head}`])];
    if (this.cells.some((cell) => cell.perQuery)) {
      heads.push(...range(0, model.query_heads).map((head) => [`q${head}`, `query head ${head}`]));
    }
    fill($("head"), heads);
    this.heads = heads.map(([value]) => value);
    $("view").hidden = $("field-b").hidden = this.cells.length < 2;
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    $("controls").addEventListener("change", () =>
      this.set({
        view: $("controls").elements.view.value,
        a: Number($("cell-a").value),
        b: Number($("cell-b").value),
        layer: Number($("layer").value),
        head: $("head").value,
        paint: $("paint").value,
      }),
    );
    $("layer-down").addEventListener("click", () => this.#stepLayer(-1));
    $("layer-up").addEventListener("click", () => this.#stepLayer(1));
  }

  #showControls() {
    const { view, a, b, layer, head, paint } = this.state;
    $("controls").elements.view.value = view;
    for (const [id, value] of Object.entries({ "cell-a": a, "cell-b": b, layer, head, paint })) $(id).value = value;
    $("layer-down").disabled = layer < 0;
    $("layer-up").disabled = layer === this.layers - 1;
    $("field-b").hidden = this.cells.length < 2 || view === "one";
    $("field-paint").hidden = view === "diff" || !this.shown.some(([, cell]) => cell.factors);
  }

  #stepLayer(by) {
    this.set({ layer: Math.min(this.layers - 1, Math.max(-1, this.state.layer + by)) });
  }

  #stepHead(by) {
    const place = this.heads.indexOf(this.state.head) + by;
    if (this.heads[place]) this.set({ head: this.heads[place] });
  }

  // The text

  #panes() {
    const callbacks = {
      onHover: (token) => this.#hover(token),
      onChoose: (token, pane) => this.choose(token, pane),
      onKey: (key, pane) => this.#key(key, pane),
    };
    const pane = (name) => new Pane($("panes"), name, this.texts, this.data.prompt.marks, callbacks);
    this.panes = this.cells.length > 1 ? [pane("text-a"), pane("text-b")] : [pane("text-a")];
    for (const one of this.panes) {
      one.map.addEventListener("click", (event) => this.#pickOnMap(event, one));
      one.list.addEventListener("focus", () => this.state.token ?? this.choose(0, one));
      one.list.addEventListener("scroll", () => {
        for (const other of this.panes) if (other !== one) other.list.scrollTop = one.list.scrollTop;
      });
    }
  }

  /** How many paired rows are looked at, and in how many of them each token is kept by A, B or both. */
  #comparison(layer) {
    const { a, b, head } = this.state;
    return this.#remember(`${a} ${b} ${layer} ${head}`, () => comparison(this.a, this.b, layer, head));
  }

  #remember(key, make) {
    if (this.memo.size > 500) this.memo.clear();
    if (!this.memo.has(key)) this.memo.set(key, make());
    return this.memo.get(key);
  }

  #paint() {
    const side = this.state.view === "side";
    if (this.panes[1]) this.panes[1].element.hidden = !side;
    $("panes").classList.toggle("two", side);
    if (this.state.view === "diff") {
      const colour = differenceColour(this.#comparison(this.state.layer));
      this.#head(this.panes[0], this.shown, "what only one of them keeps");
      this.panes[0].paint((token) => colour(token, token + 1));
    } else {
      this.shown.forEach(([letter, cell], i) => this.#paintCell(this.panes[i], letter, cell));
    }
    if (this.state.token !== null) for (const pane of this.panes) pane.choose(this.state.token, false);
    if (this.laidOut !== this.state.view) this.#layOut();
  }

  /** A view lays the text out anew: bring the chosen token, or the beginning, into sight again. */
  #layOut() {
    this.laidOut = this.state.view;
    for (const pane of this.panes) if (!pane.element.hidden) pane.reveal(this.state.token ?? 0);
  }

  /** What is coloured of a cell: only graph cells have sources and discounts. */
  #paintOf(cell) {
    return cell.factors ? this.state.paint : "kept";
  }

  #paintCell(pane, letter, cell) {
    const paint = this.#paintOf(cell);
    const rows = cell.rows(this.state.layer, this.state.head);
    const says = { kept: "what it keeps", source: "its sources", factor: "what the graph does to its scores" };
    this.#head(pane, [[letter, cell]], says[paint]);
    const [colour, marks] = [cellColour(cell, rows, paint), cellMarks(cell, rows)];
    pane.paint((token) => colour(token, token + 1) + marks(token));
  }

  #head(pane, cells, says) {
    const names = cells.flatMap(([letter, cell]) => [badge(letter), build("span", { textContent: ` ${cell.label} ` })]);
    pane.heading.replaceChildren(...names, build("small", { textContent: says }));
    const label = `Tokens of the prompt: ${cells.map(([, cell]) => cell.label).join(" and ")}, ${says}`;
    pane.list.setAttribute("aria-label", label);
    pane.map.setAttribute("aria-label", `${label}; a line a layer, from the beginning of the prompt to its end`);
  }

  /** Choose a token, as a click or the keyboard does. */
  choose(token, pane, scroll = false) {
    this.state.token = token;
    for (const one of this.panes) one.choose(token, scroll && (one === pane || !pane));
    this.hovered = null;
    this.#details();
    $("announce").textContent = spoken(this.shown, this.state.layer, this.state.head, token, this.texts);
    this.address.write(this.state);
  }

  #hover(token) {
    if (token === this.hovered) return;
    this.hovered = token;
    this.#details();
  }

  #key(key, pane) {
    const token = this.state.token ?? 0;
    const last = this.n - 1;
    const moves = {
      ArrowLeft: () => Math.max(0, token - 1),
      ArrowRight: () => Math.min(last, token + 1),
      ArrowUp: () => pane.vertical(token, -1),
      ArrowDown: () => pane.vertical(token, 1),
      Home: () => 0,
      End: () => last,
      PageUp: () => Math.max(0, token - 100),
      PageDown: () => Math.min(last, token + 100),
      n: () => pane.nextColoured(token, 1),
      p: () => pane.nextColoured(token, -1),
    };
    const steps = {
      "[": () => this.#stepLayer(-1),
      "]": () => this.#stepLayer(1),
      "{": () => this.#stepHead(-1),
      "}": () => this.#stepHead(1),
    };
    if (moves[key]) this.choose(moves[key](), pane, true);
    else if (steps[key]) steps[key]();
    else return false;
    return true;
  }

  // The maps

  #pickOnMap(event, pane) {
    const box = pane.map.getBoundingClientRect();
    const part = (value, size, count) => Math.min(count - 1, Math.max(0, Math.floor((value / size) * count)));
    const layer = part(event.clientY - box.top, box.height, this.layers);
    this.set({ layer });
    this.choose(part(event.clientX - box.left, box.width, this.n), pane, true);
  }

  /** Remember how wide the maps are: to ask for it while drawing would make the browser lay out the text at once. */
  #resized(entries) {
    for (const { target, contentRect } of entries) {
      this.panes.find((pane) => pane.map === target).width = Math.round(contentRect.width);
    }
    this.#drawMaps();
  }

  #changeScheme() {
    this.palette = palette();
    this.panes.forEach((pane) => (pane.drawn = null));
    this.#drawMaps();
  }

  /** Draw the maps anew unless nothing that they show has changed. */
  #drawMaps() {
    const { view, a, b, head, paint } = this.state;
    this.panes.forEach((pane, i) => {
      if (pane.element.hidden || !pane.width) return;
      const key = [view, a, b, head, paint, pane.width].join(" ");
      if (pane.drawn === key) return;
      pane.drawn = key;
      drawMap(pane.canvas, pane.width, this.#layerColours(i), this.n, this.palette);
    });
  }

  /** For each layer the colours of its tokens in a pane. */
  #layerColours(place) {
    const layers = range(0, this.layers);
    if (this.state.view === "diff") return layers.map((layer) => differenceColour(this.#comparison(layer)));
    const cell = this.shown[place][1];
    return layers.map((layer) => cellColour(cell, cell.rows(layer, this.state.head), this.#paintOf(cell)));
  }

  #frameLayer() {
    for (const { here } of this.panes) {
      here.hidden = this.state.layer < 0;
      here.style.top = `${(100 * this.state.layer) / this.layers}%`;
      here.style.height = `${100 / this.layers}%`;
    }
  }

  // Words and numbers

  #details() {
    const token = this.hovered ?? this.state.token;
    if (token === null) {
      const hint = "Point at a token to see its position, its rank, and what the graph did to it; click to hold it.";
      $("details-body").replaceChildren(build("p", { textContent: hint }));
      return;
    }
    const { layer, head } = this.state;
    const where = [`position ${whole(token)} of ${whole(this.n)}, counted from 0`];
    for (const { name, begin, end } of this.data.prompt.marks) if (token >= begin && token < end) where.push(name);
    const go = (other) => this.choose(other, null, true);
    $("details-body").replaceChildren(
      build("p", { className: "token" }, build("span", { textContent: quoted(this.texts[token]) })),
      build("p", { className: "where", textContent: where.join(", ") }),
      ...this.shown.map(([letter, cell]) =>
        cellDetails(cell, badge(letter), cell.rows(layer, head), token, this.texts, go),
      ),
    );
    this.#linkTokens(token);
  }

  /** Outline the sources and neighbours of a token where a single head is looked at. */
  #linkTokens(token) {
    this.panes.forEach((pane, i) => {
      const cells = this.state.view === "diff" ? this.shown : this.shown.slice(i, i + 1);
      const cell = cells.map(([, one]) => one).find((one) => one.factors);
      const rows = cell ? cell.rows(this.state.layer, this.state.head) : [];
      if (rows.length !== 1) return pane.link([]);
      const { from, to } = linksOf(cell, rows, token);
      return pane.link([...from, ...to].map((link) => link.token));
    });
  }

  #charts() {
    const { view, layer, head } = this.state;
    const onLayer = (chosen) => this.set({ layer: chosen === this.state.layer ? -1 : chosen });
    const shown = this.shown.map(([letter, cell]) => ({
      name: letter.toLowerCase(),
      says: letter,
      values: range(0, this.layers).map((one) => cell.meanSimilarity(cell.rows(one, head))),
    }));
    const all = this.data.full.similarity;
    $("similarity-numbers").replaceChildren(
      description([
        ...this.shown.map(([letter, cell]) => [
          badge(letter),
          build("b", { textContent: decimals(cell.meanSimilarity(cell.rows(layer, head))) }),
          ` ${cell.label}`,
        ]),
        ["", decimals(mean(layer < 0 ? all : [all[layer]])), " all keys of the prompt, all heads"],
      ]),
    );
    drawBars($("similarity-chart"), shown, "Mean cosine of kept keys by layer", layer, onLayer);
    $("overlap").hidden = view === "one";
    const overlaps = view === "one" ? null : this.#overlaps();
    if (overlaps) {
      const now = jaccard(this.a, this.b, this.#comparison(layer));
      $("jaccard").textContent = decimals(now);
      $("jaccard-note").textContent = "Jaccard index, without what both always keep; 1 = the same tokens";
      const series = [{ name: "both", says: "overlap", values: overlaps }];
      drawBars($("overlap-chart"), series, `Overlap of A and B by layer, mean ${decimals(mean(overlaps))}`, layer, onLayer);
    }
    this.#table(shown, overlaps);
  }

  #table(similarities, overlaps) {
    const { view, a, b, head } = this.state;
    const key = [view, a, b, head].join(" ");
    if (this.tabled === key) return;
    this.tabled = key;
    drawTable($("layers"), this.layers, [
      ["Layer", (layer) => String(layer)],
      ...this.shown.map(([letter, cell]) => [`Kept by ${letter}`, (layer) => decimals(cell.kept_per_layer[layer], 0)]),
      ...(overlaps ? [["Overlap", (layer) => decimals(overlaps[layer])]] : []),
      ...similarities.map(({ says, values }) => [`Similarity ${says}`, (layer) => decimals(values[layer])]),
      ["Similarity of all keys", (layer) => decimals(this.data.full.similarity[layer])],
    ]);
  }

  #overlaps() {
    const { a, b, head } = this.state;
    return this.#remember(`overlaps ${a} ${b} ${head}`, () =>
      range(0, this.layers).map((layer) => jaccard(this.a, this.b, this.#comparison(layer))),
    );
  }

  #legend() {
    const { layer, head } = this.state;
    const cells = this.shown.map(([, cell]) => cell);
    const single = Math.max(...cells.map((cell) => cell.rows(layer, head).length)) === 1;
    drawLegend($("legend"), legendGroups(this.state, cells, single, this.data.prompt.marks));
  }

  // The cards

  #facts() {
    const { prompt, title, made_by: madeBy } = this.data;
    $("title").textContent = title;
    const asked = prompt.question ? ` Question: ${prompt.question}` : "";
    $("about").textContent = `${whole(this.n)} tokens, ${this.layers} layers, ${this.data.model.kv_heads} KV heads.${asked}`;
    $("made-by").textContent = JSON.stringify(madeBy, null, 2);
    this.cards = this.cells.map((cell) => card(cell.label, cell.answer, cardRows(cell, this.n, prompt.marks)));
    const full = this.data.full;
    const rows = [...scoreRows(full.scores), ["Similarity", `${decimals(mean(full.similarity))} of all keys`]];
    const reference = card("full cache, for comparison", full.answer, rows);
    const missing = this.cells.some((cell) => cell.keeps_all) ? [] : [reference.element];
    $("cells").replaceChildren(...this.cards.map(({ element }) => element), ...missing);
  }

  #cards() {
    this.cards.forEach(({ element, badges }, i) => {
      const letters = this.shown.filter(([, cell]) => cell === this.cells[i]).map(([letter]) => letter);
      badges.replaceChildren(...letters.map(badge));
      element.classList.toggle("shown", letters.length > 0);
    });
  }
}
