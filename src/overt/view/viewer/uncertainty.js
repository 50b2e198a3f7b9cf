// How far posterior samples of the weights (Fan et al. 2020) agree: the predictions of each sample, what the chosen
// token's rollout draws on, and single weights, all with their spread.
import { drawMatrix, matrixPeak, matrixScale, matrixSize } from "./matrix.js";
import { drawNote, drawScale, drawToken, labelWidth, noteLines, peakOf, SCALE_HEIGHT, scaleFor, strongest } from "./parts.js";
import { fitted, textWidth } from "./surface.js";
import { number, percent, shown } from "./words.js";

const SURE_EDGE = 14;
const SURE_TITLE = 26;
const SURE_AXIS = 20;
const SURE_CLASS = 34; // height of a class
const SURE_ROW = 20; // height of a token
const SURE_NUMBERS = 100; // width of a row's numbers
const SURE_WIDE = 960; // minimum width for maps next to the tokens
const SURE_PAIR = 520; // minimum width for two maps side by side
const SURE_MAP = 440; // maximum height of a map
const SURE_NARROW = 460; // up to this width, notes are below titles
const SURE_GAP = 28;
const SURE_HELD = 0.9; // share of the samples that an interval holds
const SURE_BINS = 240; // marks of the minimap

const sureLabels = new WeakMap();
const sureClasses = new WeakMap();

/** The ends of the central interval that holds a share of some values. */
export function sureInterval(values, held = SURE_HELD) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return [NaN, NaN];
  return [(1 - held) / 2, (1 + held) / 2].map((share) => {
    const place = share * (sorted.length - 1);
    const low = Math.floor(place);
    const high = Math.min(low + 1, sorted.length - 1);
    return sorted[low] + (place - low) * (sorted[high] - sorted[low]);
  });
}

/** Mean and spread in words; rows are packed, so a 0 may be a small value that was left out. */
export function sureWords(mean, spread) {
  if (!mean) return spread ? `left out or 0, ± ${number(spread)}` : "left out or 0";
  return spread ? `${number(mean)} ± ${number(spread)}` : `${number(mean)}, its spread left out or 0`;
}

