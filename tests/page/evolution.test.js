// The three parts of an evolving map, on one scale, with all layers beneath.
import assert from "node:assert/strict";
import test from "node:test";
import { palette } from "../../src/overt/view/viewer/colour.js";
import { evolutionField, evolutionKeys, evolutionLayout, evolutionMissing, evolutionView } from "../../src/overt/view/viewer/evolution.js";
import { drawn, traceOf } from "./record.js";

const theme = palette("light");

/** Maps of one value for each cell: 0.001 for each row, 0.01 for each column, on top of `base`. */
function maps(count, rows, columns, base) {
  return Array.from({ length: count }, (_, m) => Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (_, j) => base + m / 1e4 + i / 1e3 + j / 1e2)));
}

function made({ tokens = 4, layers = 3, heads = 2, starts = [0] } = {}) {
  const words = Array.from({ length: tokens }, (_, i) => `word${i}`);
  const all = (count, base, empty = []) => Array.from({ length: layers }, (_, layer) => (empty.includes(layer) ? null : maps(count, tokens, tokens, base)));
  const fields = { mean: all(1, 0.2), "part attention": all(1, 0.1), "part convolution": all(1, 0.3, starts) };
  if (heads) Object.assign(fields, { heads: all(heads, 0.2), "part attention heads": all(heads, 0.1), "part convolution heads": all(heads, 0.3, starts) });
  return traceOf({ tokens: words }, fields);
}

function at(surface, x, y) {
  const found = surface.hits.filter((one) => x >= one.x && x < one.x + one.width && y >= one.y && y < one.y + one.height).at(-1);
  return found && (typeof found.target === "function" ? found.target(x, y) : found.target);
}

function cell(trace, state, width, part, i, j) {
  const { maps: places, sizes } = evolutionLayout(trace, { group: "", ...state }, width);
  return at(drawn(evolutionView, trace, state, width), places[part].x + sizes[part].mapX + (j + 0.5) * sizes[part].cell, places[part].y + sizes[part].mapY + (i + 0.5) * sizes[part].cell);
}

test("the three parts of a layer stand side by side and tell their own weights", () => {
  const trace = made();
  const tips = [0, 1, 2].map((part) => cell(trace, { layer: 1, head: null }, 1280, part, 2, 3));
  assert.match(tips[0].tip, /^word2 → word3: 0\.132\nself-attention, layer 2/);
  assert.match(tips[1].tip, /^word2 → word3: 0\.332\nconvolution, layer 2/);
  assert.match(tips[2].tip, /^word2 → word3: 0\.232\nfused, in use, layer 2/);
  for (const one of tips) assert.deepEqual(one.select, { query: 2, token: 3 });
});

test("a head's parts are that head's", () => {
  assert.match(cell(made(), { layer: 2, head: 1 }, 1280, 1, 0, 1).tip, /word0 → word1: 0\.310/);
  assert.deepEqual(evolutionField(made(), "", "fused", 1), { name: "heads", map: 1 });
  assert.deepEqual(evolutionField(made({ heads: 0 }), "", "attention", 1), { name: "part attention", map: 0 });
  assert.deepEqual(evolutionField(made(), "encoder", "convolution", null), { name: "encoder part convolution", map: 0 });
});

test("one scale serves the three, up to the largest of all", () => {
  const surface = drawn(evolutionView, made(), { layer: 1 }, 1280);
  assert.ok(surface.texts.includes("weight, one scale for the three maps"));
  assert.ok(surface.texts.includes("0.333"), "the convolution's largest weight");
  const [first, second, third] = surface.of("image").map((call) => call.at[0].data);
  assert.notDeepEqual(first, second);
  assert.ok(first[0] > third[0] && third[0] > second[0], "a smaller weight is paler, across maps");
});

test("where a chain starts, its place says that there is no convolution", () => {
  const trace = made({ starts: [0, 2] });
  const surface = drawn(evolutionView, trace, { layer: 2 }, 1280);
  assert.match(surface.texts.join(" "), /no convolution: a chain starts at this layer/);
  assert.ok(surface.texts.includes("convolution: none"));
  assert.equal(evolutionMissing(trace, "", "convolution", 1, null), null);
  assert.match(evolutionMissing(trace, "", "convolution", 2, 0), /chain starts/);
  const seen = { group: "", layer: 2, head: null, query: 0, token: 1 };
  assert.equal(evolutionView.describe({ trace, seen }), "layer 3 of 3, mean of heads: word0 → word1: attention 0.110, convolution none, fused 0.210");
});

