import assert from "node:assert/strict";
import { test } from "node:test";
import { captionFacts, captionPanels, captionView } from "../../src/overt/view/viewer/caption.js";
import { TraceData } from "../../src/overt/view/viewer/data.js";
import { VIEWS } from "../../src/overt/view/viewer/views.js";
import { drawn } from "./record.js";

const WORDS = ["a", "<img src=x>", "(end)"];
const CAPTION = {
  model: "BAM-WC, scenes",
  ended: true,
  probabilities: [0.9, 0.5, 1],
  others: WORDS.map((word) => [[word, 0.6, 0.1], ["dog", 0.3, 0.05]]),
  weights: [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]],
  prior: [0.4, 0.3, 0.2, 0.1],
  spread: [[0, 0, 0, 0.05], [0.2, 0.1, 0, 0], [0, 0, 0, 0]],
  samples: 20,
  draws: [["a <img src=x>", 15, true], ["a dog", 5, false]],
};

function traceOfCaption(more = {}) {
  const about = { name: "a", kind: "caption", tokens: WORDS, grid: [2, 2], image: [8, 8], main: 1, caption: { ...CAPTION, ...more } };
  return new TraceData(about, async () => new Uint8Array());
}

const light = (pixels, i) => pixels.data[4 * i] + pixels.data[4 * i + 1] + pixels.data[4 * i + 2];
const state = (more = {}) => ({ query: 1, node: null, log: false, ...more });

test("only this view is for captions, and it is for nothing else", () => {
  const trace = traceOfCaption();
  for (const view of VIEWS) assert.equal(view.applies(trace) === true, view.id === "caption", view.id);
  assert.match(captionView.applies(new TraceData({ name: "", tokens: ["a"] }, async () => new Uint8Array())), /overt caption/);
});

test("the prior stands beside the posterior, then every word, all on one scale", () => {
  const surface = drawn(captionView, traceOfCaption(), state(), 1200);
  const maps = surface.of("image").map((call) => call.at[0]).filter((one) => one.width === 2);
  assert.equal(maps.length, 3 + 4, "prior, posterior and spread; the strip: the prior and three words");
  const [prior, posterior, , small] = maps;
  assert.ok(light(posterior, 0) < light(prior, 0), "0.7 is darker than 0.4");
  assert.equal(light(prior, 0), light(small, 0), "0.4 is 0.4 everywhere");
  assert.deepEqual(captionPanels(traceOfCaption(), 1).map((one) => one.id), ["picture", "prior", "posterior", "spread"]);
});

test("words, probabilities and captions of draws are told", () => {
  const { texts } = drawn(captionView, traceOfCaption(), state(), 1200);
  assert.ok(texts.includes("90 %") && texts.includes("50 %"));
  assert.ok(texts.includes("60 % ± 10.0"));
  assert.ok(texts.includes("15 ×") && texts.includes("Captions of 20 draws, 2 different"));
  assert.equal(captionFacts(traceOfCaption(), 1, 0), "row 1, column 1\nprior: 0.400\nposterior of “<img src=x>”: 0.700\nspread of 20 draws: 0.200");
});

test("what the model has not is not there", () => {
  const plain = traceOfCaption({ prior: null, spread: null, samples: 0, draws: [], others: WORDS.map((word) => [[word, 0.6, null]]) });
  const { texts } = drawn(captionView, plain, state(), 1200);
  assert.deepEqual(captionPanels(plain, 1).map((one) => one.id), ["picture", "posterior"]);
  assert.ok(texts.includes("60 %") && !texts.some((text) => text.includes("draws")));
  const blind = traceOfCaption({ weights: null, prior: null, spread: null, samples: 0, draws: [] });
  assert.deepEqual(captionPanels(blind, 0).map((one) => one.id), ["picture"]);
  assert.match(captionView.describe({ trace: blind, seen: state() }), /sees no picture/);
});

test("a word and a region can be chosen", () => {
  const trace = traceOfCaption();
  const surface = drawn(captionView, trace, state(), 1200);
  assert.deepEqual(surface.hits[2].target.select, { query: 2 });
  const panel = surface.hits.find((one) => typeof one.target === "function");
  const found = panel.target(panel.x + 0.9 * panel.width, panel.y + 0.1 * panel.height);
  assert.deepEqual(found.select, { node: 1 });
  assert.match(captionView.describe({ trace, seen: state({ node: 3 }) }), /row 2, column 2 · prior: 0.100/);
});

test("it fits narrow screens", () => {
  for (const width of [320, 500, 761, 1600]) {
    const surface = drawn(captionView, traceOfCaption(), state(), width);
    for (const { at } of surface.of("image")) assert.ok(at[1] >= 0 && at[1] + at[3] <= width + 1, `${width}`);
  }
});
