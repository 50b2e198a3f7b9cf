// A long text with each token in the colour of its weight, below a map of the whole text at every layer.
// Only the lines on the screen are drawn.
import { drawMessage, drawScale, peakOf, SCALE_HEIGHT, scaleFor } from "./parts.js";
import { endsLine, headWords, layerWords, overLayers, passageBefore, passageDescribe, passageFound, passageRow, passageStep, passageText, passageTip, passageWord } from "./passage.js";
import { fitted, textWidth } from "./surface.js";
import { mostlyRightToLeft, number, percent, tokenPlace } from "./words.js";

const TEXT_LINE = 25;
const TEXT_SIZE = 14;
const TEXT_GAP = 5; // between words
const TEXT_EDGE = 14;
const TEXT_NUMBER = 46; // for the numbers of the lines' first tokens
const OVER_TALLEST = 96; // of the map of the whole text
const OVER_TOP = 22; // for its title
const OVER_MARKS = 20; // below it: what is on the screen, what was found

const textWidths = new Map();

function textWordWidth(word) {
  let wide = textWidths.get(word);
  if (wide === undefined) {
    if (textWidths.size > 50000) textWidths.clear();
    textWidths.set(word, (wide = textWidth(word, TEXT_SIZE) + 0.6));
  }
  return wide;
}

const textLaid = new WeakMap();

/** Lines that fit a width, broken between words: `{ lines: [{ start, stop }], x, wide, line }`, the last three by token. */
export function textLines(trace, width) {
  const cached = textLaid.get(trace);
  if (cached && cached.width === width) return cached;
  const count = trace.tokens.length;
  const left = TEXT_EDGE + TEXT_NUMBER;
  const room = Math.max(width - left - TEXT_EDGE, 80);
  const x = new Float32Array(count);
  const wide = new Float32Array(count);
  const line = new Int32Array(count);
  const lines = [];
  let used = Infinity; // the first word begins a line
  for (let start = 0; start < count; ) {
    let stop = start;
    let word = 0; // width of a word: tokens with nothing between them
    do {
      wide[stop] = Math.min(textWordWidth(passageWord(trace.tokens[stop])), room);
      word += wide[stop++];
    } while (stop < count && passageBefore(trace, stop) === "0" && !endsLine(trace.tokens[stop]) && !endsLine(trace.tokens[stop - 1]));
    const breaks = passageBefore(trace, start) === "2" || (start > 0 && endsLine(trace.tokens[start - 1]));
    const gap = passageBefore(trace, start) === "0" ? 0 : TEXT_GAP;
    if (breaks || (used + gap + word > room && !endsLine(trace.tokens[start]))) used = Infinity;
    for (let i = start; i < stop; i++) {
      const space = i === start && used > 0 ? gap : 0;
      const most = endsLine(trace.tokens[i]) ? room + TEXT_EDGE - 2 : room; // the sign may stand in the margin
      if (used + space + wide[i] > most) {
        lines.push({ start: i, stop: i });
        used = 0;
        x[i] = 0;
      } else x[i] = used + space;
      used = x[i] + wide[i];
      line[i] = lines.length - 1;
      lines[lines.length - 1].stop = i + 1;
    }
    start = stop;
  }
  const right = mostlyRightToLeft(trace.tokens);
  for (let i = 0; i < count; i++) x[i] = right ? left + room - x[i] - wide[i] : left + x[i];
  const laid = { width, lines, x, wide, line, right };
  textLaid.set(trace, laid);
  return laid;
}

/** If the scale is that of some tokens: which of the others are drawn like its end. */
export function beyondScale(trace, seen, values, top, query) {
  if (!seen.words || !trace.hasAside) return "";
  const beyond = [];
  for (let i = 0; i < values.length; i++) if (Math.abs(values[i]) > top && (trace.aside(i) || i === query)) beyond.push(i);
  if (!beyond.length) return "no token is beyond the scale";
  const own = trace.spokenOf(query - trace.source) === query ? "itself" : "just before";
  const named = beyond.slice(0, 3).map((token) => `“${passageWord(trace.tokens[token])}” (${token === query ? own : tokenPlace(trace, token)}) ${number(values[token])}`);
  return `beyond the scale, in its last colour: ${named.join(", ")}${beyond.length > 3 ? ` and ${beyond.length - 3} more` : ""}`;
}

/** Heights of what stays above the text: its scale, a note on it, the map of the whole. */
function textHead(trace, seen) {
  const noteHeight = seen.words && trace.hasAside ? 18 : 0;
  const cell = Math.max(1, Math.min(9, Math.floor(OVER_TALLEST / Math.max(trace.layers, 1))));
  const over = Math.max(cell * trace.layers, 12);
  const start = SCALE_HEIGHT + 10 + noteHeight;
  return { start, cell, over, y: start + OVER_TOP, height: start + OVER_TOP + over + OVER_MARKS };
}

