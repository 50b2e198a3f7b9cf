import assert from "node:assert/strict";
import { test } from "node:test";
import { sureInterval, sureWords, uncertaintyView } from "../../src/overt/view/viewer/uncertainty.js";
import { drawn, traceOf } from "./record.js";

const TOKENS = ["[CLS]", "the", "key"];
const MEAN = [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.2, 0.2, 0.6]];
const OWN = [[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.05, 0.05, 0.9]]; // of the mean of the weights: not the samples' mean
const SPREAD = [[0.125, 0.0625, 0.05], [0.01, 0.02, 0.03], [0.04, 0.05, 0.06]];
const HEAD = [[0.1, 0.4, 0.5], [0.3, 0.3, 0.4], [1, 0, 0]];
const HEAD_SPREAD = [[0.01, 0.08, 0.02], [0.03, 0.03, 0.03], [0, 0, 0]];
const OUTPUTS = { labels: ["plural", "singular"], mean: [0.5, 0.5], draws: [[0.25, 0.75], [0.5, 0.5], [0.75, 0.25]] };

function made(more = {}, fields = {}) {
  const about = { tokens: TOKENS, special: [1, 0, 0], samples: 3, outputs: OUTPUTS, ...more };
  const drawnOf = { average: [[MEAN]], "average heads": [[MEAN, HEAD]], spread: [[SPREAD]], "spread heads": [[SPREAD, HEAD_SPREAD]] };
  return traceOf(about, { mean: [[OWN]], heads: [[OWN, OWN]], ...drawnOf, "rollout average": [[MEAN]], "rollout spread": [[SPREAD]], ...fields });
}

/** What answers at a point, the last drawn first. */
function at(surface, x, y) {
  const found = surface.hits.findLast((one) => x >= one.x && x < one.x + one.width && y >= one.y && y < one.y + one.height);
  return typeof found?.target === "function" ? found.target(x, y) : found?.target;
}

function placeOf(surface, text, nth = 0) {
  const found = surface.of("text").filter((call) => call.at[0] === text)[nth];
  return found && { x: found.at[1], y: found.at[2] };
}

const PAPER_BLUE = "rgb(120,170,219)"; // of the bars, in light colours

test("a trace without samples says how to get them", () => {
  const trace = traceOf({ tokens: TOKENS }, { mean: [[MEAN]] });
  assert.match(uncertaintyView.applies(trace), /overt\.trace\(…, samples=20\)/);
  assert.equal(uncertaintyView.applies(made()), true);
});

test("an interval leaves out a twentieth at each end", () => {
  const [low, high] = sureInterval(Array.from({ length: 101 }, (_, i) => 100 - i));
  assert.ok(Math.abs(low - 5) < 1e-9 && Math.abs(high - 95) < 1e-9);
  assert.deepEqual(sureInterval([0.3]), [0.3, 0.3]);
  assert.deepEqual(sureInterval([null, 0.2, null]), [0.2, 0.2]);
});

test("a weight that was left out is not said to be nothing", () => {
  assert.equal(sureWords(0.12, 0.03), "0.120 ± 0.030");
  assert.match(sureWords(0, 0), /left out/);
  assert.match(sureWords(0.1, 0), /spread left out/);
});

test("every sample is a dot of its class, at its probability", () => {
  const surface = drawn(uncertaintyView, made());
  const dots = surface.of("circle");
  assert.equal(dots.length, 6);
  const zero = placeOf(surface, "0").x;
  const one = placeOf(surface, "1").x;
  const shares = dots.map((dot) => (dot.at[0] - zero) / (one - zero));
  [0.25, 0.5, 0.75, 0.75, 0.5, 0.25].forEach((share, i) => assert.ok(Math.abs(shares[i] - share) < 1e-6));
  assert.ok(surface.texts.includes("plural") && surface.texts.includes("singular"));
  assert.deepEqual(drawn(uncertaintyView, made()).of("circle"), dots, "the same dots each time");
});

