// Pieces that several views draw: the scale with its numbers, a map as pixels, token labels.
import { scaled } from "./colour.js";
import { fitted, textWidth } from "./surface.js";
import { number, shown } from "./words.js";

/** Height of what `drawScale` draws. */
export const SCALE_HEIGHT = 34;

/** The colour scale with its numbers, so that a colour can be read as a value. */
export function drawScale(surface, theme, scale, x, y, title, width = 160) {
  const steps = 40;
  surface.text(title, x, y + 6, { size: 11, fill: theme.soft });
  for (let i = 0; i < steps; i++) {
    const colour = scale.css(scale.value((i + 0.5) / steps));
    surface.rect(x + (i * width) / steps, y + 13, width / steps + 0.5, 8, { fill: colour });
  }
  surface.rect(x, y + 13, width, 8, { stroke: theme.line });
  const middle = scale.kind === "signs" ? 0 : scale.value(0.5);
  const low = scale.kind === "signs" ? -scale.top : scale.log ? scale.top / 1000 : 0;
  const under = scale.log && scale.kind !== "signs" ? "≤ " : "";
  const [first, between, last] = [under + number(low), number(middle), number(scale.top)];
  surface.text(first, x, y + 28, { size: 10, fill: theme.soft, align: "left" });
  // On a narrow scale the number in the middle would touch its neighbours.
  const room = width / 2 - textWidth(between, 10) / 2 - 4;
  if (textWidth(first, 10) < room && textWidth(last, 10) < room) surface.text(between, x + width / 2, y + 28, { size: 10, fill: theme.soft, align: "center" });
  surface.text(last, x + width, y + 28, { size: 10, fill: theme.soft, align: "right" });
}

const drawn = new WeakMap();

/** A map of a field as pixels, one for each cell (rows × columns), or fewer where `most` pixels are enough. */
export function mapPixels(field, map, scale, most = Infinity) {
  const step = Math.max(1, Math.ceil(Math.max(field.rows, field.columns) / most));
  const key = `${map}/${step}/${scale.top}/${scale.kind}/${scale.log}/${scale.css(0)}`;
  let cache = drawn.get(field);
  if (!cache) drawn.set(field, (cache = new Map()));
  if (cache.has(key)) return cache.get(key);
  const width = Math.ceil(field.columns / step);
  const height = Math.ceil(field.rows / step);
  const data = new Uint8ClampedArray(4 * width * height);
  const best = new Float32Array(width);
  for (let i = 0; i < height; i++) {
    best.fill(0);
    // The largest of the cells that share a pixel: a mean would hide a single strong weight.
    for (let row = i * step; row < Math.min((i + 1) * step, field.rows); row++) {
      const values = field.row(map, row);
      for (let at = 0, column = 0; at < width; at++) {
        for (const stop = Math.min(column + step, field.columns); column < stop; column++) {
          if (Math.abs(values[column]) > Math.abs(best[at])) best[at] = values[column];
        }
      }
    }
    for (let j = 0; j < width; j++) {
      const colour = scale.rgb(best[j]);
      const at = 4 * (i * width + j);
      data[at] = colour[0];
      data[at + 1] = colour[1];
      data[at + 2] = colour[2];
      data[at + 3] = 255;
    }
  }
  const pixels = { width, height, data };
  if (cache.size > 24) cache.clear();
  cache.set(key, pixels);
  return pixels;
}

/** The largest values of a row: `[{ token, value }]`. */
export function strongest(values, count) {
  const largest = [];
  for (let token = 0; token < values.length; token++) {
    const size = Math.abs(values[token]);
    if (!size || (largest.length === count && size <= Math.abs(largest[count - 1].value))) continue;
    let place = largest.length;
    while (place && Math.abs(largest[place - 1].value) < size) place--;
    largest.splice(place, 0, { token, value: values[token] });
    if (largest.length > count) largest.pop();
  }
  return largest;
}

