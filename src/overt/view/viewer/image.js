// An image's patches, layer by layer, by what the chosen query draws on (Wang et al. 2021, Figure 4). The picture is
// shown in grey underneath, so that none of its colours is taken for a weight; lightness orders the weights, as everywhere.
import { drawMessage, drawScale, SCALE_HEIGHT, scaleFor, strongest } from "./parts.js";
import { fitted, textWidth } from "./surface.js";
import { mostlyRightToLeft, number, percent, shown, weightWords } from "./words.js";

const IMAGE_EDGE = 14;
const IMAGE_CHIP = 24; // height of a chip
const IMAGE_CHIPS = 66; // width of the line's name before the chips
const IMAGE_TITLE = 26; // line above the large picture
const IMAGE_CAPTION = 18; // line above a small one
const IMAGE_GAP = 12;
const IMAGE_LARGEST = 480;
const IMAGE_WIDE = 720; // minimum width for small pictures next to the large one
export const IMAGE_COVER = 0.7; // opacity of the weights over the picture
const IMAGE_CONTRAST = 0.7; // of the grey picture: its light and dark must not be taken for weights
const IMAGE_SHARPEST = 640; // pixels of the grey picture's longer side

const imagePlaces = new WeakMap();
const imageElements = new WeakMap();
const imageCovers = new WeakMap();

/** Where an image's patches are among the tokens: `{ first, stop, rows, columns }`; null if there are none. */
export function imagePatches(trace) {
  if (!trace.about.grid) return null;
  const [rows, columns] = trace.about.grid;
  const stop = trace.source || trace.tokens.length;
  const first = stop - rows * columns;
  return first >= 0 && rows * columns > 0 ? { first, stop, rows, columns } : null;
}

/** Height and width of the picture, and of one patch, in its pixels. */
export function imageSize({ grid: [rows, columns], image, kind }) {
  const [height, width] = image || [rows, columns];
  // A map's pixels share the whole image, patches too unless some are incomplete.
  if (kind === "pixels" || (height % rows === 0 && width % columns === 0)) return { height, width, tall: height / rows, wide: width / columns };
  // The model does not see an incomplete patch at the right or bottom; patches are square then.
  const side = Math.min(Math.floor(height / rows), Math.floor(width / columns)) || Math.min(height / rows, width / columns);
  return { height, width, tall: side, wide: side };
}

/** What is shown of the maps: one of their parts, or "fused"; methods other than raw read the map itself. */
function imagePart(trace, seen) {
  return seen.method === "raw" && trace.parts.includes(seen.part) ? seen.part : "fused";
}

/** The rows that are shown: a method's, or those of a field. */
function imageSource(trace, seen) {
  const part = imagePart(trace, seen);
  return part === "fused" ? seen.method : part === "spread" ? part : `part ${part}`;
}

/** What is shown, and what its values are, in words. */
function imageWords(trace, seen, head) {
  const part = imagePart(trace, seen);
  const single = head === null ? "" : `, head ${head + 1}`;
  if (part === "spread") return [`spread over ${trace.about.samples} samples${single}`, "standard deviation"];
  return [`${part === "fused" ? trace.named(seen.method) : part}${single}`, trace.method(seen.method).value];
}

function imageCell(trace) {
  return trace.kind === "pixels" ? "pixel" : "patch";
}