const textColumns = new WeakMap();

/** The token of the largest value in each of some columns of equal numbers of tokens. */
export function columnPeaks(values, columns) {
  const cached = textColumns.get(values);
  if (cached && cached.length === columns) return cached;
  const peaks = new Uint32Array(columns);
  for (let column = 0, i = 0; column < columns; column++) {
    const stop = Math.floor(((column + 1) * values.length) / columns);
    peaks[column] = i;
    for (; i < stop; i++) if (Math.abs(values[i]) > Math.abs(values[peaks[column]])) peaks[column] = i;
  }
  textColumns.set(values, peaks);
  return peaks;
}

const textMarks = new WeakMap();

/** For each token, whether it is part of what was found. */
function markedTokens(trace, places) {
  if (!textMarks.has(places)) {
    const marks = new Uint8Array(trace.tokens.length);
    for (const [start, stop] of places) marks.fill(1, start, stop);
    textMarks.set(places, marks);
  }
  return textMarks.get(places);
}

export const textView = {
  id: "text",
  title: "Text",
  controls: ["query", "method", "layer", "averaged", "head", "words", "log", "find"],
  byWords: true,

  applies(trace) {
    return trace.about.rows && trace.tokens.length ? true : "this trace has maps: Token strip shows its text";
  },

  measure({ trace, seen, width }) {
    return { height: textHead(trace, seen).height + textLines(trace, width).lines.length * TEXT_LINE + 16 };
  },

  draw(scene) {
    const { surface, trace, seen, theme, width, top, bottom } = scene;
    const row = passageRow(trace, seen);
    const head = textHead(trace, seen);
    const query = trace.source + seen.query;
    const values = row && row.values;
    const scale = scaleFor(theme, values ? peakOf(trace, values, seen, query) : 1, seen, values && values.some((one) => one < 0) ? "signs" : "sizes");
    const laid = textLines(trace, width);
    const own = { ...scene, row, values, head, query, scale, laid, marks: markedTokens(trace, passageFound(trace, seen.find)) };
    const first = Math.max(0, Math.floor(top / TEXT_LINE));
    const last = Math.min(laid.lines.length, Math.ceil((bottom - head.height) / TEXT_LINE));
    for (let number_ = first; number_ < last; number_++) textDrawLine(own, number_, head.height + number_ * TEXT_LINE);
    surface.rect(0, top, width, head.height, { fill: theme.paper });
    surface.hit(0, top, width, head.height, {}); // lines below it do not answer
    textDrawHead(own, first, last);
    if (row && row.missing) drawMessage(surface, theme, row.missing, width, top + head.height + 40);
  },

  minimap({ trace, seen, width }) {
    const { lines, line } = textLines(trace, width);
    const { height } = textHead(trace, seen);
    const whole = height + lines.length * TEXT_LINE + 16;
    const row = passageRow(trace, seen);
    const chosen = line[seen.token ?? trace.spokenOf(seen.query)];
    const scale = row && row.values ? scaleFor({ sizes: [[0, 0, 0], [0, 0, 0]] }, peakOf(trace, row.values, seen, trace.source + seen.query), seen) : null;
    const peaks = scale ? linePeaks(row.values, lines) : null;
    return lines.map((_, i) => ({ at: (height + (i + 0.5) * TEXT_LINE) / whole, size: peaks ? scale.part(peaks[i]) : 0, chosen: i === chosen })).filter((one) => one.chosen || one.size > 0.02);
  },

  placeOf({ trace, seen, state, width }) {
    const { line } = textLines(trace, width);
    return textHead(trace, seen).height + line[state.token ?? trace.spokenOf(state.query)] * TEXT_LINE;
  },

  covered({ trace, seen, width }) {
    return textHead(trace, seen).height;
  },

  step: passageStep,
  describe: passageDescribe,
};

const textLinePeaks = new WeakMap();

function linePeaks(values, lines) {
  const cached = textLinePeaks.get(values);
  if (cached && cached.lines === lines) return cached.peaks;
  const peaks = Float32Array.from(lines, ({ start, stop }) => {
    let peak = 0;
    for (let i = start; i < stop; i++) peak = Math.max(peak, Math.abs(values[i]));
    return peak;
  });
  textLinePeaks.set(values, { lines, peaks });
  return peaks;
}

