// The attention graph (Abnar & Zuidema 2020, Figure 1): layers as columns, tokens as rows, weights as lines between them.
// A picked node shows only its own paths down to the input.
import { GRAPH_MOST, graphCost, GraphEdges, graphPaths, graphRow } from "./graph_paths.js";
import { drawScale, drawToken, labelWidth, noteLines, peakOf, SCALE_HEIGHT, scaleFor, strongest, wordsNote } from "./parts.js";
import { fitted, textWidth } from "./surface.js";
import { number, percent, shown, tokenPlace, weightWords } from "./words.js";

const GRAPH_PAD = 12;
const GRAPH_ROW = 22; // height of a row; a short text gets more
const GRAPH_TALLEST_ROW = 32;
const GRAPH_SHORT = 440; // height of all rows of a short text
const GRAPH_TOP = SCALE_HEIGHT + 14; // where the column headings begin
const GRAPH_HEADS = 24;
const GRAPH_FOOT = 66; // for the small lines at the end
const GRAPH_PART = 20; // above the source's and the target's tokens
const GRAPH_BAR = 32;
const GRAPH_BARS = GRAPH_BAR + 41; // a bar with its number, and air
const GRAPH_STEP = 34; // the least between columns
const GRAPH_WIDEST = 340; // the most
const GRAPH_LABELS_AGAIN = 64; // a step that leaves room for labels on the right as well
const GRAPH_FREE = 800; // upper nodes whose edges are all considered, on the screen or not
const GRAPH_QUICK = 3e6; // cells that can be walked while the pointer moves

const graphLabels = new WeakMap();

/** Positions: `x(column)`, `y(token)` and the surrounding areas. */
export function graphLayout(trace, width) {
  if (!graphLabels.has(trace)) graphLabels.set(trace, Math.ceil(labelWidth(trace.tokens, { least: 34, most: 116 })));
  const label = graphLabels.get(trace);
  const left = GRAPH_PAD + label + GRAPH_BARS;
  const right = label + 26;
  const least = left + GRAPH_STEP * trace.layers + right;
  const over = left + GRAPH_STEP * trace.layers + GRAPH_PAD > width || Math.abs(width - least) < 0.5;
  const wide = over ? least : width;
  const again = over || (wide - left - right) / trace.layers >= GRAPH_LABELS_AGAIN;
  const step = Math.min((wide - left - (again ? right : GRAPH_PAD + 6)) / trace.layers, GRAPH_WIDEST);
  const start = GRAPH_TOP + GRAPH_HEADS + 4;
  const part = trace.source ? GRAPH_PART : 0;
  const row = Math.min(Math.max(Math.floor(GRAPH_SHORT / trace.tokens.length), GRAPH_ROW), GRAPH_TALLEST_ROW);
  const y = (token) => start + row * (token + 0.5) + part + (token >= trace.source ? part : 0);
  const height = y(trace.tokens.length) - row / 2 + GRAPH_FOOT;
  return { label, left, step, again, over, start, row, part, height, width: wide, x: (column) => left + column * step, y };
}

/** The first token on the screen and the one after the last. */
function graphScreen(trace, layout, top, bottom) {
  const first = Math.floor((top - layout.start - 2 * layout.part) / layout.row) - 1;
  const last = Math.ceil((bottom - layout.start) / layout.row) + 1;
  return [Math.max(0, first), Math.min(trace.tokens.length, last)];
}

const graphPeaks = new WeakMap();

/** A method's largest weight over all layers, for one scale in the whole drawing; with `words`, without special tokens. */
function graphPeak(trace, seen) {
  let held = graphPeaks.get(trace);
  if (!held) graphPeaks.set(trace, (held = new Map()));
  const raw = seen.method === "raw";
  let peak = 0;
  for (let layer = 0; layer < trace.layers; layer++) {
    const key = `${seen.method}/${layer}/${raw ? seen.head : ""}/${Boolean(seen.words)}`;
    if (!held.has(key)) {
      const own = raw ? trace.map("", layer, seen.head) : { field: trace.field(seen.method, layer), map: 0 };
      const cross = raw && trace.source ? trace.map("cross", layer, seen.head) : null;
      if (!own || !own.field || (raw && trace.source && !cross)) continue;
      const first = raw ? trace.source : 0;
      held.set(key, Math.max(graphFieldPeak(trace, seen, own, first), cross ? graphFieldPeak(trace, seen, cross, 0) : 0));
    }
    peak = Math.max(peak, held.get(key));
  }
  return peak;
}

