// A caption word by word over its picture, the prior beside the posterior (Fan et al. 2020, Figure 1), and the spread of
// both weights and words over draws. Pictures under weights are grey, as in image.js.
import { imageGrey, imageOf } from "./image.js";
import { drawNote, drawScale, SCALE_HEIGHT, scaleFor, strongest } from "./parts.js";
import { fitted, textWidth } from "./surface.js";
import { number, percent, shown } from "./words.js";

const CAPTION_EDGE = 16;
const CAPTION_CHIP = 28; // height of a word
const CAPTION_LINE = 48; // of a line of words, with their probabilities
const CAPTION_TITLE = 24;
const CAPTION_GAP = 18;
const CAPTION_LARGEST = 300;
const CAPTION_SMALL = 148; // most and least of the small pictures
const CAPTION_SMALLEST = 108;
const CAPTION_COVER = 0.72; // opacity of the weights
const CAPTION_ROW = 22;
const CAPTION_WIDE = 760;

const captionLayouts = new WeakMap();
const captionCovers = new WeakMap();

/** The large pictures: `[{ id, title, values, kind }]`; those that the model has nothing for are left out. */
export function captionPanels(trace, query) {
  const { weights, prior, spread, samples } = trace.about.caption;
  const word = `“${shown(trace.tokens[query], 24)}”`;
  return [
    { id: "picture", title: "The picture, as the network sees it", values: null },
    ...(prior ? [{ id: "prior", title: "Prior: before any word", values: prior, kind: "sizes" }] : []),
    ...(weights ? [{ id: "posterior", title: `${prior ? "Posterior" : "Attention"}: ${word}`, values: weights[query], kind: "sizes" }] : []),
    ...(spread ? [{ id: "spread", title: `Spread of ${samples} draws: ${word}`, values: spread[query], kind: "spreads" }] : []),
  ];
}

/** The largest weight of all words and of the prior, and the largest spread: one scale each for the whole page. */
function captionPeaks({ weights, prior, spread }) {
  const most = (rows) => rows.reduce((peak, row) => row.reduce((high, value) => Math.max(high, value), peak), 0);
  return { sizes: most([...(weights || []), ...(prior ? [prior] : [])]) || 1, spreads: most(spread || []) || 1 };
}

function captionLayout(trace, width) {
  const cached = captionLayouts.get(trace);
  if (cached && cached.width === width) return cached;
  const [high, wide] = trace.about.image;
  const room = Math.max(width - 2 * CAPTION_EDGE, 200);
  const chips = [];
  let x = 0;
  let y = 34;
  trace.tokens.forEach((token, at) => {
    const across = Math.min(Math.max(textWidth(shown(token, 24), 15, 700) + 22, 44), room);
    if (x && x + across > room) {
      x = 0;
      y += CAPTION_LINE;
    }
    chips.push({ at, x: CAPTION_EDGE + x, y, wide: across });
    x += across + 8;
  });
  const start = y + CAPTION_LINE + 10;
  const count = captionPanels(trace, 0).length;
  const columns = width >= CAPTION_WIDE ? count : Math.min(count, 2);
  const side = Math.min((room - (columns - 1) * CAPTION_GAP) / columns, CAPTION_LARGEST);
  const tall = (side * high) / wide;
  const panels = Array.from({ length: count }, (_, i) => ({
    x: CAPTION_EDGE + (i % columns) * (side + CAPTION_GAP),
    y: start + CAPTION_TITLE + Math.floor(i / columns) * (tall + CAPTION_TITLE + SCALE_HEIGHT + CAPTION_GAP),
    width: side,
    height: tall,
  }));
  const below = panels[count - 1].y + tall + SCALE_HEIGHT + 26;
  const strip = trace.about.caption.weights ? trace.tokens.length + (trace.about.caption.prior ? 1 : 0) : 0;
  const least = Math.max(CAPTION_SMALLEST, Math.min(CAPTION_SMALL, (room - 7 * 12) / 8));
  const perLine = Math.max(1, Math.floor((room + 12) / (least + 12)));
  const each = Math.min(CAPTION_SMALL, (room - (perLine - 1) * 12) / perLine);
  const low = (each * high) / wide;
  const smalls = Array.from({ length: strip }, (_, i) => ({
    at: i - (trace.about.caption.prior ? 1 : 0), // −1 is the prior
    x: CAPTION_EDGE + (i % perLine) * (each + 12),
    y: below + CAPTION_TITLE + Math.floor(i / perLine) * (low + 34) + 16,
    width: each,
    height: low,
  }));
  const lists = smalls.length ? smalls[smalls.length - 1].y + low + 30 : below;
  const beside = width >= CAPTION_WIDE;
  const words = trace.about.caption.others[0].length;
  const draws = trace.about.caption.draws.length;
  const half = beside ? (room - 2 * CAPTION_GAP) / 2 : room;
  const second = beside ? { x: CAPTION_EDGE + half + 2 * CAPTION_GAP, y: lists } : { x: CAPTION_EDGE, y: lists + CAPTION_TITLE + words * CAPTION_ROW + 34 };
  const end = Math.max(lists + CAPTION_TITLE + words * CAPTION_ROW + 22, draws ? second.y + CAPTION_TITLE + draws * CAPTION_ROW : 0);
  const layout = { width, room, chips, start, panels, below, smalls, lists, half, second, height: end + 20 };
  captionLayouts.set(trace, layout);
  return layout;
}

