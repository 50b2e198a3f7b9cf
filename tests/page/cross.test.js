// Source and target of an encoder–decoder, step by step.
import assert from "node:assert/strict";
import test from "node:test";
import { crossLines, crossView } from "../../src/overt/view/viewer/cross.js";
import { drawn as drawnAs, HALF, METHODS, Recorder, traceOf } from "./record.js";
import { palette } from "../../src/overt/view/viewer/colour.js";

/** As a pane draws it: with the nearest selection that the trace has. */
function drawn(view, trace, state = {}, ...more) {
  const first = { layer: trace.layers - 1, head: null, query: trace.main, token: null, method: "rollout" };
  return drawnAs(view, trace, trace.nearest({ ...first, ...state, group: "" }), ...more);
}

const SOURCE = ["the", "old", "key", "</s>"];
const TARGET = ["<s>", "der", "Schlüssel"];
const SELF = [[1, 0, 0], [0.4, 0.6, 0], [0.2, 0.3, 0.5]];
const CROSS = [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.05, 0.05, 0.8, 0.1]];
const ROLLOUT = [[0.1, 0.2, 0.1, 0.1, 0.5, 0, 0], [0.1, 0.1, 0.1, 0.1, 0.2, 0.4, 0], [0.1, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1]];

function pair({ source = SOURCE, target = TARGET, self = SELF, cross = CROSS, rollout = ROLLOUT, flow = null, half = null, ...more } = {}) {
  const tokens = [...source, ...target];
  const groups = { cross: { layers: 1, heads: 0, rows: [source.length, tokens.length], columns: [0, source.length] } };
  const fields = { mean: [[self]], "cross mean": [[cross]], ...(rollout && { rollout: [[rollout]] }), ...(flow && { flow: [[flow]] }), ...(half && { half: [[half]] }) };
  return traceOf({ tokens, source: source.length, kind: "encoder–decoder", groups, ...more }, fields);
}

/** Widths of the curves, by the tokens that they lead to. */
function curves(surface, trace, width = 900) {
  const { boxes } = crossLines(trace, width);
  const found = new Map();
  for (const { at, look } of surface.of("path")) {
    const [x] = at[0].at(-1);
    found.set(boxes.findIndex((box, i) => i < trace.source && Math.abs(box.x + box.wide / 2 - x) < 0.01), look.line);
  }
  return found;
}

const tipOf = (surface, token) => surface.hits.find((hit) => hit.target.hover?.token === token && hit.target.tip).target.tip;

test("it is for encoder–decoders", () => {
  assert.equal(crossView.applies(pair()), true);
  assert.equal(crossView.applies(traceOf({ tokens: ["a"] }, { mean: [[[[1]]]] })), "this model is not an encoder–decoder");
});

test("raw is cross attention before self-attention, of the chosen step", () => {
  const trace = pair();
  const surface = drawn(crossView, trace, { method: "raw", query: 2 });
  assert.match(tipOf(surface, 2), /^key\nsource 2\nraw, weight: 0\.800/);
  assert.match(tipOf(surface, 5), /^der\ntarget 1\nraw, weight: 0\.300/);
});

test("curves lead to the strongest source words, the wider the stronger; weak ones have none", () => {
  const trace = pair({ cross: [[0.1, 0.2, 0.3, 0.4], [0.7, 0.01, 0.19, 0.1], [0.05, 0.05, 0.8, 0.1]] });
  const found = curves(drawn(crossView, trace, { method: "raw", query: 1 }), trace);
  assert.deepEqual([...found.keys()].sort(), [0, 2, 3], "1.4 % of the strongest is too little");
  assert.ok(found.get(0) > found.get(2) && found.get(2) > found.get(3));
  const pointed = drawn(crossView, trace, { method: "raw", query: 1, token: 1 });
  assert.ok(curves(pointed, trace).has(1), "what is pointed at has a curve");
});

test("targets that are not yet written are soft, yet legible, and have no colour", () => {
  const trace = pair();
  const surface = drawn(crossView, trace, { method: "rollout", query: 1 });
  const look = (text) => surface.of("text").find((call) => call.at[0] === text && call.look.size === 13).look;
  assert.equal(look("Schlüssel").fill, palette("light").soft);
  assert.equal(look("Schlüssel").opacity ?? 1, 1, "less would be too little contrast");
  const { boxes } = crossLines(trace, 900);
  const dashed = surface.of("line").filter((call) => call.look.dash);
  assert.deepEqual(dashed.map((call) => call.at[0] > boxes[6].x && call.at[2] < boxes[6].x + boxes[6].wide), [true], "a dashed line marks it");
  const filled = surface.of("rect").filter((call) => call.look.fill && call.look.radius === 5).map((call) => `${call.at[0]} ${call.at[2]}`);
  assert.deepEqual([5, 6].map((token) => filled.includes(`${boxes[token].x} ${boxes[token].wide}`)), [true, false]);
  assert.equal(look("der").weight, 700);
  assert.match(tipOf(surface, 6), /not generated yet/);
});

