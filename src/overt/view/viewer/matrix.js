// Maps as pictures: one enlarged, with its tokens on both axes, and small ones for grids.
import { drawToken, labelWidth, mapPixels, scaleFor } from "./parts.js";
import { fitted, textWidth } from "./surface.js";
import { percent, shown, weightWords } from "./words.js";

const MATRIX_LEAST = 9; // pixels of a cell that still has its own label
const MATRIX_MOST = 26;
const MATRIX_SLANT = 16; // pixels of a cell from which column labels are slanted instead of upright
const MATRIX_TITLE = 24;
const MATRIX_LOST = 62; // bars for what rows left out, with the gap before them
const MATRIX_BAR = 46;
const MATRIX_APART = 11; // pixels between labels if not every token can have one
const THUMB_WORK = 1e6; // cells read for thumbnails per frame
const THUMB_ASKS = 2; // layers requested at the same time
const THUMB_KEPT = 2400; // thumbnails of a trace
const THUMB_PIXELS = 64;

const matrixLabels = new WeakMap();

/** The width that the labels of some tokens of a trace need; measured once. */
function matrixLabelWidth(trace, [start, stop], size, most) {
  let cache = matrixLabels.get(trace);
  if (!cache) matrixLabels.set(trace, (cache = new Map()));
  const key = `${start}/${stop}/${size}/${most}`;
  if (!cache.has(key)) cache.set(key, Math.ceil(labelWidth(trace.tokens.slice(start, stop), { size, least: 24, most })));
  return cache.get(key);
}

/** The largest share that a row may leave out, where its bars end; 0 if the page has everything. */
export function matrixUnit(trace) {
  for (const list of Object.values(trace.about.fields || {})) {
    for (const about of list) if (about && about.unit !== undefined) return about.unit > 1e-9 ? about.unit : 0;
  }
  return 0;
}

/** The colour scale for one map, or for several that share it. */
export function matrixScale(theme, top, fields, seen) {
  return scaleFor(theme, top, seen, fields.some((field) => field && field.signs) ? "signs" : "sizes");
}

const matrixPeaks = new WeakMap();

/** The largest weight of a map; with the selection's `words` on, between different words. */
export function matrixPeak(trace, field, map, seen, rows, columns) {
  if (!seen.words) return field.peak(map);
  let cache = matrixPeaks.get(field);
  if (!cache) matrixPeaks.set(field, (cache = new Map()));
  if (cache.has(map)) return cache.get(map);
  let peak = 0;
  for (let i = 0; i < field.rows; i++) {
    if (trace.special[rows[0] + i]) continue;
    const values = field.row(map, i);
    for (let j = 0; j < values.length; j++) {
      const token = columns[0] + j;
      if (!trace.special[token] && token !== rows[0] + i && Math.abs(values[j]) > peak) peak = Math.abs(values[j]);
    }
  }
  cache.set(map, peak || field.peak(map));
  return cache.get(map);
}

/**
 * The size of an enlarged map.
 *
 * @param {object} options `rows` and `columns`: their tokens as [start, stop]; `width`: available width; `height`:
 *   maximum height, if cells stay legible; `cell`: the size of a cell, instead; `most`: the largest cell;
 *   `rowLabels`: whether tokens are shown at its left; `lost`: whether bars for what was left out are at its right;
 *   `title`: whether there is one
 * @returns {object} width and height of all; cell; left and head, the room of labels; of the map itself the size
 *   (mapWidth, mapHeight) and the place within all (mapX, mapY)
 */
