// The grid of heads and the enlarged map: what stands where, what a pointer finds, and how little is drawn of much.
import assert from "node:assert/strict";
import test from "node:test";
import { palette } from "../../src/overt/view/viewer/colour.js";
import { headsLayout, headsView } from "../../src/overt/view/viewer/heads.js";
import { drawMatrix, matrixPeak, matrixScale, matrixSize, thumbBudget, thumbOf } from "../../src/overt/view/viewer/matrix.js";
import { drawn, fieldOf, Recorder, traceOf } from "./record.js";

const theme = palette("light");

/** Weights that differ everywhere: in 1/100 000, 1 for each layer, 10 for each map, 100 for each row, 1000 for each column. */
function maps(count, rows, columns, layer = 0) {
  return Array.from({ length: count }, (_, m) => Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (_, j) => (1 + layer + 10 * m + 100 * i + 1000 * j) / 1e5)));
}

function made({ tokens = 5, layers = 3, heads = 4, ...about } = {}) {
  const words = Array.from({ length: tokens }, (_, i) => `word${i}`);
  const range = Array.from({ length: layers }, (_, layer) => layer);
  const fields = { mean: range.map((layer) => maps(1, tokens, tokens, layer)) };
  if (heads) fields.heads = range.map((layer) => maps(heads, tokens, tokens, layer));
  const trace = traceOf({ tokens: words, ...about }, fields);
  for (const list of Object.values(trace.about.fields)) for (const one of list) one.unit = 0.02;
  return trace;
}

/** What the last hit at a point answers. */
function at(surface, x, y) {
  const found = surface.hits.filter((one) => x >= one.x && x < one.x + one.width && y >= one.y && y < one.y + one.height).at(-1);
  return found && (typeof found.target === "function" ? found.target(x, y) : found.target);
}

function thumbHits(surface) {
  return surface.hits.filter((one) => one.target.select && "head" in one.target.select);
}

function pageOf(words, weights, unit, dropped = 0) {
  const trace = traceOf({ tokens: words }, { mean: [[weights]] });
  trace.about.fields.mean[0].unit = unit;
  trace.fields.set("mean/0", fieldOf([weights], dropped));
  return trace;
}

test("every head of every layer has a thumbnail, the mean before them", () => {
  const trace = made();
  const hits = thumbHits(drawn(headsView, trace, {}, 1280));
  assert.equal(hits.length, 3 * 5);
  assert.deepEqual(hits.slice(0, 5).map((one) => one.target.select), [null, 0, 1, 2, 3].map((head) => ({ layer: 0, head })));
  for (let i = 1; i < 5; i++) assert.ok(hits[i].x > hits[i - 1].x && hits[i].y === hits[i - 1].y, "heads stand in a row");
  assert.ok(hits[5].y > hits[0].y && hits[5].x === hits[0].x, "layers stand under each other");
  assert.equal(hits[7].target.tip, `layer 2, head 2\nlargest weight ${((2 + 10 + 400 + 4000) / 1e5).toFixed(4).replace(/0$/, "")}`);
});

test("maps that are not attention are said to be what they are", () => {
  const trace = made({ mixing: "norm", mixing_title: "norm of what is added" });
  assert.ok(drawn(headsView, trace, {}, 1280).texts.includes("norm of what is added, weight in the enlarged map"));
  const seen = { group: "", layer: 1, head: 2, query: 0, token: null };
  assert.match(headsView.describe({ trace, seen }), /^norm of what is added, layer 2 of 3, head 3: /);
  assert.match(headsView.describe({ trace: made(), seen }), /^layer 2 of 3, head 3: /);
});

test("the chosen thumbnail has a frame, and no other has", () => {
  const surface = drawn(headsView, made(), { layer: 1, head: 2, query: 3 }, 1280);
  const frames = surface.of("rect").filter((call) => call.look.stroke === theme.select && call.look.line === 2.5);
  assert.equal(frames.length, 1);
  const [x, y] = frames[0].at;
  assert.deepEqual(at(surface, x + 5, y + 5).select, { layer: 1, head: 2 });
});

