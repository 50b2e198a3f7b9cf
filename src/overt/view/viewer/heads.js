// Every head of every layer as a thumbnail, the chosen one enlarged with its tokens.
import { drawMatrix, drawThumb, matrixCell, matrixColumn, matrixLost, matrixPeak, matrixRow, matrixScale, matrixSize, matrixWithin, thumbBudget, thumbNote, thumbOf } from "./matrix.js";
import { drawNote, drawScale, noteLines, SCALE_HEIGHT, strongest } from "./parts.js";
import { fitted } from "./surface.js";
import { number, shown } from "./words.js";

const HEADS_PAD = 14;
const HEADS_GUTTER = 26; // for the numbers of layers
const HEADS_GAP = 4; // between thumbnails
const HEADS_APART = 8; // between the mean and the heads
const HEADS_BETWEEN = 36; // between the grid and the enlarged map
const HEADS_NUMBERS = 16; // height of the heads' numbers
const HEADS_LEAST = 22; // pixels of a thumbnail
const HEADS_MOST = 76;
const HEADS_TOP = 8;
const HEADS_ABOVE = HEADS_TOP + SCALE_HEIGHT + 12; // of the enlarged map

const headsScreens = new WeakMap();

function headsFacts(trace, state) {
  const group = trace.group(state.group);
  const prefix = state.group ? `${state.group} ` : "";
  const heads = trace.has(`${prefix}heads`) ? group.heads : 0;
  return { ...group, prefix, heads, count: heads + 1, single: trace.about.single_heads !== false };
}

function headsNotes(facts, seen) {
  const own = thumbNote(seen);
  if (facts.heads || !facts.single) return [own]; // some mixings have no maps of single heads
  return [own, "only the mean of heads: overt.trace(…, heads=True) keeps single heads"];
}

function headsGridWidth(facts, size) {
  return HEADS_GUTTER + facts.count * (size + HEADS_GAP) + (facts.heads ? HEADS_APART : 0);
}

/** Layout of the grid and the enlarged map within a width. */
export function headsLayout(trace, state, width, screen = 600) {
  const facts = headsFacts(trace, matrixWithin(trace, state));
  const inner = width - 2 * HEADS_PAD;
  const about = { trace, rows: facts.rows, columns: facts.columns, title: "" };
  const least = headsGridWidth(facts, facts.heads ? HEADS_LEAST : 48);
  const beside = inner - HEADS_BETWEEN - Math.max(least, 150) >= (facts.heads ? 360 : 200);
  let mapWidth = inner;
  if (beside) {
    const whole = matrixSize({ ...about, width: inner }).width;
    const legible = matrixSize({ ...about, width: inner, cell: 9 }).width;
    const besides = (grid) => inner - HEADS_BETWEEN - Math.max(grid, 150);
    const wanted = Math.max(0.54 * inner, Math.min(legible, 0.68 * inner), besides(headsGridWidth(facts, HEADS_MOST)));
    mapWidth = Math.min(whole, wanted, besides(least));
  }
  const matrix = { ...about, width: mapWidth, height: beside ? Math.max(screen - SCALE_HEIGHT - 40, 380) : 460 };
  const size = matrixSize(matrix);
  const gridRoom = beside ? inner - HEADS_BETWEEN - mapWidth : inner;
  const room = gridRoom - HEADS_GUTTER - (facts.heads ? HEADS_APART : 0);
  const fit = Math.max(1, Math.min(facts.count, Math.floor(room / (HEADS_LEAST + HEADS_GAP))));
  const lines = Math.ceil(facts.count / fit);
  const line = Math.ceil(facts.count / lines);
  const thumb = Math.max(Math.min(room / line - HEADS_GAP, HEADS_MOST), 12);
  // With several lines per layer, each line has its heads' numbers; otherwise they are shown once, at the top.
  const block = lines * (thumb + HEADS_GAP + (lines > 1 ? HEADS_NUMBERS : 0)) + (lines > 1 ? 8 : 0);
  const notes = headsNotes(facts, state).reduce((sum, text) => sum + 15 * noteLines(text, gridRoom).length, 0);
  const head = 22 + notes + 6 + (lines > 1 ? 0 : HEADS_NUMBERS);
  const used = Math.min(gridRoom, Math.max(headsGridWidth({ ...facts, count: line }, thumb), 240));
  const mapX = beside ? HEADS_PAD + used + HEADS_BETWEEN : HEADS_PAD;
  const map = { x: mapX, y: 0, height: HEADS_ABOVE + size.height + 16 };
  const gridHeight = HEADS_TOP + head + facts.layers * block + 12;
  const grid = { x: HEADS_PAD, y: beside ? 0 : map.height + 8, width: gridRoom, height: gridHeight };
  const height = beside ? Math.max(map.height, grid.height) : grid.y + grid.height;
  return { facts, beside, matrix, size, map, grid, head, line, lines, thumb, block, height };
}