export function matrixSize(options) {
  const { trace, rows, columns, width, height = Infinity, cell = null, most = MATRIX_MOST } = options;
  const { rowLabels = true, lost = true, title = null } = options;
  const tall = Math.max(rows[1] - rows[0], 1);
  const wide = Math.max(columns[1] - columns[0], 1);
  const bars = lost && matrixUnit(trace) ? MATRIX_LOST : 0;
  const above = title === null ? 0 : MATRIX_TITLE;
  const left = rowLabels ? matrixLabelWidth(trace, rows, 13, Math.round(Math.min(130, Math.max(0.22 * width, 48)))) + 10 : 0;
  const upright = matrixLabelWidth(trace, columns, 12, 84);
  const plain = (width - left - bars) / wide;
  // The last slanted label extends beyond its column: over the bars, or into extra room.
  const beyond = bars ? 0 : Math.ceil(upright / 2);
  const fit = plain < MATRIX_SLANT ? plain : Math.max((width - left - bars - beyond) / wide, MATRIX_SLANT - 0.1);
  const high = (height - above - upright - 12) / tall;
  // If not every row can have a label anyway, show the whole map.
  const least = fit < MATRIX_LEAST ? 0.6 * fit : MATRIX_LEAST;
  const size = cell ?? Math.max(Math.min(fit, most, high), least, 0.02);
  const slanted = size >= MATRIX_SLANT;
  const head = Math.max(upright * (slanted ? Math.sin(Math.PI / 3) : 1) + 12, 30);
  const mapWidth = size * wide;
  const mapHeight = size * tall;
  const whole = { width: left + mapWidth + bars + (slanted ? beyond : 0), height: above + head + mapHeight };
  return { ...whole, cell: size, left, head, bars, slanted, mapX: left, mapY: above + head, mapWidth, mapHeight };
}

/** The selection within a trace's limits: a compared trace may have fewer layers, heads or groups. */
export function matrixWithin(trace, seen) {
  const group = trace.groups.includes(seen.group) ? seen.group : trace.home;
  const { layers, heads } = trace.group(group);
  const head = seen.head !== null && seen.head < heads ? seen.head : null;
  return { ...seen, group, layer: Math.max(Math.min(seen.layer, layers - 1), 0), head };
}

/** The token of the row that a selection is at, in a map whose rows are `rows`; null if it is elsewhere. */
export function matrixRow(trace, seen, rows) {
  // Queries are counted from the end of the source; rows of the source are named separately.
  const token = rows[0] >= trace.source ? trace.source + seen.query : seen.row;
  return Number.isInteger(token) && token >= rows[0] && token < rows[1] ? token : null;
}

/** The token of the column that a selection is at, or null. */
export function matrixColumn(seen, columns) {
  const { token } = seen;
  return Number.isInteger(token) && token >= columns[0] && token < columns[1] ? token : null;
}

function matrixRowState(trace, token) {
  return token >= trace.source ? { query: token - trace.source } : { row: token };
}

/** A cell in words. */
export function matrixCell(trace, field, map, row, column, rows, columns) {
  const value = field.at(map, row - rows[0], column - columns[0]);
  return `${shown(trace.tokens[row], 60)} → ${shown(trace.tokens[column], 60)}: ${weightWords(value)}`;
}

/** What a row left out, in words; empty if nothing. */
export function matrixLost(field, map, row, rows, unit = null) {
  const lost = field.lost(map, row - rows[0]);
  return lost > 0 ? `this row left out ${percent(lost)}` : unit ? "this row left out nothing" : "";
}

/**
 * One enlarged map. Its column labels stay on the screen while its rows scroll.
 *
 * @param {Surface} surface
 * @param {object} options those of `matrixSize`, and: `theme`; `field` and `map`, null until unpacked; `scale`; `x`, `y`:
 *   the place of all; `seen`, `state`: the selection with and without what the pointer is over; `top`, `bottom`: what is
 *   on the screen; `title`: a text, or null; `mark`: a colour beside the title; `note`: further lines of a tip;
 *   `hover`, `select`: what else a cell stands for
 * @returns {object} as `matrixSize`
 */