test("a cell of the enlarged map tells its weight and leads to its query and key", () => {
  const trace = made();
  const state = { layer: 2, head: 1, query: 0 };
  const surface = drawn(headsView, trace, state, 1280);
  const { map, size } = headsLayout(trace, state, 1280, 600);
  const y = 8 + 34 + 12 + size.mapY; // under the scale
  const found = at(surface, map.x + size.mapX + 3.5 * size.cell, y + 1.5 * size.cell);
  assert.deepEqual(found.hover, { query: 1, token: 3 });
  assert.deepEqual(found.select, { query: 1, token: 3 });
  assert.match(found.tip, /^word1 → word3: 0\.0311\nlayer 3, head 2/);
});

test("the enlarged map's scale ends at its own largest weight", () => {
  const surface = drawn(headsView, made(), { layer: 0, head: 0 }, 1280);
  assert.ok(surface.texts.includes("0.044"), "1 + 400 + 4000 of 100 000");
  assert.ok(surface.texts.some((text) => text.startsWith("each has its own scale")));
});

test("what rows left out stands beside them, from nothing to the page's unit", () => {
  const trace = pageOf(["a", "b"], [[0.9, 0.1], [0.5, 0.5]], 0.04, 0.01);
  const surface = drawn(headsView, trace, { layer: 0 }, 900);
  assert.ok(surface.texts.includes("left out") && surface.texts.includes("4.0 %"));
  const bars = surface.of("rect").filter((call) => call.look.fill === theme.soft);
  assert.equal(bars.length, 2);
  assert.ok(Math.abs(bars[0].at[2] - 46 / 4) < 1e-3, "a quarter of the unit is a quarter of the bar");
  const [x, y] = bars[1].at;
  assert.equal(at(surface, x + 1, y + 1).tip, "b\nthis row left out 1.0 %");
  assert.match(at(surface, x - 30, y + 1).tip, /this row left out 1\.0 %$/);
});

test("a page that left nothing out has no bars of it", () => {
  assert.ok(!drawn(headsView, pageOf(["a", "b"], [[0.9, 0.1], [0.5, 0.5]], 0), { layer: 0 }).texts.includes("left out"));
});

test("without single heads there is one column, and how to have more", () => {
  const surface = drawn(headsView, made({ heads: 0 }), {}, 1280);
  assert.equal(thumbHits(surface).length, 3);
  assert.match(surface.texts.join(" "), /overt\.trace\(…, heads=True\)/);
});

test("the map stands beside the grid in a wide pane and above it in a narrow one", () => {
  const trace = made({ tokens: 8, heads: 12 });
  assert.equal(headsLayout(trace, { group: "" }, 1280).beside, true);
  const narrow = headsLayout(trace, { group: "" }, 390);
  assert.equal(narrow.beside, false);
  assert.ok(narrow.grid.y >= narrow.map.height);
});

test("nothing reaches beyond the pane, however many heads and tokens", () => {
  for (const width of [360, 640, 1280]) {
    for (const [tokens, heads] of [[3, 1], [60, 12], [20, 32]]) {
      const surface = drawn(headsView, made({ tokens, heads, layers: 2 }), {}, width);
      for (const hit of surface.hits) assert.ok(hit.x >= 0 && hit.x + hit.width <= width + 1, `${tokens} tokens, ${heads} heads in ${width}: ${hit.x + hit.width}`);
    }
  }
});

test("of many layers, those on the screen are drawn, and the map stays in sight", () => {
  const trace = made({ layers: 48, heads: 12 });
  const whole = headsView.measure({ trace, seen: {}, state: { group: "" }, width: 1280, screen: 600 });
  assert.ok(whole.height > 1500);
  const surface = drawn(headsView, trace, { layer: 47 }, 1280, [900, 1500]);
  const layers = new Set(thumbHits(surface).map((one) => one.target.select.layer));
  assert.ok(layers.size < 24 && !layers.has(0) && !layers.has(47));
  assert.ok(surface.of("text").some((call) => call.at[0] === "word0" && call.at[2] > 900 && call.at[2] < 1500));
});

