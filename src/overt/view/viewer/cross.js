// An encoder–decoder, step by step: what the chosen target token draws on in the source, and in the target generated so
// far; below, the alignment of all target tokens with the source.
import { drawMatrix, matrixPeak, matrixScale, matrixSize } from "./matrix.js";
import { drawScale, peakOf, SCALE_HEIGHT, scaleFor, strongest } from "./parts.js";
import { fitted, textWidth } from "./surface.js";
import { mostlyRightToLeft, number, percent, shown, tokenPlace, weightWords } from "./words.js";

const CROSS_PAD = 14;
const CROSS_LINE = 31; // height of a line of tokens
const CROSS_BOX = 25; // height of a token in it
const CROSS_CAPTION = 26;
const CROSS_GAP = 84; // between source and target, for the curves
const CROSS_CURVES = 8;
const CROSS_FAINTEST = 0.04; // of the largest weight; weaker ones have no curve
const CROSS_THICKEST = 6;
const CROSS_WIDE = 620; // minimum width for the row's notes and the steps next to the scale

const crossKept = new WeakMap();

/**
 * Lines of the source and of the target that fit a width: `{ source, target }`, each `[{ start, stop }]`, and for each
 * token its line and its box: `{ line, x, wide }`.
 */
export function crossLines(trace, width) {
  const cached = crossKept.get(trace);
  if (cached && cached.width === width) return cached.lines;
  const room = Math.max(width - 2 * CROSS_PAD, 80);
  const widths = new Map(); // words recur
  const boxes = new Array(trace.tokens.length);
  const wrapped = (start, stop) => {
    const right = mostlyRightToLeft(trace.tokens.slice(start, Math.min(stop, start + 400)));
    const lines = [];
    let used = Infinity;
    for (let i = start; i < stop; i++) {
      const token = trace.tokens[i];
      if (!widths.has(token)) widths.set(token, Math.min(Math.max(textWidth(shown(token), 13, 700) + 14, 26), 190, room));
      const wide = widths.get(token);
      if (used + wide > room) {
        lines.push({ start: i, stop: i });
        used = 0;
      }
      boxes[i] = { line: lines.length - 1, x: right ? CROSS_PAD + room - used - wide : CROSS_PAD + used, wide };
      used += wide + 4;
      lines[lines.length - 1].stop = i + 1;
    }
    return lines;
  };
  const lines = { source: wrapped(0, trace.source), target: wrapped(trace.source, trace.tokens.length), boxes };
  crossKept.set(trace, { width, lines });
  return lines;
}

function crossLayout(trace, width) {
  const lines = crossLines(trace, width);
  const beside = width >= CROSS_WIDE;
  const head = SCALE_HEIGHT + (beside ? 24 : 68);
  const source = head + CROSS_CAPTION;
  const caption = source + lines.source.length * CROSS_LINE + CROSS_GAP;
  const target = caption + CROSS_CAPTION;
  const scale = target + lines.target.length * CROSS_LINE + 26;
  const matrix = { x: CROSS_PAD, y: scale + SCALE_HEIGHT + 30 };
  const { rows, columns } = trace.group("cross");
  const about = { trace, rows, columns, width: width - 2 * CROSS_PAD, title: null };
  const size = matrixSize(about);
  return { lines, beside, head, source, caption, target, scale, matrix, about, size, height: matrix.y + size.height + 20 };
}

function crossBox(trace, layout, token) {
  const { line, x, wide } = layout.lines.boxes[token];
  return { x, y: (token < trace.source ? layout.source : layout.target) + line * CROSS_LINE, wide };
}

function crossRow(trace, { method, layer, query, head }) {
  return trace.row(method, layer, query, method === "raw" ? head : null);
}

function crossSum(values, start, stop) {
  let sum = 0;
  for (let i = start; i < stop; i++) sum += values[i];
  return sum;
}

const crossParts = new WeakMap();