/** What the samples predict: `{ low, high, rows: [{ label, mean, values, interval }] }`; null if unknown. */
function sureOutputs(trace) {
  if (sureClasses.has(trace)) return sureClasses.get(trace);
  const { outputs } = trace.about;
  let classes = null;
  if (outputs && outputs.draws && outputs.draws.length && outputs.labels.length) {
    const rows = outputs.labels.map((label, i) => {
      const values = outputs.draws.map((draw) => draw[i]);
      return { label, mean: outputs.mean[i], values, interval: sureInterval(values) };
    });
    let low = 0;
    let high = 1;
    for (const value of rows.flatMap((one) => one.values)) {
      if (Number.isFinite(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
    }
    classes = { low, high, rows };
  }
  sureClasses.set(trace, classes);
  return classes;
}

function sureNoOutputs(trace) {
  return trace.about.outputs
    ? "No predictions of single samples: this trace kept only their maps."
    : "No predictions: the model returned no logits; overt.trace(…, output=…) extracts them.";
}

/** Height of a title and its note, which is below it in a narrow pane. */
function sureHead(width) {
  return SURE_TITLE + (width < SURE_NARROW ? 14 : 0);
}

function sureDrawHead(surface, theme, title, note, x, y, width) {
  const text = fitted(title, width, 13, 600);
  surface.text(text, x, y + 8, { size: 13, fill: theme.ink, weight: 600 });
  const beside = width < SURE_NARROW ? 0 : textWidth(text, 13, 600) + 10;
  const room = width - beside;
  if (room > 60) surface.text(fitted(note, room, 11), x + beside, y + (beside ? 8.5 : 25), { size: 11, fill: theme.soft });
}

/** Which row of the rollouts a query has: its place, or −1. */
function surePlace(trace, query) {
  const rows = trace.rowsOf("rollout average");
  return rows ? rows.indexOf(query) : query;
}

/** The query whose rollouts are shown: the one under the pointer, the chosen one, or one that the page has. */
function sureQuery(trace, seen, state) {
  const query_ = [seen.query, state.query].find((query) => surePlace(trace, query) >= 0);
  return query_ === undefined ? trace.rowsOf("rollout average")[0] : query_;
}

/** A note before the rollouts, or in their place. */
function sureMissing(trace, query) {
  if (!trace.has("rollout average")) return trace.why("rollout");
  if (surePlace(trace, query) >= 0) return null;
  const rows = trace.rowsOf("rollout average");
  const names = rows.slice(0, 3).map((one) => `“${shown(trace.tokens[trace.source + one], 20)}” (token ${one})`).join(", ");
  const name = `“${shown(trace.tokens[trace.source + query], 20)}” (token ${query})`;
  return `None for ${name}: the page has the samples’ rollouts only for ${names}${rows.length > 3 ? ", …" : ""}.`;
}

function sureLabelWidth(trace, most) {
  const cached = sureLabels.get(trace);
  if (cached && cached.most === most) return cached.wide;
  const wide = Math.ceil(labelWidth(trace.tokens, { most }));
  sureLabels.set(trace, { most, wide });
  return wide;
}

/** Sizes of the two maps within a width, and the place of the second. */
function sureMaps(trace, room) {
  const { rows, columns } = trace.group("");
  const about = { trace, rows, columns, lost: false, height: SURE_MAP };
  if (room < SURE_PAIR) {
    const mean = { ...about, width: room };
    const size = matrixSize(mean);
    const tall = SCALE_HEIGHT + 10 + size.height;
    return { mean, spread: mean, places: [[0, 0], [0, tall + SURE_GAP]], height: SURE_TITLE + 2 * tall + SURE_GAP };
  }
  // The labels of rows are shown once, to the left of both.
  const { left } = matrixSize({ ...about, width: room / 2 });
  const mean = { ...about, width: (room - SURE_GAP + left) / 2 };
  const size = matrixSize(mean);
  const spread = { ...about, width: size.mapWidth, cell: size.cell, rowLabels: false };
  return { mean, spread, places: [[0, 0], [size.width + SURE_GAP, 0]], height: SURE_TITLE + SCALE_HEIGHT + 10 + size.height };
}

function sureLayout(trace, state, width) {
  const room = Math.max(width - 2 * SURE_EDGE, 200);
  const classes = sureOutputs(trace);
  const first = classes
    ? sureHead(room) + SURE_AXIS + classes.rows.length * SURE_CLASS
    : 15 * noteLines(sureNoOutputs(trace), room, 11).length;
  const start = 10 + first + SURE_GAP;
  const wide = width >= SURE_WIDE;
  const span = wide ? Math.round(0.4 * room) : room;
  const maps = sureMaps(trace, wide ? room - span - SURE_GAP : room);
  const missing = sureMissing(trace, state.query);
  const tokens = { x: SURE_EDGE, y: wide ? start : start + maps.height + SURE_GAP, width: span, missing };
  tokens.start = tokens.y + sureHead(span) + SURE_AXIS + (missing ? 15 * noteLines(missing, span, 11).length + 6 : 0);
  tokens.height = tokens.start - tokens.y + (trace.has("rollout average") ? trace.tokens.length * SURE_ROW : 0);
  maps.x = wide ? SURE_EDGE + span + SURE_GAP : SURE_EDGE;
  maps.y = start;
  const height = Math.max(tokens.y + tokens.height, maps.y + maps.height) + 18;
  return { room, classes, wide, maps, tokens, height };
}

/** Rows of the mean and of the spread of what a query's rollout draws on; null until they are unpacked. */
function sureRows(trace, layer, query) {
  const place = surePlace(trace, query);
  const mean = trace.field("rollout average", layer);
  const spread = trace.field("rollout spread", layer);
  if (!mean || !spread || place < 0) return null;
  return { means: mean.row(0, place), spreads: spread.row(0, place), lost: mean.lost(0, place) };
}

function sureLayer(trace, seen) {
  return Math.min(seen.layer, trace.layers - 1);
}

export const uncertaintyView = {
  id: "uncertainty",
  title: "Uncertainty",
  controls: ["query", "layer", "head", "words", "log"],

  applies(trace) {
    if (trace.about.samples && trace.has("average") && trace.has("spread")) return true;
    return "no posterior samples: trace a Bayesian model with overt.trace(…, samples=20)";
  },

  measure({ trace, state, width }) {
    return { height: sureLayout(trace, state, width).height };
  },

  draw(scene) {
    const { surface, trace, state, theme, width, top, bottom } = scene;
    const layout = sureLayout(trace, state, width);
    if (layout.classes) sureDrawClasses(scene, layout.classes, Math.min(layout.room, 980));
    else drawNote(surface, theme, sureNoOutputs(trace), SURE_EDGE, 10, layout.room);
    sureDrawTokens(scene, layout.tokens);
    const { maps } = layout;
    // Next to a long list of tokens, the maps stay on the screen if they fit.
    const fits = layout.wide && maps.height + 20 < bottom - top;
    const slack = Math.max(layout.height - 18 - maps.height - maps.y, 0);
    sureDrawMaps(scene, maps, maps.y + (fits ? Math.min(Math.max(top + 10 - maps.y, 0), slack) : 0));
  },

  minimap({ trace, seen, state, width }) {
    const { tokens, height } = sureLayout(trace, state, width);
    if (!trace.has("rollout average")) return [];
    const query = sureQuery(trace, seen, state);
    const rows = sureRows(trace, sureLayer(trace, seen), query);
    if (!rows) return [];
    const bins = Math.min(SURE_BINS, rows.means.length);
    const sums = new Float64Array(bins);
    rows.means.forEach((value, i) => (sums[Math.floor((i * bins) / rows.means.length)] += Math.abs(value)));
    const most = Math.max(...sums, 1e-12);
    const chosen = Math.floor(((trace.source + query) * bins) / rows.means.length);
    const place = (i) => (tokens.start + ((i + 0.5) / bins) * rows.means.length * SURE_ROW) / height;
    return Array.from(sums, (sum, i) => ({ at: place(i), size: sum / most, chosen: i === chosen }));
  },

  describe({ trace, seen }) {
    const layer = sureLayer(trace, seen);
    const classes = sureOutputs(trace);
    const parts = [`${trace.about.samples} posterior samples`];
    if (classes) {
      const { label, mean, interval } = classes.rows[0];
      parts.push(`${shown(label, 30)} ${number(mean)} (${percent(SURE_HELD)} of samples ${number(interval[0])} to ${number(interval[1])})`);
    }
    const name = `“${shown(trace.tokens[trace.source + seen.query], 30)}” (token ${seen.query}), ${trace.named("rollout")} to layer ${layer + 1}, mean of the samples`;
    const rows = sureMissing(trace, seen.query) ? null : sureRows(trace, layer, seen.query);
    const words = ({ token, value }) => `${shown(trace.tokens[token], 20)} ${sureWords(value, rows.spreads[token])}`;
    if (rows) parts.push(`${name}: ${strongest(rows.means, 4).map(words).join(", ")}`);
    return parts.join(" · ");
  },
};

function sureTick(value) {
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

/** A line per class, a dot per sample. */
function sureDrawClasses({ surface, trace, seen, theme, top, bottom }, { low, high, rows }, width) {
  const y = 10;
  const chances = low === 0 && high === 1;
  const note = `${trace.about.samples} samples, their mean, the interval of ${percent(SURE_HELD)} of them`;
  sureDrawHead(surface, theme, chances ? "Predicted probabilities" : "Outputs", note, SURE_EDGE, y, width);
  const wide = width >= 560; // room for the interval after the mean
  const written = ({ mean, interval: [from, to] }) => (wide ? `${number(mean)}  (${number(from)} to ${number(to)})` : number(mean));
  const numbers = Math.max(46, ...rows.map((one) => Math.ceil(textWidth(written(one), 11)))) + 4;
  const most = Math.round(Math.min(200, 0.26 * width));
  const label = Math.ceil(Math.min(Math.max(...rows.map((one) => textWidth(shown(one.label, 40), 13)), 40), most)) + 13;
  const left = SURE_EDGE + label;
  const span = Math.max(width - label - numbers - 12, 40);
  const at = (value) => left + (span * (value - low)) / (high - low);
  const start = y + sureHead(width) + SURE_AXIS;
  const end = start + rows.length * SURE_CLASS;
  if (end < top || y > bottom) return;
  for (let i = 0; i <= 4; i++) {
    const value = low + ((high - low) * i) / 4;
    surface.line(at(value), start - 4, at(value), end, { stroke: theme.line });
    surface.text(sureTick(value), at(value), start - 12, { size: 10, fill: theme.soft, align: "center" });
  }
  const dot = `rgb(${theme.sizes[3].join(",")})`;
  rows.forEach((row, i) => {
    const { label: name, mean, values, interval } = row;
    const middle = start + (i + 0.5) * SURE_CLASS;
    const heights = (sample) => middle + 16 * (((sample * 0.6180339887) % 1) - 0.5); // spread evenly, always the same
    drawToken(surface, theme, name, left - 12, middle, { width: label - 12, align: "right" });
    const [from, to] = interval;
    if (Number.isFinite(from)) {
      const band = { fill: `rgb(${theme.spreads[2].join(",")})`, opacity: theme.dark ? 0.35 : 0.3, radius: 3 };
      surface.rect(at(from), middle - 11, Math.max(at(to) - at(from), 1), 22, band);
    }
    const faint = Math.min(0.75, Math.max(0.15, 30 / values.length));
    values.forEach((value, sample) => {
      if (Number.isFinite(value)) surface.circle(at(value), heights(sample), 2.75, { fill: dot, opacity: faint });
    });
    if (Number.isFinite(mean)) surface.line(at(mean), middle - 13, at(mean), middle + 13, { stroke: theme.accent, line: 2.5 });
    const pointed = values[seen.sample];
    if (Number.isFinite(pointed)) surface.circle(at(pointed), heights(seen.sample), 5, { fill: dot, stroke: theme.accent, line: 2 });
    surface.text(written(row), left + span + 12, middle, { size: 11, fill: theme.soft });
    const whole = `${shown(name, 60)}\nmean ${number(mean)}, ${percent(SURE_HELD)} of samples ${number(from)} to ${number(to)}`;
    surface.hit(SURE_EDGE, middle - SURE_CLASS / 2, width, SURE_CLASS, (px, py) => {
      let nearest = null;
      let least = 49;
      values.forEach((value, sample) => {
        const far = (at(value) - px) ** 2 + (heights(sample) - py) ** 2;
        if (Number.isFinite(value) && far < least) [nearest, least] = [sample, far];
      });
      if (nearest === null) return { tip: whole };
      return { hover: { sample: nearest }, tip: `sample ${nearest}: ${number(values[nearest])}\n${whole}` };
    });
  });
}

/** A line per token: a bar for the mean, a whisker of one spread to both sides. */
function sureDrawTokens({ surface, trace, seen, state, theme, top, bottom }, place) {
  const { x, y, start, width, missing } = place;
  if (y > bottom || y + place.height < top) return;
  const here = trace.has("rollout average");
  const query = here ? sureQuery(trace, seen, state) : state.query;
  const layer = sureLayer(trace, seen);
  const title = `What “${shown(trace.tokens[trace.source + query], 24)}” draws on`;
  sureDrawHead(surface, theme, title, `${trace.named("rollout")} to layer ${layer + 1}, samples’ mean ± one spread`, x, y, width);
  if (missing) drawNote(surface, theme, missing, x, y + sureHead(width), width);
  if (!here) return;
  const rows = sureRows(trace, layer, query);
  const label = sureLabelWidth(trace, Math.round(Math.min(150, 0.3 * width))) + 10;
  const left = x + label;
  const span = Math.max(width - label - SURE_NUMBERS - 10, 40);
  const from = Math.max(0, Math.floor((top - start) / SURE_ROW));
  const to = Math.min(trace.tokens.length, Math.ceil((bottom - start) / SURE_ROW));
  const sums = rows && rows.means.map((mean, i) => Math.abs(mean) + rows.spreads[i]);
  const scale = scaleFor(theme, rows ? peakOf(trace, sums, seen, trace.source + query) : 1, seen);
  const at = (value) => left + span * scale.part(Math.max(value, 0));
  if (rows) {
    // The axis stays at the top edge while its rows scroll.
    const axis = Math.min(Math.max(start, top + SURE_AXIS), start + trace.tokens.length * SURE_ROW);
    for (const part of [0, 0.5, 1]) {
      const edge = left + span * part;
      surface.line(edge, axis - 4, edge, start + to * SURE_ROW, { stroke: theme.line });
    }
    for (let i = from; i < to; i++) {
      const middle = start + (i + 0.5) * SURE_ROW;
      const line = { i, middle, x, left, span, width, label, at, scale, query, layer, ...rows };
      if (middle >= axis) sureDrawToken(surface, trace, seen, theme, line);
    }
    if (axis > start) surface.rect(x, axis - SURE_AXIS, width, SURE_AXIS - 4, { fill: theme.paper });
    for (const part of [0, 0.5, 1]) {
      const least = scale.log && part === 0;
      const text = least ? `≤ ${number(scale.top / 1000)}` : number(scale.value(part));
      surface.text(text, left + span * part, axis - 11, { size: 10, fill: theme.soft, align: "center" });
    }
    return;
  }
  for (let i = from; i < to; i++) {
    const look = { width: label - 14, align: "right", strong: i === trace.source + query, faint: Boolean(trace.special[i]) };
    drawToken(surface, theme, trace.tokens[i], left - 10, start + (i + 0.5) * SURE_ROW, look);
  }
}

function sureDrawToken(surface, trace, seen, theme, line) {
  const { i, middle, x, left, span, width, label, at, scale, query, layer, means, spreads, lost } = line;
  const mean = means[i];
  const spread = spreads[i];
  const over = middle - SURE_ROW / 2;
  const chosen = i === trace.source + query;
  if (i === seen.token) surface.rect(x, over, width, SURE_ROW, { fill: theme.raised });
  const mark = { fill: theme.select, radius: 4, opacity: theme.dark ? 0.3 : 0.16 };
  if (chosen) surface.rect(left - label, over + 1, label - 4, SURE_ROW - 2, mark);
  const look = { width: label - 14, align: "right", strong: chosen, faint: Boolean(trace.special[i]) };
  drawToken(surface, theme, trace.tokens[i], left - 10, middle, look);
  if (mean > 0) surface.rect(left, middle - 5, Math.max(at(mean) - left, 0.5), 10, { fill: `rgb(${theme.sizes[2].join(",")})` });
  if (spread > 0) {
    const whisker = { stroke: `rgb(${theme.spreads[4].join(",")})`, line: 1.5 };
    const [low, high] = [at(mean - spread), at(mean + spread)];
    surface.line(low, middle, high, middle, whisker);
    for (const end of [low, high]) surface.line(end, middle - 3.5, end, middle + 3.5, whisker);
  }
  // The scale ends before the bar.
  if (mean > scale.top) surface.text("▸", left + span, middle, { size: 11, fill: theme.accent });
  const numbers = spread ? `${number(mean)} ± ${number(spread)}` : number(mean);
  surface.text(numbers, left + span + 12, middle, { size: 11, fill: theme.soft });
  const part = mean ? `\nspread / mean ${number(spread / mean)}` : "";
  const gone = lost > 0 ? `\nthis row left out ${percent(lost)}` : "";
  const tip = `${shown(trace.tokens[i], 60)}: ${sureWords(mean, spread)}${part}\ntoken ${i}, ${trace.named("rollout")} to layer ${layer + 1}${gone}`;
  surface.hit(x, over, width, SURE_ROW, { hover: { token: i }, select: { token: i }, tip });
  const select = { query: i - trace.source, token: null };
  if (i >= trace.source) surface.hit(x, over, label, SURE_ROW, { hover: { token: i }, select, tip });
}

/** Mean and spread of every weight of the chosen layer and head over the samples; the trace's own maps are not their mean. */
function sureDrawMaps({ surface, trace, seen, state, theme, top, bottom }, maps, y) {
  if (y > bottom || y + maps.height < top) return;
  const layer = sureLayer(trace, seen);
  const { rows, columns } = trace.group("");
  const single = seen.head !== null && trace.has("average heads") && trace.has("spread heads");
  const [mean, spread] = ["average", "spread"].map((name) => {
    const field = trace.field(single ? `${name} heads` : name, layer);
    return field && { field, map: single ? Math.min(seen.head, field.maps - 1) : 0 };
  });
  const what = `layer ${layer + 1}, ${single ? `head ${seen.head + 1}` : "mean of heads"}`;
  const name = trace.recurrent ? "Weights of the source" : trace.source ? "Weights of the decoder’s self-attention" : "Weights";
  const kind = trace.mapsTitle && ` (${trace.mapsTitle})`;
  surface.text(`${name}${kind}: ${what}`, maps.x, y + 8, { size: 13, fill: theme.ink, weight: 600 });
  const peak = (one) => (one ? matrixPeak(trace, one.field, one.map, seen, rows, columns) : 1);
  const { samples } = trace.about;
  const sides = [
    { ...maps.mean, found: mean, title: `mean of ${samples} samples`, scale: matrixScale(theme, peak(mean), [mean && mean.field], seen) },
    { ...maps.spread, found: spread, title: `spread over ${samples} samples`, scale: scaleFor(theme, peak(spread), seen, "spreads") },
  ];
  sides.forEach(({ found, title, scale, ...about }, i) => {
    const left = maps.x + maps.places[i][0];
    const above = y + SURE_TITLE + maps.places[i][1];
    const size = matrixSize(about);
    drawScale(surface, theme, scale, left + size.mapX, above, title, Math.min(160, Math.max(size.mapWidth, 90)));
    const place = { x: left, y: above + SCALE_HEIGHT + 10 };
    const map = found ? { field: found.field, map: found.map } : {};
    drawMatrix(surface, { ...about, ...place, ...map, theme, scale, seen, state, top, bottom });
    if (!mean || !spread) return;
    const under = place.y + size.mapY;
    const from = Math.max(under, Math.min(top + size.head, under + size.mapHeight)); // the labels may have moved down
    surface.hit(left + size.mapX, from, size.mapWidth, under + size.mapHeight - from, (px, py) => {
      const row = Math.min(Math.max(Math.floor((py - under) / size.cell), 0), rows[1] - rows[0] - 1);
      const column = Math.min(Math.max(Math.floor((px - left - size.mapX) / size.cell), 0), columns[1] - columns[0] - 1);
      const at = { query: row, token: columns[0] + column };
      const [value, wide] = [mean.field.at(mean.map, row, column), spread.field.at(spread.map, row, column)];
      const name = `${shown(trace.tokens[rows[0] + row], 60)} → ${shown(trace.tokens[at.token], 60)}`;
      const part = value ? `\nspread / mean ${number(wide / Math.abs(value))}` : "";
      return { hover: at, select: at, tip: `${name}: ${sureWords(value, wide)}${part}\n${what}, samples’ mean ± one spread` };
    });
  });
}
