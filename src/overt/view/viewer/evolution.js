// How a map evolves (Wang et al. 2021, Figure 6): a layer's own attention, what the convolution makes of it and the map
// below, and the two fused, which is the map in use; below, all layers of one of them.
import { drawMatrix, drawThumb, matrixColumn, matrixPeak, matrixRow, matrixScale, matrixSize, matrixWithin, thumbBudget, thumbNote, thumbOf } from "./matrix.js";
import { drawMessage, drawNote, drawScale, drawToken, noteLines, SCALE_HEIGHT, strongest } from "./parts.js";
import { fitted } from "./surface.js";
import { number, percent, shown, weightWords } from "./words.js";

const EVOLUTION_PARTS = [
  { part: "attention", title: "self-attention" },
  { part: "convolution", title: "convolution" },
  { part: "fused", title: "fused, in use" },
];
const EVOLUTION_NONE = "no parts: trace an evolving model with overt.trace(…, parts=True)";
const EVOLUTION_PAD = 14;
const EVOLUTION_GAP = 26;
const EVOLUTION_TOP = 8 + SCALE_HEIGHT + 14;
const EVOLUTION_ACROSS = 560; // minimum width for the three maps side by side
const EVOLUTION_WIDE = 960; // minimum width for the bars next to the thumbnails
const EVOLUTION_HEAD = 44; // the title and the note of the thumbnails, of the bars
const EVOLUTION_NUMBER = 18; // under a thumbnail
const EVOLUTION_BARS = 84;
const EVOLUTION_KEYS = 12;

const evolutionScreens = new WeakMap();

function evolutionPrefix(group) {
  return group ? `${group} ` : "";
}

function evolutionColours(theme) {
  return { attention: `rgb(${theme.sizes[3].join(",")})`, convolution: `rgb(${theme.spreads[3].join(",")})`, fused: theme.soft };
}

/** The field that holds a part, and which of its maps. */
export function evolutionField(trace, group, part, head) {
  const prefix = evolutionPrefix(group);
  const mean = part === "fused" ? `${prefix}mean` : `${prefix}part ${part}`;
  const heads = part === "fused" ? `${prefix}heads` : `${mean} heads`;
  const single = head !== null && trace.has(heads);
  return { name: single ? heads : mean, map: single ? head : 0 };
}

/** Why a layer lacks a part, or null if it has it. */
export function evolutionMissing(trace, group, part, layer, head) {
  const { name } = evolutionField(trace, group, part, head);
  if (trace.has(name) && trace.about.fields[name][layer]) return null;
  const own = evolutionField(trace, group, "attention", head).name;
  const starts = part === "convolution" && trace.has(own) && trace.about.fields[own][layer];
  if (starts) return "no convolution: a chain starts at this layer, so there is no map below to evolve from";
  return "this layer does not evolve: it has no parts";
}

function evolutionFound(trace, seen) {
  return EVOLUTION_PARTS.map(({ part, title }) => {
    const { name, map } = evolutionField(trace, seen.group, part, seen.head);
    const missing = evolutionMissing(trace, seen.group, part, seen.layer, seen.head);
    return { part, title, name, map, missing, field: missing ? null : trace.field(name, seen.layer) };
  });
}

function evolutionHas(trace, requested) {
  const group = trace.groups.includes(requested) ? requested : trace.home;
  return trace.has(`${evolutionPrefix(group)}part attention`);
}

/** Layout of the three maps, the thumbnails and the bars. */
export function evolutionLayout(trace, state, width) {
  const group = trace.group(matrixWithin(trace, state).group);
  const inner = Math.max(width - 2 * EVOLUTION_PAD, 160);
  const about = { trace, rows: group.rows, columns: group.columns, title: "", most: 30 };
  const across = inner >= EVOLUTION_ACROSS;
  let maps;
  if (across) {
    const first = inner / 3 + 60;
    const { left } = matrixSize({ ...about, width: first });
    const each = (inner - left - 2 * EVOLUTION_GAP) / 3;
    const lost = each >= 240;
    const { cell, width: wide } = matrixSize({ ...about, rowLabels: false, lost, width: each, height: 440 });
    maps = [0, 1, 2].map((i) => {
      const x = EVOLUTION_PAD + (i ? left : 0) + i * (wide + EVOLUTION_GAP);
      return { ...about, x, y: EVOLUTION_TOP, width: i ? each : first, rowLabels: i === 0, lost, cell };
    });
  } else {
    const { cell, height } = matrixSize({ ...about, width: inner, height: 420 });
    maps = [0, 1, 2].map((i) => ({ ...about, x: EVOLUTION_PAD, y: EVOLUTION_TOP + i * (height + 22), width: inner, cell }));
  }
  const sizes = maps.map((one) => matrixSize(one));
  const beside = inner >= EVOLUTION_WIDE;
  const room = beside ? (inner - 2 * EVOLUTION_GAP) / 2 : inner;
  const strip = maps[2].y + sizes[2].height + 28;
  const fit = Math.max(1, Math.floor((room + 10) / 46));
  const lines = Math.ceil(group.layers / fit);
  const line = Math.ceil(group.layers / lines);
  const thumb = Math.min((room + 10) / line - 10, 84);
  const stripHeight = EVOLUTION_HEAD + lines * (thumb + EVOLUTION_NUMBER + 6);
  const keys = Math.max(3, Math.min(EVOLUTION_KEYS, Math.floor((room - 44) / 50), group.columns[1] - group.columns[0]));
  const barsHeight = EVOLUTION_HEAD + EVOLUTION_BARS + 30;
  const right = EVOLUTION_PAD + room + 2 * EVOLUTION_GAP;
  const bars = beside ? { x: right, y: strip } : { x: EVOLUTION_PAD, y: strip + stripHeight + 14 };
  const height = Math.max(strip + stripHeight, bars.y + barsHeight) + 10;
  return { group, inner, room, across, maps, sizes, strip, stripHeight, thumb, line, bars, barsHeight, keys, height };
}