/** A method's rows cut to the source, as a field for a matrix. */
function crossCut(field, columns) {
  let part = crossParts.get(field);
  if (part) return part;
  let peak = -1;
  part = {
    maps: 1,
    rows: field.rows,
    columns,
    signs: field.signs,
    broken: field.broken,
    at: (map, row, column) => field.at(map, row, column),
    row: (map, row) => field.row(map, row).subarray(0, columns),
    lost: (map, row) => field.lost(map, row),
    peak: (map) => {
      if (peak < 0) {
        peak = 0;
        for (let i = 0; i < field.rows; i++) for (const value of part.row(map, i)) peak = Math.max(peak, Math.abs(value));
      }
      return peak;
    },
  };
  crossParts.set(field, part);
  return part;
}

/** What the matrix shows: `{ field, map, title, note }`; the field is null until it is unpacked. */
function crossAligned(trace, seen) {
  const { layer, method } = seen;
  if (method !== "raw" && !trace.rowsOf(method)) {
    const field = trace.field(method, layer);
    const title = `${trace.named(method)} of every target token, the source’s part, layer ${layer + 1}`;
    return { field: field && crossCut(field, trace.source), map: 0, title, note: `${trace.measure(method)}, layer ${layer + 1}` };
  }
  const head = method === "raw" ? seen.head : null;
  const cross = trace.map("cross", layer, head);
  const headName = head === null ? "mean of heads" : `head ${head + 1}`;
  const why = method === "raw" ? "" : ` (the page has ${trace.method(method).title} for some tokens only)`;
  const title = `${trace.mapsTitle ? `${trace.mapsTitle}, the source’s part` : "attention to the source"}, layer ${layer + 1}, ${headName}${why}`;
  const note = `${trace.mapsTitle ? `${trace.mapsTitle}, ` : ""}layer ${layer + 1}, ${headName}`;
  return { field: cross && cross.field, map: cross ? cross.map : 0, title, note };
}

const crossScreens = new WeakMap();

