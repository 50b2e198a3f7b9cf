// Pictures in the prompt of a language model: their patches by what a word draws on, over each picture, side by side.
import { IMAGE_COVER, imageGrey, imageLoaded } from "./image.js";
import { drawNote, drawScale, SCALE_HEIGHT, scaleFor } from "./parts.js";
import { headWords, layerWords, overLayers, passageRow, passageWord, ranking, rankWords, shareWords, spokenWords } from "./passage.js";
import { fitted, textWidth } from "./surface.js";
import { mostlyRightToLeft, number, tokenPlace, weightWords } from "./words.js";

const PICTURES_EDGE = 14;
const PICTURES_GAP = 18;
const PICTURES_CHIP = 24; // height of a word
const PICTURES_TITLE = 20; // line above a picture
const PICTURES_LARGEST = 520;
const PICTURES_LEAST = 240; // width from which on two are side by side
const PICTURES_BARS = 40; // height of the shares by layer

const picturesLaid = new WeakMap();
const picturesCovers = new WeakMap();

/** The words that have rows, which can be pointed at: those that were generated. */
function picturesWords(trace) {
  return trace.written && trace.kept ? trace.kept.filter((query) => trace.generated(trace.spokenOf(query))) : [];
}

/** What a panel covers, as shares of its picture: more than the picture where tiles were padded. */
export function picturesBounds({ tiles }) {
  const sides = (place, pick, first) => tiles.reduce((found, { box }) => pick(found, box[place]), first);
  return [sides(0, Math.min, 0), sides(1, Math.min, 0), sides(2, Math.max, 1), sides(3, Math.max, 1)];
}

function picturesLayout(trace, width) {
  const cached = picturesLaid.get(trace);
  if (cached && cached.width === width) return cached;
  const room = Math.max(width - 2 * PICTURES_EDGE, 160);
  const words = picturesWords(trace);
  const right = mostlyRightToLeft(words.map((query) => trace.tokens[trace.spokenOf(query)]));
  const chips = [];
  let x = 0;
  let y = SCALE_HEIGHT + 38;
  for (const query of words) {
    const token = trace.spokenOf(query);
    const wide = Math.min(textWidth(passageWord(trace.tokens[token]), 13, 700) + 10, room);
    if (x + wide > room && x > 0) {
      x = 0;
      y += PICTURES_CHIP + 2;
    }
    chips.push({ query, token, x: PICTURES_EDGE + (right ? room - x - wide : x), y, wide });
    x += wide + 2;
  }
  const bars = (words.length ? y + PICTURES_CHIP + 12 : y) + 16;
  const start = bars + PICTURES_BARS + 26;
  const { panels } = trace.about.pictures;
  const columns = Math.max(1, Math.min(panels.length, Math.floor((room + PICTURES_GAP) / (PICTURES_LEAST + PICTURES_GAP))));
  const side = Math.min((room - (columns - 1) * PICTURES_GAP) / columns, PICTURES_LARGEST);
  let top = start;
  let tallest = 0;
  const places = panels.map((panel, i) => {
    if (i && i % columns === 0) {
      top += tallest + PICTURES_TITLE + 34;
      tallest = 0;
    }
    const bounds = picturesBounds(panel);
    const [high, wide] = [panel.size[0] * (bounds[3] - bounds[1]), panel.size[1] * (bounds[2] - bounds[0])];
    const grow = side / Math.max(high, wide);
    tallest = Math.max(tallest, high * grow);
    return { panel, bounds, x: PICTURES_EDGE + (i % columns) * (side + PICTURES_GAP), y: top + PICTURES_TITLE, width: wide * grow, height: high * grow, side };
  });
  const layout = { width, room, chips, bars, places, height: top + PICTURES_TITLE + tallest + 40 };
  picturesLaid.set(trace, layout);
  return layout;
}