/** Weights as pixels, one for each region. */
function captionCover(trace, key, values, scale, opacity) {
  let cache = captionCovers.get(trace);
  if (!cache) captionCovers.set(trace, (cache = new Map()));
  const full = `${key}/${scale.top}/${scale.kind}/${scale.log}/${scale.css(0)}/${opacity}`;
  if (cache.has(full)) return cache.get(full);
  const [rows, columns] = trace.about.grid;
  const data = new Uint8ClampedArray(4 * rows * columns);
  for (let i = 0; i < rows * columns; i++) data.set([...scale.rgb(values[i]), Math.round(255 * opacity)], 4 * i);
  if (cache.size > 256) cache.clear();
  const pixels = { width: columns, height: rows, data };
  cache.set(full, pixels);
  return pixels;
}

/** A region in words, by its row and column from the upper left. */
function captionRegion(trace, region) {
  const columns = trace.about.grid[1];
  return `row ${Math.floor(region / columns) + 1}, column ${(region % columns) + 1}`;
}

/** All that is known of a region at a word. */
export function captionFacts(trace, query, region) {
  const { weights, prior, spread, samples } = trace.about.caption;
  const facts = [captionRegion(trace, region)];
  if (prior) facts.push(`prior: ${number(prior[region])}`);
  if (weights) facts.push(`${prior ? "posterior" : "attention"} of “${shown(trace.tokens[query], 24)}”: ${number(weights[query][region])}`);
  if (spread) facts.push(`spread of ${samples} draws: ${number(spread[query][region])}`);
  return facts.join("\n");
}

export const captionView = {
  id: "caption",
  title: "Caption",
  controls: ["query", "log"],

  applies(trace) {
    return trace.about.caption ? true : "this trace is not of a caption: overt caption IMAGE --model FOLDER --out page.html makes one";
  },

  measure({ trace, width }) {
    return { height: captionLayout(trace, width).height };
  },

  draw(scene) {
    const { surface, trace, seen, theme, width, redraw } = scene;
    const layout = captionLayout(trace, width);
    const { caption } = trace.about;
    const peaks = captionPeaks(caption);
    const scales = { sizes: scaleFor(theme, peaks.sizes, seen), spreads: scaleFor(theme, peaks.spreads, seen, "spreads") };
    const query = Math.min(seen.query, trace.tokens.length - 1);
    const own = { ...scene, layout, scales, query, region: seen.node, picture: imageOf(trace, redraw) };
    surface.text(fitted(caption.model, layout.room, 12), CAPTION_EDGE, 16, { size: 12, fill: theme.soft });
    captionDrawWords(own);
    captionPanels(trace, query).forEach((panel, i) => captionDrawPanel(own, panel, layout.panels[i]));
    captionDrawStrip(own);
    captionDrawOthers(own);
    captionDrawDraws(own);
  },

  minimap({ trace, seen, width }) {
    const { smalls, height } = captionLayout(trace, width);
    return smalls.map((place) => ({ at: (place.y + place.height / 2) / height, size: 0.5, chosen: place.at === seen.query }));
  },

  describe({ trace, seen }) {
    const { weights, prior, probabilities } = trace.about.caption;
    const query = Math.min(seen.query, trace.tokens.length - 1);
    const start = `“${shown(trace.tokens[query], 30)}”, word ${query + 1} of ${trace.tokens.length}, probability ${number(probabilities[query])}`;
    if (!weights) return `${start}; the network sees no picture`;
    if (seen.node !== null && seen.node < weights[query].length) return `${start}; ${captionFacts(trace, query, seen.node).replaceAll("\n", " · ")}`;
    const most = strongest(weights[query], 4).map((one) => `${captionRegion(trace, one.token)} ${number(one.value)}${prior ? ` (prior ${number(prior[one.token])})` : ""}`);
    return `${start}; draws on ${most.join(" · ")}`;
  },
};

