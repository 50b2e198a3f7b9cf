// The token strip (Abnar & Zuidema 2020, Figures 2 and 3): what the chosen token draws on, at every layer, the
// methods side by side, importances below. Tokens are laid out and wrap like text, so any length works.
import { drawNote, drawScale, noteLines, peakOf, SCALE_HEIGHT, scaleFor, wordsNote } from "./parts.js";
import { fitted, textWidth } from "./surface.js";
import { mostlyRightToLeft, number, percent, shown, tokenPlace, weightWords } from "./words.js";

const GUTTER = 92; // for the names of methods and the numbers of layers; wider for long names
const WIDEST_GUTTER = 140;
const LABEL = 24; // height of the tokens' line
const CELL = 11; // height of a layer's line; less if there are many layers
const TALLEST_STRIP = 150; // of one method
const GAP = 6;
const BAR = 22; // height of importances
const BLOCK_GAP = 22;

function widthOf(token) {
  return Math.max(22, Math.min(textWidth(shown(token), 13) + 10, 190));
}

function stripCell(trace) {
  return Math.min(CELL, Math.max(3, TALLEST_STRIP / trace.layers));
}

const stripGutters = new WeakMap();

/** Width for the names of methods and importances, and for the numbers of layers after them. */
function stripGutter(trace) {
  if (!stripGutters.has(trace)) {
    const titles = [...trace.methods.map((name) => trace.method(name).title), ...trace.importances(0).map((one) => one.title)];
    const wide = Math.max(0, ...titles.map((title) => textWidth(title, 12, 600))) + 34;
    stripGutters.set(trace, Math.ceil(Math.min(Math.max(wide, GUTTER), WIDEST_GUTTER)));
  }
  return stripGutters.get(trace);
}

function stripTitle(surface, trace, theme, title, y) {
  surface.text(fitted(title, stripGutter(trace) - 34, 12, 600), 12, y + 6, { size: 12, fill: theme.ink, weight: 600 });
}

const laid = new WeakMap();

/** Lines of tokens that fit a width: `[{ start, stop, x: [left edges], widths }]`. */
export function stripLines(trace, width) {
  let cached = laid.get(trace);
  if (cached && cached.width === width) return cached.lines;
  const gutter = stripGutter(trace);
  const room = Math.max(width - gutter - 12, 80);
  const right = mostlyRightToLeft(trace.tokens);
  const lines = [];
  let line = null;
  const few = trace.tokens.length < 200;
  const total = few ? trace.tokens.reduce((sum, token) => sum + widthOf(token), 0) : 0;
  // Tighten slightly rather than leave one word on a separate line.
  const closer = total > room && total < 1.12 * room ? (room - 0.5) / total : 1;
  trace.tokens.forEach((token, i) => {
    const wide = Math.min(closer * widthOf(token), room);
    if (!line || line.used + wide > room) lines.push((line = { start: i, stop: i, used: 0, widths: [] }));
    line.widths.push(wide);
    line.used += wide;
    line.stop = i + 1;
  });
  for (const one of lines) {
    let x = right ? gutter + room : gutter;
    one.x = one.widths.map((wide) => {
      if (right) return (x -= wide);
      x += wide;
      return x - wide;
    });
  }
  laid.set(trace, { width, lines });
  return lines;
}

function sections(trace, seen) {
  const methods = trace.methods.map((method) => ({ method, layers: trace.layers }));
  const scores = trace.importances(seen.query);
  const tall = methods.reduce((sum, one) => sum + one.layers * stripCell(trace) + GAP, 0) + scores.length * (BAR + GAP);
  return { methods, scores, block: LABEL + tall + BLOCK_GAP };
}

/** Why methods and importances are missing, shown below. */
function stripNotes(trace) {
  return trace.told.filter(({ name }) => trace.about.missing && trace.about.missing[name]).map(({ name }) => trace.why(name));
}

/** Height of the scales and the notes on them. */
function heading(trace, seen, width) {
  const note = wordsNote(trace, seen);
  const noteHeight = note ? 15 * noteLines(note, width - 24).length + 4 : 0;
  return SCALE_HEIGHT + 16 + noteHeight + (trace.mapsTitle ? 16 : 0) + (trace.methods.length ? 0 : 20);
}

