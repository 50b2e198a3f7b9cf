// What a node draws on: rows of the methods with their strongest entries, and the paths from a node down to the input.

export const GRAPH_MOST = 3000; // edges in one frame
const GRAPH_ROW_KEPT = 128; // strongest entries of a row that may become edges
const GRAPH_ROWS_HELD = 8000;
const GRAPH_PATHS_HELD = 24;
const GRAPH_STAYS = { row: [1], gaps: [], gap: 0, lost: 0 };

const graphFloat = new Float32Array(1);
const graphBits = new Uint32Array(graphFloat.buffer);

/** Keeps the largest of many in one pass: counts sizes in buckets, sixteen per doubling, and raises the threshold. */
export class GraphTop {
  constructor(most) {
    this.most = most;
    this.list = [];
    this.counts = new Uint32Array(4096);
    this.bar = 0; // the lowest bucket that still counts
    this.above = 0; // number of entries in it and above
    this.floor = 0; // smaller entries are not accepted
  }

  /** @param {{size: number}} one */
  add(one) {
    if (one.size < this.floor) return;
    graphFloat[0] = one.size;
    const bucket = graphBits[0] >>> 19;
    if (bucket < this.bar) return;
    this.list.push(one);
    this.counts[bucket]++;
    this.above++;
    if (this.above - this.counts[this.bar] < this.most) return;
    while (this.above - this.counts[this.bar] >= this.most) this.above -= this.counts[this.bar++];
    graphBits[0] = this.bar << 19;
    this.floor = graphFloat[0];
  }

  /** The largest entries, in rising order. */
  rising() {
    const left = this.list.filter((one) => one.size >= this.floor).sort((a, b) => a.size - b.size);
    return left.slice(Math.max(0, left.length - this.most));
  }
}

/** Edges for one frame: half are shared equally by the layers, so that none looks empty; the rest are the strongest. */
export class GraphEdges {
  constructor(layers, most = GRAPH_MOST) {
    this.most = most;
    this.all = new GraphTop(most);
    this.each = Array.from({ length: layers }, () => new GraphTop(Math.max(1, Math.floor(most / (2 * layers)))));
    this.total = 0;
  }

  /** The size below which edges of a layer are not accepted. */
  floor(layer) {
    return Math.min(this.all.floor, this.each[layer].floor);
  }

  /** @param {{size: number, value: number, layer: number, from: number, to: number}} edge */
  add(edge) {
    this.all.add(edge);
    this.each[edge.layer].add(edge);
  }

  /** The chosen edges, the weakest first. */
  rising() {
    const chosen = new Set(this.each.flatMap((one) => one.rising()));
    for (const edge of this.all.rising().reverse()) {
      if (chosen.size >= this.most) break;
      chosen.add(edge);
    }
    return [...chosen].sort((a, b) => a.size - b.size);
  }
}

const graphHeld = new WeakMap();

function graphHeldFor(trace) {
  let held = graphHeld.get(trace);
  if (!held) graphHeld.set(trace, (held = { rows: new Map(), paths: new Map() }));
  return held;
}

function graphKeep(map, most, key, value) {
  if (map.size >= most) map.clear();
  map.set(key, value);
  return value;
}

/**
 * A row of a method, its strongest entries first.
 * @returns {{tokens: Uint32Array, values: Float32Array, count: number} | {missing: string} | null} `count` is how many
 *   entries are not zero; null until the row is unpacked
 */
export function graphRow(trace, method, layer, query, head = null) {
  const { rows } = graphHeldFor(trace);
  const key = `${method}/${layer}/${query}/${method === "raw" ? head : ""}`;
  if (rows.has(key)) return rows.get(key);
  const row = trace.row(method, layer, query, method === "raw" ? head : null);
  if (!row || row.missing) return row;
  const { values: all } = row;
  const nonzero = [];
  for (let token = 0; token < all.length; token++) if (all[token] !== 0) nonzero.push(token);
  let best = nonzero;
  if (nonzero.length > GRAPH_ROW_KEPT) {
    const sizes = Float32Array.from(nonzero, (token) => Math.abs(all[token])).sort();
    const floor = sizes[nonzero.length - GRAPH_ROW_KEPT];
    best = nonzero.filter((token) => Math.abs(all[token]) >= floor);
  }
  best.sort((a, b) => Math.abs(all[b]) - Math.abs(all[a]));
  const tokens = Uint32Array.from(best.slice(0, GRAPH_ROW_KEPT));
  const values = Float32Array.from(tokens, (token) => all[token]);
  return graphKeep(rows, GRAPH_ROWS_HELD, key, { tokens, values, count: nonzero.length });
}