function graphFieldPeak(trace, seen, { field, map }, first) {
  if (!seen.words) return field.peak(map);
  const rows = seen.method === "raw" ? null : trace.rowsOf(seen.method);
  let peak = 0;
  for (let row = 0; row < field.rows; row++) {
    const own = trace.source + (rows ? rows[row] : row) - first;
    for (let column = 0; column < field.columns; column++) {
      if (column === own || trace.special[first + column]) continue;
      const size = Math.abs(field.at(map, row, column));
      if (size > peak) peak = size;
    }
  }
  return peak || field.peak(map);
}

/** What the chosen node draws on, over the input tokens: `{ values, lost }`, `{ missing }`, or null until it is unpacked. */
export function graphTotals(trace, seen) {
  const row = trace.row(seen.method, seen.layer, seen.query, seen.method === "raw" ? seen.head : null);
  if (!seen.picked || !trace.method(seen.method).paths) return row;
  // A picked node's raw row covers one layer; the paths of other methods lead to their own rows.
  if (seen.method !== "raw" && !(row && row.missing)) return row;
  const paths = graphPaths(trace, seen.method, seen.layer, seen.query, seen.head);
  return paths && { values: paths.totals, lost: paths.lost };
}

/** Edges of the whole matrices, from the rows on the screen, or from all rows if there are few. */
function graphMatrices(trace, seen, layout, top, bottom) {
  const [first, last] = graphScreen(trace, layout, top, bottom);
  const all = trace.queries * trace.layers <= GRAPH_FREE;
  const begin = all ? 0 : Math.max(first - trace.source, 0);
  const end = all ? trace.queries : Math.max(last - trace.source, 0);
  const edgeSet = new GraphEdges(trace.layers);
  let missing = null;
  for (let layer = 0; layer < trace.layers; layer++) {
    for (let query = begin; query < end; query++) {
      const row = graphRow(trace, seen.method, layer, query, seen.head);
      if (!row) continue;
      if (row.missing) {
        missing = row.missing;
        continue;
      }
      edgeSet.total += row.count;
      const from = trace.source + query;
      for (let i = 0; i < row.tokens.length; i++) {
        const value = row.values[i];
        const size = Math.abs(value);
        if (size < edgeSet.floor(layer)) break;
        const to = row.tokens[i];
        if ((from < first && to < first) || (from >= last && to >= last)) {
          edgeSet.total--; // no part of it is on the screen
          continue;
        }
        edgeSet.add({ size, value, layer, from, to });
      }
    }
  }
  return { edges: edgeSet.rising(), total: edgeSet.total, missing, few: !all };
}

/** Edges to draw: `{ edges, total, top, missing?, paths?, straight? }`, weakest first. */
function graphEdges(trace, seen, layout, top, bottom) {
  if (!seen.picked) return { ...graphMatrices(trace, seen, layout, top, bottom), top: graphPeak(trace, seen) };
  const from = trace.source + seen.query;
  if (!trace.method(seen.method).paths) {
    const row = trace.row(seen.method, seen.layer, seen.query);
    if (!row || row.missing) return { edges: [], total: 0, top: 0, straight: true, missing: row ? row.missing : null };
    const best = strongest(row.values, GRAPH_MOST).reverse();
    const edges = best.map(({ token, value }) => ({ size: Math.abs(value), value, layer: seen.layer, from, to: token }));
    const total = row.values.reduce((sum, value) => sum + (value !== 0), 0);
    return { edges, total, top: peakOf(trace, row.values, seen, from), straight: true };
  }
  const paths = graphPaths(trace, seen.method, seen.layer, seen.query, seen.head);
  if (!paths) return { edges: [], total: 0, top: 0 };
  let peak = 0;
  for (const { size, from: upper, to } of paths.edges) {
    if (seen.words && (upper === to || trace.special[to])) continue;
    if (size > peak) peak = size;
  }
  if (!peak && paths.edges.length) peak = paths.edges[paths.edges.length - 1].size;
  return { edges: paths.edges, total: paths.total, top: peak, paths };
}