test("of a long map, labels and bars on the screen alone are drawn, under labels of columns that stay", () => {
  const trace = made({ tokens: 90, layers: 1, heads: 0 });
  const field = trace.field("mean", 0);
  const surface = new Recorder();
  const options = { trace, theme, field, map: 0, rows: [0, 90], columns: [0, 90], x: 0, y: 0, width: 1400, seen: { query: 0, token: null }, top: 500, bottom: 700, title: "one" };
  drawMatrix(surface, { ...options, scale: matrixScale(theme, 1, [field], {}) });
  const labels = surface.of("text").filter((call) => String(call.at[0]).startsWith("word"));
  const rows = labels.filter((call) => !call.look.turn);
  const columns = labels.filter((call) => call.look.turn);
  assert.ok(rows.length > 5 && rows.length < 20, `${rows.length} rows`);
  assert.equal(columns.length, 90);
  assert.ok(columns.every((call) => call.at[2] >= 500 && call.at[2] <= 700));
});

test("of 512 tokens the map is one picture with few labels, and still every cell answers", () => {
  const words = Array.from({ length: 512 }, (_, i) => `w${i}`);
  const trace = traceOf({ tokens: words, heads: 0 }, { mean: [maps(1, 1, 1)] });
  trace.about.groups[""].rows = trace.about.groups[""].columns = [0, 512];
  trace.about.fields.mean[0].unit = 0.02;
  const field = fieldOf([[[0]]]);
  Object.assign(field, { rows: 512, columns: 512, at: (map, i, j) => (i === 300 && j === 200 ? 0.25 : 0), lost: () => 0.01, peak: () => 0.25 });
  field.row = (map, i) => Float32Array.from({ length: 512 }, (_, j) => field.at(map, i, j));
  trace.fields.set("mean/0", field);
  const surface = drawn(headsView, trace, { query: 7 }, 1280);
  assert.ok(surface.calls.length < 800, `${surface.calls.length} calls`);
  const { map, size } = headsLayout(trace, { group: "" }, 1280, 600);
  const found = at(surface, map.x + size.mapX + 200.5 * size.cell, 54 + size.mapY + 300.5 * size.cell);
  assert.deepEqual(found.select, { query: 300, token: 200 });
  assert.match(found.tip, /^w300 → w200: 0\.250/);
  assert.ok(surface.texts.includes("w7"), "the chosen row has its label");
});

test("a pane makes few thumbnails in a frame and asks for the next", () => {
  const connected = { context: { canvas: { isConnected: true } } };
  const budget = thumbBudget(connected);
  const field = { rows: 512, columns: 512, peak: () => 1, row: () => new Float32Array(512), signs: null };
  const trace = made({ layers: 1 });
  trace.fields.set("heads/0", field);
  const options = (map) => ({ name: "heads", layer: 0, map, theme, seen: {}, rows: [0, 512], columns: [0, 512], budget });
  const first = Array.from({ length: 12 }, (_, map) => thumbOf(trace, options(map)));
  const count = first.filter(Boolean).length;
  assert.ok(count >= 1 && count < 8, `${count} of 12`);
  assert.equal(budget.more, true);
  assert.equal(thumbOf(trace, options(0)), first[0], "what was made is kept, and costs nothing");
  assert.equal(thumbBudget(new Recorder()).left, Infinity, "what is exported is made whole");
});

test("a thumbnail that was made needs its layer no more", () => {
  const trace = made({ layers: 1 });
  const options = { name: "mean", layer: 0, map: 0, theme, seen: {}, rows: [0, 5], columns: [0, 5], budget: { left: Infinity, more: false } };
  const thumb = thumbOf(trace, options);
  trace.fields.clear();
  assert.equal(thumbOf(trace, options), thumb);
  assert.equal(trace.idle, true);
});