/** The caption's words; the width of the line below one is its probability. */
function captionDrawWords({ surface, trace, theme, layout, query }) {
  const { probabilities, ended } = trace.about.caption;
  for (const { at, x, y, wide } of layout.chips) {
    const chosen = at === query;
    const end = ended && at === trace.tokens.length - 1; // the end is no word
    surface.rect(x, y, wide, CAPTION_CHIP, { fill: chosen ? theme.ink : theme.raised, radius: 7, stroke: chosen ? null : theme.line });
    const ink = chosen ? theme.paper : end ? theme.soft : theme.ink;
    surface.text(fitted(shown(trace.tokens[at], 24), wide - 12, 15, chosen ? 700 : 500), x + wide / 2, y + CAPTION_CHIP / 2, { size: 15, fill: ink, align: "center", weight: chosen ? 700 : 500 });
    surface.rect(x + 4, y + CAPTION_CHIP + 3, wide - 8, 3, { fill: theme.line, radius: 1.5 });
    surface.rect(x + 4, y + CAPTION_CHIP + 3, Math.max((wide - 8) * probabilities[at], 1), 3, { fill: theme.edge, radius: 1.5 });
    surface.text(percent(probabilities[at]), x + wide / 2, y + CAPTION_CHIP + 13, { size: 10, fill: theme.soft, align: "center" });
    surface.hit(x, y, wide, CAPTION_LINE - 6, { hover: { query: at }, select: { query: at }, tip: `${shown(trace.tokens[at], 120)}\nprobability ${number(probabilities[at])}` });
  }
}

/** The picture in grey, or as it is without values, and values over it. */
function captionDrawPicture(scene, place, values, key, kind) {
  const { surface, trace, theme, scales, picture } = scene;
  const { x, y, width, height } = place;
  surface.rect(x, y, width, height, { fill: theme.raised });
  if (picture && !values) surface.picture(picture.element, x, y, width, height);
  else if (picture) {
    const grey = imageGrey(picture);
    if (grey) surface.image(grey, x, y, width, height, { smooth: true });
  }
  if (values) surface.image(captionCover(trace, key, values, scales[kind], picture ? CAPTION_COVER : 1), x, y, width, height);
}

/** The chosen region: visible on any colour. */
function captionDrawMark({ surface, trace, theme, region }, place, line) {
  const [rows, columns] = trace.about.grid;
  if (region === null || region === undefined || region >= rows * columns) return;
  const [tall, wide] = [place.height / rows, place.width / columns];
  const x = place.x + (region % columns) * wide;
  const y = place.y + Math.floor(region / columns) * tall;
  surface.rect(x, y, wide, tall, { stroke: theme.paper, line: line + 2, opacity: 0.8 });
  surface.rect(x, y, wide, tall, { stroke: theme.select, line });
}

function captionRegionAt(trace, place, x, y) {
  const [rows, columns] = trace.about.grid;
  const row = Math.min(Math.max(Math.floor(((y - place.y) / place.height) * rows), 0), rows - 1);
  const column = Math.min(Math.max(Math.floor(((x - place.x) / place.width) * columns), 0), columns - 1);
  return row * columns + column;
}

function captionDrawPanel(scene, panel, place) {
  const { surface, trace, theme, scales, query, state } = scene;
  const { x, y, width, height } = place;
  surface.text(fitted(panel.title, width, 13, 600), x, y - 12, { size: 13, fill: theme.ink, weight: 600 });
  captionDrawPicture(scene, place, panel.values, `${panel.id}/${query}`, panel.kind);
  captionDrawMark(scene, place, 2);
  surface.rect(x, y, width, height, { stroke: theme.line });
  if (panel.values) {
    const what = panel.kind === "spreads" ? "standard deviation of a region’s weight" : "a region’s weight";
    drawScale(surface, theme, scales[panel.kind], x, y + height + 8, fitted(what, width, 11), Math.min(160, width));
  }
  surface.hit(x, y, width, height, (px, py) => {
    const region = captionRegionAt(trace, place, px, py);
    return { hover: { node: region }, select: { node: state.node === region ? null : region }, tip: captionFacts(trace, query, region) };
  });
}