/** Number of cells that a node's paths may run through: the cost of finding them. */
export function graphCost(trace) {
  const group = trace.groups.includes("encoder") ? trace.group("encoder") : null;
  return trace.layers * trace.queries * trace.tokens.length + (group ? group.layers * trace.source * trace.source : 0);
}

/**
 * The paths from a node down to the input. The share of an edge is what reaches its upper end times its weight: for raw
 * as it is, for the others mixed with the residual. Raw is thus rollout with a residual of 0: in an encoder–decoder,
 * cross-attention comes last, and without a residual nothing from self-attention gets past it, unless the two share a
 * row: then what the row has for the target passes through cross-attention.
 *
 * @returns {{reach: Float64Array[], edges: object[], total: number, totals: Float64Array, lost: number} | null} `reach`:
 *   for each column from the input to the node's, what arrives at each token; `edges`: the strongest, in rising order,
 *   as `{ layer, from, to, value, size }` with token numbers; `total`: how many there are; `totals`: what the input
 *   tokens get, through the encoder where there is one; `lost`: the share whose path used weights that the page left
 *   out, at any level. Null until the maps are unpacked.
 */
export function graphPaths(trace, method, layer, query, head = null) {
  const { paths } = graphHeldFor(trace);
  const own = method === "raw" ? head : null; // the others use the mean of the heads
  const key = `${method}/${layer}/${query}/${own}`;
  if (paths.has(key)) return paths.get(key);
  const residual = method === "raw" ? null : trace.about.residual;
  const maps = [];
  // Request all before waiting for any.
  for (let at = 0; at <= layer; at++) maps.push([trace.map("", at, own), trace.source ? trace.map("cross", at, own) : null]);
  const encoder = graphEncoderMaps(trace, own);
  if (maps.some(([self, cross]) => !self || (trace.source && !cross)) || encoder.some((map) => !map)) return null;
  const top = new GraphEdges(layer + 1);
  const reach = Array.from({ length: layer + 2 }, () => new Float64Array(trace.tokens.length));
  reach[layer + 1][trace.source + query] = 1;
  let kept = 1;
  for (let at = layer; at >= 0; at--) kept *= 1 - graphStep(trace, maps[at], residual, at, reach[at + 1], reach[at], top);
  let totals = reach[0];
  if (encoder.length) {
    let below = totals.slice(0, trace.source);
    const beside = graphMass(totals.subarray(trace.source));
    for (const map of encoder.reverse()) {
      const level = graphThrough(trace, map, residual, below, beside);
      below = level.below;
      kept *= 1 - level.lost;
    }
    totals = totals.slice();
    totals.set(below);
  }
  const total = top.total;
  return graphKeep(paths, GRAPH_PATHS_HELD, key, { reach, edges: top.rising(), total, totals, lost: Math.max(1 - kept, 0) });
}

function graphMass(values) {
  let sum = 0;
  for (let i = 0; i < values.length; i++) sum += Math.abs(values[i]);
  return sum;
}

function graphEncoderMaps(trace, head) {
  if (!trace.source || !trace.groups.includes("encoder")) return [];
  const { layers, heads } = trace.group("encoder");
  const own = head !== null && head < heads ? head : null;
  return Array.from({ length: layers }, (_, at) => trace.map("encoder", at, own));
}