test("source and target have their own rows and columns", () => {
  const tokens = ["ein", "Haus", "</s>", "a", "house"];
  const fields = { mean: [maps(1, 2, 2)], heads: [maps(2, 2, 2)], "encoder mean": [maps(1, 3, 3)], "encoder heads": [maps(2, 3, 3)], "cross mean": [maps(1, 2, 3)], "cross heads": [maps(2, 2, 3)] };
  const groups = { encoder: { layers: 1, heads: 2, rows: [0, 3], columns: [0, 3] }, cross: { layers: 1, heads: 2, rows: [3, 5], columns: [0, 3] } };
  const trace = traceOf({ tokens, source: 3, groups }, fields);
  const cell = (group, i, j) => {
    const state = { group, layer: 0, head: 1 };
    const { map, size } = headsLayout(trace, state, 1280, 600);
    return at(drawn(headsView, trace, state, 1280), map.x + size.mapX + (j + 0.5) * size.cell, 54 + size.mapY + (i + 0.5) * size.cell);
  };
  assert.deepEqual(cell("", 1, 0).select, { query: 1, token: 3 });
  assert.deepEqual(cell("cross", 1, 0).select, { query: 1, token: 0 });
  assert.match(cell("cross", 1, 0).tip, /^house → ein: 0\.0011/);
  assert.deepEqual(cell("encoder", 2, 1).select, { row: 2, token: 1 });
  const seen = { group: "encoder", layer: 0, head: 1, query: 0, row: 2, token: 1 };
  assert.match(headsView.describe({ trace, seen }), /^encoder, layer 1 of 1, head 2: <\/s> → Haus: 0\.0121/);
});

test("the status names layer, head and the cell with its weight", () => {
  const seen = { group: "", layer: 1, head: null, query: 2, token: 4 };
  assert.equal(headsView.describe({ trace: made(), seen }), "layer 2 of 3, mean of heads: word2 → word4: 0.042");
  assert.match(headsView.describe({ trace: made(), seen: { ...seen, token: null } }), /“word2” → word4 0\.042, word3 0\.032/);
});

test("a scale by words leaves out special tokens and the token itself", () => {
  const trace = pageOf(["[CLS]", "a", "b"], [[0.9, 0.8, 0.7], [0.6, 0.5, 0.2], [0.5, 0.3, 0.4]], 0.02);
  trace.special = [1, 0, 0];
  const field = trace.field("mean", 0);
  assert.equal(matrixPeak(trace, field, 0, { words: false }, [0, 3], [0, 3]), 0.9);
  assert.ok(Math.abs(matrixPeak(trace, field, 0, { words: true }, [0, 3], [0, 3]) - 0.3) < 1e-6);
});

test("a trace that is compared with a larger one shows what it has", () => {
  const surface = drawn(headsView, made({ layers: 2, heads: 2 }), { layer: 5, head: 7, query: 40, group: "cross" }, 1280);
  assert.ok(surface.texts.includes("layer 2, mean of heads"));
  assert.ok(surface.of("image").every((call) => Number.isFinite(call.at[1])));
});

test("tokens are drawn as they may be", () => {
  const surface = drawn(headsView, pageOf(["\u202eevil\n", "x".repeat(200)], [[0.5, 0.5], [0.5, 0.5]], 0), { layer: 0 });
  for (const text of surface.texts) assert.ok(!/[\u202e\n]/.test(text) && text.length < 90, text);
});

test("a trace without maps says so", () => {
  assert.equal(typeof headsView.applies(traceOf({ kind: "nodes", layers: 0 }, {})), "string");
});

test("cells are large where tokens are few, and small before labels are thinned", () => {
  const cell = (tokens, width) => matrixSize({ trace: made({ tokens, layers: 1, heads: 0 }), rows: [0, tokens], columns: [0, tokens], width, height: 500 }).cell;
  assert.equal(cell(8, 900), 26);
  assert.equal(cell(70, 1280), 9);
  assert.ok(cell(300, 640) < 2.5);
});