/** How much of a row is on some panels' patches; NaN where weights may be negative. */
export function picturesShare(values, panels) {
  let whole = 0;
  for (const value of values) {
    if (value < 0) return NaN;
    whole += value;
  }
  let inside = 0;
  for (const { tiles } of panels) for (const { start, rows, columns } of tiles) for (let i = start; i < start + rows * columns; i++) inside += values[i];
  return whole > 0 ? inside / whole : 0;
}

function picturesPeak(values, panels) {
  let peak = 0;
  for (const { tiles } of panels) for (const { start, rows, columns } of tiles) for (let i = start; i < start + rows * columns; i++) peak = Math.max(peak, Math.abs(values[i]));
  return peak;
}

/** A patch of the panels in words, or null: its picture, row and column, counted from 1. */
export function patchWords({ panels }, token) {
  for (const { name, tiles } of panels) {
    for (const [number_, { start, rows, columns }] of tiles.entries()) {
      const at = token - start;
      if (token === null || at < 0 || at >= rows * columns) continue;
      const tile = tiles.length > 1 ? `, tile ${number_ + 1}` : "";
      return `${name}${tile}, row ${Math.floor(at / columns) + 1}, column ${(at % columns) + 1}`;
    }
  }
  return null;
}

export const picturesView = {
  id: "pictures",
  title: "Pictures",
  controls: ["query", "method", "layer", "averaged", "head", "log"],

  applies(trace) {
    if (trace.about.pictures && trace.methods.length) return true;
    return (trace.about.missing && trace.about.missing.pictures) || "there are no pictures in this trace’s prompt";
  },

  measure({ trace, width }) {
    return { height: picturesLayout(trace, width).height };
  },

  draw({ surface, trace, seen, theme, width, top, bottom, redraw }) {
    const layout = picturesLayout(trace, width);
    const { panels, photos } = trace.about.pictures;
    const row = passageRow(trace, seen);
    const values = row && row.values;
    const signed = Boolean(values) && values.some((one) => one < 0);
    const scale = scaleFor(theme, values ? picturesPeak(values, panels) : 1, seen, signed ? "signs" : "sizes");
    const title = `${trace.measure(seen.method)} of a patch, ${layerWords(trace, seen)}${headWords(trace, seen)}${seen.log ? ", log scale" : ""}`;
    drawScale(surface, theme, scale, PICTURES_EDGE, 6, fitted(title, layout.room, 11), Math.min(220, layout.room));
    const share = values ? picturesShare(values, panels) : NaN;
    const on = Number.isNaN(share) ? "" : `: ${shareWords(share)} of the row is on ${panels.length > 1 ? "pictures" : "the picture"}`;
    surface.text(fitted(`what ${spokenWords(trace, seen.query, 24)} draws on${on}`, layout.room, 13, 600), PICTURES_EDGE, SCALE_HEIGHT + 20, { size: 13, fill: theme.ink, weight: 600 });
    const scene = { surface, trace, seen, theme, layout, scale, row, values, top, bottom };
    picturesDrawWords(scene);
    picturesDrawLayers(scene, panels);
    for (const place of layout.places) {
      if (place.y - PICTURES_TITLE > bottom || place.y + place.height + 20 < top) continue;
      const photo = place.panel.photo === null ? null : photos[place.panel.photo];
      picturesDrawPanel(scene, place, photo && imageLoaded(photo, photo.link, redraw));
    }
    if (row && row.missing) drawNote(surface, theme, row.missing, PICTURES_EDGE, layout.places[0].y + 20, layout.room, { size: 12 });
  },

  placeOf({ trace, state, width }) {
    const { chips } = picturesLayout(trace, width);
    const chip = chips.find(({ query }) => query === state.query);
    return chip ? chip.y : NaN;
  },

  minimap: false,

  describe({ trace, seen }) {
    const row = passageRow(trace, seen);
    if (!row || !row.values) return null;
    const { pictures } = trace.about;
    const named = (token) => patchWords(pictures, token) || `“${passageWord(trace.tokens[token])}” (${tokenPlace(trace, token)})`;
    const what = `${trace.named(seen.method)}, ${layerWords(trace, seen)}${headWords(trace, seen)}, of ${spokenWords(trace, seen.query)}`;
    if (seen.token !== null && seen.token !== undefined) return `${named(seen.token)}: ${rankWords(row.values, seen.token)} · ${what}`;
    const most = Array.from(ranking(row.values).order.subarray(0, 3), (token) => `${named(token)} ${number(row.values[token])}`).join("; ");
    const shares = pictures.panels.map((panel) => `${panel.name} ${shareWords(picturesShare(row.values, [panel]))}`);
    return `${what}: ${row.values.some((one) => one < 0) ? "" : `${shares.join(", ")} of the row; `}most from ${most}`;
  },
};