export const evolutionView = {
  id: "evolution",
  title: "Evolution",
  controls: ["part", "group", "layer", "head", "query", "words", "log"],

  parts: () => EVOLUTION_PARTS.map(({ part }) => [part, part]),

  applies(trace) {
    return trace.groups.some((group) => evolutionHas(trace, group)) ? true : EVOLUTION_NONE;
  },

  measure({ trace, state, width, screen }) {
    evolutionScreens.set(trace, screen);
    return { height: evolutionHas(trace, state.group) ? evolutionLayout(trace, state, width).height : 160 };
  },

  draw(given) {
    const { surface, trace, theme, width } = given;
    const seen = matrixWithin(trace, given.seen);
    const state = matrixWithin(trace, given.state);
    const scene = { ...given, seen, state };
    if (!evolutionHas(trace, state.group)) {
      const others = trace.groups.filter((group) => evolutionHas(trace, group)).map((group) => group || "decoder");
      drawMessage(surface, theme, `this attention does not evolve; see: ${others.join(", ")}`, width);
      return;
    }
    const layout = evolutionLayout(trace, state, width);
    const found = evolutionFound(trace, seen);
    const { rows, columns } = layout.group;
    const here = found.filter((one) => one.field);
    const peak = Math.max(1e-9, ...here.map((one) => matrixPeak(trace, one.field, one.map, seen, rows, columns)));
    const scale = matrixScale(theme, peak, here.map((one) => one.field), seen);
    drawScale(surface, theme, scale, EVOLUTION_PAD, 8, "weight, one scale for the three maps", Math.min(220, layout.inner));
    evolutionMaps(scene, layout, found, scale);
    evolutionStrip(scene, layout);
    evolutionBars(scene, layout, found);
  },

  minimap({ trace, state, width }) {
    if (!evolutionHas(trace, state.group)) return [];
    const layout = evolutionLayout(trace, state, width);
    const row = matrixRow(trace, state, layout.group.rows);
    if (row === null) return [];
    const at = (i) => layout.maps[i].y + layout.sizes[i].mapY + (row + 0.5 - layout.group.rows[0]) * layout.sizes[i].cell;
    return (layout.across ? [0] : [0, 1, 2]).map((i) => ({ at: at(i) / layout.height, size: 0.6, chosen: true }));
  },

  placeOf({ trace, state, width }) {
    if (!evolutionHas(trace, state.group)) return undefined;
    const layout = evolutionLayout(trace, state, width);
    const row = matrixRow(trace, state, layout.group.rows);
    // Maps that fit the screen are not scrolled.
    if (row === null || !layout.across || layout.sizes[0].height < (evolutionScreens.get(trace) || 600)) return undefined;
    return layout.maps[0].y + layout.sizes[0].mapY + (row - layout.group.rows[0]) * layout.sizes[0].cell;
  },

  describe({ trace, seen: given }) {
    const seen = matrixWithin(trace, given);
    const { rows, columns, layers } = trace.group(seen.group);
    const head = seen.head === null ? "mean of heads" : `head ${seen.head + 1}`;
    const place = `layer ${seen.layer + 1} of ${layers}, ${head}`;
    const row = matrixRow(trace, seen, rows);
    const column = matrixColumn(seen, columns);
    if (!evolutionHas(trace, seen.group) || row === null) return place;
    const found = evolutionFound(trace, seen);
    if (column === null) {
      const { field, map } = found[2];
      const most = field ? strongest(field.row(map, row - rows[0]), 4) : [];
      const listed = most.map((one) => `${shown(trace.tokens[columns[0] + one.token], 20)} ${number(one.value)}`);
      return `${place}: “${shown(trace.tokens[row], 30)}” → ${field ? listed.join(", ") || "nothing" : "…"} (fused)`;
    }
    const values = evolutionValues(found, row, column, trace.group(seen.group));
    return `${place}: ${shown(trace.tokens[row], 30)} → ${shown(trace.tokens[column], 30)}: ${values.join(", ")}`;
  },
};