export const crossView = {
  id: "cross",
  title: "Source and target",
  controls: ["method", "layer", "head", "query", "words", "log"],

  applies(trace) {
    const pair = trace.kind === "encoder–decoder" && trace.has("cross mean") && trace.source > 0 && trace.queries > 0;
    return pair ? true : "this model is not an encoder–decoder";
  },

  measure({ trace, width }) {
    return { height: crossLayout(trace, width).height };
  },

  draw(scene) {
    const { surface, trace, seen, theme, width, top, bottom } = scene;
    crossScreens.set(trace, { top, bottom });
    const layout = crossLayout(trace, width);
    const row = crossRow(trace, seen);
    const values = row && row.values ? row.values : null;
    const signed = values !== null && values.some((value) => value < 0);
    const scale = scaleFor(theme, values ? peakOf(trace, values, seen, trace.source + seen.query) : 1, seen, signed ? "signs" : "sizes");
    const parts = { ...scene, layout, row, values, signed, scale };
    if (top < layout.head) crossDrawHead(parts);
    // Curves are drawn below the tokens that they pass.
    crossDrawCurves(parts);
    crossDrawCaptions(parts);
    for (const [lines, start] of [[layout.lines.source, layout.source], [layout.lines.target, layout.target]]) {
      const first = Math.max(0, Math.floor((top - start) / CROSS_LINE));
      const last = Math.min(lines.length, Math.ceil((bottom - start) / CROSS_LINE));
      for (let i = first; i < last; i++) for (let token = lines[i].start; token < lines[i].stop; token++) crossDrawToken(parts, token);
    }
    if (row && row.missing) {
      const why = fitted(row.missing, width - 2 * CROSS_PAD, 12);
      surface.text(why, width / 2, layout.caption - CROSS_GAP / 2, { size: 12, fill: theme.soft, align: "center" });
    }
    crossDrawMatrix(parts);
  },

  minimap({ trace, seen, width }) {
    const layout = crossLayout(trace, width);
    const row = crossRow(trace, seen);
    const query = trace.source + seen.query;
    const marks = [[layout.lines.source, layout.source], [layout.lines.target, layout.target]].flatMap(([lines, start]) =>
      lines.map((line, i) => ({
        at: (start + (i + 0.5) * CROSS_LINE) / layout.height,
        size: row && row.values ? Math.abs(crossSum(row.values, line.start, line.stop)) : 0,
        chosen: query >= line.start && query < line.stop,
      })),
    );
    const most = marks.reduce((peak, one) => Math.max(peak, one.size), 1e-9);
    return marks.map((one) => ({ ...one, size: one.size / most }));
  },

  placeOf({ trace, state, width }) {
    const layout = crossLayout(trace, width);
    const { y } = crossBox(trace, layout, trace.source + state.query);
    const screen = crossScreens.get(trace);
    const row = layout.matrix.y + layout.size.mapY + (state.query + 0.5) * layout.size.cell;
    // Do not scroll away from a choice made in the matrix while it is visible there.
    if (screen && (y + CROSS_LINE < screen.top || y > screen.bottom) && row > screen.top + layout.size.head && row < screen.bottom) return NaN;
    return y;
  },

  describe({ trace, seen }) {
    const { method, layer } = seen;
    const head = method === "raw" && trace.heads ? `, ${seen.head === null ? "mean of heads" : `head ${seen.head + 1}`}` : "";
    const query = trace.source + seen.query;
    const step = `“${shown(trace.tokens[query], 30)}” (${tokenPlace(trace, query)})`;
    const place = `${step}, layer ${layer + 1} of ${trace.layers}, ${trace.measure(method)}${head}: `;
    const row = crossRow(trace, seen);
    if (!row) return `${place}…`;
    if (row.missing) return place + row.missing;
    const said = (start, stop, count) =>
      strongest(row.values.subarray(start, stop), count).map((one) => `${shown(trace.tokens[start + one.token], 20)} ${number(one.value)}`).join(", ") || "nothing";
    const lost = row.lost > 0 ? ` · left out ${percent(row.lost)}` : "";
    const pointed = Number.isInteger(seen.token) ? ` · “${shown(trace.tokens[seen.token], 20)}” ${weightWords(row.values[seen.token])}` : "";
    const target = trace.recurrent ? "" : `; target ${said(trace.source, trace.tokens.length, 2)}`;
    return `${place}source ${said(0, trace.source, 4)}${target}${lost}${pointed}`;
  },
};

function crossDrawHead(scene) {
  const { surface, row, scale, theme, seen, width, layout, trace } = scene;
  const { method, layer } = seen;
  const room = width - 2 * CROSS_PAD;
  const wide = Math.min(220, room);
  drawScale(surface, theme, scale, CROSS_PAD, 8, fitted(trace.measure(method), layout.beside ? wide + 20 : room, 11), wide);
  const x = layout.beside ? CROSS_PAD + wide + 28 : CROSS_PAD;
  const y = layout.beside ? 14 : SCALE_HEIGHT + 20;
  const heads = method === "raw" && trace.heads ? `${seen.head === null ? "mean of heads" : `head ${seen.head + 1}`}, ` : "";
  const lost = !row || row.missing ? "" : row.lost > 0 ? `left out of this row: ${percent(row.lost)}` : "nothing is left out of this row";
  surface.text(fitted(`layer ${layer + 1}, ${heads}${lost || trace.method(method).title}`, width - x - CROSS_PAD, 11), x, y, { size: 11, fill: theme.soft });
  crossDrawSteps(scene, x, y + (layout.beside ? 14 : 18));
}