/** The layout for a given width. */
function imageLayout(trace, width) {
  const cached = imagePlaces.get(trace);
  if (cached && cached.width === width) return cached;
  const { first, stop } = imagePatches(trace);
  const size = imageSize(trace.about);
  const room = Math.max(width - 2 * IMAGE_EDGE, 160);
  const others = trace.tokens.flatMap((_, i) => (i < first || i >= stop ? [i] : []));
  const right = mostlyRightToLeft(others.map((i) => trace.tokens[i]));
  const chips = [];
  let x = IMAGE_CHIPS;
  let y = SCALE_HEIGHT + 16;
  for (const token of others) {
    const wide = Math.min(Math.max(textWidth(shown(trace.tokens[token]), 13, 700) + 18, 34), room - IMAGE_CHIPS);
    if (x + wide > room && x > IMAGE_CHIPS) {
      x = IMAGE_CHIPS;
      y += IMAGE_CHIP + 6;
    }
    chips.push({ token, x: IMAGE_EDGE + (right ? room + IMAGE_CHIPS - x - wide : x), y, wide });
    x += wide + 6;
  }
  const start = others.length ? y + IMAGE_CHIP + 14 : y;
  const beside = width >= IMAGE_WIDE;
  const most = Math.min(beside ? Math.round(0.46 * room) : room, IMAGE_LARGEST);
  const grow = Math.min(most / size.width, IMAGE_LARGEST / size.height);
  const large = { x: IMAGE_EDGE, y: start + IMAGE_TITLE, width: size.width * grow, height: size.height * grow };
  const under = large.y + large.height + 24;
  const left = beside ? large.x + large.width + 32 : IMAGE_EDGE;
  const across = IMAGE_EDGE + room - left;
  const count = trace.layers + (trace.about.picture ? 1 : 0);
  const [columns, wide] = imageColumns(count, across, size, beside ? under - start : 0);
  const tall = (wide * size.height) / size.width;
  const smalls = Array.from({ length: count }, (_, i) => ({
    layer: i - (count - trace.layers), // −1 is the picture itself
    x: left + (i % columns) * (wide + IMAGE_GAP),
    y: (beside ? start : under + 8) + Math.floor(i / columns) * (tall + IMAGE_CAPTION + IMAGE_GAP) + IMAGE_CAPTION,
    width: wide,
    height: tall,
  }));
  const last = smalls[smalls.length - 1];
  const height = Math.max(under, last.y + tall) + 16;
  const layout = { width, beside, size, chips, start, large, under, smalls, height };
  imagePlaces.set(trace, layout);
  return layout;
}

/** Number of small pictures in a line, and their width: as large as fits the height, but not too small. */
function imageColumns(count, across, size, height) {
  for (let columns = 2; ; columns++) {
    const most = Math.min(240, (240 * size.width) / size.height);
    const wide = Math.min((across - (columns - 1) * IMAGE_GAP) / columns, most);
    const tall = (wide * size.height) / size.width + IMAGE_CAPTION + IMAGE_GAP;
    const narrower = (across - columns * IMAGE_GAP) / (columns + 1);
    if (Math.ceil(count / columns) * tall <= height || narrower < (height ? 132 : 104)) return [columns, wide];
  }
}

export const imageView = {
  id: "image",
  title: "Image",
  controls: ["method", "part", "layer", "head", "query", "log"],

  parts(trace, { method }) {
    const parts = method === "raw" ? trace.parts : [];
    const alone = parts.every((part) => part === "fused" || part === "spread");
    return parts.map((part) => [part, part === "fused" && alone ? "map" : part]);
  },

  applies(trace) {
    if (!trace.about.grid || !trace.methods.length) return "this trace is not of an image";
    return imagePatches(trace) ? true : "this trace has fewer tokens than its image has patches";
  },

  measure({ trace, width }) {
    return { height: imageLayout(trace, width).height };
  },

  draw({ surface, trace, seen, theme, width, top, bottom, redraw }) {
    const layout = imageLayout(trace, width);
    const { first, stop } = imagePatches(trace);
    const head = seen.method === "raw" ? seen.head : null;
    const query = trace.source + seen.query;
    const source = imageSource(trace, seen);
    const rows = Array.from({ length: trace.layers }, (_, layer) => trace.row(source, layer, seen.query, head));
    const layer = Math.min(seen.layer, trace.layers - 1);
    let peak = 0;
    let own = 0;
    let signed = false;
    for (const row of rows) {
      if (!row || !row.values) continue;
      for (let i = first; i < stop; i++) {
        if (row.values[i] < 0) signed = true;
        // A patch draws most on itself (by rollout, at least half in the first layer), which would dwarf the others.
        if (i === query) own = Math.max(own, Math.abs(row.values[i]));
        else peak = Math.max(peak, Math.abs(row.values[i]));
      }
    }
    const scale = scaleFor(theme, peak || own, seen, source === "spread" ? "spreads" : signed ? "signs" : "sizes");
    const [what, value] = imageWords(trace, seen, head);
    // Without values there is no scale.
    if (rows.some((row) => row && row.values)) {
      const title = `${what}: a ${imageCell(trace)}’s ${value}, all layers${own > scale.top ? `; its own is up to ${number(own)}` : ""}`;
      const room = width - 2 * IMAGE_EDGE;
      drawScale(surface, theme, scale, IMAGE_EDGE, 8, fitted(title, room, 11), Math.min(220, room));
    }
    const scene = { surface, trace, seen, theme, scale, what, source, head, query, picture: imageOf(trace, redraw), size: layout.size };
    imageDrawChips(scene, layout, rows[layer], top, bottom);
    // Next to many layers, the large picture stays on the screen if it fits.
    const tall = layout.under - layout.start;
    const fits = layout.beside && tall + 16 < bottom - top;
    const moved = fits ? Math.min(Math.max(top + 6 - layout.start, 0), Math.max(layout.height - 16 - layout.under, 0)) : 0;
    imageDrawLarge(scene, layout, moved, rows[layer], layer);
    for (const place of layout.smalls) {
      if (place.y - IMAGE_CAPTION > bottom || place.y + place.height < top) continue;
      imageDrawSmall(scene, place, place.layer < 0 ? null : rows[place.layer], layer);
    }
  },

  describe({ trace, seen }) {
    const source = imageSource(trace, seen);
    if (source === seen.method) return null; // described as elsewhere
    const [what] = imageWords(trace, seen, seen.head);
    const row = trace.row(source, seen.layer, seen.query, seen.head);
    const place = `“${shown(trace.tokens[trace.source + seen.query], 30)}”, layer ${seen.layer + 1} of ${trace.layers}, ${what}: `;
    if (!row || !row.values) return place + (row ? row.missing : "…");
    return place + (strongest(row.values, 5).map((one) => `${shown(trace.tokens[one.token], 20)} ${number(one.value)}`).join(", ") || "nothing");
  },

  minimap({ trace, seen, width }) {
    const { smalls, height } = imageLayout(trace, width);
    return smalls.map((place) => ({ at: (place.y + place.height / 2) / height, size: 0.5, chosen: place.layer === seen.layer }));
  },
};

