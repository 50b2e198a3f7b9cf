// A caption word by word over its picture, the prior beside the posterior (Fan et al. 2020, Figure 1), and the spread of
// both weights and words over draws. Weights have the colours of their scale; the picture is drawn over them as shades.
import { imageOf } from "./image.js";
import { drawNote, drawScale, noteLines, SCALE_HEIGHT, scaleFor, strongest } from "./parts.js";
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
const CAPTION_TALLEST = 1.3; // height of a picture, in widths of its place
const CAPTION_FLATTEST = 4; // a longer strip would be too thin to read
const CAPTION_SHADE = 0.5; // how much of a picture's contrast its shades have
const CAPTION_DARKEST = 0.32; // most of a shade
const CAPTION_ROW = 22;
const CAPTION_TEXT = 17; // height of a line of a draw's caption
const CAPTION_HEAD = 20; // of a line of the caption itself
const CAPTION_WIDE = 760;
const CAPTION_CUT = "… (cut)"; // after a draw's caption that has no end

const captionLayouts = new WeakMap();
const captionCovers = new WeakMap();
const captionShades = new WeakMap();

/**
 * The large pictures: `[{ id, titles, values, kind, lacks }]`, with titles from long to short. What the model has nothing
 * for is left out, unless a caption beside it has it: then its place says what is lacking.
 */
export function captionPanels(trace, query, together = [trace]) {
  const { weights, prior, spread, samples } = trace.about.caption;
  const word = `“${shown(trace.tokens[query], 24)}”`;
  const name = prior ? "Posterior" : "Attention";
  const draws = samples === 1 ? "1 draw" : `${samples} draws`;
  const spreads = spread ? [`Spread of ${draws}: ${word}`, `Spread: ${word}`] : ["Spread"];
  const all = [
    { id: "picture", titles: ["The picture", "Picture"], values: null },
    { id: "prior", titles: ["Prior: before any word", "Prior"], values: prior, kind: "sizes", lacks: weights ? "This model has no prior." : "This model sees no picture." },
    { id: "posterior", titles: weights ? [`${name}: ${word}`, word] : ["Attention"], values: weights && weights[query], kind: "sizes", lacks: "This model sees no picture." },
    { id: "spread", titles: [...spreads, word], values: spread && spread[query], kind: "spreads", lacks: weights ? "The weights of this model are not random." : "This model sees no picture." },
  ];
  const has = { prior: (one) => one.prior, posterior: (one) => one.weights, spread: (one) => one.spread };
  return all.filter(({ id }) => id === "picture" || together.some((one) => has[id](one.about.caption)));
}

/** The captions that stand side by side, whose rows line up: this one, or the two that are compared. */
function captionTogether({ trace, seen, beside }) {
  const compared = beside && Number.isInteger(seen.other) ? [trace.page[seen.trace], trace.page[seen.other]] : [];
  return compared.includes(trace) && compared.every((one) => one && one.about.caption) ? compared : [trace];
}

/** The caption, and that it was cut where it was. */
export function captionWhole({ tokens, about }) {
  const { ended } = about.caption;
  const words = (ended ? tokens.slice(0, -1) : tokens).map((token) => shown(token, 120));
  if (!ended) return `${words.join(" ")} … (cut at ${words.length === 1 ? "1 word" : `${words.length} words`})`;
  return words.join(" ") || "(no words)";
}

/** Width and height of a picture in its file's proportions, within a width. */
function captionSize(trace, room) {
  const [high, wide] = trace.about.image;
  const ratio = Math.min(Math.max(high / wide, 1 / CAPTION_FLATTEST), CAPTION_FLATTEST);
  const height = Math.min(room * ratio, room * CAPTION_TALLEST);
  return [height / ratio, height];
}

/** A caption's words in their places, from the upper edge. */
function captionTop(trace, room) {
  const lines = noteLines(captionWhole(trace), room, 15, 600);
  const chips = [];
  let x = 0;
  let y = 32 + lines.length * CAPTION_HEAD + 8;
  trace.tokens.forEach((token, at) => {
    const across = Math.min(Math.max(textWidth(shown(token, 24), 15, 700) + 22, 44), room);
    if (x && x + across > room) {
      x = 0;
      y += CAPTION_LINE;
    }
    chips.push({ at, x: CAPTION_EDGE + x, y, wide: across });
    x += across + 8;
  });
  return { lines, chips, start: y + CAPTION_LINE + 10 };
}

