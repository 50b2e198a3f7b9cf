// Pictures in a prompt: where patches are drawn, how much of a row is on each picture, and the mean of layers.
import assert from "node:assert/strict";
import { test } from "node:test";
import { fillControls } from "../../src/overt/view/viewer/controls.js";
import { pressed } from "../../src/overt/view/viewer/keys.js";
import { layerWords, passageRow } from "../../src/overt/view/viewer/passage.js";
import { patchWords, picturesBounds, picturesShare, picturesView } from "../../src/overt/view/viewer/pictures.js";
import { Store } from "../../src/overt/view/viewer/store.js";
import { textView } from "../../src/overt/view/viewer/text.js";
import { VIEWS } from "../../src/overt/view/viewer/views.js";
import { documented, made } from "./dom.js";
import { drawn, traceOf } from "./record.js";

// A token, a picture of 2 × 2 patches, a token, a picture of 1 × 2, then two words that were generated.
const TOKENS = ["Look", "▪", "▪", "▪", "▪", "and", "▪", "▪", "a", "dog"];
const ROWS = [
  [[0.1, 0.1, 0.2, 0.1, 0.1, 0.1, 0.2, 0.1, 0, 0], [0, 0, 0, 0, 0.8, 0, 0, 0.1, 0.1, 0]],
  [[0.5, 0.1, 0, 0, 0.1, 0.1, 0.1, 0.1, 0, 0], [0.2, 0, 0, 0, 0.4, 0, 0, 0.3, 0.1, 0]],
];
const PANELS = [
  { name: "picture 1", photo: null, size: [40, 60], tiles: [{ start: 1, rows: 2, columns: 2, box: [1 / 6, 0, 5 / 6, 1] }] },
  { name: "picture 2", photo: null, size: [10, 20], tiles: [{ start: 6, rows: 1, columns: 2, box: [0, 0, 1, 1] }] },
];

function seeing(about = {}) {
  const rows = { queries: [7, 8], before: "1".repeat(TOKENS.length), generated: [8, 10] };
  const pictures = { photos: [], panels: PANELS };
  return traceOf({ kind: "causal", layers: 2, tokens: TOKENS, main: 7, rows, pictures, queries: { raw: [7, 8] }, ...about }, { raw: ROWS.map((row) => [row]) });
}

const near = (found, want) => found.forEach((one, i) => assert.ok(Math.abs(one - want[i]) < 1e-6, `${found} is not ${want}`));

test("a trace with pictures in its prompt has a view of them, others say why not", () => {
  assert.equal(picturesView.applies(seeing()), true);
  assert.match(picturesView.applies(seeing({ pictures: null })), /no pictures in this trace/);
  assert.equal(picturesView.applies(seeing({ pictures: null, missing: { pictures: "no grid is known" } })), "no grid is known");
  const order = VIEWS.filter((view) => view.applies(seeing()) === true).map((view) => view.id);
  assert.deepEqual(order, ["pictures", "text", "top", "strip"]);
});

test("shares of the row are those of the patches", () => {
  const trace = seeing();
  const row = trace.row("raw", 0, 7).values;
  near([picturesShare(row, PANELS), picturesShare(row, [PANELS[0]]), picturesShare(row, [PANELS[1]])], [0.8, 0.5, 0.3]);
  assert.ok(Number.isNaN(picturesShare([0.5, -0.1, 0.6, 0, 0, 0, 0, 0], PANELS)), "of signed values there is none");
  const { texts } = drawn(picturesView, trace, { method: "raw", layer: 0, query: 7 });
  assert.ok(texts.some((text) => /draws on: 80 % of the row is on pictures/.test(text)));
  assert.ok(texts.includes("50 % of the row; the model saw the middle only"));
  assert.ok(texts.includes("30 % of the row"));
});

test("patches are drawn over their part of the picture, each with its own colour and answer", () => {
  const trace = seeing();
  const surface = drawn(picturesView, trace, { method: "raw", layer: 0, query: 8 });
  const [first, second] = surface.of("image");
  const [x, , width, height] = first.at.slice(1);
  assert.ok(Math.abs(width / height - 1) < 1e-6, "the middle two thirds of 60 × 40 are square");
  const [frame] = surface.of("rect").filter((call) => Math.abs(call.at[3] - height) < 1e-6 && call.at[2] > width);
  assert.ok(Math.abs((x - frame.at[0]) / frame.at[2] - 1 / 6) < 1e-6);
  const strength = ({ data }, i) => data[4 * i]; // the darker, the more
  const cover = first.at[0];
  assert.ok(strength(cover, 3) < strength(cover, 0), "the last patch has .8 of the row");
  assert.equal(strength(cover, 0), strength(cover, 1));
  assert.deepEqual([cover.width, cover.height, second.at[0].width, second.at[0].height], [2, 2, 2, 1]);
  const hit = surface.hits.find((one) => typeof one.target === "function");
  const target = hit.target(hit.x + 0.75 * hit.width, hit.y + 0.75 * hit.height);
  assert.deepEqual(target.hover, { token: 4 });
  assert.match(target.tip, /^picture 1, row 2, column 2 \(token 4\)\nraw, layer 1 of 2: 0\.800/);
  assert.equal(patchWords({ panels: PANELS }, 7), "picture 2, row 1, column 2");
  for (const token of [0, 5, 9, null]) assert.equal(patchWords({ panels: PANELS }, token), null);
});