/** The tokens that are not patches, coloured like patches; those that are queries can be chosen. */
function imageDrawChips({ surface, trace, seen, theme, scale, what, query }, layout, row, top, bottom) {
  if (!layout.chips.length) return;
  surface.text(trace.source ? "words" : "queries", IMAGE_EDGE, layout.chips[0].y + IMAGE_CHIP / 2, { size: 12, fill: theme.soft });
  for (const { token, x, y, wide } of layout.chips) {
    if (y > bottom || y + IMAGE_CHIP < top) continue;
    const asks = token >= trace.source;
    const chosen = token === query;
    const value = row && row.values ? row.values[token] : null;
    const stroke = chosen || token === seen.token ? theme.select : asks ? theme.line : null;
    const fill = value === null ? theme.raised : scale.css(value);
    const ink = value === null ? theme.ink : scale.ink(value);
    surface.rect(x, y, wide, IMAGE_CHIP - 2, { fill, radius: asks ? 6 : 2, stroke, line: chosen ? 2.5 : 1 });
    const text = fitted(shown(trace.tokens[token]), wide - 10, 13, chosen ? 700 : 400);
    surface.text(text, x + wide / 2, y + IMAGE_CHIP / 2 - 1, { size: 13, fill: ink, align: "center", weight: chosen ? 700 : 400 });
    const says = value === null ? "" : `\n${what}: ${weightWords(value)}`;
    const target = { hover: { token }, tip: `${shown(trace.tokens[token], 120)}\ntoken ${token}${says}` };
    if (asks) target.select = { query: token - trace.source, token: null };
    surface.hit(x, y, wide, IMAGE_CHIP, target);
  }
}