/** Colours from one to another, in 256 steps. */
function graphRamp(from, to) {
  const ends = [from, to].map((colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));
  const between = (part) => ends[0].map((low, k) => Math.round(low + part * (ends[1][k] - low)));
  return Array.from({ length: 256 }, (_, i) => `rgb(${between(i / 255).join(",")})`);
}

/** The scale whose colours are those of edges on the page's background. */
function graphScale(theme, top, seen, signed, paths) {
  const scale = scaleFor(theme, top, seen, signed ? "signs" : "sizes");
  const part = signed ? (value) => Math.abs(2 * scale.part(value) - 1) : scale.part;
  // Paths fan out and soon get weak; there are few, so they can be drawn stronger. So can lines on black.
  const power = seen.log ? 1 : paths ? 0.55 : theme.dark ? 0.8 : 1;
  const strength = (value) => part(value) ** power;
  const stroke = (value) => (value < 0 ? theme.select : theme.edge);
  const [ramp, negative] = [theme.edge, theme.select].map((colour) => graphRamp(theme.paper, colour));
  return { ...scale, strength, stroke, css: (value) => (value < 0 ? negative : ramp)[Math.round(255 * strength(value))] };
}

function graphQuoted(trace, token, most = 18) {
  return `“${shown(trace.tokens[token], most)}”`;
}

function graphHead(trace, seen) {
  if (seen.method !== "raw" || !trace.heads) return "";
  return seen.head === null ? ", mean of heads" : `, head ${seen.head + 1}`;
}

/** What the chosen node's numbers are. A product down to the input is not the node's raw row. */
function graphMeasure(trace, seen) {
  if (seen.method !== "raw") return trace.measure(seen.method);
  const { title, value } = trace.method("raw");
  const maps = trace.mapsTitle && `, ${trace.mapsTitle}`;
  if (!seen.picked) return `${title} ${value}${maps}${graphHead(trace, seen)}`;
  return `product of ${title} ${value}s${maps}, layer ${seen.layer + 1} to the input${graphHead(trace, seen)}`;
}

function graphStrongest(trace, values, count) {
  return strongest(values, count).map((one) => `${shown(trace.tokens[one.token], 20)} ${number(one.value)}`).join(", ");
}