export function drawMatrix(surface, options) {
  const { trace, theme, field = null, map = 0, scale, rows, columns, x, y } = options;
  const { seen, state = seen, top = -Infinity, bottom = Infinity } = options;
  const { title = null, mark = null, note = "", hover = {}, select = {} } = options;
  const size = matrixSize(options);
  if (y > bottom || y + size.height < top) return size;
  const { cell, mapWidth, mapHeight } = size;
  const left = x + size.mapX;
  const under = y + size.mapY;
  // Column labels stay at the top edge as long as there is map below them.
  const labels = Math.min(Math.max(under, top + size.head), under + Math.max(mapHeight - cell, 0));
  const first = Math.max(0, Math.floor((labels - under) / cell));
  const last = Math.min(rows[1] - rows[0], Math.ceil((bottom - under) / cell));
  const row = matrixRow(trace, seen, rows);
  const chosen = matrixRow(trace, state, rows);
  const column = matrixColumn(seen, columns);
  if (title !== null) {
    if (mark) surface.rect(x, y + 4, 9, 9, { fill: mark, radius: 2 });
    const at = mark ? 15 : 0;
    surface.text(fitted(title, Math.max(size.width - at, 60), 13, 600), x + at, y + 9, { size: 13, fill: theme.ink, weight: 600 });
  }
  if (field) matrixImage(surface, field, map, scale, left, under, size);
  else surface.rect(left, under, mapWidth, mapHeight, { fill: theme.raised });
  if (cell >= 12) matrixLines(surface, theme, left, under, size, first, last);
  surface.rect(left, under, mapWidth, mapHeight, { stroke: theme.line });
  const cross = { row: row === null ? null : row - rows[0], column: column === null ? null : column - columns[0] };
  matrixCross(surface, theme, left, under, size, cross);
  const rowAt = (py) => Math.min(Math.max(Math.floor((py - under) / cell), 0), rows[1] - rows[0] - 1);
  const columnAt = (px) => Math.min(Math.max(Math.floor((px - left) / cell), 0), columns[1] - columns[0] - 1);
  const lines = (...some) => some.filter(Boolean).join("\n");
  const from = Math.max(under, labels);
  const seenHeight = Math.max(Math.min(under + mapHeight, bottom) - from, 0);
  surface.hit(left, from, mapWidth, seenHeight, (px, py) => {
    const query = rows[0] + rowAt(py);
    const key = columns[0] + columnAt(px);
    const at = { ...matrixRowState(trace, query), token: key };
    const words = field && matrixCell(trace, field, map, query, key, rows, columns);
    const tip = lines(words, note, field && matrixLost(field, map, query, rows));
    return { hover: { ...hover, ...at }, select: { ...select, ...at }, tip };
  });
  if (size.left) {
    matrixRowLabels(surface, trace, theme, { ...size, x, under, rows, first, last, row, chosen });
    surface.hit(x, from, size.left, seenHeight, (px, py) => {
      const query = rows[0] + rowAt(py);
      const at = matrixRowState(trace, query);
      const tip = lines(shown(trace.tokens[query], 120), `token ${query}`, field && matrixLost(field, map, query, rows));
      return { hover: { ...hover, ...at }, select: { ...select, ...at, token: null }, tip };
    });
  }
  if (size.bars) {
    const unit = matrixUnit(trace);
    if (field) matrixBars(surface, theme, field, map, unit, left + mapWidth + MATRIX_LOST - MATRIX_BAR, under, cell, first, last);
    surface.hit(left + mapWidth, from, MATRIX_LOST, seenHeight, (px, py) => {
      const query = rows[0] + rowAt(py);
      const tip = field ? lines(shown(trace.tokens[query], 60), matrixLost(field, map, query, rows, unit)) : "";
      return { hover: { ...hover, ...matrixRowState(trace, query) }, tip };
    });
  }
  matrixHead(surface, trace, theme, { ...size, x, left, labels, stuck: labels > under, columns, column });
  surface.hit(left, labels - size.head, mapWidth, size.head, (px) => {
    const key = columns[0] + columnAt(px);
    const tip = lines(shown(trace.tokens[key], 120), `token ${key}`);
    return { hover: { ...hover, token: key }, select: { ...select, token: key }, tip };
  });
  return size;
}

function matrixImage(surface, field, map, scale, left, under, { cell, mapWidth, mapHeight }) {
  const most = cell < 1 ? Math.max(Math.ceil(2 * Math.max(mapWidth, mapHeight)), 64) : Infinity;
  const step = Math.max(1, Math.ceil(Math.max(field.rows, field.columns) / most));
  const pixels = mapPixels(field, map, scale, most);
  // The last pixels may stand for cells beyond the map.
  surface.clipped(left, under, mapWidth, mapHeight, () => {
    surface.image(pixels, left, under, pixels.width * step * cell, pixels.height * step * cell, { smooth: cell * step < 1 });
  });
}

function matrixLines(surface, theme, left, under, { cell, mapWidth, mapHeight }, first, last) {
  const look = { stroke: theme.paper, line: 1, opacity: theme.dark ? 0.5 : 0.75 };
  for (let i = Math.max(first, 1); i < last; i++) surface.line(left, under + i * cell, left + mapWidth, under + i * cell, look);
  const end = Math.min(under + last * cell, under + mapHeight);
  for (let x = left + cell; x < left + mapWidth - 1; x += cell) surface.line(x, under + first * cell, x, end, look);
}