/** All words, one small picture each, after the prior. */
function captionDrawStrip(scene) {
  const { surface, trace, theme, layout, query, top, bottom } = scene;
  const { weights, prior, probabilities } = trace.about.caption;
  if (!layout.smalls.length) return;
  surface.text("Word by word", CAPTION_EDGE, layout.below, { size: 13, fill: theme.ink, weight: 600 });
  for (const place of layout.smalls) {
    const { at, x, y, width, height } = place;
    if (y - 20 > bottom || y + height < top) continue;
    const chosen = at === query;
    const word = at < 0 ? "prior" : shown(trace.tokens[at], 24);
    surface.text(fitted(word, width - 36, 12, chosen ? 700 : 500), x, y - 9, { size: 12, fill: at < 0 ? theme.soft : chosen ? theme.accent : theme.ink, weight: chosen ? 700 : 500 });
    if (at >= 0) surface.text(percent(probabilities[at]), x + width, y - 9, { size: 10, fill: theme.soft, align: "right" });
    captionDrawPicture(scene, place, at < 0 ? prior : weights[at], `small/${at}`, "sizes");
    captionDrawMark(scene, place, 1);
    surface.rect(x, y, width, height, { stroke: chosen ? theme.select : theme.line, line: chosen ? 2.5 : 1 });
    if (at >= 0) surface.hit(x, y - 18, width, height + 18, { hover: { query: at }, select: { query: at } });
  }
}

/** The likeliest words at this place, with their spread over draws. */
function captionDrawOthers(scene) {
  const { surface, trace, theme, layout, query } = scene;
  const { others, samples } = trace.about.caption;
  const { lists, half } = layout;
  surface.text(fitted(`Likeliest words in place of “${shown(trace.tokens[query], 24)}”`, half, 13, 600), CAPTION_EDGE, lists, { size: 13, fill: theme.ink, weight: 600 });
  const named = Math.min(130, 0.32 * half);
  const said = samples ? 104 : 56;
  const room = Math.max(half - named - said - 10, 30);
  others[query].forEach(([word, probability, spread], i) => {
    const y = lists + CAPTION_TITLE - 6 + i * CAPTION_ROW;
    const middle = y + CAPTION_ROW / 2;
    const own = word === trace.tokens[query];
    const at = (value) => CAPTION_EDGE + named + room * Math.min(Math.max(value, 0), 1);
    surface.text(fitted(shown(word, 24), named - 10, 12, own ? 700 : 400), CAPTION_EDGE, middle, { size: 12, fill: own ? theme.accent : theme.ink, weight: own ? 700 : 400 });
    surface.rect(at(0), y + 5, room, CAPTION_ROW - 10, { fill: theme.raised, radius: 2 });
    surface.rect(at(0), y + 5, Math.max(at(probability) - at(0), 1), CAPTION_ROW - 10, { fill: theme.edge, opacity: own ? 1 : 0.55, radius: 2 });
    if (spread) {
      surface.line(at(probability - spread), middle, at(probability + spread), middle, { stroke: theme.select, line: 1.5 });
      for (const end of [probability - spread, probability + spread]) surface.line(at(end), middle - 4, at(end), middle + 4, { stroke: theme.select, line: 1.5 });
    }
    surface.text(spread === null ? percent(probability) : `${percent(probability)} ± ${(100 * spread).toFixed(1)}`, at(1) + 8, middle, { size: 11, fill: theme.soft });
  });
}

/** The captions that draws of the weights lead to. */
function captionDrawDraws(scene) {
  const { surface, trace, theme, layout } = scene;
  const { draws, samples } = trace.about.caption;
  if (!draws.length) {
    if (layout.half < layout.room) drawNote(surface, theme, "The weights of this model are not random: every pass gives the same caption.", layout.second.x, layout.second.y - 6, layout.half, { size: 12 });
    return;
  }
  const { x, y } = layout.second;
  const width = layout.half;
  const kinds = draws.length === 1 ? "all alike" : `${draws.length} different`;
  surface.text(`Captions of ${samples} draws, ${kinds}`, x, y, { size: 13, fill: theme.ink, weight: 600 });
  draws.forEach(([text, count, same], i) => {
    const middle = y + CAPTION_TITLE - 6 + (i + 0.5) * CAPTION_ROW;
    surface.rect(x, middle - 6, Math.max((34 * count) / samples, 1), 12, { fill: theme.edge, opacity: same ? 1 : 0.55, radius: 2 });
    surface.text(`${count} ×`, x + 66, middle, { size: 11, fill: theme.soft, align: "right" });
    surface.text(fitted(shown(text, 160), width - 78, 12, same ? 700 : 400), x + 78, middle, { size: 12, fill: theme.ink, weight: same ? 700 : 400 });
    surface.hit(x, middle - CAPTION_ROW / 2, width, CAPTION_ROW, { tip: `${shown(text, 400)}\n${count} of ${samples} draws${same ? ", as with their mean" : ""}` });
  });
}