/** A token's label within a width, marked when it is chosen. */
export function drawToken(surface, theme, token, x, y, { width = 120, align = "left", size = 13, strong = false, faint = false } = {}) {
  const text = fitted(shown(token, 40), width, size, strong ? 700 : 400);
  const fill = strong ? theme.accent : faint ? theme.soft : theme.ink;
  surface.text(text, x, y, { size, fill, align, weight: strong ? 700 : 400 });
}

/** The width that the labels of some tokens need, within bounds. */
export function labelWidth(tokens, { size = 13, least = 40, most = 150 } = {}) {
  let wide = least;
  const step = Math.max(1, Math.floor(tokens.length / 300)); // a sample of a long text is enough
  for (let i = 0; i < tokens.length && wide < most; i += step) wide = Math.max(wide, textWidth(shown(tokens[i], 40), size, 700));
  return Math.min(wide, most);
}

/** A text in lines that fit a width. */
export function noteLines(text, width, size = 11, weight = 400) {
  const lines = [];
  for (const word of String(text).split(" ")) {
    const last = lines[lines.length - 1];
    if (last !== undefined && textWidth(`${last} ${word}`, size, weight) <= width) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
  }
  return lines;
}

/** A note in soft ink, wrapped; returns the height it takes. */
export function drawNote(surface, theme, text, x, y, width, { size = 11, align = "left" } = {}) {
  const lines = noteLines(text, width, size);
  lines.forEach((line, i) => surface.text(line, x, y + (size + 4) * (i + 0.5), { size, fill: theme.soft, align }));
  return lines.length * (size + 4);
}

/** A message in the middle of a view that has nothing else to show. */
export function drawMessage(surface, theme, text, width, y = 60) {
  const look = { size: 14, fill: theme.soft, align: "center" };
  noteLines(text, width - 40, 14).forEach((line, i) => surface.text(line, width / 2, y + 22 * i, look));
}

/** Height of what `drawMessage` draws. */
export function messageHeight(text, width) {
  return 22 * noteLines(text, width - 40, 14).length;
}

/**
 * The largest size among values; with the selection's `words` on, without special tokens, the first token of a long
 * text and the query itself, which often dwarf the others. Larger values then get the strongest colour too.
 */
export function peakOf(trace, values, seen, query = null) {
  let peak = 0;
  let rest = 0;
  for (let i = 0; i < values.length; i++) {
    const size = Math.abs(values[i]);
    if (size > rest) rest = size;
    if (seen.words && (trace.aside(i) || i === query)) continue;
    if (size > peak) peak = size;
  }
  return peak || rest;
}

/**
 * Whether a view scales a trace by its words: as the reader chose; by default, if a special token would leave them all
 * pale.
 */
export function scaledByWords(view, trace, { words }) {
  return words ?? Boolean(view.byWords && trace.drowned);
}

/** If the scale is that of the words: why, and how larger values are drawn. Otherwise empty. */
export function wordsNote(trace, seen) {
  const query = trace.source + seen.query;
  // Without words there is nothing to scale by, and `peakOf` uses all tokens.
  const has = (wanted) => trace.tokens.some((_, i) => trace.aside(i) === wanted && (wanted || i !== query));
  if (!seen.words || !has(true) || !has(false)) return "";
  const rest = "larger values are drawn like the end of the scale";
  if (!trace.drowned) return `Scaled by words: ${rest}.`;
  const { method, token, special, word, averaged } = trace.drowned;
  const main = trace.source + trace.main;
  const drawn = token === main ? "itself" : `“${shown(trace.tokens[token])}”`;
  const others = trace.about.grid && !trace.source ? "patches" : trace.sink >= 0 ? "other tokens" : "words";
  const why = `by ${trace.method(method).title} “${shown(trace.tokens[main])}” draws on ${drawn} with ${number(special)} ${averaged ? "in the mean of layers" : `at layer ${trace.layers}`}, on ${others} with at most ${number(word)}`;
  return `Scaled by words: ${why}; ${rest}.`;
}

/** The scale for values of a kind under the selection's choice of linear or logarithmic. */
export function scaleFor(theme, top, seen, kind = "sizes") {
  return scaled(theme, top, { kind, log: Boolean(seen.log) });
}