/** One layer's edges from what has reached its tokens, added to `below` and offered to `top`; returns the share lost. */
function graphStep(trace, [self, cross], residual, layer, above, below, top) {
  const { source } = trace;
  let gone = 0;
  let floor = top.floor(layer);
  const spread = (from, first, mass, { row, gaps, gap, lost }) => {
    gone += Math.abs(mass) * lost;
    for (let i = 0; i < gaps.length; i++) below[first + gaps[i]] += mass * gap; // no edges: they are unknown
    for (let key = 0; key < row.length; key++) {
      const value = mass * row[key];
      if (value === 0) continue;
      below[first + key] += value;
      top.total++;
      const size = Math.abs(value);
      if (size < floor) continue;
      top.add({ size, value, layer, from, to: first + key });
      floor = top.floor(layer);
    }
  };
  // The encoder's output is the same for every layer: what reached it stays there.
  for (let token = 0; token < source; token++) if (above[token]) spread(token, token, above[token], GRAPH_STAYS);
  for (let query = 0; query < trace.queries; query++) {
    const from = source + query;
    let mass = above[from];
    if (mass === 0) continue;
    const { joint } = trace.about;
    if (cross) {
      const level = graphLevel(trace, cross, residual, query, joint ? graphWhole(trace, self, query).sum : 0);
      spread(from, 0, mass, level);
      // Cross-attention comes after self-attention: its residual, and what of a shared row is the target's, carry on
      // what self-attention brought.
      mass *= level.own;
      if (mass === 0) continue;
    }
    // How much of a shared row is the target's has been taken already.
    const level = graphLevel(trace, self, residual === null && joint ? 0 : residual, query);
    level.row[query] += level.own;
    spread(from, source, mass, level);
  }
  return gone / (graphMass(above) || 1);
}

/** One of the encoder's layers; `beside` is the mass at the target's tokens, which takes no part in it. */
function graphThrough(trace, map, residual, above, beside) {
  const below = new Float64Array(above.length);
  let gone = 0;
  for (let query = 0; query < above.length; query++) {
    if (above[query] === 0) continue;
    const { row, own, gaps, gap, lost } = graphLevel(trace, map, residual, query);
    for (const key of gaps) below[key] += above[query] * gap;
    gone += Math.abs(above[query]) * lost;
    for (let key = 0; key < row.length; key++) below[key] += above[query] * row[key];
    below[query] += above[query] * own;
  }
  return { below, lost: gone / (graphMass(above) + beside || 1) };
}

const graphOpened = new WeakMap();

/** Which columns of a map are not empty, and whether it is causal: where weights may have been left out. */
function graphOpen(field, map) {
  let held = graphOpened.get(field);
  if (!held) graphOpened.set(field, (held = new Map()));
  if (!held.has(map)) {
    const columns = new Uint8Array(field.columns);
    let last = 0; // how far beyond itself a query sees
    for (let query = 0; query < field.rows; query++) {
      const row = field.row(map, query);
      for (let key = 0; key < row.length; key++) {
        if (row[key] === 0) continue;
        columns[key] = 1;
        if (key - query > last) last = key - query;
      }
    }
    held.set(map, { columns, causal: field.rows === field.columns && last === 0 });
  }
  return held.get(map);
}

/** A row with the share that packing left out, and its sum including that. Signed weights left out may cancel. */
function graphWhole(trace, { field, map }, query) {
  const row = field.row(map, query);
  const left = Math.min(field.lost(map, query), 0.9);
  let sum = 0;
  for (let key = 0; key < row.length; key++) sum += row[key];
  return { row, left, sum: trace.about.signed ? sum : sum / (1 - left) };
}

/**
 * A row of a level as in tracing/levels.py: `row` excludes the query's own part (the residual's weight and `rest`), which
 * is `own`. What packing left out would be missing again at each level of a product, so it is spread evenly over the
 * cells that may have held it: `gap` at each of `gaps`. `lost` is its share.
 */
function graphLevel(trace, { field, map }, residual, query, rest = 0) {
  const { signed, unit } = trace.about;
  const { row, left, sum } = graphWhole(trace, { field, map }, query);
  const missed = rest ? (left * sum) / (sum + rest) : left; // of the whole row
  const gaps = [];
  let gap = 0;
  if (left > 0 && !signed) {
    const { columns, causal } = graphOpen(field, map);
    const stop = causal ? query + 1 : row.length;
    for (let key = 0; key < stop; key++) if (row[key] === 0 && columns[key]) gaps.push(key);
    if (gaps.length) gap = (sum * left) / gaps.length;
    else for (let key = 0; key < row.length; key++) row[key] /= 1 - left;
  }
  if (residual === null) return { row, own: rest, gaps, gap, lost: missed };
  let part = 1 - residual;
  if (unit) part /= sum + rest || 1;
  let own = part * rest + residual;
  if (!signed) {
    // Rows sum to one there.
    const whole = part * sum + own || 1;
    part /= whole;
    own /= whole;
  }
  for (let key = 0; key < row.length; key++) row[key] *= part;
  return { row, own, gaps, gap: gap * part, lost: (1 - residual) * missed };
}