/** What was generated, word by word: point at one to see what it draws on. */
function picturesDrawWords({ surface, trace, seen, theme, layout, top, bottom }) {
  for (const { query, token, x, y, wide } of layout.chips) {
    if (y > bottom || y + PICTURES_CHIP < top) continue;
    const chosen = query === seen.query;
    const word = passageWord(trace.tokens[token]);
    if (chosen) surface.rect(x, y, wide, PICTURES_CHIP - 2, { fill: theme.raised, radius: 4, stroke: theme.select, line: 2 });
    surface.text(fitted(word, wide - 6, 13, chosen ? 700 : 400), x + wide / 2, y + PICTURES_CHIP / 2 - 1, { size: 13, fill: theme.ink, align: "center", weight: chosen ? 700 : 400 });
    if (!chosen) surface.rect(x + 3, y + PICTURES_CHIP - 3, wide - 6, 1.5, { fill: theme.accent });
    const here = { query, token: null };
    surface.hit(x, y, wide, PICTURES_CHIP, { hover: here, select: here, tip: `${word}\ntoken ${token}, generated` });
  }
}

/** How much of the row is on pictures at each layer; point at a layer to see it. */
function picturesDrawLayers({ surface, trace, seen, theme, layout, values }, panels) {
  const left = PICTURES_EDGE;
  const wide = Math.min(16, layout.room / Math.max(trace.layers, 1));
  surface.text(fitted("share of the row on pictures, by layer", layout.room, 11), left, layout.bars - 8, { size: 11, fill: theme.soft });
  surface.rect(left, layout.bars, wide * trace.layers, PICTURES_BARS, { fill: theme.raised });
  if (values && values.some((one) => one < 0)) return;
  const one = overLayers(seen) ? null : seen.layer;
  for (let layer = 0; layer < trace.layers; layer++) {
    const row = passageRow(trace, seen, layer);
    const share = row && row.values ? picturesShare(row.values, panels) : NaN;
    const tall = Number.isNaN(share) ? 0 : share * PICTURES_BARS;
    const gap = wide > 4 ? 1 : 0;
    if (tall) surface.rect(left + layer * wide + gap, layout.bars + PICTURES_BARS - tall, wide - gap, tall, { fill: layer === one ? theme.select : theme.edge });
    const tip = `layer ${layer + 1}${Number.isNaN(share) ? "" : `: ${shareWords(share)} of the row is on pictures`}`;
    surface.hit(left + layer * wide, layout.bars, wide, PICTURES_BARS, { hover: { layer, averaged: false }, select: { layer }, tip });
  }
  const every = Math.ceil(16 / wide);
  for (let layer = 0; layer < trace.layers; layer++) {
    if (layer !== one && (layer % every || (one !== null && Math.abs(layer - one) < every))) continue;
    const look = layer === one ? { fill: theme.accent, weight: 700 } : { fill: theme.soft };
    surface.text(String(layer + 1), left + (layer + 0.5) * wide, layout.bars + PICTURES_BARS + 8, { size: 9, align: "center", ...look });
  }
}