function imageDrawLarge(scene, layout, moved, row, layer) {
  const { surface, trace, seen, theme, what, query, size } = scene;
  const { first, rows, columns } = imagePatches(trace);
  const large = { ...layout.large, y: layout.large.y + moved };
  const heading = `layer ${layer + 1} of ${trace.layers}, ${what}: what “${shown(trace.tokens[query], 24)}” draws on`;
  const room = Math.max(large.width, 150);
  surface.text(fitted(heading, room, 12, 600), large.x, layout.start + moved + 10, { size: 12, fill: theme.ink, weight: 600 });
  imageDrawPatches(scene, large, row, layer);
  if (row && row.missing) {
    surface.clipped(large.x, large.y, large.width, large.height, () => {
      const inside = { text: (text, x, y, look) => surface.text(text, x + large.x, y, look) };
      drawMessage(inside, theme, row.missing, large.width, large.y + Math.min(40, large.height / 4));
    });
    return;
  }
  const tall = (size.tall * large.height) / size.height;
  const wide = (size.wide * large.width) / size.width;
  const over = seen.token !== null && seen.token >= first && seen.token < first + rows * columns;
  if (over && Math.min(tall, wide) >= 5) {
    const look = { stroke: theme.paper, line: 1, opacity: 0.35 };
    const { x, y } = large;
    for (let i = 1; i < rows; i++) surface.line(x, y + i * tall, x + columns * wide, y + i * tall, look);
    for (let j = 1; j < columns; j++) surface.line(x + j * wide, y, x + j * wide, y + rows * tall, look);
  }
  imageDrawMarks(scene, large, true);
  if (!row) return;
  // In a captioning model, only words are queries.
  const select = (token) => (trace.source ? { token } : { query: token, token: null });
  imageHit(scene, large, row, layer, (token) => ({ hover: { token }, select: select(token) }));
  surface.text(fitted(imageShares(trace, row.values, scene.source), room, 11), large.x, layout.under + moved - 12, { size: 11, fill: theme.soft });
}

/** How much of a row goes to patches, which the colours do not show. */
function imageShares(trace, values, method) {
  const { first, stop } = imagePatches(trace);
  let inside = 0;
  let whole = 0;
  for (let i = 0; i < values.length; i++) {
    if (values[i] < 0) return "weights may be negative";
    whole += values[i];
    if (i >= first && i < stop) inside += values[i];
  }
  if (!whole || stop - first === values.length || method === "spread") return "";
  const others = trace.source ? "words and other tokens" : "other tokens";
  const what = method === "raw" || method.startsWith("part ") ? "the weight" : trace.method(method).title;
  return `${percent(1 - inside / whole)} of ${what} is on ${others}`;
}

function imageDrawSmall(scene, place, row, layer) {
  const { surface, trace, theme, picture } = scene;
  const { x, y, width, height } = place;
  if (place.layer < 0) {
    surface.text("picture", x, y - 8, { size: 11, fill: theme.soft });
    if (picture) surface.picture(picture.element, x, y, width, height);
    surface.rect(x, y, width, height, { stroke: theme.line });
    imageDrawMarks(scene, place, false);
    return;
  }
  const chosen = place.layer === layer;
  surface.text(`layer ${place.layer + 1}`, x, y - 8, { size: 11, ...(chosen ? { fill: theme.accent, weight: 700 } : { fill: theme.soft }) });
  imageDrawPatches(scene, place, row, place.layer);
  if (chosen) surface.rect(x - 1.5, y - 1.5, width + 3, height + 3, { stroke: theme.select, line: 2, radius: 2 });
  imageDrawMarks(scene, place, false);
  const here = { layer: place.layer };
  surface.hit(x, y - IMAGE_CAPTION, width, height + IMAGE_CAPTION, { hover: here, select: here, tip: `layer ${place.layer + 1}` });
  if (row && row.values) imageHit(scene, place, row, place.layer, (token) => ({ hover: { ...here, token }, select: here }));
}

/** One area that responds for every patch of a picture. */
function imageHit({ surface, trace, what, size }, place, row, layer, target) {
  const { first, rows, columns } = imagePatches(trace);
  const tall = (size.tall * place.height) / size.height;
  const wide = (size.wide * place.width) / size.width;
  const lost = row.lost > 0 ? `\nthis row left out ${percent(row.lost)}` : "";
  surface.hit(place.x, place.y, columns * wide, rows * tall, (px, py) => {
    const i = Math.min(Math.max(Math.floor((py - place.y) / tall), 0), rows - 1);
    const j = Math.min(Math.max(Math.floor((px - place.x) / wide), 0), columns - 1);
    const token = first + i * columns + j;
    const value = row.values[token];
    const tip = `${imageCell(trace)} ${i},${j} (row, column): ${weightWords(value)}\n${what}, layer ${layer + 1}${lost}`;
    return { ...target(token), tip };
  });
}