// A part shorter than the screen stays visible while the other part scrolls.
function headsShift(part, layout, top, screen) {
  return layout.beside && part.height <= screen ? Math.max(Math.min(top, layout.height - part.height), 0) : 0;
}

function headsPlace(seen, layers) {
  const group = { encoder: "encoder, ", cross: "decoder → encoder, " }[seen.group] || "";
  return `${group}layer ${seen.layer + 1} of ${layers}, ${headsName(seen.head)}`;
}

/** What the maps hold, as a prefix, if it is not attention itself. */
function headsMaps(trace) {
  return trace.mapsTitle ? `${trace.mapsTitle}, ` : "";
}

function headsName(head) {
  return head === null ? "mean of heads" : `head ${head + 1}`;
}

function headsThumbY(layout, layer) {
  return layout.grid.y + HEADS_TOP + layout.head + layer * layout.block;
}

export const headsView = {
  id: "heads",
  title: "Heads",
  controls: ["group", "layer", "head", "query", "words", "log"],

  applies(trace) {
    if (trace.kept) return "this trace has rows of some tokens in place of maps";
    return trace.layers && trace.has(trace.mean) ? true : "this trace has no maps";
  },

  measure({ trace, state, width, screen }) {
    headsScreens.set(trace, screen);
    return { height: headsLayout(trace, state, width, screen).height };
  },

  draw(given) {
    const { trace, width, top, bottom } = given;
    const state = matrixWithin(trace, given.state);
    const scene = { ...given, state, seen: matrixWithin(trace, given.seen) };
    const layout = headsLayout(trace, state, width, headsScreens.get(trace));
    headsDrawMap(scene, layout, headsShift(layout.map, layout, top, bottom - top));
    headsDrawGrid(scene, layout, headsShift(layout.grid, layout, top, bottom - top));
  },

  minimap({ trace, state, width }) {
    const layout = headsLayout(trace, state, width, headsScreens.get(trace));
    return Array.from({ length: layout.facts.layers }, (_, layer) => {
      const at = (headsThumbY(layout, layer) + layout.block / 2) / layout.height;
      return { at, size: 0.6, chosen: layer === matrixWithin(trace, state).layer };
    });
  },

  placeOf({ trace, state, width }) {
    const screen = headsScreens.get(trace) || 600;
    const layout = headsLayout(trace, state, width, screen);
    // A map that is always on the screen needs no scrolling, but the grid next to it may.
    const { layer } = matrixWithin(trace, state);
    if (layout.beside && layout.map.height <= screen) return headsThumbY(layout, layer) + layout.thumb / 2;
    const row = matrixRow(trace, state, layout.facts.rows);
    return HEADS_ABOVE + layout.size.mapY + (row === null ? 0 : (row - layout.facts.rows[0]) * layout.size.cell);
  },

  describe({ trace, seen: given }) {
    const seen = matrixWithin(trace, given);
    const { rows, columns, layers } = headsFacts(trace, seen);
    const place = `${headsMaps(trace)}${headsPlace(seen, layers)}`;
    const found = trace.map(seen.group, seen.layer, seen.head);
    const row = matrixRow(trace, seen, rows);
    if (!found || row === null) return place;
    const column = matrixColumn(seen, columns);
    const lost = matrixLost(found.field, found.map, row, rows);
    const tail = lost ? ` · ${lost}` : "";
    if (column !== null) return `${place}: ${matrixCell(trace, found.field, found.map, row, column, rows, columns)}${tail}`;
    const most = strongest(found.field.row(found.map, row - rows[0]), 5);
    const listed = most.map((one) => `${shown(trace.tokens[columns[0] + one.token], 20)} ${number(one.value)}`).join(", ");
    return `${place}: “${shown(trace.tokens[row], 30)}” → ${listed || "nothing"}${tail}`;
  },
};