export const stripView = {
  id: "strip",
  title: "Token strip",
  controls: ["query", "layer", "head", "words", "log"],
  byWords: true,

  applies(trace) {
    return trace.methods.length && trace.tokens.length ? true : "this trace has no tokens to show in a strip";
  },

  measure({ trace, seen, width }) {
    const notes = stripNotes(trace).reduce((sum, note) => sum + 15 * noteLines(note, width - 24).length + 4, 0);
    return { height: heading(trace, seen, width) + stripLines(trace, width).length * sections(trace, seen).block + notes };
  },

  draw({ surface, trace, seen, theme, width, top, bottom }) {
    const { methods, scores, block } = sections(trace, seen);
    const lines = stripLines(trace, width);
    const begin = heading(trace, seen, width);
    const rows = methods.map(({ method, layers }) => {
      const found = Array.from({ length: layers }, (_, layer) => trace.row(method, layer, seen.query, method === "raw" ? seen.head : null));
      const here = found.filter((row) => row && row.values);
      const peak = Math.max(1e-9, ...here.map((row) => peakOf(trace, row.values, seen, trace.source + seen.query)));
      const signed = here.some((row) => row.values.some((value) => value < 0));
      return { method, found, scale: scaleFor(theme, peak, seen, signed ? "signs" : "sizes") };
    });
    rows.forEach(({ method, scale }, i) => {
      const wide = Math.min(150, (width - 24) / rows.length - 20);
      const { title, value } = trace.method(method);
      drawScale(surface, theme, scale, 12 + i * (wide + 20), 8, fitted(`${title}, ${value}`, wide + 14, 11), wide);
    });
    // Once for all: there is no room for it after every title.
    if (trace.mapsTitle) surface.text(fitted(`maps: ${trace.mapsTitle}`, width - 24, 11), 12, SCALE_HEIGHT + 18, { size: 11, fill: theme.soft });
    const note = wordsNote(trace, seen);
    if (note) drawNote(surface, theme, note, 12, SCALE_HEIGHT + 10 + (trace.mapsTitle ? 16 : 0), width - 24);
    const query = trace.spokenOf(seen.query);
    lines.forEach((line, number_) => {
      const start = begin + number_ * block;
      if (start > bottom || start + block < top) return;
      drawLabels(surface, trace, seen, theme, line, start, query);
      let y = start + LABEL;
      const cell = stripCell(trace);
      for (const { method, found, scale } of rows) {
        stripTitle(surface, trace, theme, trace.method(method).title, y);
        found.forEach((row, layer) => drawRow(surface, trace, seen, theme, line, y + layer * cell, row, scale, method, layer));
        y += found.length * cell + GAP;
      }
      for (const score of scores) {
        drawBars(surface, trace, seen, theme, line, y, score);
        y += BAR + GAP;
      }
    });
    let y = begin + lines.length * block;
    for (const note of stripNotes(trace)) y += drawNote(surface, theme, note, 12, y, width - 24) + 4;
  },

  minimap({ trace, seen, width }) {
    const lines = stripLines(trace, width);
    const row = trace.row(trace.methods.includes(seen.method) ? seen.method : "raw", seen.layer, seen.query);
    const sums = lines.map((line) => (row && row.values ? row.values.subarray(line.start, line.stop).reduce((a, b) => a + Math.abs(b), 0) : 0));
    const most = Math.max(...sums, 1e-9);
    const query = trace.source + seen.query;
    return lines.map((line, i) => ({ at: (i + 0.5) / lines.length, size: sums[i] / most, chosen: query >= line.start && query < line.stop }));
  },

  placeOf({ trace, seen, state, width }) {
    const token = trace.source + state.query;
    const line = stripLines(trace, width).findIndex((one) => token < one.stop);
    return heading(trace, seen, width) + line * sections(trace, seen).block;
  },
};

function drawLabels(surface, trace, seen, theme, line, y, query) {
  for (let i = line.start; i < line.stop; i++) {
    const x = line.x[i - line.start];
    const wide = line.widths[i - line.start];
    const chosen = i === query;
    if (chosen) surface.rect(x + 1, y, wide - 2, LABEL - 4, { fill: theme.select, radius: 4, opacity: theme.dark ? 0.35 : 0.2 });
    if (i === seen.token) surface.rect(x + 1, y, wide - 2, LABEL - 4, { stroke: theme.accent, radius: 4 });
    const fill = chosen ? theme.accent : trace.special[i] ? theme.soft : theme.ink;
    const weight = chosen ? 700 : 400;
    surface.text(fitted(shown(trace.tokens[i]), wide - 2, 13, weight), x + wide / 2, y + LABEL / 2 - 2, { size: 13, fill, align: "center", weight });
    const target = { hover: { token: i }, tip: `${shown(trace.tokens[i], 120)}\n${tokenPlace(trace, i)}` };
    if (i >= trace.source) target.select = { query: Math.max(trace.queryOf(i), 0), token: null };
    surface.hit(x, y, wide, LABEL, target);
  }
}