/** Mark the query, if it is a patch, and the patch under the pointer. */
function imageDrawMarks({ surface, trace, seen, theme, query, size }, place, large) {
  const { first, stop, columns } = imagePatches(trace);
  const tall = (size.tall * place.height) / size.height;
  const wide = (size.wide * place.width) / size.width;
  for (const [token, colour] of [[seen.token, theme.accent], [query, theme.select]]) {
    if (token === null || token === undefined || token < first || token >= stop) continue;
    const x = place.x + ((token - first) % columns) * wide;
    const y = place.y + Math.floor((token - first) / columns) * tall;
    // A light and a strong line: visible on any colour.
    surface.rect(x - 1, y - 1, wide + 2, tall + 2, { stroke: theme.paper, line: large ? 4 : 2.5, opacity: 0.8 });
    surface.rect(x - 1, y - 1, wide + 2, tall + 2, { stroke: colour, line: (token === query ? 1.5 : 1) * (large ? 1.6 : 1) });
  }
}

/** The picture in grey, weights over it. */
function imageDrawPatches({ surface, trace, theme, scale, seen, source, head, picture, size }, place, row, layer) {
  const { rows, columns } = imagePatches(trace);
  const { x, y, width, height } = place;
  surface.rect(x, y, width, height, { fill: theme.raised });
  if (picture) {
    const grey = imageGrey(picture);
    if (grey) surface.image(grey, x, y, width, height, { smooth: true });
    else surface.picture(picture.element, x, y, width, height, { opacity: 1 - IMAGE_COVER });
  }
  if (row && row.values) {
    const key = [source, head, layer, seen.query, scale.top, scale.kind, scale.log, scale.css(0), Boolean(picture)].join("/");
    const cover = imageCover(trace, key, row.values, scale, picture ? IMAGE_COVER : 1);
    surface.image(cover, x, y, (columns * size.wide * width) / size.width, (rows * size.tall * height) / size.height);
  } else surface.rect(x, y, width, height, { fill: theme.paper, opacity: IMAGE_COVER });
  surface.rect(x, y, width, height, { stroke: theme.line });
}

/** Weights as pixels, one for each patch. */
function imageCover(trace, key, values, scale, opacity) {
  let cache = imageCovers.get(trace);
  if (!cache) imageCovers.set(trace, (cache = new Map()));
  if (cache.has(key)) return cache.get(key);
  const { first, rows, columns } = imagePatches(trace);
  const data = new Uint8ClampedArray(4 * rows * columns);
  for (let i = 0; i < rows * columns; i++) data.set([...scale.rgb(values[first + i]), Math.round(255 * opacity)], 4 * i);
  if (cache.size > 256) cache.clear();
  const pixels = { width: columns, height: rows, data };
  cache.set(key, pixels);
  return pixels;
}

/** A trace's picture once it has loaded, else null; `redraw` is called when it loads. */
export function imageOf(trace, redraw) {
  return imageLoaded(trace, trace.about.picture, redraw);
}

/** The picture at a link that holds it, once it has loaded, else null; it is kept for as long as its holder. */
export function imageLoaded(holder, source, redraw) {
  if (typeof source !== "string" || !source.startsWith("data:image/") || typeof Image === "undefined") return null;
  let loaded = imageElements.get(holder);
  if (!loaded) {
    loaded = { element: new Image(), ready: false, waiting: new Set(), grey: undefined };
    imageElements.set(holder, loaded);
    loaded.element.onload = () => {
      loaded.ready = true;
      for (const one of loaded.waiting) one();
      loaded.waiting.clear();
    };
    loaded.element.src = source;
  }
  if (!loaded.ready) loaded.waiting.add(redraw);
  return loaded.ready ? loaded : null;
}

/** The picture in grey as pixels, computed once; null if there is no canvas. */
export function imageGrey(loaded) {
  if (loaded.grey !== undefined || typeof document === "undefined") return loaded.grey || null;
  const { naturalWidth, naturalHeight } = loaded.element;
  const shrink = Math.min(1, IMAGE_SHARPEST / Math.max(naturalWidth, naturalHeight, 1));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(naturalWidth * shrink));
  canvas.height = Math.max(1, Math.round(naturalHeight * shrink));
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(loaded.element, 0, 0, canvas.width, canvas.height);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4) {
    const light = 0.299 * data[i] + 0.587 * data[i + 1] + 0.114 * data[i + 2];
    data.fill(128 + IMAGE_CONTRAST * (light - 128), i, i + 3);
  }
  return (loaded.grey = { width: canvas.width, height: canvas.height, data });
}