function picturesDrawPanel({ surface, trace, seen, theme, layout, scale, row, values }, place, photo) {
  const { panel, bounds, x, y, width, height, side } = place;
  const [wide, tall] = [width / (bounds[2] - bounds[0]), height / (bounds[3] - bounds[1])];
  const at = (box) => [x + (box[0] - bounds[0]) * wide, y + (box[1] - bounds[1]) * tall, (box[2] - box[0]) * wide, (box[3] - box[1]) * tall];
  surface.text(fitted(panel.name, side, 12, 600), x, y - 10, { size: 12, fill: theme.ink, weight: 600 });
  surface.rect(x, y, width, height, { fill: theme.raised });
  if (photo) {
    const grey = imageGrey(photo);
    if (grey) surface.image(grey, ...at([0, 0, 1, 1]), { smooth: true });
    else surface.picture(photo.element, ...at([0, 0, 1, 1]), { opacity: 1 - IMAGE_COVER });
  }
  for (const tile of panel.tiles) {
    const [left, top, w, h] = at(tile.box);
    if (values) surface.image(picturesCover(tile, values, scale, photo ? IMAGE_COVER : 1), left, top, w, h);
    else surface.rect(left, top, w, h, { fill: theme.paper, opacity: IMAGE_COVER });
    surface.rect(left, top, w, h, { stroke: theme.line });
    const [cellWide, cellTall] = [w / tile.columns, h / tile.rows];
    const marked = seen.token === null || seen.token === undefined ? -1 : seen.token - tile.start;
    if (marked >= 0 && marked < tile.rows * tile.columns) {
      const [cx, cy] = [left + (marked % tile.columns) * cellWide, top + Math.floor(marked / tile.columns) * cellTall];
      // A light and a strong line: visible on any colour.
      surface.rect(cx - 1, cy - 1, cellWide + 2, cellTall + 2, { stroke: theme.paper, line: 4, opacity: 0.8 });
      surface.rect(cx - 1, cy - 1, cellWide + 2, cellTall + 2, { stroke: theme.accent, line: 1.6 });
    }
    if (!values) continue;
    surface.hit(left, top, w, h, (px, py) => {
      const i = Math.min(Math.max(Math.floor((py - top) / cellTall), 0), tile.rows - 1);
      const j = Math.min(Math.max(Math.floor((px - left) / cellWide), 0), tile.columns - 1);
      const token = tile.start + i * tile.columns + j;
      const tip = `${patchWords({ panels: [panel] }, token)} (token ${token})\n${trace.named(seen.method)}, ${layerWords(trace, seen)}: ${weightWords(values[token])}`;
      return { hover: { token }, select: { token }, tip };
    });
  }
  if (!values) return;
  const share = picturesShare(values, [panel]);
  const cut = panel.tiles.length === 1 && panel.tiles[0].box.some((one, i) => (i < 2 ? one > 0 : one < 1)) ? "; the model saw the middle only" : "";
  const said = Number.isNaN(share) ? "weights may be negative" : `${shareWords(share)} of the row${cut}`;
  surface.text(fitted(said, side, 11), x, y + height + 12, { size: 11, fill: theme.soft });
}

/** Weights as pixels, one for each patch. */
function picturesCover({ start, rows, columns }, values, scale, opacity) {
  let cache = picturesCovers.get(values);
  if (!cache) picturesCovers.set(values, (cache = new Map()));
  const key = [start, scale.top, scale.kind, scale.log, scale.css(0), opacity].join("/");
  if (cache.has(key)) return cache.get(key);
  const data = new Uint8ClampedArray(4 * rows * columns);
  for (let i = 0; i < rows * columns; i++) data.set([...scale.rgb(values[start + i]), Math.round(255 * opacity)], 4 * i);
  const pixels = { width: columns, height: rows, data };
  cache.set(key, pixels);
  return pixels;
}