function textDrawLine({ surface, trace, seen, theme, values, row, scale, laid, marks }, number_, y) {
  const { start, stop } = laid.lines[number_];
  const { x, wide } = laid;
  const middle = y + TEXT_LINE / 2;
  const spoken = trace.spokenOf(seen.query);
  surface.text(String(start), TEXT_EDGE + TEXT_NUMBER - 10, middle, { size: 10, fill: theme.soft, align: "right" });
  for (let i = start; i < stop; i++) {
    const word = passageWord(trace.tokens[i]);
    const value = values ? values[i] : 0;
    const itself = i === spoken;
    // Without a gap between tokens of one word, no colour of the paper shows through.
    if (values) surface.rect(x[i], y + 2, wide[i], TEXT_LINE - 4, { fill: scale.css(value) });
    if (trace.generated(i)) surface.rect(x[i], y + TEXT_LINE - 2, wide[i], 1.5, { fill: theme.accent });
    if (marks[i]) surface.rect(x[i], y + TEXT_LINE - 4, wide[i], 3, { fill: theme.select });
    if (itself || i === seen.token) surface.rect(x[i] + 0.5, y + 1.5, wide[i] - 1, TEXT_LINE - 3, { stroke: itself ? theme.select : theme.accent, line: 2 });
    const faint = /^[↵␣⇥]+$/.test(word) || trace.special[i];
    const ink = values ? scale.ink(value) : theme.ink;
    surface.text(fitted(word, wide[i], TEXT_SIZE), x[i] + wide[i] / 2, middle, { size: TEXT_SIZE, fill: ink, align: "center", opacity: faint ? 0.6 : 1 });
  }
  const low = Math.min(x[start], x[stop - 1]);
  const high = Math.max(x[start] + wide[start], x[stop - 1] + wide[stop - 1]);
  surface.hit(low, y, high - low, TEXT_LINE, (at) => {
    for (let i = start; i < stop; i++) if (at >= x[i] && at < x[i] + wide[i]) return textTarget(trace, seen, row, i);
    return null;
  });
}

/** What a token answers: a generated one has a row of its own, which shows what it draws on. */
function textTarget(trace, seen, row, token) {
  const query = trace.queryOf(token);
  const own = trace.generated(token) && trace.kept && trace.kept.includes(query);
  if (!own) return { hover: { token }, select: { token }, tip: passageTip(trace, seen, row, token) };
  return { hover: { query, token: null }, select: { query, token: null }, tip: `${passageWord(trace.tokens[token], 60)}\n${tokenPlace(trace, token)}, generated` };
}

function textDrawHead(scene, first, last) {
  const { surface, trace, seen, theme, width, top, head, scale, query, values, row } = scene;
  const room = width - 2 * TEXT_EDGE;
  const title = `${trace.measure(seen.method)}, ${layerWords(trace, seen)}${headWords(trace, seen)}${seen.log ? ", log scale" : ""}`;
  const legend = Math.min(210, room / 2);
  drawScale(surface, theme, scale, TEXT_EDGE, top + 6, fitted(title, legend + 40, 11), legend);
  const spoken = trace.spokenOf(seen.query);
  const said = `what “${passageWord(trace.tokens[spoken], 24)}” (${tokenPlace(trace, spoken)}) draws on`;
  const beside = TEXT_EDGE + legend + 60;
  if (width - beside > 140) surface.text(fitted(said, width - beside - TEXT_EDGE, 13, 600), beside, top + 22, { size: 13, fill: theme.ink, weight: 600 });
  const note = values ? beyondScale(trace, seen, values, scale.top, query) : "";
  if (note) surface.text(fitted(note, room, 11), TEXT_EDGE, top + SCALE_HEIGHT + 15, { size: 11, fill: theme.soft });
  textDrawOverview(scene, first, last);
  surface.line(0, top + head.height - 0.5, width, top + head.height - 0.5, { stroke: theme.line });
  if (row && row.lost > 0) surface.text(`left out ${percent(row.lost)}`, width - TEXT_EDGE, top + 12, { size: 11, fill: theme.soft, align: "right" });
  else if (!row && !values) surface.text("…", width - TEXT_EDGE, top + 12, { size: 11, fill: theme.soft, align: "right" });
}

const textPictures = new WeakMap();

