import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { graphView } from "../../src/overt/view/viewer/graph.js";
import { imagePatches, imageSize, imageView } from "../../src/overt/view/viewer/image.js";
import { drawn, HALF, METHODS, traceOf } from "./record.js";

const TOKENS = ["[CLS]", "0,0", "0,1", "1,0", "1,1", "2,0", "2,1"];
const ROW = [0.4, 0, 0.1, 0.2, 0.1, 0.15, 0.05];
const cells = (row) => [TOKENS.map((_, i) => (i ? TOKENS.map((__, j) => (i === j ? 0.7 : 0.05)) : row))];
const LAYERS = [cells(ROW), cells([0.5, 0.3, 0, 0, 0, 0, 0.2])];

function made(more = {}, fields = {}) {
  return traceOf({ tokens: TOKENS, special: [1, 0, 0, 0, 0, 0, 0], grid: [3, 2], image: [48, 32], ...more }, { mean: LAYERS, rollout: LAYERS, ...fields });
}

/** A captioning model: four patches behind a CLS token, then two words. */
function caption() {
  const about = { tokens: ["[CLS]", "0,0", "0,1", "1,0", "1,1", "a", "cat"], source: 5, kind: "encoder–decoder", grid: [2, 2], image: [8, 8] };
  const own = [[[1, 0], [0.5, 0.5]]];
  const cross = [[[0.2, 0.8, 0, 0, 0], [0.1, 0, 0, 0, 0.9]]];
  const groups = { cross: { layers: 1, heads: 0, rows: [5, 7], columns: [0, 5] } };
  return traceOf({ ...about, groups, main: 1 }, { mean: [own], "cross mean": [cross] });
}

function at(surface, x, y) {
  const found = surface.hits.findLast((one) => x >= one.x && x < one.x + one.width && y >= one.y && y < one.y + one.height);
  return typeof found?.target === "function" ? found.target(x, y) : found?.target;
}

const light = (pixels, i) => pixels.data[4 * i] + pixels.data[4 * i + 1] + pixels.data[4 * i + 2];

afterEach(() => delete globalThis.Image);

test("what is no image says so", () => {
  assert.match(imageView.applies(traceOf({ tokens: TOKENS }, { mean: LAYERS })), /this trace is not of an image/);
  assert.match(imageView.applies(made({ grid: [9, 9] })), /fewer tokens/);
  assert.equal(imageView.applies(made()), true);
});

test("patches are the last tokens, of the source where there is one", () => {
  assert.deepEqual(imagePatches(made()), { first: 1, stop: 7, rows: 3, columns: 2 });
  assert.deepEqual(imagePatches(caption()), { first: 1, stop: 5, rows: 2, columns: 2 });
});

test("a patch is its share of the picture, and square where the picture has a rest", () => {
  assert.deepEqual(imageSize({ grid: [3, 2], image: [48, 32] }), { height: 48, width: 32, tall: 16, wide: 16 });
  assert.deepEqual(imageSize({ grid: [2, 4], image: [32, 32] }), { height: 32, width: 32, tall: 16, wide: 8 });
  assert.deepEqual(imageSize({ grid: [1, 2], image: [30, 33] }), { height: 30, width: 33, tall: 16, wide: 16 });
});

test("each layer is a picture of its patches, the chosen one large as well, on one scale", () => {
  const surface = drawn(imageView, made(), { layer: 0, query: 0 });
  const images = surface.of("image");
  assert.equal(images.length, 3);
  const [large, first, second] = images;
  assert.deepEqual([large.at[0].width, large.at[0].height], [2, 3]);
  assert.ok(large.at[3] > first.at[3] && large.at[0] === first.at[0]);
  assert.ok(light(first.at[0], 2) < light(first.at[0], 1), "0.2 is darker than 0.1");
  assert.equal(light(first.at[0], 2), light(second.at[0], 5), "0.2 is 0.2 in every layer");
  assert.ok(light(second.at[0], 0) < light(second.at[0], 5), "0.3 is the darkest");
  assert.ok(surface.texts.includes("0.300"), "where the scale ends: CLS is no patch");
  assert.match(surface.texts.join(" "), /40 % of rollout is on other tokens/);
});