/** The current step, with arrows to others. */
function crossDrawSteps(scene, from, y) {
  const { surface, trace, seen, state, theme, width } = scene;
  const { queries } = trace;
  const wide = textWidth(tokenPlace(trace, trace.tokens.length - 1), 11, 600) + 12;
  let x = from - 6;
  const arrow = (text, to, tip) => {
    const on = to >= 0 && to < queries;
    surface.text(text, x + 10, y + 9, { size: 16, fill: on ? theme.accent : theme.line, align: "center", weight: 600 });
    if (on) surface.hit(x, y - 2, 20, 24, { select: { query: to, token: null }, tip });
    x += 20;
  };
  arrow("‹", state.query - 1, "previous step (↑)");
  surface.text(tokenPlace(trace, trace.source + seen.query), x + wide / 2, y + 10, { size: 11, fill: theme.ink, align: "center", weight: 600 });
  x += wide;
  arrow("›", state.query + 1, "next step (↓)");
  const track = Math.min(width - x - CROSS_PAD - 28, 320);
  if (track >= 60 && queries > 1) crossDrawTrack(scene, x + 16, y + 10, track);
}

function crossDrawCaptions({ surface, trace, seen, theme, layout, values, signed, top, bottom }) {
  const parts = [
    ["source", "cross-attention", 0, trace.source, layout.source],
    ["target", trace.recurrent ? "" : "self-attention", trace.source, trace.tokens.length, layout.target],
  ];
  for (const [name, by, start, stop, y] of parts) {
    if (y < top || y - CROSS_CAPTION > bottom) continue;
    let text = name;
    // Raw is two distributions, or one that both share. A method's shares are split between the parts; amounts have no sum.
    const { title, value } = trace.method(seen.method);
    const part = values && !signed ? percent(crossSum(values, start, stop)) : "";
    if (seen.method === "raw" && by) text += ` · ${by}${trace.about.joint && part ? `, ${part}` : ""}`;
    else if (value === "share" && part) text += ` · ${part} of ${title}`;
    surface.rect(CROSS_PAD - 3, y - 23, textWidth(text, 11) + 6, 18, { fill: theme.paper, opacity: 0.85, radius: 4 });
    surface.text(text, CROSS_PAD, y - 14, { size: 11, fill: theme.soft });
  }
}

/** A track with a mark for each step: pointing previews, clicking selects. */
function crossDrawTrack({ surface, trace, seen, theme }, x, y, wide) {
  const { queries } = trace;
  const at = (query) => x + (wide * query) / (queries - 1);
  surface.line(x, y, x + wide, y, { stroke: theme.line, line: 3 });
  surface.line(x, y, at(seen.query), y, { stroke: theme.select, line: 3 });
  if (wide / queries >= 7) for (let i = 0; i < queries; i++) surface.circle(at(i), y, 2, { fill: i <= seen.query ? theme.select : theme.soft });
  surface.circle(at(seen.query), y, 6, { fill: theme.select, stroke: theme.paper, line: 2 });
  surface.hit(x - 8, y - 11, wide + 16, 22, (px) => {
    const query = Math.min(Math.max(Math.round(((px - x) / wide) * (queries - 1)), 0), queries - 1);
    return { hover: { query }, select: { query, token: null }, tip: `${shown(trace.tokens[trace.source + query], 60)}\n${tokenPlace(trace, trace.source + query)}` };
  });
}