/** The whole text at every layer: a pixel for each layer and column of tokens, by the largest weight in it. */
function textDrawOverview({ surface, trace, seen, theme, width, top, head, query, laid }, first, last) {
  const left = TEXT_EDGE + TEXT_NUMBER;
  const room = Math.max(width - left - TEXT_EDGE, 80);
  const count = trace.tokens.length;
  const columns = Math.min(count, Math.floor(room));
  const y = top + head.y;
  const text = `all ${count.toLocaleString("en")} tokens at each layer, the largest weight of each pixel; every layer has its own scale`;
  surface.text(fitted(text, room, 11), left, top + head.start + OVER_TOP / 2 + 2, { size: 11, fill: theme.soft });
  const rows = Array.from({ length: trace.layers }, (_, layer) => passageRow(trace, seen, layer));
  const picture = overviewPicture(trace, seen, theme, rows, columns, query);
  const at = (token) => left + (token / count) * room;
  surface.rect(left, y, room, head.over, { fill: theme.raised });
  if (picture) surface.image(picture, left, y, room, head.cell * trace.layers);
  const one = overLayers(seen) ? null : seen.layer;
  const every = Math.ceil(11 / head.cell); // numbers that would touch are left out
  for (let layer = 0; layer < trace.layers; layer++) {
    const chosen = layer === one;
    if (!chosen && (layer % every || (one !== null && Math.abs(layer - one) * head.cell < 10))) continue;
    surface.text(String(layer + 1), left - 8, y + (layer + 0.5) * head.cell, { size: 9, fill: chosen ? theme.accent : theme.soft, align: "right", weight: chosen ? 700 : 400 });
  }
  const [from_, tall] = one === null ? [0, trace.layers] : [one, 1];
  surface.rect(left - 1, y + from_ * head.cell - 1, room + 2, tall * head.cell + 2, { stroke: theme.select, line: 1.5 });
  const below = y + head.over;
  const places = passageFound(trace, seen.find);
  let drawnAt = -2;
  for (const [start] of places) {
    if (at(start) - drawnAt < 1) continue;
    drawnAt = at(start);
    surface.rect(drawnAt - 0.75, below + 1, 1.5, 6, { fill: theme.select });
  }
  // What is on the screen, below the head.
  const [from, to] = [laid.lines[Math.min(first, laid.lines.length - 1)].start, laid.lines[Math.max(last - 1, 0)].stop];
  surface.rect(at(from), below + 9, Math.max(at(to) - at(from), 3), 5, { fill: theme.ink, opacity: 0.55, radius: 2 });
  surface.line(left, below + 11.5, left + room, below + 11.5, { stroke: theme.line });
  if (trace.written) surface.rect(at(trace.written[0]), y - 3, Math.max(at(trace.written[1]) - at(trace.written[0]), 2), 2, { fill: theme.accent });
  for (const [token, colour] of [[trace.spokenOf(seen.query), theme.select], [seen.token, theme.accent]]) {
    if (token === null || token === undefined) continue;
    const x = at(token + 0.5);
    surface.path([[x - 4, y - 7], [x + 4, y - 7], [x, y - 1]], { fill: colour });
  }
  surface.hit(left, y, room, head.over + OVER_MARKS, (px, py) => overviewTarget({ trace, seen, rows, columns, laid, head, left, room, y }, px, py));
}

function overviewTarget({ trace, seen, rows, columns, laid, head, left, room, y }, px, py) {
  const count = trace.tokens.length;
  const place = Math.min(Math.max((px - left) / room, 0), 1 - 1e-9);
  const inside = py < y + head.cell * trace.layers;
  const layer = inside ? Math.min(Math.max(Math.floor((py - y) / head.cell), 0), trace.layers - 1) : seen.layer;
  const row = inside ? rows[layer] : passageRow(trace, seen);
  const column = Math.floor(place * columns);
  const token = row && row.values ? columnPeaks(row.values, columns)[column] : Math.floor(place * count);
  const [low, high] = [Math.floor((column * count) / columns), Math.floor(((column + 1) * count) / columns) - 1];
  const range = high > low ? `tokens ${low}–${high}` : `token ${low}`;
  const value = row && row.values ? `“${passageWord(trace.tokens[token])}” (${tokenPlace(trace, token)}) ${number(row.values[token])}\n` : "";
  const tip = `${inside ? `layer ${layer + 1}` : layerWords(trace, seen)}, ${range}\n${high > low ? "largest: " : ""}${value}… ${passageText(trace, token - 6, token + 7)} …`;
  const scrollTo = head.height + (laid.line[Math.floor(place * count)] + 0.5) * TEXT_LINE;
  return { select: inside ? { layer, token } : { token }, tip, scrollTo };
}

function overviewPicture(trace, seen, theme, rows, columns, query) {
  const here = rows.filter((row) => row && row.values).length;
  if (!here) return null;
  const key = [seen.method, seen.query, seen.head, seen.log, seen.words, theme.paper, columns, here].join("/");
  const cached = textPictures.get(trace);
  if (cached && cached.key === key && cached.last === rows.at(-1)) return cached.pixels;
  const data = new Uint8ClampedArray(4 * columns * rows.length);
  rows.forEach((row, layer) => {
    if (!row || !row.values) return;
    const { values } = row;
    const scale = scaleFor(theme, peakOf(trace, values, seen, query), seen, values.some((one) => one < 0) ? "signs" : "sizes");
    columnPeaks(values, columns).forEach((token, column) => data.set([...scale.rgb(values[token]), 255], 4 * (layer * columns + column)));
  });
  const pixels = { width: columns, height: rows.length, data };
  textPictures.set(trace, { key, pixels, last: rows.at(-1) });
  return pixels;
}