export const graphView = {
  id: "graph",
  title: "Graph",
  controls: ["method", "layer", "head", "query", "words", "log"],
  byWords: true,

  applies(trace) {
    if (trace.recurrent) return "a recurrent decoder passes on what it saw outside attention: there are no layers to draw paths through";
    if (trace.kind === "pixels") return "convolutions and shortcuts pass information on outside attention: there are no layers to draw paths through";
    if (trace.kept) return "this trace has rows of some tokens in place of maps: there are no weights of the others to draw paths through";
    if (trace.methods.length && trace.layers) return true;
    return "this trace has no layers of tokens: overt.trace(model, text) makes one that does";
  },

  measure({ trace, width }) {
    const layout = graphLayout(trace, width);
    return { height: layout.height, width: layout.width };
  },

  draw({ surface, trace, seen, state, theme, width, top, bottom }) {
    const layout = graphLayout(trace, width);
    const edgeSet = graphEdges(trace, seen, layout, top, bottom);
    const totals = graphTotals(trace, seen);
    const signed = edgeSet.edges.some((edge) => edge.value < 0);
    const scene = { surface, trace, seen, state, theme, layout, edgeSet, totals, top, bottom };
    scene.scale = graphScale(theme, edgeSet.top, seen, signed, seen.picked && !edgeSet.straight);
    scene.screen = graphScreen(trace, layout, top, bottom);
    drawGraphRails(scene);
    drawGraphEdges(scene);
    drawGraphBands(scene);
    drawGraphNodes(scene);
    drawGraphLabels(scene);
    drawGraphTop(scene);
    drawGraphHeads(scene);
    drawGraphFoot(scene);
  },

  minimap({ trace, seen, width }) {
    const layout = graphLayout(trace, width);
    const totals = graphTotals(trace, seen);
    const values = totals && totals.values;
    const query = trace.source + seen.query;
    const bins = Math.min(trace.tokens.length, 400);
    const marks = Array.from({ length: bins }, () => ({ at: 0, size: 0, chosen: false }));
    const most = (values && peakOf(trace, values, seen, query)) || 1;
    for (let token = 0; token < trace.tokens.length; token++) {
      const mark = marks[Math.floor((token * bins) / trace.tokens.length)];
      const size = values ? Math.min(Math.abs(values[token]) / most, 1) : 0;
      if (!mark.at || size > mark.size) mark.at = layout.y(token) / layout.height;
      mark.size = Math.max(mark.size, size);
    }
    const chosen = marks[Math.floor((query * bins) / trace.tokens.length)];
    if (chosen) Object.assign(chosen, { chosen: true, size: 1, at: layout.y(query) / layout.height });
    return marks;
  },

  placeOf({ trace, state, width }) {
    const { y, row } = graphLayout(trace, width);
    return y(trace.source + state.query) - row / 2;
  },

  describe({ trace, seen }) {
    if (!seen.picked) return null;
    const totals = graphTotals(trace, seen);
    const query = trace.source + seen.query;
    const node = `${graphQuoted(trace, query, 30)} (${tokenPlace(trace, query)}) at layer ${seen.layer + 1}`;
    if (totals && totals.missing) return `${node}: ${totals.missing}`;
    const begin = `${node} draws on (${graphMeasure(trace, seen)}): `;
    if (!totals) return `${begin}…`;
    const way = seen.method === "raw" ? " on the way, spread evenly" : "";
    const lost = totals.lost > 0 ? ` · left out ${percent(totals.lost)}${way}` : "";
    const token = seen.token ?? null;
    const own = token !== null && token !== query ? ` · ${graphQuoted(trace, token)} ${weightWords(totals.values[token])}` : "";
    return `${begin}${graphStrongest(trace, totals.values, 6) || "nothing"}${lost}${own}`;
  },
};

/** The encoder's output is available to every layer of the decoder: a rail instead of nodes. */
function drawGraphRails({ surface, trace, theme, layout: { x, y }, screen: [first, last] }) {
  for (let i = first; i < Math.min(last, trace.source); i++) {
    surface.line(x(0), y(i), x(trace.layers - 1), y(i), { stroke: theme.line });
  }
}

/** Bands over the chosen row and the one that the pointer is over. */
function drawGraphBands({ surface, trace, seen, theme, layout, screen: [first, last] }) {
  const { x, y, row } = layout;
  const wide = x(trace.layers) + (layout.again ? layout.label + 22 : 8) - 4;
  const query = trace.source + seen.query;
  const fill = { fill: theme.select, opacity: theme.dark ? 0.16 : 0.1, radius: 4 };
  if (query >= first && query < last) surface.rect(4, y(query) - row / 2 + 1, wide, row - 2, fill);
  const token = seen.token ?? -1;
  const line = { stroke: theme.accent, radius: 4, opacity: 0.7 };
  if (token >= first && token < last) surface.rect(4.5, y(token) - row / 2 + 1.5, wide, row - 3, line);
}

function drawGraphEdges({ surface, layout, edgeSet, scale, top, bottom }) {
  const { x, y } = layout;
  for (const { value, layer, from, to } of edgeSet.edges) {
    const [above, below] = [y(from), y(to)];
    if ((above < top && below < top) || (above > bottom && below > bottom)) continue;
    const strength = scale.strength(value);
    if (strength < 0.002) continue; // the colour of the paper
    // As if the weight were its opacity, but without dark spots where many lines overlap.
    const look = { stroke: scale.css(value), line: 0.7 + 1.6 * strength };
    if (edgeSet.straight) surface.line(x(layer + 1), above, x(0), below, look);
    else surface.curve(x(layer + 1), above, x(layer), below, look);
  }
}