test("a method's numbers are called what the index calls them", () => {
  const trace = made({ methods: [...METHODS, HALF] }, { half: LAYERS, flow: LAYERS });
  const texts = (method) => drawn(imageView, trace, { layer: 0, query: 0, method }).texts.join("\n");
  assert.match(texts("half"), /half rollout: a patch’s share, all layers/);
  assert.match(texts("half"), /40 % of half rollout is on other tokens/);
  assert.match(texts("flow"), /flow: a patch’s amount, all layers/);
  assert.match(texts("raw"), /raw: a patch’s weight, all layers/);
  assert.match(texts("raw"), /40 % of the weight is on other tokens/);
});

test("a patch tells its weight and place, and becomes the query by a click", () => {
  const surface = drawn(imageView, made(), { layer: 0, query: 0 });
  const [, x, y, wide, tall] = surface.of("image")[0].at;
  const target = at(surface, x + 0.25 * wide, y + 0.5 * tall);
  assert.match(target.tip, /patch 1,0 \(row, column\): 0\.200\nrollout, layer 1/);
  assert.deepEqual(target.hover, { token: 3 });
  assert.deepEqual(target.select, { query: 3, token: null });
  const [, sx, sy, swide, stall] = surface.of("image")[2].at;
  const small = at(surface, sx + 0.75 * swide, sy + 0.9 * stall);
  assert.deepEqual(small.hover, { layer: 1, token: 6 });
  assert.deepEqual(small.select, { layer: 1 });
  assert.match(small.tip, /patch 2,1 .*: 0\.200\nrollout, layer 2/);
});

test("tokens that are no patches are chips that can be chosen", () => {
  const surface = drawn(imageView, made(), { layer: 0, query: 3 });
  const chip = surface.of("text").find((call) => call.at[0] === "[CLS]");
  assert.deepEqual(at(surface, chip.at[1], chip.at[2]).select, { query: 0, token: null });
  assert.ok(!surface.texts.includes("0,0"), "patches are no chips");
});

test("of a captioning model words are the queries, and patches are not", () => {
  const trace = caption();
  const surface = drawn(imageView, trace, { layer: 0, query: 1, method: "raw" });
  const pixels = surface.of("image")[0].at[0];
  assert.ok(light(pixels, 3) < light(pixels, 0), "“cat” looks at the last patch");
  const word = surface.of("text").find((call) => call.at[0] === "a");
  assert.deepEqual(at(surface, word.at[1], word.at[2]).select, { query: 0, token: null });
  const cls = surface.of("text").find((call) => call.at[0] === "[CLS]");
  assert.equal(at(surface, cls.at[1], cls.at[2]).select, undefined);
  const [, x, y, wide, tall] = surface.of("image")[0].at;
  assert.deepEqual(at(surface, x + 0.9 * wide, y + 0.9 * tall).select, { token: 4 });
});

test("the scale ends at the largest of the other patches, and tells the query's own", () => {
  const { texts } = drawn(imageView, made(), { layer: 0, query: 3 });
  assert.ok(texts.includes("0.050") && !texts.includes("0.700"));
  assert.ok(texts.includes("rollout: a patch’s share, all layers; its own is up to 0.700"));
  assert.ok(drawn(imageView, made(), { layer: 0, query: 0 }).texts.includes("rollout: a patch’s share, all layers"));
});

test("the query's patch is marked in every picture", () => {
  const marks = (query) => drawn(imageView, made(), { layer: 0, query }).of("rect").filter((call) => call.look.stroke === "#d8590f").length;
  // The chosen layer's frame and CLS' chip, against the frame and a patch in three pictures.
  assert.equal(marks(0), 2);
  assert.equal(marks(3), 4);
});

test("the picture is loaded once, drawn when it has come, and nothing else is fetched", () => {
  const loaded = [];
  globalThis.Image = class {
    set src(value) {
      loaded.push(this);
      this.kept = value;
    }
    get src() {
      return this.kept;
    }
  };
  const trace = made({ picture: "data:image/png;base64,AAAA" });
  let asked = 0;
  const again = { ...imageView, draw: (scene) => imageView.draw({ ...scene, redraw: () => asked++ }) };
  assert.equal(drawn(again, trace, { layer: 0, query: 0 }).of("picture").length, 0);
  assert.equal(loaded.length, 1);
  loaded[0].onload();
  assert.equal(asked, 1);
  const surface = drawn(again, trace, { layer: 0, query: 0 });
  assert.equal(loaded.length, 1);
  assert.equal(surface.of("picture").length, 4, "itself, and beneath the weights of three");
  assert.ok(surface.of("image")[0].at[0].data[3] < 255, "weights let it through");
  drawn(again, made({ picture: "https://example.org/spy.png" }), { layer: 0, query: 0 });
  assert.equal(loaded.length, 1);
});