test("all layers of the chosen part lie beneath, and lead to their layer", () => {
  const trace = made({ layers: 12 });
  const surface = drawn(evolutionView, trace, { layer: 4, part: "convolution" }, 1280);
  const hits = surface.hits.filter((one) => one.target.select && "layer" in one.target.select);
  assert.deepEqual(hits.map((one) => one.target.select), Array.from({ length: 12 }, (_, layer) => ({ layer })));
  assert.match(hits[0].target.tip, /no convolution/);
  assert.match(hits[5].target.tip, /^layer 6, convolution\nlargest weight 0\.333/);
  assert.ok(surface.texts.includes("convolution in all layers"));
});

test("a map's title chooses the part beneath", () => {
  const trace = made();
  const { maps: places } = evolutionLayout(trace, { group: "" }, 1280);
  const surface = drawn(evolutionView, trace, {}, 1280);
  assert.deepEqual(places.map((place) => at(surface, place.x + 4, place.y + 6).select), [{ part: "attention" }, { part: "convolution" }, { part: "fused" }]);
});

test("the chosen cell is marked in all three maps", () => {
  const surface = drawn(evolutionView, made(), { layer: 1, query: 1, token: 2 }, 1280);
  const marks = surface.of("rect").filter((call) => call.look.stroke === theme.select && call.look.line === 2);
  assert.equal(marks.length, 3);
  assert.equal(new Set(marks.map((call) => call.at[1])).size, 1, "at one height");
});

test("the bars are the parts' weights of the chosen row, its strongest keys in the order of the text", () => {
  const group = { rows: [0, 2], columns: [0, 4] };
  const of = (...rows) => ({ map: 0, field: { row: (map, i) => Float32Array.from(rows[i]) } });
  const found = [of([0, 0, 0, 0], [0.1, 0, 0.2, 0.3]), { map: 0, field: null }, of([0, 0, 0, 0], [0.6, 0, 0.1, 0.05])];
  const listed = evolutionKeys(found, 1, group, 2);
  assert.deepEqual(listed.map((one) => one.token), [0, 3]);
  assert.deepEqual(listed[0].values.map((value) => value && Number(value.toFixed(3))), [0.1, null, 0.6]);
  assert.deepEqual(evolutionKeys(found, 0, group, 2), []);
});

test("bars are as tall as their weights", () => {
  const surface = drawn(evolutionView, made(), { layer: 1, query: 0 }, 1280);
  const tall = (part) => surface.of("rect").filter((call) => call.look.fill === part && call.at[2] > 10).map((call) => call.at[3]);
  const blue = tall(`rgb(${theme.sizes[3].join(",")})`);
  const orange = tall(`rgb(${theme.spreads[3].join(",")})`);
  assert.equal(blue.length, 4);
  assert.ok(Math.abs(blue[0] / orange[0] - 0.1 / 0.3) < 1e-6);
  assert.ok(Math.abs(blue[0] / blue[3] - 0.1 / 0.13) < 1e-6);
});

test("on a phone the maps stand under each other, and nothing reaches beyond the pane", () => {
  const { maps: places, across } = evolutionLayout(made(), { group: "" }, 390);
  assert.equal(across, false);
  assert.ok(places[0].y < places[1].y && places[1].y < places[2].y);
  for (const width of [360, 640, 1280]) {
    for (const tokens of [2, 9, 40]) {
      const trace = made({ tokens, layers: 24 });
      for (const hit of drawn(evolutionView, trace, {}, width).hits) assert.ok(hit.x >= 0 && hit.x + hit.width <= width + 1, `${tokens} tokens in ${width}`);
    }
  }
});

test("what is not on the screen is not drawn", () => {
  const trace = made();
  const { strip, height } = evolutionLayout(trace, { group: "" }, 640);
  const surface = drawn(evolutionView, trace, {}, 640, [strip - 5, height]);
  assert.equal(surface.of("image").length, 3, "the thumbnails alone");
});

test("a group that does not evolve says which does", () => {
  const trace = made();
  trace.about.groups.encoder = { layers: 2, heads: 2, rows: [0, 4], columns: [0, 4] };
  assert.equal(evolutionView.applies(trace), true);
  assert.deepEqual(drawn(evolutionView, trace, { group: "encoder", layer: 1 }).texts, ["this attention does not evolve; see: decoder"]);
});

test("a trace without parts says how to have them", () => {
  const trace = traceOf({ tokens: ["a", "b"] }, { mean: [maps(1, 2, 2, 0.1)] });
  assert.equal(evolutionView.applies(trace), "no parts: trace an evolving model with overt.trace(…, parts=True)");
});