function drawGraphNodes(scene) {
  const { surface, trace, seen, theme, layout, edgeSet, scale, screen: [first, last] } = scene;
  const { x, y, row } = layout;
  const near = Math.min(layout.step / 2, 18);
  const plain = { fill: theme.soft, opacity: seen.picked ? 0.3 : 0.75 };
  const ring = { fill: seen.picked ? theme.select : theme.paper, stroke: theme.select, line: 2 };
  for (let i = first; i < last; i++) {
    const query = i - trace.source;
    if (query < 0) surface.hit(x(0), y(i) - row / 2, x(trace.layers - 1) - x(0), row, { hover: { token: i } });
    for (let column = 0; column <= (query < 0 ? 0 : trace.layers); column++) {
      const layer = column - 1;
      const chosen = query === seen.query && layer === seen.layer;
      const got = !edgeSet.paths || layer > seen.layer ? 0 : edgeSet.paths.reach[column][i];
      // Paper around what is marked, so that it stands out from the lines.
      if (chosen || i === seen.token) surface.circle(x(column), y(i), 7.5, { fill: theme.paper });
      if (chosen) surface.circle(x(column), y(i), 5, ring);
      else if (got) {
        const part = Math.min(Math.sqrt(Math.abs(got) / scale.top), 1);
        surface.circle(x(column), y(i), 2 + 2.5 * part, { fill: scale.stroke(got), opacity: 0.25 + 0.75 * part });
      } else surface.circle(x(column), y(i), 2, plain);
      if (i === seen.token && !chosen) surface.circle(x(column), y(i), 5, { stroke: theme.accent, line: 1.5 });
      surface.hit(x(column) - near, y(i) - row / 2, 2 * near, row, new GraphNode(scene, i, layer));
    }
  }
}

/** A node's response to the pointer, computed on demand: there are thousands, and one is pointed at. */
class GraphNode {
  constructor(scene, token, layer) {
    this.scene = scene;
    this.token = token;
    this.layer = layer; // −1 is the input
  }

  get query() {
    return this.token - this.scene.trace.source;
  }

  get hover() {
    const { query, layer, token } = this;
    if (layer < 0) return { token };
    return { query, layer, token, ...(graphCost(this.scene.trace) <= GRAPH_QUICK ? { picked: true } : {}) };
  }

  get select() {
    const { query, layer, scene: { state } } = this;
    if (layer < 0) return query < 0 ? undefined : { query, token: null };
    if (state.picked && state.query === query && state.layer === layer) return { picked: false };
    return { query, layer, token: null, picked: true };
  }

  get tip() {
    const { token, layer, scene: { trace, seen, edgeSet } } = this;
    const name = shown(trace.tokens[token], 120);
    const place = tokenPlace(trace, token);
    if (layer < 0) return `${name}\n${place}, input`;
    const lines = [name, `${place}, layer ${layer + 1}`];
    const row = graphRow(trace, seen.method, layer, this.query, seen.head);
    if (row && row.missing) lines.push(row.missing);
    else if (row) {
      const best = Array.from(row.tokens.subarray(0, 3), (one, i) => `${shown(trace.tokens[one], 20)} ${number(row.values[i])}`);
      lines.push(`${graphMeasure(trace, { ...seen, picked: false })}: ${best.join(", ") || "nothing"}`);
    }
    const own = { ...seen, picked: true, layer, query: this.query };
    if (seen.method === "raw" && layer > 0 && graphCost(trace) <= GRAPH_QUICK) {
      const totals = graphTotals(trace, own);
      const best = totals && totals.values && (graphStrongest(trace, totals.values, 3) || "nothing");
      if (best) lines.push(`${graphMeasure(trace, own)}: ${best}`);
    }
    if (edgeSet.paths && layer < seen.layer) {
      const got = weightWords(edgeSet.paths.reach[layer + 1][token]);
      lines.push(`passing through here from ${graphQuoted(trace, trace.source + seen.query)}, layer ${seen.layer + 1}: ${got}`);
    }
    return lines.join("\n");
  }
}