function headsDrawMap({ surface, trace, seen, state, theme, width, top, bottom }, layout, shift) {
  const { facts, map, matrix, size } = layout;
  const chosen = trace.map(seen.group, seen.layer, seen.head);
  const field = chosen && chosen.field;
  const peak = field ? matrixPeak(trace, field, chosen.map, seen, facts.rows, facts.columns) : 1;
  const scale = matrixScale(theme, peak, [field], seen);
  const y = map.y + shift;
  const wide = Math.min(220, Math.max(matrix.width - 20, 120));
  const what = fitted(`${headsMaps(trace)}weight in the enlarged map`, width - map.x - HEADS_PAD, 11);
  if (field) drawScale(surface, theme, scale, map.x, y + HEADS_TOP, what, wide);
  const title = `layer ${seen.layer + 1}, ${headsName(seen.head)}`;
  const broken = field && field.broken ? ` · ${field.broken} cells of this layer were NaN or infinite and count as 0` : "";
  const place = { ...matrix, cell: size.cell, x: map.x, y: y + HEADS_ABOVE, top, bottom };
  const picture = { field, map: chosen ? chosen.map : 0, scale, title: title + broken, note: `${headsMaps(trace)}${title}` };
  drawMatrix(surface, { ...place, ...picture, theme, seen, state });
}

function headsDrawGrid(scene, layout, shift) {
  const { surface, trace, seen, state, theme, top, bottom, redraw } = scene;
  const { facts, grid, line, lines, thumb, block } = layout;
  let y = grid.y + shift + HEADS_TOP;
  const title = facts.heads ? "layers (down) × heads (across)" : "layers";
  surface.text(title, grid.x, y + 9, { size: 13, fill: theme.ink, weight: 600 });
  y += 22;
  for (const note of headsNotes(facts, state)) y += drawNote(surface, theme, note, grid.x, y, grid.width);
  const start = headsThumbY(layout, 0) + shift;
  if (lines === 1) headsNumbers(surface, seen, theme, layout, 0, start - HEADS_NUMBERS);
  const budget = thumbBudget(surface);
  const numbers = lines > 1 ? HEADS_NUMBERS : 0; // above each line
  const { rows, columns } = facts;
  const row = matrixRow(trace, seen, facts.rows);
  const first = Math.max(0, Math.floor((top - start) / block));
  const last = Math.min(facts.layers, Math.ceil((bottom - start) / block));
  for (let layer = first; layer < last; layer++) {
    const above = start + layer * block;
    const here = layer === seen.layer;
    const middle = above + numbers + thumb / 2;
    const look = { size: 11, fill: here ? theme.accent : theme.soft, align: "right", weight: here ? 700 : 400 };
    surface.text(String(layer + 1), grid.x + HEADS_GUTTER - 8, middle, look);
    surface.hit(grid.x, above, HEADS_GUTTER, block, { select: { layer }, tip: `layer ${layer + 1}` });
    for (let at = 0; at < lines; at++) {
      if (numbers) headsNumbers(surface, seen, theme, layout, at, above + at * (thumb + HEADS_GAP + numbers));
    }
    for (let i = 0; i < facts.count; i++) {
      const head = i ? i - 1 : null;
      const x = headsX(layout, i);
      const under = above + Math.floor(i / line) * (thumb + HEADS_GAP + numbers) + numbers;
      const name = `${facts.prefix}${head === null ? "mean" : "heads"}`;
      const made = thumbOf(trace, { name, layer, map: head ?? 0, theme, seen, rows, columns, budget });
      const chosen = layer === state.layer && head === state.head;
      const pointed = here && head === seen.head;
      drawThumb(surface, theme, { thumb: made, x, y: under, size: thumb, rows, columns, row, chosen, pointed });
      const tip = `layer ${layer + 1}, ${headsName(head)}${made ? `\nlargest weight ${number(made.peak)}` : ""}`;
      const side = thumb + HEADS_GAP;
      const target = { hover: { layer, head }, select: { layer, head }, tip };
      surface.hit(x - HEADS_GAP / 2, under - HEADS_GAP / 2, side, side, target);
    }
  }
  if (budget.more) redraw();
}

function headsX({ facts, grid, line, thumb }, i) {
  return grid.x + HEADS_GUTTER + (i % line) * (thumb + HEADS_GAP) + (facts.heads && i % line > 0 ? HEADS_APART : 0);
}

function headsNumbers(surface, seen, theme, layout, at, y) {
  const { facts, line, thumb } = layout;
  for (let i = at * line; i < Math.min((at + 1) * line, facts.count); i++) {
    const head = i ? i - 1 : null;
    const here = head === seen.head;
    const text = head === null ? "mean" : String(head + 1);
    const size = thumb < 30 && head === null ? 9 : 10;
    const look = { size, fill: here ? theme.accent : theme.soft, align: "center", weight: here ? 700 : 400 };
    surface.text(text, headsX(layout, i) + thumb / 2, y + 7, look);
  }
}