function matrixCross(surface, theme, left, under, { cell, mapWidth, mapHeight }, { row, column }) {
  const thick = Math.max(cell, 2);
  const look = { stroke: theme.select, line: 1, opacity: 0.9 };
  if (row !== null) {
    const at = under + (row + 0.5) * cell;
    for (const edge of [at - thick / 2, at + thick / 2]) surface.line(left, edge, left + mapWidth, edge, look);
  }
  if (column !== null) {
    const at = left + (column + 0.5) * cell;
    for (const edge of [at - thick / 2, at + thick / 2]) surface.line(edge, under, edge, under + mapHeight, look);
  }
  if (row !== null && column !== null) {
    const [x, y] = [column, row].map((place) => (place + 0.5) * cell - thick / 2);
    surface.rect(left + x, under + y, thick, thick, { stroke: theme.select, line: 2 });
  }
}

/** The labels that have room, and those that must be shown. */
function matrixThinned(first, last, cell, musts) {
  const step = Math.max(1, Math.ceil(MATRIX_APART / cell - 0.25));
  const required = musts.filter((one, i) => one !== null && one >= first && one < last && musts.indexOf(one) === i);
  const free = (i) => step === 1 || required.every((one) => Math.abs(one - i) * cell >= MATRIX_APART);
  const others = [];
  for (let i = Math.ceil(first / step) * step; i < last; i += step) if (!required.includes(i) && free(i)) others.push(i);
  return [...others, ...required];
}

function matrixFont(cell) {
  return cell >= 15 ? 13 : cell >= 13 ? 12 : cell >= 11 || cell < MATRIX_LEAST ? 10 : 9;
}

function matrixRowLabels(surface, trace, theme, { x, under, cell, left, rows, first, last, row, chosen }) {
  const size = matrixFont(cell);
  const musts = [row, chosen].map((one) => (one === null ? null : one - rows[0]));
  const tall = Math.min(Math.max(cell, 12), 16);
  const look = { fill: theme.select, radius: 4, opacity: theme.dark ? 0.3 : 0.16 };
  for (const i of matrixThinned(first, last, cell, musts)) {
    const token = rows[0] + i;
    const at = under + (i + 0.5) * cell;
    if (token === chosen) surface.rect(x, at - tall / 2, left - 3, tall, look);
    const label = { width: left - 10, align: "right", size, strong: token === row, faint: Boolean(trace.special[token]) };
    drawToken(surface, theme, trace.tokens[token], x + left - 6, at, label);
  }
}

function matrixHead(surface, trace, theme, place) {
  const { x, left, width, mapWidth, bars, cell, slanted, head, labels, stuck, columns, column } = place;
  if (stuck) surface.rect(x, labels - head, width, head, { fill: theme.paper });
  const size = Math.min(matrixFont(cell), 12);
  const room = (head - 10) / (slanted ? Math.sin(Math.PI / 3) : 1);
  for (const j of matrixThinned(0, columns[1] - columns[0], cell, [column === null ? null : column - columns[0]])) {
    const token = columns[0] + j;
    const strong = token === column;
    const fill = strong ? theme.accent : trace.special[token] ? theme.soft : theme.ink;
    const text = fitted(shown(trace.tokens[token], 40), room, size, strong ? 700 : 400);
    surface.text(text, left + (j + 0.5) * cell, labels - 6, { size, fill, weight: strong ? 700 : 400, turn: slanted ? -60 : -90 });
  }
  if (left - x > 50) {
    const up = cell < MATRIX_LEAST ? 6 : 0; // the first row's label reaches beyond its row
    surface.text("key →", left - 6, labels - 20 - up, { size: 9, fill: theme.soft, align: "right" });
    surface.text("query ↓", left - 6, labels - 8 - up, { size: 9, fill: theme.soft, align: "right" });
  }
  if (bars) {
    const start = left + mapWidth + MATRIX_LOST - MATRIX_BAR;
    surface.text("left out", start, labels - 18, { size: 9, fill: theme.soft });
    surface.text("0", start, labels - 7, { size: 9, fill: theme.soft });
    surface.text(percent(matrixUnit(trace)), start + MATRIX_BAR, labels - 7, { size: 9, fill: theme.soft, align: "right" });
  }
}