test("a sample under the pointer is told, and found in every class", () => {
  const surface = drawn(uncertaintyView, made());
  const [x, y] = surface.of("circle")[2].at;
  const target = at(surface, x, y);
  assert.deepEqual(target.hover, { sample: 2 });
  assert.match(target.tip, /sample 2: 0\.750\nplural/);
  assert.equal(drawn(uncertaintyView, made(), { sample: 2 }).of("circle").length, 8, "one ring in each class");
});

test("outputs that are no probabilities get a scale of their own", () => {
  const outputs = { labels: ["grade"], mean: [3], draws: [[2], [4]] };
  const surface = drawn(uncertaintyView, made({ outputs }));
  assert.ok(surface.texts.includes("Outputs"));
  assert.ok(surface.texts.includes("4"));
});

test("without outputs the first part is left out, and it says why", () => {
  const surface = drawn(uncertaintyView, made({ outputs: undefined }));
  assert.equal(surface.of("circle").length, 0);
  assert.match(surface.texts.join(" "), /No predictions: the model returned no logits/);
  assert.match(drawn(uncertaintyView, made({ outputs: { ...OUTPUTS, draws: null } })).texts.join(" "), /No predictions of single samples/);
});

test("bars are as long as means, whiskers reach one spread to both sides", () => {
  const surface = drawn(uncertaintyView, made(), { query: 0 });
  const bars = surface.of("rect").filter((call) => call.look.fill === PAPER_BLUE);
  assert.equal(bars.length, 3);
  assert.ok(Math.abs(bars[0].at[2] / bars[1].at[2] - 2) < 1e-6, "0.5 is twice 0.25");
  const [x, y, wide, tall] = bars[0].at;
  const unit = wide / 0.5;
  const whisker = surface.of("line").find((call) => call.at[1] === y + tall / 2 && call.at[3] === y + tall / 2);
  assert.ok(Math.abs(whisker.at[0] - (x + 0.375 * unit)) < 1e-4);
  assert.ok(Math.abs(whisker.at[2] - (x + 0.625 * unit)) < 1e-4);
  assert.ok(surface.texts.includes("0.500 ± 0.125"));
});

test("a line of a token links the token; its name chooses it as the query", () => {
  const surface = drawn(uncertaintyView, made(), { query: 0 });
  const line = placeOf(surface, "0.250 ± 0.0625");
  const target = at(surface, line.x, line.y);
  assert.deepEqual(target.hover, { token: 1 });
  assert.match(target.tip, /spread \/ mean 0\.250/);
  const name = surface.of("text").filter((call) => call.at[0] === "the").find((call) => Math.abs(call.at[2] - line.y) < 1);
  assert.deepEqual(at(surface, name.at[1] - 1, line.y).select, { query: 1, token: null });
});

test("a cell of either map tells its mean, its spread and their ratio", () => {
  const surface = drawn(uncertaintyView, made(), { query: 0, head: 1 }, 1200);
  const maps = surface.of("image");
  assert.equal(maps.length, 2);
  assert.ok(maps[1].at[1] > maps[0].at[1] && maps[1].at[2] === maps[0].at[2], "side by side");
  for (const { at: [, x, y, wide, tall] } of maps) {
    const target = at(surface, x + wide / 2, y + tall / 6); // the second cell of the first row
    assert.deepEqual(target.select, { query: 0, token: 1 });
    assert.match(target.tip, /\[CLS\] → the: 0\.400 ± 0\.080\nspread \/ mean 0\.200\nlayer 1, head 2, samples’ mean ± one spread$/);
  }
  const narrow = drawn(uncertaintyView, made(), {}, 390).of("image");
  assert.ok(narrow[1].at[2] > narrow[0].at[2] && narrow[1].at[1] === narrow[0].at[1], "one under the other");
});

test("each map has its scale", () => {
  const { texts } = drawn(uncertaintyView, made());
  assert.ok(texts.includes("mean of 3 samples") && texts.includes("0.750"));
  assert.ok(texts.includes("spread over 3 samples") && texts.includes("0.125"));
});