/** Tokens on the left with bars of what the chosen node draws on, and again on the right where there is room. */
function drawGraphLabels({ surface, trace, seen, theme, layout, totals, screen: [first, last] }) {
  const { label, x, y, row } = layout;
  const query = trace.source + seen.query;
  const values = totals && totals.values;
  const most = values ? peakOf(trace, values, seen, query) || 1 : 1;
  const edge = GRAPH_PAD + label;
  if (trace.source) {
    for (const [title, at] of [["source", 0], ["target", trace.source]]) {
      surface.text(title, edge, y(at) - row / 2 - 8, { size: 10, fill: theme.soft, align: "right" });
    }
  }
  for (let i = first; i < last; i++) {
    const look = { width: label, strong: i === query, faint: Boolean(trace.special[i]) };
    drawToken(surface, theme, trace.tokens[i], edge, y(i), { ...look, align: "right" });
    if (layout.again) drawToken(surface, theme, trace.tokens[i], x(trace.layers) + 14, y(i), look);
    const value = values ? values[i] : 0;
    if (value) {
      const part = Math.min(Math.abs(value) / most, 1);
      const colour = value < 0 ? theme.spreads[3] : theme.sizes[3];
      surface.rect(edge + 7, y(i) - 4, Math.max(GRAPH_BAR * part, 0.5), 8, { fill: `rgb(${colour.join(",")})`, opacity: 0.85 });
      // Numbers where a bar is visible: the others are in the tips.
      if (part >= 0.05) surface.text(graphShort(value), edge + 10 + GRAPH_BAR * part, y(i), { size: 9, fill: theme.soft });
    }
    const target = { hover: { token: i }, get tip() { return graphLabelTip(trace, seen, i, values); } };
    if (i >= trace.source) target.select = { query: i - trace.source, token: null };
    surface.hit(4, y(i) - row / 2, edge + GRAPH_BARS - GRAPH_PAD - 12, row, target);
    if (layout.again) surface.hit(x(trace.layers) + 12, y(i) - row / 2, label + 10, row, target);
  }
}

function graphLabelTip(trace, seen, token, values) {
  const name = `${shown(trace.tokens[token], 120)}\n${tokenPlace(trace, token)}`;
  if (!values) return name;
  const node = `${graphQuoted(trace, trace.source + seen.query)}, layer ${seen.layer + 1}`;
  return `${name}\ndrawn on by ${node}\n${graphMeasure(trace, seen)}: ${weightWords(values[token])}`;
}

function graphShort(value) {
  const size = Math.abs(value);
  return (value < 0 ? "−" : "") + (size >= 0.01 ? size.toFixed(2) : size.toFixed(3));
}

/** The scale, and a description of what is drawn. */
function drawGraphTop({ surface, trace, seen, theme, layout, edgeSet, scale, top }) {
  if (top > GRAPH_TOP) return;
  const node = `${graphQuoted(trace, trace.source + seen.query, 14)}, layer ${seen.layer + 1}`;
  const title = fitted(graphTitle(trace, seen, node), layout.width - 2 * GRAPH_PAD, 11);
  drawScale(surface, theme, scale, GRAPH_PAD, 6, title, 170);
  const from = GRAPH_PAD + Math.max(170, textWidth(title, 11)) + 36;
  const room = Math.min(layout.width - from - GRAPH_PAD, 600);
  if (room < 170 || layout.over) return; // a drawing wider than the pane begins with its scale alone
  const { title: name, paths } = trace.method(seen.method);
  const lines = `Lines between two columns show ${name} at the layer of the right one.`;
  const by = seen.method === "raw" ? "weights multiplied along the way" : `by ${name}`;
  let text = `${lines} Point at a node, or click it, for its ${paths ? "paths" : "lines"} to the input.`;
  if (edgeSet.straight) text = `The ${name} of ${node}, to each input token. Esc releases it.`;
  else if (seen.picked) text = `The paths of ${node}, down to the input, ${by}. Esc releases it.`;
  const look = { size: 11, fill: theme.soft };
  noteLines(text, room, 11).slice(0, 3).forEach((line, i) => surface.text(line, from, 12 + 14 * i, look));
}

