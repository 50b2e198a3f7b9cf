// The controls above the panes: what they offer is what the index tells.
import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { fillControls } from "../../src/overt/view/viewer/controls.js";
import { documented, made } from "./dom.js";
import { HALF, METHODS, traceOf } from "./record.js";

const MAP = [[1, 0], [0.25, 0.75]];
let leave = null;

beforeEach(() => (leave = documented()));
afterEach(() => leave());

/** The controls of a view that listens to `uses`, with what they select. */
function controls(trace, state = {}, uses = ["method"]) {
  const selected = [];
  const store = { state: { trace: 0, other: null, method: "raw", head: null, layer: 0, query: 0, ...state }, select: (changes) => selected.push(changes) };
  const limits = { layers: trace.layers, heads: trace.heads, queries: trace.queries };
  const viewer = { controls: made(), store, trace, traces: [trace], limits, uses: (one) => uses.includes(one), panes: [{ view: { controls: uses } }], fits: [] };
  fillControls(viewer);
  const buttons = viewer.controls.all((one) => one.tagName === "BUTTON");
  return { viewer, selected, buttons };
}

test("methods are offered by their titles, in the index's order; those that the page has not say why", () => {
  const about = { tokens: ["a", "b"], methods: [...METHODS, HALF], missing: { flow: "flow takes long" } };
  const { buttons, selected } = controls(traceOf(about, { mean: [[MAP]], half: [[MAP]] }));
  assert.deepEqual(buttons.map((one) => one.textContent), ["raw", "rollout", "flow", "half rollout"]);
  assert.deepEqual(buttons.map((one) => one.disabled), [false, true, true, false]);
  assert.deepEqual(buttons.slice(1, 3).map((one) => one.title), ["the page has no rollout", "flow takes long"]);
  buttons[3].listeners.click();
  assert.deepEqual(selected, [{ method: "half" }]);
});

test("a method that the index does not tell of is not offered", () => {
  const { buttons } = controls(traceOf({ tokens: ["a", "b"], methods: [METHODS[0], HALF] }, { mean: [[MAP]], rollout: [[MAP]], half: [[MAP]] }));
  assert.deepEqual(buttons.map((one) => one.textContent), ["raw", "half rollout"]);
});

test("words of a caption are counted from 1, and chosen from 0 in the address; other tokens from 0 in both", () => {
  const trace = traceOf({ tokens: ["a", "dog", "(end)"], caption: {} }, {});
  const { viewer, selected } = controls(trace, { query: 1 }, ["query"]);
  const [box] = viewer.controls.all((one) => one.tagName === "INPUT");
  assert.deepEqual([box.value, box.attributes.min, box.attributes.max, box.attributes["aria-label"]], ["2", "1", "3", "Word"]);
  for (const value of ["3", "0", "9"]) {
    box.value = value;
    box.listeners.change();
  }
  assert.deepEqual(selected, [{ query: 2 }, { query: 0 }, { query: 2 }]);
  const other = controls(traceOf({ tokens: ["a", "b", "c"] }, {}), { query: 1 }, ["query"]);
  const [plain] = other.viewer.controls.all((one) => one.tagName === "INPUT");
  assert.deepEqual([plain.value, plain.attributes.min, plain.attributes["aria-label"]], ["1", "0", "Token"]);
});

test("heads are for the maps themselves; of other methods it is said that they have none", () => {
  const trace = traceOf({ tokens: ["a", "b"], methods: [...METHODS, HALF] }, { mean: [[MAP]], heads: [[MAP, MAP]], half: [[MAP]] });
  const picked = (method) => controls(trace, { method }, ["method", "head"]).viewer.controls.all((one) => one.title && one.tagName === "LABEL");
  assert.deepEqual(picked("half").map((one) => one.title), ["half rollout uses the mean of the heads"]);
  assert.deepEqual(picked("raw"), []);
});