test("the mean beside the spread is the samples', not the map of the mean of the weights", () => {
  const trace = made();
  const [mean] = drawn(uncertaintyView, trace, { query: 0 }, 1200).of("image");
  const dark = ({ data }, i) => 765 - data[4 * i] - data[4 * i + 1] - data[4 * i + 2];
  const flat = MEAN.flat();
  assert.ok(dark(mean.at[0], 4) > dark(mean.at[0], 0), "0.75 of the samples, where the own map has 0.9 twice");
  for (let i = 0; i < 9; i++) for (let j = 0; j < 9; j++) if (flat[i] > flat[j]) assert.ok(dark(mean.at[0], i) >= dark(mean.at[0], j), `${i} ${j}`);
  const surface = drawn(uncertaintyView, trace, { query: 0 }, 1200);
  assert.ok(!surface.texts.includes("0.900"), "no scale is of the own map");
  assert.ok(surface.texts.includes("rollout to layer 1, samples’ mean ± one spread"), surface.texts.join("|"));
  assert.match(uncertaintyView.describe({ trace, seen: { query: 0, layer: 0, head: null } }), /rollout to layer 1, mean of the samples: \[CLS\] 0\.500/);
});

test("maps that are not attention are said to be what they are", () => {
  const { texts } = drawn(uncertaintyView, made({ mixing: "norm", mixing_title: "norm of what is added" }), { query: 0 }, 1200);
  assert.ok(texts.includes("Weights (norm of what is added): layer 1, mean of heads"), texts.join("|"));
});

test("a query without rollouts is said to have none, and those that are there are shown", () => {
  const trace = made({ queries: { "rollout average": [0], "rollout spread": [0] } }, { "rollout average": [[[MEAN[0]]]], "rollout spread": [[[SPREAD[0]]]] });
  const surface = drawn(uncertaintyView, trace, { query: 2 });
  assert.match(surface.texts.join(" "), /None for “key” \(token 2\): the page has the samples’ rollouts only for “\[CLS\]” \(token 0\)\./);
  assert.ok(surface.texts.includes("What “[CLS]” draws on"));
  assert.ok(surface.texts.includes("0.500 ± 0.125"));
  assert.doesNotMatch(drawn(uncertaintyView, trace, { query: 0 }).texts.join(" "), /None for/);
});

test("a page without rollouts says so and still has the maps", () => {
  const trace = made({ missing: { rollout: "rollout was not asked for" } });
  delete trace.about.fields["rollout average"];
  const surface = drawn(uncertaintyView, trace);
  assert.ok(surface.texts.includes("rollout was not asked for"));
  assert.equal(surface.of("image").length, 2);
});

test("of a long text only what is on the screen is drawn", () => {
  const count = 20000;
  const tokens = Array.from({ length: count }, (_, i) => `w${i}`);
  const row = tokens.map(() => 1 / count);
  const about = { tokens, special: tokens.map(() => 0), samples: 2, outputs: OUTPUTS, queries: { "rollout average": [0], "rollout spread": [0] } };
  const trace = traceOf(about, { "rollout average": [[[row]]], "rollout spread": [[[row]]], average: [[[[0]]]], spread: [[[[0]]]] }); // its maps are still on their way
  trace.layers = 1;
  trace.about.groups[""] = { layers: 1, heads: 0, rows: [0, count], columns: [0, count] };
  const { height } = uncertaintyView.measure({ trace, state: { query: 0 }, width: 900 });
  assert.ok(height > 20 * count);
  const surface = drawn(uncertaintyView, trace, { query: 0 }, 900, [100000, 100600]);
  assert.ok(surface.calls.length < 600, `${surface.calls.length} calls`);
  assert.ok(surface.of("rect").some((call) => call.look.fill === PAPER_BLUE));
});

test("the status tells the likeliest class and what the query draws on", () => {
  const text = uncertaintyView.describe({ trace: made(), seen: { query: 0, layer: 0, head: null } });
  assert.match(text, /3 posterior samples · plural 0\.500 .* \[CLS\] 0\.500 ± 0\.125/);
});