/** Where all things are; what is in rows is in the same rows in captions that stand side by side. */
function captionLayout(scene) {
  const { trace, width } = scene;
  const together = captionTogether(scene);
  const cached = captionLayouts.get(trace);
  if (cached && cached.width === width && cached.together.length === together.length && cached.together.every((one, i) => one === together[i])) return cached;
  const room = Math.max(width - 2 * CAPTION_EDGE, 200);
  const most = (measure) => Math.max(...together.map(measure));
  const { lines, chips } = captionTop(trace, room);
  const start = most((one) => captionTop(one, room).start);
  const count = captionPanels(trace, 0, together).length;
  const columns = width >= CAPTION_WIDE ? count : Math.min(count, 2);
  const side = Math.min((room - (columns - 1) * CAPTION_GAP) / columns, CAPTION_LARGEST);
  const [across, own] = captionSize(trace, side);
  const tall = most((one) => captionSize(one, side)[1]);
  const panels = Array.from({ length: count }, (_, i) => ({
    x: CAPTION_EDGE + (i % columns) * (side + CAPTION_GAP),
    y: start + CAPTION_TITLE + Math.floor(i / columns) * (tall + CAPTION_TITLE + SCALE_HEIGHT + CAPTION_GAP),
    width: across,
    height: own,
    room: side,
  }));
  const below = panels[count - 1].y + tall + SCALE_HEIGHT + 26;
  const first = together.some((one) => one.about.caption.prior) ? 1 : 0; // place of the first word
  const strip = most((one) => (one.about.caption.weights ? one.tokens.length + first : 0));
  const least = Math.max(CAPTION_SMALLEST, Math.min(CAPTION_SMALL, (room - 7 * 12) / 8));
  const perLine = Math.max(1, Math.floor((room + 12) / (least + 12)));
  const each = Math.min(CAPTION_SMALL, (room - (perLine - 1) * 12) / perLine);
  const [thin, flat] = captionSize(trace, each);
  const low = most((one) => captionSize(one, each)[1]);
  const places = Array.from({ length: strip }, (_, i) => ({
    at: i - first, // −1 is the prior
    x: CAPTION_EDGE + (i % perLine) * (each + 12),
    y: below + CAPTION_TITLE + Math.floor(i / perLine) * (low + 34) + 16,
    width: thin,
    height: flat,
    room: each,
  }));
  const { weights, prior } = trace.about.caption;
  const smalls = places.filter(({ at }) => weights && (at < 0 ? prior : at < trace.tokens.length));
  const lists = places.length ? places[places.length - 1].y + low + 30 : below;
  const parallel = width >= CAPTION_WIDE;
  const words = most((one) => one.about.caption.others[0].length);
  const half = parallel ? (room - 2 * CAPTION_GAP) / 2 : room;
  const second = parallel ? { x: CAPTION_EDGE + half + 2 * CAPTION_GAP, y: lists } : { x: CAPTION_EDGE, y: lists + CAPTION_TITLE + words * CAPTION_ROW + 34 };
  const draws = captionDraws(trace, half);
  const drawsEnd = most((one) => captionDraws(one, half).end);
  const end = Math.max(lists + CAPTION_TITLE + words * CAPTION_ROW + 22, drawsEnd ? second.y + drawsEnd : 0);
  const layout = { width, together, room, lines, chips, start, panels, below, smalls, lists, half, second, draws, height: end + 20 };
  captionLayouts.set(trace, layout);
  return layout;
}