/** The value of a cell in each part, in words. */
function evolutionValues(found, row, column, group) {
  return found.map(({ part, field, map, missing }) => {
    const value = field && field.at(map, row - group.rows[0], column - group.columns[0]);
    return `${part} ${missing ? "none" : !field ? "…" : weightWords(value)}`;
  });
}

function evolutionMaps({ surface, trace, seen, state, theme, top, bottom }, layout, found, scale) {
  const colours = evolutionColours(theme);
  found.forEach(({ part, title, field, map, missing }, i) => {
    const place = layout.maps[i];
    const size = layout.sizes[i];
    const named = { title, mark: colours[part], note: `${title}, layer ${seen.layer + 1}` };
    if (!missing) drawMatrix(surface, { ...place, ...named, theme, field, map, scale, seen, state, top, bottom });
    else if (place.y < bottom && place.y + size.height > top) evolutionGap(surface, theme, place, size, named, missing);
    const wide = Math.max(size.width, 60);
    surface.hit(place.x, place.y - 2, wide, 20, { select: { part }, tip: `show all layers of ${part} below` });
    const end = place.x + Math.min(wide, 150);
    if (part === state.part) surface.line(place.x, place.y + 19, end, place.y + 19, { stroke: theme.select, line: 2 });
  });
}

function evolutionGap(surface, theme, place, size, { title, mark }, missing) {
  surface.rect(place.x, place.y + 4, 9, 9, { fill: mark, radius: 2 });
  surface.text(title, place.x + 15, place.y + 9, { size: 13, fill: theme.ink, weight: 600 });
  const x = place.x + size.mapX;
  const y = place.y + size.mapY;
  surface.rect(x, y, size.mapWidth, size.mapHeight, { fill: theme.raised, stroke: theme.line });
  const room = Math.max(size.mapWidth - 20, 60);
  const tall = 16 * noteLines(missing, room, 12).length;
  drawNote(surface, theme, missing, x + size.mapWidth / 2, y + (size.mapHeight - tall) / 2, room, { size: 12, align: "center" });
}

function evolutionStrip({ surface, trace, seen, state, theme, top, bottom, redraw }, layout) {
  const { group, strip, thumb, line } = layout;
  const { rows, columns } = group;
  const budget = thumbBudget(surface);
  const named = EVOLUTION_PARTS.find((one) => one.part === state.part) || EVOLUTION_PARTS[2];
  if (strip > bottom || strip + layout.stripHeight < top) return;
  surface.rect(EVOLUTION_PAD, strip + 4, 9, 9, { fill: evolutionColours(theme)[named.part], radius: 2 });
  const title = `${named.part} in all layers`;
  surface.text(title, EVOLUTION_PAD + 15, strip + 9, { size: 13, fill: theme.ink, weight: 600 });
  surface.text(fitted(thumbNote(state), layout.room, 11), EVOLUTION_PAD, strip + 28, { size: 11, fill: theme.soft });
  for (let layer = 0; layer < group.layers; layer++) {
    const x = EVOLUTION_PAD + (layer % line) * (thumb + 10);
    const y = strip + EVOLUTION_HEAD + Math.floor(layer / line) * (thumb + EVOLUTION_NUMBER + 6);
    if (y > bottom || y + thumb + EVOLUTION_NUMBER < top) continue;
    const { name, map } = evolutionField(trace, state.group, named.part, seen.head);
    const missing = evolutionMissing(trace, state.group, named.part, layer, seen.head);
    const made = missing ? null : thumbOf(trace, { name, layer, map, theme, seen, rows, columns, budget });
    const chosen = layer === state.layer;
    const row = missing ? null : matrixRow(trace, seen, rows);
    drawThumb(surface, theme, { thumb: made, x, y, size: thumb, rows, columns, row, chosen, pointed: layer === seen.layer });
    if (missing) surface.text("none", x + thumb / 2, y + thumb / 2, { size: 10, fill: theme.soft, align: "center" });
    const fill = layer === seen.layer ? theme.accent : theme.soft;
    const look = { size: 11, fill, align: "center", weight: chosen ? 700 : 400 };
    surface.text(String(layer + 1), x + thumb / 2, y + thumb + 11, look);
    const more = missing || (made && `largest weight ${number(made.peak)}`);
    const tip = `layer ${layer + 1}, ${named.part}${more ? `\n${more}` : ""}`;
    surface.hit(x - 5, y - 3, thumb + 10, thumb + EVOLUTION_NUMBER + 3, { hover: { layer }, select: { layer }, tip });
  }
  if (budget.more) redraw();
}