test("the line below names pictures and patches, not tokens that say nothing", () => {
  const seen = { method: "raw", layer: 0, query: 8, head: null, token: null };
  const said = picturesView.describe({ trace: seeing(), seen });
  assert.match(said, /of “dog” \(token 9, as it was written\): picture 1 80 %, picture 2 10 % of the row; most from picture 1, row 2, column 2 0\.800; /);
  assert.match(said, /“a” \(token 8\) 0\.100$/);
  assert.match(picturesView.describe({ trace: seeing(), seen: { ...seen, token: 7 } }), /^picture 2, row 1, column 2: 0\.100, 10 % of the row, number 2 of 10 · raw, layer 1 of 2/);
});

test("a picture that was padded is inside its panel", () => {
  assert.deepEqual(picturesBounds({ tiles: [{ box: [0, -0.25, 1, 1.25] }] }), [0, -0.25, 1, 1.25]);
  assert.deepEqual(picturesBounds(PANELS[0]), [0, 0, 1, 1]);
});

test("pointing at a word shows its row", () => {
  const surface = drawn(picturesView, seeing(), { method: "raw", layer: 0, query: 7 }, 420);
  const words = surface.hits.filter((one) => one.target.hover && "query" in one.target.hover);
  assert.deepEqual(words.map((one) => one.target.hover), [{ query: 7, token: null }, { query: 8, token: null }]);
  assert.match(words[1].target.tip, /^dog\ntoken 9, generated/);
  const layers = surface.hits.filter((one) => one.target.select && "layer" in one.target.select);
  assert.deepEqual(layers.map((one) => one.target.hover), [{ layer: 0, averaged: false }, { layer: 1, averaged: false }]);
  assert.match(layers[1].target.tip, /layer 2: 40 % of the row/);
});

test("the mean of layers is that of the rows, for raw attention only", () => {
  const trace = seeing();
  const seen = { method: "raw", layer: 1, query: 7, head: null, averaged: true };
  near(Array.from(passageRow(trace, seen).values), ROWS[0][0].map((one, i) => (one + ROWS[1][0][i]) / 2));
  assert.equal(passageRow(trace, seen), passageRow(trace, seen), "computed once");
  near(Array.from(passageRow(trace, seen, 0).values), ROWS[0][0]);
  assert.equal(layerWords(trace, seen), "mean of 2 layers");
  assert.equal(layerWords(trace, { ...seen, method: "rollout" }), "layer 2 of 2");
  assert.equal(layerWords(trace, { ...seen, averaged: false }), "layer 2 of 2");
  const few = traceOf({ ...trace.about, layers: 2 }, { raw: [null, [ROWS[1]]] });
  near(Array.from(passageRow(few, seen).values), ROWS[1][0]);
  assert.equal(layerWords(few, seen), "mean of 1 layer");
  const { texts } = drawn(textView, trace, { ...seen, find: "" });
  assert.ok(texts.some((text) => text.startsWith("raw, weight, mean of 2 layers")));
});

test("whoever chooses a layer leaves the mean; the key a, the box and a link bring it back", () => {
  const store = new Store({ layer: 1, averaged: true, method: "raw", view: "text" });
  store.select({ query: 3 });
  assert.equal(store.state.averaged, true);
  store.select({ layer: 0 });
  assert.equal(store.state.averaged, false);
  assert.equal(store.toHash(), "layer=0&averaged=0&query=3");
  store.fromHash("layer=0&averaged=1");
  assert.deepEqual([store.state.layer, store.state.averaged], [0, true]);
  store.fromHash("layer=0");
  assert.equal(store.state.averaged, false);
  store.fromHash("query=2");
  assert.equal(store.state.averaged, true, "as the page begins");
  const viewer = { store, help: {}, tabs: { contains: () => false }, fits: [], uses: (control) => control === "averaged", limits: { layers: 2, heads: 0 }, trace: seeing() };
  pressed(viewer, { key: "a", target: { tagName: "DIV" }, preventDefault: () => {} });
  assert.equal(store.state.averaged, false);
});

test("the controls offer the mean where a view listens, and raw is shown", () => {
  const leave = documented();
  const trace = seeing();
  const selected = [];
  const store = { state: { layer: 1, averaged: true, method: "raw", trace: 0, other: null, query: 7, log: false }, select: (changes) => selected.push(changes) };
  const viewer = { store, trace, traces: [trace], panes: [{ view: picturesView, trace }], fits: [], limits: { layers: 2, heads: 0, queries: 10 }, uses: (control) => picturesView.controls.includes(control), controls: made(), words: false };
  const boxes = () => {
    fillControls(viewer);
    return viewer.controls.all((one) => one.getAttribute("aria-label") === "mean of layers");
  };
  const [box] = boxes();
  assert.equal(box.checked, true);
  box.checked = false;
  box.listeners.change();
  assert.deepEqual(selected, [{ averaged: false }]);
  const [slider] = viewer.controls.all((one) => one.getAttribute("aria-label") === "Layer");
  assert.equal(slider.getAttribute("aria-valuetext"), "mean of 2");
  store.state.method = "rollout";
  assert.deepEqual(boxes(), []);
  leave();
});