function crossDrawToken({ surface, trace, seen, state, theme, layout, row, values, scale }, token) {
  const { x, y, wide } = crossBox(trace, layout, token);
  const query = trace.source + seen.query;
  const chosen = token === query;
  const later = token > query;
  const value = values ? values[token] : 0;
  if (!later) surface.rect(x, y, wide, CROSS_BOX, { fill: values ? scale.css(value) : theme.raised, radius: 5 });
  const frame = chosen ? { stroke: theme.select, line: 2 } : token === seen.token ? { stroke: theme.accent, line: 1.5 } : null;
  if (frame) {
    // A light gap between the frame and a cell that may be as dark.
    surface.rect(x, y, wide, CROSS_BOX, { stroke: theme.paper, line: frame.line + 3, radius: 5 });
    surface.rect(x, y, wide, CROSS_BOX, { ...frame, radius: 5 });
  }
  const fill = later ? theme.soft : values ? scale.ink(value) : theme.ink;
  const text = fitted(shown(trace.tokens[token]), wide - 6, 13, chosen ? 700 : 400);
  surface.text(text, x + wide / 2, y + CROSS_BOX / 2, { size: 13, fill, align: "center", weight: chosen ? 700 : 400 });
  if (later) surface.line(x + 5, y + CROSS_BOX - 2, x + wide - 5, y + CROSS_BOX - 2, { stroke: theme.soft, opacity: 0.6, dash: [2, 3] });
  const name = shown(trace.tokens[token], 120);
  const weight = !values ? "" : later ? "\nnot generated yet at this step" : `\n${trace.measure(seen.method)}: ${weightWords(value)}`;
  const lost = row && row.lost > 0 && !later ? `\nthis row left out ${percent(row.lost)}` : "";
  const select = token < trace.source ? { token: state.token === token ? null : token } : { query: token - trace.source, token: null };
  surface.hit(x, y, wide, CROSS_BOX, { hover: { token }, select, tip: `${name}\n${tokenPlace(trace, token)}${weight}${lost}` });
}

/** Curves from the target word to the strongest source words, vertical at both ends. */
function crossDrawCurves({ surface, trace, seen, theme, layout, values, scale, top, bottom }) {
  if (!values) return;
  const pointed = Number.isInteger(seen.token) && seen.token < trace.source ? seen.token : null;
  const most = strongest(values.subarray(0, trace.source), CROSS_CURVES);
  if (!most.length) return;
  const peak = Math.abs(most[0].value);
  const curves = most.filter((one) => Math.abs(one.value) >= CROSS_FAINTEST * peak && one.token !== pointed).reverse();
  if (pointed !== null && values[pointed]) curves.push({ token: pointed, value: values[pointed] });
  const from = crossBox(trace, layout, trace.source + seen.query);
  const start = [from.x + from.wide / 2, from.y];
  for (const { token, value } of curves) {
    const box = crossBox(trace, layout, token);
    const end = [box.x + box.wide / 2, box.y + CROSS_BOX];
    if (end[1] > bottom || start[1] < top) continue;
    const part = Math.min(Math.abs(value) / scale.top, 1); // as the colours are
    const lit = token === pointed;
    const opacity = lit ? 0.95 : (pointed === null ? 1 : 0.5) * (0.18 + 0.62 * part);
    surface.path(crossCurve(start, end), { stroke: lit ? theme.accent : theme.edge, line: 0.8 + (CROSS_THICKEST - 0.8) * part, opacity });
  }
}

function crossCurve([x1, y1], [x2, y2]) {
  const middle = (y1 + y2) / 2;
  return Array.from({ length: 25 }, (_, i) => {
    const t = i / 24;
    const [a, b, c, d] = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t ** 3];
    return [(a + b) * x1 + (c + d) * x2, a * y1 + (b + c) * middle + d * y2];
  });
}

function crossDrawMatrix({ surface, trace, seen, state, theme, layout, top, bottom, width }) {
  if (layout.scale > bottom) return;
  const { field, map, title, note } = crossAligned(trace, seen);
  const { rows, columns } = layout.about;
  const scale = matrixScale(theme, field ? matrixPeak(trace, field, map, seen, rows, columns) : 1, [field], seen);
  if (layout.scale + SCALE_HEIGHT + 30 > top) {
    const room = width - 2 * CROSS_PAD;
    const heading = fitted("Alignment of every target token with the source", room, 13, 600);
    surface.text(heading, CROSS_PAD, layout.scale + 2, { size: 13, fill: theme.ink, weight: 600 });
    if (field) drawScale(surface, theme, scale, CROSS_PAD, layout.scale + 14, fitted(title, room, 11), Math.min(220, room));
  }
  drawMatrix(surface, { ...layout.about, ...layout.matrix, theme, field, map, scale, seen, state, top, bottom, title: null, note });
}
