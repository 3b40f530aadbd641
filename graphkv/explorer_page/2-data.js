// The data of the page: packed arrays, and what can be asked of a cell about its tokens.

/** Bytes of an entry of graphkv/packing.py: base64, gzip, and all first bytes of the numbers before all second ones. */
async function unpack(entry) {
  const packed = Uint8Array.from(atob(entry.data), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const Type = { bits: Uint8Array, u2: Uint16Array, f4: Float32Array }[entry.dtype];
  const size = Type.BYTES_PER_ELEMENT;
  const count = planes.length / size;
  const bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < size; plane++) {
    for (let i = 0; i < count; i++) bytes[i * size + plane] = planes[plane * count + i];
  }
  return new Type(bytes.buffer);
}

/** What one cell did with each token; a *row* is one stored head of one layer, counted layer by layer. */
class Cell {
  constructor(facts, arrays, model, n) {
    Object.assign(this, facts);
    this.n = n;
    this.layers = model.layers;
    this.group = facts.heads / model.kv_heads; // stored heads a KV head
    this.perQuery = facts.heads !== model.kv_heads;
    this.queriesPerHead = model.query_heads / facts.heads;
    this.stride = Math.ceil(n / 8);
    for (const name of ["kept", "ranks", "plain_ranks", "factors"]) this[name] = arrays[facts[name]] ?? null;
    this.edges = facts.edges && this.#edges(facts.edges, arrays);
  }

  /** Where the edges of each layer begin in the flat arrays. */
  #edges(facts, arrays) {
    const begins = [];
    let sources = 0;
    let neighbors = 0;
    for (let layer = 0; layer < this.layers; layer++) {
      begins.push({ sources, neighbors });
      const count = this.heads * facts.choices[layer] * facts.k[layer];
      sources += count;
      neighbors += count * (facts.m[layer] ?? 0);
    }
    const flat = { sources: arrays[facts.sources], neighbors: arrays[facts.neighbors] };
    return { ...facts, ...flat, similarity: arrays[facts.similarity], begins };
  }

  /** Rows of a layer (-1: all) and a head: "all", "k<KV head>" or "q<query head>". */
  rows(layer, head) {
    let from = 0;
    let to = this.heads;
    if (head[0] === "k") [from, to] = [Number(head.slice(1)) * this.group, (Number(head.slice(1)) + 1) * this.group];
    if (head[0] === "q") {
      from = Math.floor(Number(head.slice(1)) / this.queriesPerHead);
      to = from + 1;
    }
    const rows = [];
    for (let l = layer < 0 ? 0 : layer; l < (layer < 0 ? this.layers : layer + 1); l++) {
      for (let h = from; h < to; h++) rows.push(l * this.heads + h);
    }
    return rows;
  }

  /** The bits of a row. */
  bits(row) {
    return this.kept.subarray(row * this.stride, (row + 1) * this.stride);
  }

  keeps(row, token) {
    return (this.kept[row * this.stride + (token >> 3)] >> (token & 7)) & 1;
  }

  /** In how many of `rows` each token is kept. */
  keptCounts(rows) {
    const counts = new Uint16Array(this.n);
    for (const row of rows) addBits(counts, this.bits(row));
    return counts;
  }

  /** In how many of `rows` each token is a source. */
  sourceCounts(rows) {
    const counts = new Uint16Array(this.n);
    for (const row of rows) {
      for (const source of new Set(this.sources(row).flatMap((chosen) => [...chosen]))) counts[source]++;
    }
    return counts;
  }

  /** In how many of `rows` each token is a neighbour of some source. */
  neighborCounts(rows) {
    const counts = new Uint16Array(this.n);
    const last = new Int32Array(this.n).fill(-1);
    for (const row of rows) {
      const { m, sources, neighbors, everyOther, nodes } = this.links(row);
      for (let i = 0; i < neighbors.length; i++) {
        const neighbor = neighbors[i];
        if (neighbor === sources[Math.floor(i / m)] || last[neighbor] === row) continue;
        counts[neighbor]++;
        last[neighbor] = row;
      }
      if (everyOther) for (let token = 0; token < nodes; token++) counts[token]++;
    }
    return counts;
  }

  /** Mean over `rows` of what the graph multiplied each token's score by. */
  meanFactors(rows) {
    const means = new Float64Array(this.n);
    for (const row of rows) {
      for (let token = 0, at = row * this.n; token < this.n; token++, at++) means[token] += this.factors[at];
    }
    return means.map((sum) => sum / rows.length);
  }

  /** The sources of a row: one list for each time that they were chosen. */
  sources(row) {
    const layer = Math.floor(row / this.heads);
    const { k, choices, begins, sources } = this.edges;
    const begin = begins[layer].sources + (row % this.heads) * choices[layer] * k[layer];
    const lists = [];
    for (let i = 0; i < choices[layer]; i++) lists.push(sources.subarray(begin + i * k[layer], begin + (i + 1) * k[layer]));
    return lists;
  }

  /**
   * All edges of a row, `m` a source: a source itself stands where it has fewer neighbours. `everyOther`: each source
   * has all other tokens as its neighbours, and they are not listed.
   */
  links(row) {
    const layer = Math.floor(row / this.heads);
    const { k, choices, begins } = this.edges;
    const m = this.edges.m[layer] ?? 0;
    const size = choices[layer] * k[layer] * m;
    const begin = begins[layer].neighbors + (row % this.heads) * size;
    return {
      m,
      everyOther: this.edges.m[layer] === null && k[layer] > 0,
      nodes: this.n - this.window,
      sources: this.sources(row).flatMap((chosen) => [...chosen]),
      neighbors: this.edges.neighbors.subarray(begin, begin + size),
      similarity: this.edges.similarity.subarray(begin, begin + size),
    };
  }

  /** Whether a token is kept whatever its score is: "window", "sink" or nothing. */
  always(token) {
    if (this.keeps_all) return "";
    return token >= this.n - this.window ? "window" : token < this.sinks ? "sink" : "";
  }

  /** Mean similarity of kept keys over the rows that have one, or null. */
  meanSimilarity(rows) {
    return mean(rows.map((row) => this.similarity[Math.floor(row / this.heads)][row % this.heads]));
  }
}