/** The keys with the largest weights in any part of a row, in text order: `[{ token, values: [of each part] }]`. */
export function evolutionKeys(found, row, group, count) {
  const lines = found.map(({ field, map }) => field && field.row(map, row - group.rows[0]));
  const most = (j) => Math.max(...lines.map((line) => (line ? Math.abs(line[j]) : 0)));
  const wide = group.columns[1] - group.columns[0];
  const sizes = Float32Array.from({ length: wide }, (_, j) => most(j));
  const order = Array.from(sizes.keys()).filter((j) => sizes[j] > 0);
  order.sort((a, b) => sizes[b] - sizes[a] || a - b);
  const largest = order.slice(0, count).sort((a, b) => a - b);
  return largest.map((j) => ({ token: group.columns[0] + j, values: lines.map((line) => line && line[j]) }));
}

function evolutionBars({ surface, trace, seen, theme, top, bottom }, layout, found) {
  const { bars, room, group, keys } = layout;
  if (bars.y > bottom || bars.y + layout.barsHeight < top) return;
  const row = matrixRow(trace, seen, group.rows);
  const colours = evolutionColours(theme);
  if (row === null) {
    surface.text("a row, part by part", bars.x, bars.y + 9, { size: 13, fill: theme.ink, weight: 600 });
    drawNote(surface, theme, "choose a row in one of the maps", bars.x, bars.y + 20, room);
    return;
  }
  const listed = evolutionKeys(found, row, group, keys);
  const peak = Math.max(1e-9, ...listed.flatMap((one) => one.values.map((value) => Math.abs(value || 0))));
  const title = `what “${shown(trace.tokens[row], 24)}” looks at most, layer ${seen.layer + 1}`;
  surface.text(title, bars.x, bars.y + 9, { size: 13, fill: theme.ink, weight: 600 });
  let x = bars.x;
  for (const { part, field, map, missing } of found) {
    const lost = field ? field.lost(map, row - group.rows[0]) : 0;
    const text = `${part}${missing ? ": none" : lost > 0 && room > 420 ? `, left out ${percent(lost)}` : ""}`;
    surface.rect(x, bars.y + 24, 8, 8, { fill: colours[part], radius: 2 });
    surface.text(text, x + 13, bars.y + 28, { size: 11, fill: theme.soft });
    x += room > 420 ? 170 : 96;
  }
  const base = bars.y + EVOLUTION_HEAD + EVOLUTION_BARS;
  const left = bars.x + 44;
  const wide = Math.min((room - 44) / Math.max(listed.length, 1), 92);
  for (const [part, text] of [[0, "0"], [0.5, number(peak / 2)], [1, number(peak)]]) {
    const y = base - part * (EVOLUTION_BARS - 8);
    surface.line(left, y, left + wide * listed.length, y, { stroke: theme.line, opacity: part ? 0.6 : 1 });
    surface.text(text, left - 6, y, { size: 9, fill: theme.soft, align: "right" });
  }
  const thin = Math.min((wide - 10) / 3, 16);
  listed.forEach(({ token, values }, i) => {
    const start = left + i * wide;
    const strong = token === seen.token;
    const shade = { fill: theme.select, opacity: theme.dark ? 0.2 : 0.1, radius: 4 };
    if (strong) surface.rect(start, base - EVOLUTION_BARS, wide, EVOLUTION_BARS + 24, shade);
    values.forEach((value, k) => {
      if (!value) return;
      const tall = (Math.abs(value) / peak) * (EVOLUTION_BARS - 8);
      surface.rect(start + (wide - 3 * thin) / 2 + k * thin, base - tall, thin - 1, tall, { fill: colours[found[k].part] });
    });
    const faint = Boolean(trace.special[token]);
    const look = { width: wide - 4, align: "center", size: wide < 60 ? 11 : 13, strong, faint };
    drawToken(surface, theme, trace.tokens[token], start + wide / 2, base + 13, look);
    const tip = [shown(trace.tokens[token], 60), ...evolutionValues(found, row, token, group)].join("\n");
    const at = row >= trace.source ? { query: row - trace.source } : { row };
    const target = { hover: { ...at, token }, select: { ...at, token }, tip };
    surface.hit(start, base - EVOLUTION_BARS, wide, EVOLUTION_BARS + 26, target);
  });
}