test("the parts of source and target in rollout are said", () => {
  const texts = drawn(crossView, pair(), { method: "rollout", query: 2 }).texts;
  assert.ok(texts.includes("source · 70 % of rollout") && texts.includes("target · 30 % of rollout"));
  assert.ok(texts.includes("rollout, share"));
});

test("raw is two distributions, each by its name", () => {
  const texts = drawn(crossView, pair(), { method: "raw", query: 2 }).texts;
  assert.ok(texts.includes("source · cross-attention") && texts.includes("target · self-attention"));
});

test("of a row that both share, raw says how much is the source's and how much the target's", () => {
  const joint = { self: SELF.map((row) => row.map((value) => 0.25 * value)), cross: CROSS.map((row) => row.map((value) => 0.75 * value)) };
  const { texts } = drawn(crossView, pair({ ...joint, joint: true, mixing: "zeroing", mixing_title: "value zeroing" }), { method: "raw", query: 2 });
  assert.ok(texts.includes("source · cross-attention, 75 %") && texts.includes("target · self-attention, 25 %"), texts.join("|"));
  assert.ok(texts.includes("raw value zeroing, weight"));
  assert.ok(texts.includes("value zeroing, the source’s part, layer 1, mean of heads"));
});

test("a method that no view has heard of is shown by its title, its shares as shares", () => {
  const trace = pair({ methods: [...METHODS, HALF], half: ROLLOUT });
  const surface = drawn(crossView, trace, { method: "half", query: 2 });
  assert.ok(surface.texts.includes("half rollout, share"));
  assert.ok(surface.texts.includes("source · 70 % of half rollout") && surface.texts.includes("target · 30 % of half rollout"));
  assert.ok(surface.texts.includes("half rollout of every target token, the source’s part, layer 1"));
  assert.match(tipOf(surface, 1), /^old\nsource 1\nhalf rollout, share: 0\.300$/);
});

test("flow is told in amounts, not in shares", () => {
  const trace = pair({ flow: ROLLOUT.map((row) => row.map((value) => 5 * value)) });
  const surface = drawn(crossView, trace, { method: "flow", query: 2 });
  assert.ok(surface.texts.includes("flow, amount"));
  assert.ok(surface.texts.includes("source") && surface.texts.includes("target"));
  assert.doesNotMatch(surface.texts.join("\n"), /%|share/);
  assert.match(tipOf(surface, 1), /^old\nsource 1\nflow, amount: 1\.50$/);
});

test("a weight that may have been left out is not said to be 0", () => {
  const trace = pair({ cross: [CROSS[0], CROSS[1], [0, 0.2, 0.8, 0]] });
  assert.match(tipOf(drawn(crossView, trace, { method: "raw", query: 2 }), 0), /raw, weight: left out or 0$/);
  assert.match(crossView.describe({ trace, seen: { method: "raw", layer: 0, head: null, query: 2, token: 0 } }), /· “the” left out or 0$/);
});

test("frames have paper beneath, whatever the colour of the cell", () => {
  const trace = pair();
  const { boxes } = crossLines(trace, 900);
  const theme = palette("light");
  const surface = drawn(crossView, trace, { method: "raw", query: 2, token: 2 });
  for (const [token, stroke] of [[6, theme.select], [2, theme.accent]]) {
    const frames = surface.of("rect").filter((call) => call.look.stroke && call.look.radius === 5 && call.at[0] === boxes[token].x && call.at[2] === boxes[token].wide);
    assert.deepEqual(frames.map((call) => call.look.stroke), [theme.paper, stroke]);
    assert.ok(frames[0].look.line > frames[1].look.line);
  }
});

test("a click on a target chooses the step, on a source word holds it", () => {
  const hits = drawn(crossView, pair(), { query: 1 }).hits.map((hit) => hit.target);
  assert.deepEqual(hits.find((one) => one.hover?.token === 6).select, { query: 2, token: null });
  assert.deepEqual(hits.find((one) => one.hover?.token === 2).select, { token: 2 });
  const held = drawn(crossView, pair(), { query: 1, token: 2 }).hits.map((hit) => hit.target);
  assert.deepEqual(held.find((one) => one.hover?.token === 2).select, { token: null });
});

test("arrows step, and stop at both ends; the track leads to every step", () => {
  const targets = (query) => drawn(crossView, pair(), { query }).hits.map((hit) => hit.target);
  const steps = (query) => targets(query).filter((one) => /step/.test(one.tip || "") && one.select && !one.hover).map((one) => one.select.query);
  assert.deepEqual(steps(1), [0, 2]);
  assert.deepEqual(steps(0), [1]);
  assert.deepEqual(steps(2), [1]);
  const track = drawn(crossView, pair(), { query: 1 }).hits.find((hit) => typeof hit.target === "function" && hit.y < 60);
  assert.equal(track.target(track.x, track.y).hover.query, 0);
  assert.equal(track.target(track.x + track.width / 2, track.y).hover.query, 1);
  assert.equal(track.target(track.x + track.width, track.y).select.query, 2);
});