function graphTitle(trace, seen, node) {
  const { title, value, paths } = trace.method(seen.method);
  if (seen.method === "raw") return seen.picked ? graphMeasure(trace, seen) : `${trace.named("raw")}${graphHead(trace, seen)}`;
  if (!seen.picked) return paths ? trace.named(seen.method) : graphMeasure(trace, seen);
  const over = trace.mapsTitle && `, over ${trace.mapsTitle}`;
  return paths ? `${value} of ${node}${over}` : `${title} of ${node}, ${value}${over}`;
}

/** The column headings, which stay while the rows scroll. */
function drawGraphHeads({ surface, trace, seen, theme, layout, top }) {
  const y = Math.max(top, GRAPH_TOP);
  const { x } = layout;
  surface.rect(0, y, layout.width, GRAPH_HEADS, { fill: theme.paper });
  surface.line(0, y + GRAPH_HEADS - 0.5, layout.width, y + GRAPH_HEADS - 0.5, { stroke: theme.line });
  surface.hit(0, y, layout.width, GRAPH_HEADS, {}); // rows below do not respond
  surface.text("input", x(0), y + 11, { size: 11, fill: theme.soft, align: "center" });
  for (let layer = 0; layer < trace.layers; layer++) {
    const chosen = layer === seen.layer;
    const at = x(layer + 1);
    if (chosen) surface.rect(at - 12, y + GRAPH_HEADS - 3, 24, 3, { fill: theme.select });
    const look = { size: 11, fill: chosen ? theme.accent : theme.soft, align: "center", weight: chosen ? 700 : 400 };
    surface.text(String(layer + 1), at, y + 11, look);
    const half = Math.min(layout.step / 2, 24);
    surface.hit(at - half, y, 2 * half, GRAPH_HEADS, { hover: { layer }, select: { layer }, tip: `layer ${layer + 1}` });
  }
}

/** Notes at the bottom of the screen: what is not drawn, or not to scale, and why. */
function drawGraphFoot({ surface, trace, seen, theme, layout, edgeSet, bottom }) {
  const notes = [edgeSet.missing, wordsNote(trace, seen)].filter(Boolean);
  const { title, value } = trace.method(seen.method);
  if (edgeSet.straight && !edgeSet.missing) notes.push(`${title} is not a sum over paths: its ${value}s are drawn straight to the input`);
  const through = edgeSet.paths && trace.source && trace.groups.includes("encoder");
  if (edgeSet.paths && trace.source && seen.method === "raw" && !trace.about.joint) {
    notes.push("cross-attention comes last, and without a residual it passes nothing on from the target; rollout, which has one, does");
  }
  if (through) notes.push("the bars of the source tokens show what reaches them through the encoder");
  if (edgeSet.total > edgeSet.edges.length) {
    const where = edgeSet.few ? " from the tokens on the screen" : "";
    notes.push(`${graphCount(edgeSet.edges.length)} of ${graphCount(edgeSet.total)} edges${where}, strongest first`);
  }
  if (!notes.length) return;
  const lines = notes.flatMap((note) => noteLines(note, (layout.over ? 350 : layout.width) - 2 * GRAPH_PAD, 11));
  const few = lines.slice(0, 4);
  const y = bottom - 14 * few.length - 6;
  surface.rect(0, y - 2, layout.width, bottom - y + 2, { fill: theme.paper });
  few.forEach((line, i) => surface.text(line, GRAPH_PAD, y + 7 + 14 * i, { size: 11, fill: theme.soft }));
}

function graphCount(value) {
  return String(value).replace(/\B(?=(\d{3})+$)/g, " ");
}
