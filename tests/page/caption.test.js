import assert from "node:assert/strict";
import { test } from "node:test";
import { captionFacts, captionOthers, captionPanels, captionShaded, captionView, captionWhole } from "../../src/overt/view/viewer/caption.js";
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
  draws: [["a <img src=x>", 15, true, true], ["a dog", 5, false, true]],
  peaks: { sizes: 0.7, spreads: 0.2 },
};

function traceOfCaption(more = {}, also = {}) {
  const about = { name: "a", kind: "caption", tokens: WORDS, grid: [2, 2], image: [8, 8], seen: [8, 8], main: 1, caption: { ...CAPTION, ...more }, ...also };
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

const SOFT = { prior: null, spread: null, samples: 0, draws: [], others: WORDS.map((word) => [[word, 0.6, null]]) };

/** Two captions of one page, the second of soft attention, whose words take more lines. */
function pairOfCaptions() {
  const tokens = [...Array.from({ length: 19 }, (_, i) => `word${i}`), "(end)"];
  const weights = tokens.map(() => [0.1, 0.2, 0.3, 0.4]);
  const soft = { ...SOFT, weights, probabilities: tokens.map(() => 0.5), others: tokens.map((word) => [[word, 0.6, null]]) };
  const pair = [traceOfCaption(), traceOfCaption(soft, { tokens })];
  for (const trace of pair) trace.page = pair;
  return pair;
}

/** Where a drawing has a text. */
const whereIs = (surface, start) => surface.of("text").find((call) => call.at[0].startsWith(start)).at.slice(1);
const mapsOf = (surface) => surface.of("image").filter((call) => call.at[0].width === 2);

test("a weight has the same colour in all captions of a page, whatever their own largest weights are", () => {
  const faint = CAPTION.weights.map((row) => row.map((value) => value / 4));
  faint[1] = [0.4, 0.2, 0.2, 0.2];
  const colours = (trace) => mapsOf(drawn(captionView, trace, state(), 1200)).map((call) => call.at[0]);
  const [prior] = colours(traceOfCaption());
  const [posterior] = colours(traceOfCaption({ ...SOFT, weights: faint }));
  assert.equal(light(prior, 0), light(posterior, 0), "0.4 is 0.4 in both");
  const [own] = colours(traceOfCaption({ ...SOFT, weights: faint, peaks: { sizes: 0.4, spreads: 1 } }));
  assert.notEqual(light(own, 0), light(posterior, 0), "on a scale of its own it would not be");
});

test("captions that are compared have their pictures in the same places, and alone each closes its ranks", () => {
  const [one, soft] = pairOfCaptions();
  for (const width of [620, 900]) {
    const [left, right] = [one, soft].map((trace) => drawn(captionView, trace, state({ trace: 0, other: 1 }), width, null, true));
    assert.deepEqual(whereIs(left, "Posterior"), whereIs(right, "Attention"), `${width}`);
    assert.deepEqual(whereIs(left, "Word by word"), whereIs(right, "Word by word"));
    assert.deepEqual(whereIs(left, "Likeliest"), whereIs(right, "Likeliest"));
    const [, posterior, , , first] = mapsOf(left).map((call) => call.at.slice(1));
    assert.deepEqual(mapsOf(right)[0].at.slice(1), posterior, "attention beside the posterior");
    assert.deepEqual(mapsOf(right)[1].at.slice(1), first, "word beside word");
    assert.ok(right.texts.includes("This model has no prior."));
    assert.deepEqual([one, soft].map((trace) => captionView.measure({ trace, seen: state({ trace: 0, other: 1 }), beside: true, width }).height).reduce((a, b) => a - b), 0);
  }
  const alone = drawn(captionView, soft, state({ trace: 1, other: null }), 620);
  assert.ok(!alone.texts.some((text) => text.startsWith("This model has no prior") || text.startsWith("Prior")));
  const below = drawn(captionView, soft, state({ trace: 0, other: 1 }), 380);
  assert.ok(!below.texts.some((text) => text.startsWith("Prior")), "one below the other, there is nothing to line up with");
});

test("a caption is there whole, and says where it was cut", () => {
  const tokens = Array.from({ length: 20 }, (_, i) => `longword${i}`);
  const rows = { weights: tokens.map(() => [0.1, 0.2, 0.3, 0.4]), spread: null, probabilities: tokens.map(() => 0.5), others: tokens.map((word) => [[word, 0.6, null]]) };
  const cut = traceOfCaption({ ...rows, ended: false }, { tokens });
  assert.equal(captionWhole(cut), `${tokens.join(" ")} … (cut at 20 words)`);
  for (const width of [320, 1200]) {
    const { texts } = drawn(captionView, cut, state(), width);
    assert.ok(texts.join(" ").includes(captionWhole(cut)), `${width}`);
  }
  assert.match(captionView.describe({ trace: cut, seen: state({ query: 19 }) }), /word 20 of 20, where it was cut/);
  assert.match(captionView.describe({ trace: cut, seen: state({ query: 18 }) }), /word 19 of 20, probability/);
  const ended = traceOfCaption();
  assert.equal(captionWhole(ended), "a <img src=x>");
  assert.match(captionView.describe({ trace: ended, seen: state({ query: 1 }) }), /word 2 of 2, probability/);
  assert.match(captionView.describe({ trace: ended, seen: state({ query: 2 }) }), /“\(end\)”, after word 2,/);
  assert.equal(captionWhole(traceOfCaption({}, { tokens: ["(end)"] })), "(no words)");
});

test("on a phone the titles of pictures are whole, and have the word", () => {
  const { texts } = drawn(captionView, traceOfCaption({}, { tokens: ["a", "triangles", "(end)"] }), state(), 380);
  for (const title of ["The picture", "Prior", "Posterior: “triangles”", "Spread: “triangles”"]) assert.ok(texts.some((text) => text === title || text === `${title}: before any word`), title);
  assert.ok(!texts.some((text) => text.includes("…")), texts.filter((text) => text.includes("…")).join(", "));
});

test("captions of draws are whole on any screen, and what is not in the caption is bold", () => {
  const tokens = [..."abcdefghijklmnopqrs".split("").map((letter) => letter.repeat(5)), "(end)"];
  const mean = tokens.slice(0, -1);
  const other = [...mean.slice(0, 17), "dog", mean[18]];
  const rows = { weights: tokens.map(() => [0.1, 0.2, 0.3, 0.4]), spread: tokens.map(() => [0, 0, 0, 0.1]), probabilities: tokens.map(() => 0.5), others: tokens.map((word) => [[word, 0.6, 0.1]]) };
  const trace = traceOfCaption({ ...rows, draws: [[mean.join(" "), 15, true, true], [other.join(" "), 5, false, true]] }, { tokens });
  for (const width of [380, 1200]) {
    const surface = drawn(captionView, trace, state(), width);
    const from = surface.texts.findIndex((text) => text.startsWith("Captions of 20 draws"));
    const [first, second] = ["15 ×", "5 ×"].map((sign) => surface.texts.indexOf(sign));
    const calls = surface.of("text");
    assert.ok(from < first && first < second);
    assert.equal(surface.texts.slice(first + 1, second).join(" "), mean.join(" "));
    assert.equal(surface.texts.slice(second + 1).join(" "), other.join(" "));
    assert.deepEqual(calls.slice(first + 1).filter((call) => call.look.weight === 700).map((call) => call.at[0]), ["dog"]);
    for (const { at } of calls.slice(first + 1)) assert.ok(at[1] < width);
  }
  assert.deepEqual(captionOthers(["a", "b", "a"], ["a", "a"]), [false, true, false]);
  assert.deepEqual(captionOthers(["b", "a"], []), [true, true]);
});

test("a draw's caption that was cut says so, beside one of the same words that has its end", () => {
  const draws = [["a <img src=x>", 12, true, true], ["a <img src=x>", 8, false, false]];
  const surface = drawn(captionView, traceOfCaption({ draws }), state(), 1200);
  const [first, second] = ["12 ×", "8 ×"].map((sign) => surface.texts.indexOf(sign));
  assert.equal(surface.texts.slice(first + 1, second).join(" "), "a <img src=x>");
  assert.equal(surface.texts.slice(second + 1).join(" "), "a <img src=x> … (cut)");
  assert.ok(surface.texts.includes("Captions of 20 draws, 2 different"));
  const tips = surface.hits.map(({ target }) => target.tip);
  assert.ok(tips.includes("a <img src=x> … (cut)\n8 of 20 draws"));
});

test("pictures have the proportions of their files, and the tallest still fit the screen", () => {
  for (const [image, ratio] of [[[100, 300], 1 / 3], [[300, 200], 1.5], [[400, 100], 4], [[10, 1000], 1 / 4]]) {
    for (const { at } of mapsOf(drawn(captionView, traceOfCaption({}, { image }), state(), 1200))) {
      assert.ok(Math.abs(at[4] / at[3] - ratio) < 1e-6, `${image}`);
      assert.ok(at[3] <= 301 && at[4] <= 391, `${image}`);
    }
  }
});

test("a click on a picture that is not square hits the region that is drawn there", () => {
  const surface = drawn(captionView, traceOfCaption({}, { image: [100, 400], seen: [64, 64] }), state(), 1200);
  const panel = surface.hits.find((one) => typeof one.target === "function");
  assert.equal(panel.height, panel.width / 4);
  const found = panel.target(panel.x + 0.1 * panel.width, panel.y + 0.9 * panel.height);
  assert.deepEqual(found.select, { node: 2 });
  assert.match(found.tip, /squeezed into 64 × 64 pixels/);
});

test("weights have the colours of the scale, and a picture's shades leave large even parts as they are", () => {
  for (const { at } of mapsOf(drawn(captionView, traceOfCaption(), state(), 1200))) {
    for (let i = 0; i < 4; i++) assert.equal(at[0].data[4 * i + 3], 255, "nothing shows through");
  }
  // Half black, half white.
  const [width, height] = [60, 40];
  const data = new Uint8ClampedArray(4 * width * height).fill(255);
  for (let i = 0; i < width * height; i++) if (i % width < 30) data.fill(0, 4 * i, 4 * i + 3);
  const shades = captionShaded({ width, height, data });
  const at = (x) => [...shades.data.slice(4 * (20 * width + x), 4 * (20 * width + x) + 4)];
  for (const x of [0, 10, 50, 59]) assert.equal(at(x)[3], 0, `${x} is even`);
  assert.ok(at(29)[3] > 40 && at(29)[0] === 0, "dark on the dark side of the edge");
  assert.ok(at(30)[3] > 40 && at(30)[0] === 255, "light on the other");
});

test("it fits narrow screens", () => {
  for (const width of [320, 500, 761, 1600]) {
    const surface = drawn(captionView, traceOfCaption(), state(), width);
    for (const { at } of surface.of("image")) assert.ok(at[1] >= 0 && at[1] + at[3] <= width + 1, `${width}`);
  }
});