function matrixBars(surface, theme, field, map, unit, x, under, cell, first, last) {
  surface.line(x, under + first * cell, x, under + last * cell, { stroke: theme.line });
  surface.line(x + MATRIX_BAR, under + first * cell, x + MATRIX_BAR, under + last * cell, { stroke: theme.line, opacity: 0.6 });
  // Rows thinner than a line share a bar, the longest of them.
  const step = Math.max(1, Math.ceil(1.5 / cell));
  for (let i = Math.floor(first / step) * step; i < last; i += step) {
    let lost = 0;
    for (let k = i; k < Math.min(i + step, field.rows); k++) lost = Math.max(lost, field.lost(map, k));
    if (lost <= 0) continue;
    const rim = cell * step > 6 ? 2 : 0;
    const long = Math.max(Math.min(lost / unit, 1) * MATRIX_BAR, 0.5);
    surface.rect(x, under + i * cell + rim, long, cell * step - 2 * rim, { fill: theme.soft, opacity: 0.7 });
  }
}

const thumbs = new WeakMap();

/** How much thumbnail work a draw may do: little for a pane that will redraw, any amount for an export. */
export function thumbBudget(surface) {
  const canvas = surface.context && surface.context.canvas;
  return { left: canvas && canvas.isConnected ? THUMB_WORK : Infinity, more: false };
}

/**
 * A map as a thumbnail on its own scale, `{ pixels, peak }`; null until it is unpacked. Once made, it no longer needs its
 * field, so that a grid may have more layers than are held at a time.
 */
export function thumbOf(trace, { name, layer, map, theme, seen, rows, columns, budget }) {
  let cache = thumbs.get(trace);
  if (!cache) thumbs.set(trace, (cache = new Map()));
  const key = `${name}/${layer}/${map}/${theme.dark}/${Boolean(seen.log)}/${Boolean(seen.words)}`;
  const cached = cache.get(key);
  if (cached) return cached;
  if (budget.left <= 0) {
    budget.more = true;
    return null;
  }
  // A few layers at a time: requested all at once, they would arrive together and block the page.
  const patient = budget.left < Infinity && trace.waiting.size >= THUMB_ASKS;
  if (patient && !trace.fields.has(`${name}/${layer}`)) return null;
  const field = trace.field(name, layer);
  if (!field) return null;
  budget.left -= field.rows * field.columns + 1e4;
  const peak = matrixPeak(trace, field, map, seen, rows, columns);
  const thumb = { pixels: mapPixels(field, map, matrixScale(theme, peak, [field], seen), THUMB_PIXELS), peak };
  if (cache.size >= THUMB_KEPT) cache.delete(cache.keys().next().value);
  cache.set(key, thumb);
  return thumb;
}

/** What the thumbnails' colours mean, in words. */
export function thumbNote(seen) {
  const reach = seen.log ? "three decades to" : "from 0 to";
  return `each has its own scale, ${reach} its largest weight${seen.words ? " among words" : ""}`;
}

/**
 * A thumbnail in a square, framed when it is chosen or under the pointer.
 *
 * @param {object} options `thumb`: from `thumbOf`, or null; `size`: of the square; `rows`, `columns`; `row`: the token whose
 *   row is marked where rows are thick enough, or null; `chosen`, `pointed`
 */
export function drawThumb(surface, theme, { thumb, x, y, size, rows, columns, row = null, chosen = false, pointed = false }) {
  const tall = Math.max(rows[1] - rows[0], 1);
  const wide = Math.max(columns[1] - columns[0], 1);
  const width = Math.max((size * wide) / Math.max(tall, wide), 4);
  const height = Math.max((size * tall) / Math.max(tall, wide), 4);
  const left = x + (size - width) / 2;
  const above = y + (size - height) / 2;
  if (thumb) surface.image(thumb.pixels, left, above, width, height, { smooth: thumb.pixels.width > width });
  else surface.rect(left, above, width, height, { fill: theme.raised });
  surface.rect(left, above, width, height, { stroke: theme.line, line: 0.75 });
  if (row !== null && height / tall >= 1.5) {
    const at = above + ((row - rows[0]) * height) / tall;
    surface.rect(left, at, width, height / tall, { stroke: theme.select, line: 0.75, opacity: 0.8 });
  }
  if (chosen) surface.rect(left - 2, above - 2, width + 4, height + 4, { stroke: theme.select, line: 2.5, radius: 2 });
  else if (pointed) surface.rect(left - 1.5, above - 1.5, width + 3, height + 3, { stroke: theme.soft, line: 1.5, radius: 2 });
}