function drawRow(surface, trace, seen, theme, line, y, row, scale, method, layer) {
  const chosen = layer === seen.layer;
  const cell = stripCell(trace);
  const gutter = stripGutter(trace);
  const every = Math.ceil(9 / cell); // numbers that would touch are left out
  if (chosen || layer % every === 0) surface.text(String(layer + 1), gutter - 8, y + cell / 2, { size: 9, fill: chosen ? theme.accent : theme.soft, align: "right", weight: chosen ? 700 : 400 });
  surface.hit(gutter - 28, y, 26, cell, { hover: { layer }, select: { layer }, tip: `layer ${layer + 1}` });
  if (!row || row.missing) {
    if (row && layer === 0) surface.text(row.missing, gutter, y + 6, { size: 11, fill: theme.soft });
    return;
  }
  for (let i = line.start; i < line.stop; i++) {
    const x = line.x[i - line.start];
    const wide = line.widths[i - line.start];
    const value = row.values[i];
    surface.rect(x + 0.5, y, wide - 1, cell - (cell > 5 ? 1 : 0), { fill: scale.css(value) });
    if (i === seen.token && chosen) {
      surface.rect(x + 0.5, y, wide - 1, cell - 1, { stroke: theme.paper, line: 3 });
      surface.rect(x + 0.5, y, wide - 1, cell - 1, { stroke: theme.accent, line: 1.5 });
    }
  }
  // One area for the whole line: a tip for every cell in every frame would cost more than the drawing.
  surface.hit(Math.min(...line.x), y, line.used, cell, (at) => {
    const place = line.x.findIndex((left, i) => at >= left && at < left + line.widths[i]);
    if (place < 0) return null;
    const token = line.start + place;
    const lost = row.lost > 0 ? `\nthis row left out ${percent(row.lost)}` : "";
    const tip = `${shown(trace.tokens[token], 60)}: ${weightWords(row.values[token])}\n${trace.measure(method)}, layer ${layer + 1}${lost}`;
    return { hover: { token, layer }, select: { layer, method, token }, tip };
  });
}

function drawBars(surface, trace, seen, theme, line, y, score) {
  if (!score.values) {
    const few = score.only.slice(0, 4).map((query) => tokenPlace(trace, trace.source + query)).join(", ");
    stripTitle(surface, trace, theme, score.title, y);
    surface.text(`the page has it only for ${few}${score.only.length > 4 ? ", …" : ""}`, stripGutter(trace), y + 6, { size: 11, fill: theme.soft });
    return;
  }
  const most = Math.max(...score.values.map(Math.abs), 1e-12);
  const signed = score.values.some((value) => value < 0);
  const zero = signed ? y + BAR / 2 : y + BAR;
  stripTitle(surface, trace, theme, score.title, y);
  surface.text(`${signed ? "±" : "0 to"} ${number(most)}`, 12, y + 19, { size: 10, fill: theme.soft });
  const left = Math.min(...line.x);
  surface.line(left, zero, left + line.used, zero, { stroke: theme.line });
  for (let i = line.start; i < line.stop; i++) {
    const x = line.x[i - line.start];
    const wide = line.widths[i - line.start];
    const tall = (Math.abs(score.values[i]) / most) * (signed ? BAR / 2 : BAR);
    const below = score.values[i] < 0;
    const colour = below ? `rgb(${theme.spreads[3].join(",")})` : `rgb(${theme.sizes[3].join(",")})`;
    surface.rect(x + 2, below ? zero : zero - tall, wide - 4, Math.max(tall, 0.5), { fill: colour, opacity: i === seen.token ? 1 : 0.85 });
    surface.hit(x, y, wide, BAR, { hover: { token: i }, tip: `${shown(trace.tokens[i], 60)}: ${number(score.values[i])}\n${score.title}${score.target ? ` of ${shown(score.target, 60)}` : ""}` });
  }
}