/** Add 1 to `counts` wherever a bit is set. */
function addBits(counts, bits) {
  for (let byte = 0, base = 0; byte < bits.length; byte++, base += 8) {
    for (let rest = bits[byte]; rest; rest &= rest - 1) counts[base + 31 - Math.clz32(rest & -rest)]++;
  }
}

/** Rows of two cells in pairs: where one stores query heads and the other KV heads, the latter's are repeated. */
function pairedRows(a, b, layer, head) {
  const both = [a.rows(layer, head), b.rows(layer, head)];
  const length = Math.max(both[0].length, both[1].length);
  return both.map((rows) => Array.from({ length }, (_, i) => rows[Math.floor((i * rows.length) / length)]));
}

/** Counts over paired rows of what only A, only B, and both keep, for each token. */
function comparison(a, b, layer, head) {
  const [ours, theirs] = pairedRows(a, b, layer, head);
  const counts = { onlyA: new Uint16Array(a.n), onlyB: new Uint16Array(a.n), both: new Uint16Array(a.n), rows: ours.length };
  const mixed = [new Uint8Array(a.stride), new Uint8Array(a.stride), new Uint8Array(a.stride)];
  ours.forEach((row, i) => {
    const [x, y] = [a.bits(row), b.bits(theirs[i])];
    for (let byte = 0; byte < a.stride; byte++) {
      mixed[0][byte] = x[byte] & ~y[byte];
      mixed[1][byte] = y[byte] & ~x[byte];
      mixed[2][byte] = x[byte] & y[byte];
    }
    addBits(counts.onlyA, mixed[0]);
    addBits(counts.onlyB, mixed[1]);
    addBits(counts.both, mixed[2]);
  });
  return counts;
}

/** |A ∩ B| / |A ∪ B| of the kept tokens without the sinks and the window that both have; null if there are none. */
function jaccard(a, b, counts) {
  const [from, to] = [Math.min(a.sinks, b.sinks), a.n - Math.min(a.window, b.window)];
  const shared = sum(counts.both, from, to);
  const union = shared + sum(counts.onlyA, from, to) + sum(counts.onlyB, from, to);
  return union ? shared / union : null;
}