test("a method that has not the query says so", () => {
  const trace = made({ queries: { rollout: [0] } });
  const surface = drawn(imageView, trace, { layer: 0, query: 3 });
  assert.match(surface.texts.join(" "), /the page has rollout for one query/);
  assert.equal(surface.of("image").length, 0);
});

test("layers beyond the screen are not drawn", () => {
  const many = Array.from({ length: 48 }, () => cells(ROW));
  const trace = made({}, { mean: many, rollout: many });
  const { height } = imageView.measure({ trace, width: 600 });
  assert.ok(height > 1500);
  assert.ok(drawn(imageView, trace, { layer: 0, query: 0 }, 600, [0, 600]).of("image").length < 12);
  assert.equal(drawn(imageView, trace, { layer: 0, query: 0 }, 600).of("image").length, 49);
});

/** A network over pixels, without CLS: two layers of 2 × 2 pixels, the second with parts, both with a spread. */
function pixels(more = {}, fields = {}) {
  const about = { tokens: ["0,0", "0,1", "1,0", "1,1"], kind: "pixels", grid: [2, 2], image: [9, 9], samples: 5, main: 3, ...more };
  const row = (...values) => [[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], values]];
  const mean = [row(0.4, 0.3, 0.2, 0.1), row(0.1, 0.6, 0.2, 0.1)];
  const parts = { "part attention": [row(0.7, 0.1, 0.1, 0.1), row(0.25, 0.25, 0.4, 0.1)], "part convolution": [null, row(0, 0.9, 0.1, 0)] };
  return traceOf(about, { mean, ...parts, spread: [row(0.01, 0, 0.02, 0), row(0, 0.05, 0, 0)], ...fields });
}

test("pixels of a map fill the picture, also where they do not divide it", () => {
  assert.deepEqual(imagePatches(pixels()), { first: 0, stop: 4, rows: 2, columns: 2 });
  assert.deepEqual(imageSize(pixels().about), { height: 9, width: 9, tall: 4.5, wide: 4.5 });
});

test("parts and spread of a map are shown on its grid, each on its own scale", () => {
  const seen = { layer: 1, query: 3, method: "raw" };
  const shades = (part) => drawn(imageView, pixels(), { ...seen, part }).of("image").map((one) => one.at[0]);
  const [fused] = shades("fused");
  assert.ok(light(fused, 1) < light(fused, 2), "0.6 is darker than 0.2");
  const [attention] = shades("attention");
  assert.ok(light(attention, 2) < light(attention, 1), "0.4 is darker than 0.25");
  const spread = drawn(imageView, pixels(), { ...seen, part: "spread" });
  assert.ok(spread.texts.some((text) => text.startsWith("spread over 5 samples: a pixel’s standard deviation")));
  assert.ok(spread.texts.includes("0.050"), "where its scale ends");
  assert.equal(drawn(imageView, pixels(), { ...seen, layer: 0, part: "convolution" }).of("image").length, 1, "only the second layer has one");
  assert.match(drawn(imageView, pixels(), { ...seen, layer: 0, part: "convolution" }).texts.join(" "), /layer 1 has no convolution/);
});

test("parts are offered for raw maps only, and none where there are none", () => {
  const names = (trace, method = "raw") => imageView.parts(trace, { method }).map(([, title]) => title);
  assert.deepEqual(names(pixels()), ["attention", "convolution", "fused", "spread"]);
  assert.deepEqual(names(pixels(), "rollout"), []);
  assert.deepEqual(names(made({}, { spread: LAYERS })), ["map", "spread"]);
  assert.deepEqual(names(made()), ["map"]);
  assert.deepEqual(names(caption()), ["map"]);
});

test("the status tells what is shown", () => {
  const seen = { layer: 1, query: 3, head: null, method: "raw" };
  assert.equal(imageView.describe({ trace: pixels(), seen: { ...seen, part: "fused" } }), null);
  assert.match(imageView.describe({ trace: pixels(), seen: { ...seen, part: "spread" } }), /“1,1”, layer 2 of 2, spread over 5 samples: 0,1 0\.050/);
  assert.match(imageView.describe({ trace: pixels(), seen: { ...seen, layer: 0, part: "convolution" } }), /layer 1 has no convolution/);
});

test("paths are not drawn through convolutions", () => {
  assert.match(graphView.applies(pixels()), /convolutions and shortcuts pass information on outside attention/);
});