test("a cell of the matrix links step and source word, by raw and by rollout", () => {
  for (const [method, said] of [["raw", "0.700"], ["rollout", "0.100"]]) {
    const surface = drawn(crossView, pair(), { method, query: 0 });
    const cells = surface.hits.filter((hit) => typeof hit.target === "function").map((hit) => ({ hit, found: hit.target(hit.x + 1, hit.y + hit.height / 2) }));
    const { found } = cells.find((one) => one.found.hover?.token === 0 && one.found.hover.query === 1);
    assert.match(found.tip, new RegExp(`der → the: ${said}`), method);
  }
});

test("rollout of some tokens only: the row says why, the matrix shows attention", () => {
  const trace = pair({ rollout: [ROLLOUT[2]], queries: { rollout: [2] } });
  const texts = drawn(crossView, trace, { method: "rollout", query: 0 }).texts.join("\n");
  assert.match(texts, /the page has rollout for one query only/);
  assert.match(texts, /attention to the source, layer 1, mean of heads \(the page has rollout for some tokens only\)/);
  assert.match(crossView.describe({ trace, seen: { method: "rollout", layer: 0, head: null, query: 0, token: null } }), /one query only/);
});

test("what a row left out is said", () => {
  const trace = pair();
  trace.fields.get("rollout/0").dropped.fill(0.017);
  assert.ok(drawn(crossView, trace, { method: "rollout" }).texts.includes("layer 1, left out of this row: 1.7 %"));
  assert.ok(drawn(crossView, pair(), { method: "rollout" }).texts.includes("layer 1, nothing is left out of this row"));
});

test("lines of right-to-left tokens run from the right, the others from the left", () => {
  const source = ["المفتاح", "تحت", "السجادة"];
  const cut = (rows) => rows.map((row) => row.slice(0, 3));
  const trace = pair({ source, cross: cut(CROSS), rollout: null });
  const { boxes } = crossLines(trace, 900);
  assert.ok(boxes[0].x > boxes[1].x && boxes[1].x > boxes[2].x);
  assert.ok(Math.abs(boxes[0].x + boxes[0].wide - (900 - 14)) < 1e-9);
  assert.ok(boxes[3].x < boxes[4].x && boxes[3].x === 14);
});

test("tokens wrap, and none stands outside", () => {
  const source = Array.from({ length: 80 }, (_, i) => (i % 9 ? `word${i}` : "x".repeat(200)));
  const trace = pair({ source, cross: TARGET.map(() => source.map(() => 1 / 80)), rollout: null });
  const { source: lines, boxes } = crossLines(trace, 390);
  assert.ok(lines.length > 10);
  for (const box of boxes) assert.ok(box.x >= 14 && box.x + box.wide <= 376.01);
});

test("of a long text only what is on the screen is drawn", () => {
  const [n, m] = [20000, 20000];
  const tokens = [...Array.from({ length: n }, (_, i) => `s${i}`), ...Array.from({ length: m }, (_, i) => `t${i}`)];
  const trace = pair({ source: SOURCE });
  const row = new Float32Array(n + m).fill(1 / (n + m));
  Object.assign(trace, { tokens, special: new Uint8Array(n + m), source: n, queries: m, row: () => ({ values: row, lost: 0 }), rowsOf: () => [0], map: () => null });
  trace.about.groups.cross = { layers: 1, heads: 0, rows: [n, n + m], columns: [0, n] };
  const seen = { layer: 0, head: null, query: 10000, token: null, method: "rollout", log: false, words: false };
  const { height } = crossView.measure({ trace, seen, state: seen, width: 900, screen: 600 });
  const surface = new Recorder();
  crossView.draw({ surface, trace, seen, state: seen, theme: palette("light"), width: 900, height, top: 9000, bottom: 9600 });
  assert.ok(surface.texts.length > 100 && surface.texts.length < 600, `${surface.texts.length} texts`);
  assert.ok(surface.of("path").length <= 8);
});

test("who chose in the matrix is not carried away", () => {
  const source = Array.from({ length: 300 }, (_, i) => `word${i}`);
  const trace = pair({ source, cross: TARGET.map(() => source.map(() => 1 / 300)), rollout: null });
  const place = (part) => {
    const state = { query: 1, method: "raw", layer: 0, head: null, token: null };
    drawn(crossView, trace, state, 900, part);
    return crossView.placeOf({ trace, seen: state, state, width: 900 });
  };
  assert.ok(Number.isFinite(place([0, 300])));
  const { height } = crossView.measure({ trace, width: 900 });
  assert.ok(Number.isNaN(place([height - 120, height])));
});

test("the status names the step and its strongest sources", () => {
  const said = crossView.describe({ trace: pair(), seen: { method: "raw", layer: 0, head: null, query: 2, token: 0 } });
  assert.match(said, /^“Schlüssel” \(target 2\), layer 1 of 1, raw, weight: source key 0\.800, <\/s> 0\.100, .*; target Schlüssel 0\.500, der 0\.300 · “the” 0\.050/);
});

test("tokens are drawn as visible signs", () => {
  const trace = pair({ source: ["a\u202eb", "c\nd", "\u0000", ""] });
  const surface = drawn(crossView, trace, { query: 1 });
  assert.doesNotMatch(surface.texts.join(""), /[\u202e\u0000\n]/);
  assert.ok(surface.texts.includes("a·b"));
});