/** Which words of a text are not in another one, in its order: what is left of their longest common sequence. */
export function captionOthers(words, own) {
  const common = Array.from({ length: words.length + 1 }, () => new Uint16Array(own.length + 1));
  for (let i = words.length - 1; i >= 0; i--) {
    for (let j = own.length - 1; j >= 0; j--) common[i][j] = words[i] === own[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
  }
  const differs = new Array(words.length).fill(true);
  for (let i = 0, j = 0; i < words.length && j < own.length; ) {
    if (words[i] === own[j]) {
      differs[i++] = false;
      j++;
    } else if (common[i + 1][j] >= common[i][j + 1]) i++;
    else j++;
  }
  return differs;
}

/** Captions of draws in lines: pieces of one ink each, and whether they differ from the caption with the mean. */
function captionDraws(trace, width) {
  const { draws, ended } = trace.about.caption;
  const mean = ended ? trace.tokens.slice(0, -1) : trace.tokens;
  const room = width - 78;
  let y = CAPTION_TITLE - 4 + (draws.some(([, , same]) => !same) ? 18 : 0);
  const rows = draws.map(([text, count, same, whole]) => {
    const words = text ? text.split(" ") : [];
    const differs = captionOthers(words, mean);
    const lines = [[]];
    let x = 0;
    const pieces = words.map((word, i) => ({ text: shown(word, 40), differs: differs[i] }));
    if (!whole) pieces.push({ text: CAPTION_CUT, differs: false, soft: true });
    pieces.forEach((piece) => {
      const wide = textWidth(piece.text, 12, piece.differs ? 700 : 400);
      if (x && x + wide > room) {
        lines.push([]);
        x = 0;
      }
      lines[lines.length - 1].push({ ...piece, x });
      x += wide + textWidth(" ", 12) + 1;
    });
    if (!words.length) lines[0].push({ text: "(no words)", differs: !same, x: 0 });
    const row = { text: whole ? text : `${text} ${CAPTION_CUT}`, count, same, lines, y, height: lines.length * CAPTION_TEXT + 6 };
    y += row.height;
    return row;
  });
  return { rows, end: draws.length ? y : 0 };
}

/** Weights as pixels, one for each region. */
function captionCover(trace, key, values, scale) {
  let cache = captionCovers.get(trace);
  if (!cache) captionCovers.set(trace, (cache = new Map()));
  const full = `${key}/${scale.top}/${scale.kind}/${scale.log}/${scale.css(0)}`;
  if (cache.has(full)) return cache.get(full);
  const [rows, columns] = trace.about.grid;
  const data = new Uint8ClampedArray(4 * rows * columns);
  for (let i = 0; i < rows * columns; i++) data.set([...scale.rgb(values[i]), 255], 4 * i);
  if (cache.size > 256) cache.clear();
  const pixels = { width: columns, height: rows, data };
  cache.set(full, pixels);
  return pixels;
}

/**
 * A picture's pixels as shades of black and white, (4 × pixels), to draw over colours. They show how a pixel differs from
 * what surrounds it: a large dark part keeps its outline, but does not darken the colours, which would then be those of
 * other weights.
 */
export function captionShaded({ width, height, data }) {
  const light = new Float32Array(width * height);
  for (let i = 0; i < light.length; i++) light[i] = 0.299 * data[4 * i] + 0.587 * data[4 * i + 1] + 0.114 * data[4 * i + 2];
  const reach = Math.max(1, Math.round(Math.max(width, height) / 20));
  let around = light;
  for (let pass = 0; pass < 2; pass++) around = captionBlurred(captionBlurred(around, height, width, width, 1, reach), width, height, 1, width, reach);
  const shades = new Uint8ClampedArray(4 * light.length);
  for (let i = 0; i < light.length; i++) {
    const apart = (CAPTION_SHADE * (light[i] - around[i])) / 128;
    if (apart > 0) shades.fill(255, 4 * i, 4 * i + 3);
    shades[4 * i + 3] = Math.round(255 * Math.min(Math.abs(apart), CAPTION_DARKEST));
  }
  return { width, height, data: shades };
}

/** Means over `reach` values to both sides, along one direction; lines begin `across` apart, their values are `along` apart. */
function captionBlurred(values, lines, length, across, along, reach) {
  const means = new Float32Array(values.length);
  for (let line = 0; line < lines; line++) {
    const at = (i) => line * across + Math.min(Math.max(i, 0), length - 1) * along; // the edge goes on
    let sum = 0;
    for (let i = -reach; i <= reach; i++) sum += values[at(i)];
    for (let i = 0; i < length; i++) {
      means[at(i)] = sum / (2 * reach + 1);
      sum += values[at(i + reach + 1)] - values[at(i - reach)];
    }
  }
  return means;
}

/** The shades of a picture that has loaded, computed once; null if there is no canvas. */
function captionShadesOf(loaded) {
  if (captionShades.has(loaded) || typeof document === "undefined") return captionShades.get(loaded) || null;
  const { naturalWidth: width, naturalHeight: height } = loaded.element;
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.max(1, width), height: Math.max(1, height) });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(loaded.element, 0, 0);
  const shades = captionShaded(context.getImageData(0, 0, canvas.width, canvas.height));
  captionShades.set(loaded, shades);
  return shades;
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
  wraps: true, // its controls, on a phone

  applies(trace) {
    return trace.about.caption ? true : "this trace is not of a caption: overt caption IMAGE --model FOLDER --out page.html makes one";
  },

  measure(scene) {
    return { height: captionLayout(scene).height };
  },

  draw(scene) {
    const { surface, trace, seen, theme, redraw } = scene;
    const layout = captionLayout(scene);
    const { caption } = trace.about;
    const { peaks } = caption; // of the whole page
    const scales = { sizes: scaleFor(theme, peaks.sizes, seen), spreads: scaleFor(theme, peaks.spreads, seen, "spreads") };
    const query = Math.min(seen.query, trace.tokens.length - 1);
    const own = { ...scene, layout, scales, query, region: seen.node, picture: imageOf(trace, redraw) };
    surface.text(fitted(caption.model, layout.room, 12), CAPTION_EDGE, 16, { size: 12, fill: theme.soft });
    layout.lines.forEach((line, i) => surface.text(fitted(line, layout.room, 15, 600), CAPTION_EDGE, 40 + i * CAPTION_HEAD, { size: 15, fill: theme.ink, weight: 600 }));
    captionDrawWords(own);
    captionPanels(trace, query, layout.together).forEach((panel, i) => captionDrawPanel(own, panel, layout.panels[i]));
    captionDrawStrip(own);
    captionDrawOthers(own);
    captionDrawDraws(own);
  },

  minimap(scene) {
    const { seen } = scene;
    const { smalls, height } = captionLayout(scene);
    return smalls.map((place) => ({ at: (place.y + place.height / 2) / height, size: 0.5, chosen: place.at === seen.query }));
  },

  describe({ trace, seen }) {
    const { weights, prior, probabilities, ended } = trace.about.caption;
    const query = Math.min(seen.query, trace.tokens.length - 1);
    const count = trace.tokens.length - (ended ? 1 : 0);
    const cut = ended ? "" : ", where it was cut";
    const place = query === count ? `after word ${count}` : `word ${query + 1} of ${count}${query === count - 1 ? cut : ""}`;
    const start = `“${shown(trace.tokens[query], 30)}”, ${place}, probability ${number(probabilities[query])}`;
    if (!weights) return `${start}; the network sees no picture`;
    if (seen.node !== null && seen.node < weights[query].length) return `${start}; ${captionFacts(trace, query, seen.node).replaceAll("\n", " · ")}`;
    const most = strongest(weights[query], 3).map((one) => `${captionRegion(trace, one.token)} ${number(one.value)}${prior ? ` (prior ${number(prior[one.token])})` : ""}`);
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

/** The picture as it is, or values with its shades over them. */
function captionDrawPicture(scene, place, values, key, kind) {
  const { surface, trace, theme, scales, picture } = scene;
  const { x, y, width, height } = place;
  surface.rect(x, y, width, height, { fill: theme.raised });
  if (!values) {
    if (picture) surface.picture(picture.element, x, y, width, height);
    return;
  }
  surface.image(captionCover(trace, key, values, scales[kind]), x, y, width, height);
  const shades = picture && captionShadesOf(picture);
  if (shades) surface.image(shades, x, y, width, height, { smooth: true });
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
  const { x, y, width, height, room } = place;
  const lacking = panel.id !== "picture" && !panel.values;
  const title = panel.titles.find((one) => textWidth(one, 13, 600) <= room) || panel.titles[panel.titles.length - 1];
  surface.text(fitted(title, room, 13, 600), x, y - 12, { size: 13, fill: lacking ? theme.soft : theme.ink, weight: 600 });
  if (lacking) {
    drawNote(surface, theme, panel.lacks, x, y, room, { size: 12 });
    return;
  }
  captionDrawPicture(scene, place, panel.values, `${panel.id}/${query}`, panel.kind);
  captionDrawMark(scene, place, 2);
  surface.rect(x, y, width, height, { stroke: theme.line });
  if (panel.values) {
    const what = panel.kind === "spreads" ? "standard deviation of a region’s weight" : "a region’s weight";
    const words = [what, "standard deviation", "weight"].find((one) => what.includes(one) && textWidth(one, 11) <= room) || what;
    drawScale(surface, theme, scales[panel.kind], x, y + height + 8, fitted(words, room, 11), Math.min(160, room));
  }
  surface.hit(x, y, width, height, (px, py) => {
    const region = captionRegionAt(trace, place, px, py);
    const [high, wide] = trace.about.seen;
    const facts = captionFacts(trace, query, region);
    const tip = panel.values ? facts : `${facts}\nthe network sees the picture squeezed into ${wide} × ${high} pixels`;
    return { hover: { node: region }, select: { node: state.node === region ? null : region }, tip };
  });
}

/** All words, one small picture each, after the prior. */
function captionDrawStrip(scene) {
  const { surface, trace, theme, layout, query, top, bottom } = scene;
  const { weights, prior, probabilities } = trace.about.caption;
  if (!layout.smalls.length) return;
  surface.text("Word by word", CAPTION_EDGE, layout.below, { size: 13, fill: theme.ink, weight: 600 });
  for (const place of layout.smalls) {
    const { at, x, y, width, height, room } = place;
    if (y - 20 > bottom || y + height < top) continue;
    const chosen = at === query;
    const word = at < 0 ? "prior" : shown(trace.tokens[at], 24);
    surface.text(fitted(word, room - 36, 12, chosen ? 700 : 500), x, y - 9, { size: 12, fill: at < 0 ? theme.soft : chosen ? theme.accent : theme.ink, weight: chosen ? 700 : 500 });
    if (at >= 0) surface.text(percent(probabilities[at]), x + room, y - 9, { size: 10, fill: theme.soft, align: "right" });
    captionDrawPicture(scene, place, at < 0 ? prior : weights[at], `small/${at}`, "sizes");
    captionDrawMark(scene, place, 1);
    surface.rect(x, y, width, height, { stroke: chosen ? theme.select : theme.line, line: chosen ? 2.5 : 1 });
    if (at >= 0) surface.hit(x, y - 18, room, height + 18, { hover: { query: at }, select: { query: at } });
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
  const { draws, samples, weights } = trace.about.caption;
  if (!draws.length) {
    if (layout.half < layout.room) drawNote(surface, theme, weights ? "The weights of this model are not random: every pass gives the same caption." : "This model sees no picture: every picture gives the same caption.", layout.second.x, layout.second.y - 6, layout.half, { size: 12 });
    return;
  }
  const { x, y } = layout.second;
  const width = layout.half;
  const kinds = draws.length === 1 ? "all alike" : `${draws.length} different`;
  const heading = samples === 1 ? "Caption of 1 draw" : `Captions of ${samples} draws, ${kinds}`;
  surface.text(fitted(heading, width, 13, 600), x, y, { size: 13, fill: theme.ink, weight: 600 });
  if (draws.some(([, , same]) => !same)) surface.text(fitted("bold: not in the caption with the mean", width, 11), x, y + 19, { size: 11, fill: theme.soft });
  for (const row of layout.draws.rows) {
    const middle = y + row.y + CAPTION_TEXT / 2;
    surface.rect(x, middle - 6, Math.max((34 * row.count) / samples, 1), 12, { fill: theme.edge, opacity: row.same ? 1 : 0.55, radius: 2 });
    surface.text(`${row.count} ×`, x + 66, middle, { size: 11, fill: theme.soft, align: "right" });
    row.lines.forEach((line, i) => {
      for (const piece of line) surface.text(fitted(piece.text, width - 78 - piece.x, 12, piece.differs ? 700 : 400), x + 78 + piece.x, middle + i * CAPTION_TEXT, { size: 12, fill: piece.differs ? theme.accent : piece.soft ? theme.soft : theme.ink, weight: piece.differs ? 700 : 400 });
    });
    surface.hit(x, y + row.y - 3, width, row.height, { tip: `${shown(row.text, 400)}\n${row.count} of ${samples} draws${row.same ? ", as with their mean" : ""}` });
  }
}
