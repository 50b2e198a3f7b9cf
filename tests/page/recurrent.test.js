// A recurrent decoder's trace: cross-attention, and no maps of its own.
import assert from "node:assert/strict";
import test from "node:test";
import { crossView } from "../../src/overt/view/viewer/cross.js";
import { evolutionView } from "../../src/overt/view/viewer/evolution.js";
import { graphView } from "../../src/overt/view/viewer/graph.js";
import { headsView } from "../../src/overt/view/viewer/heads.js";
import { imageView } from "../../src/overt/view/viewer/image.js";
import { stripView } from "../../src/overt/view/viewer/strip.js";
import { uncertaintyView } from "../../src/overt/view/viewer/uncertainty.js";
import { drawn as drawnAs, traceOf } from "./record.js";

const TOKENS = ["das", "Haus", "</s>", "<s>", "the", "house", "stands"];
const CROSS = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.4, 0.3], [0.25, 0.25, 0.5]]; // four steps, three source tokens
const SPREAD = CROSS.map((row) => row.map((value) => value / 8));

function recurrent(more = {}, fields = {}) {
  const groups = { cross: { layers: 1, heads: 1, rows: [3, 7], columns: [0, 3] } };
  const missing = { rollout: "there is no rollout through a recurrent decoder" };
  const about = { tokens: TOKENS, source: 3, kind: "encoder–decoder", layers: 1, heads: 1, main: 3, groups, missing, ...more };
  const trace = traceOf(about, { "cross mean": [[CROSS]], "cross heads": [[CROSS]], ...fields });
  delete trace.about.groups[""];
  return trace;
}

/** As a pane draws it: with the nearest selection that the trace has. */
const drawn = (view, trace, state = {}) => drawnAs(view, trace, trace.nearest({ group: "", layer: 0, head: null, query: 1, token: null, method: "rollout", part: "fused", ...state }));
const tipOf = (surface, token) => surface.hits.find((hit) => hit.target.hover?.token === token && hit.target.tip).target.tip;

test("its only method is raw, its only group cross-attention", () => {
  const trace = recurrent();
  assert.deepEqual(trace.methods, ["raw"]);
  assert.deepEqual(trace.groups, ["cross"]);
  const near = trace.nearest({ group: "", layer: 5, head: 3, query: 9, token: null, method: "rollout" });
  assert.deepEqual([near.group, near.layer, near.head, near.query, near.method], ["cross", 0, null, 3, "raw"]);
  assert.match(trace.why("rollout"), /recurrent/);
});

test("a row is the source's weights, and 0 for the target", () => {
  const trace = recurrent();
  for (const head of [null, 0]) {
    const { values, lost } = trace.row("raw", 0, 1, head);
    assert.deepEqual([...values].map((value) => Number(value.toFixed(6))), [0.1, 0.8, 0.1, 0, 0, 0, 0]);
    assert.equal(lost, 0);
  }
});

test("source and target, strip and heads show it; there is no graph to draw", () => {
  const trace = recurrent();
  for (const view of [crossView, stripView, headsView]) {
    assert.equal(view.applies(trace), true, view.id);
    const surface = drawn(view, trace);
    assert.ok(surface.calls.length > 5, view.id);
    assert.ok(surface.texts.some((text) => text.includes("Haus")), view.id);
  }
  assert.match(graphView.applies(trace), /recurrent decoder/);
  for (const view of [evolutionView, imageView, uncertaintyView]) assert.notEqual(view.applies(trace), true, view.id);
});

test("source and target: weights of the step, and no word of self-attention", () => {
  const trace = recurrent();
  const surface = drawn(crossView, trace);
  assert.match(tipOf(surface, 1), /^Haus\nsource 1\nraw, weight: 0\.800/);
  assert.ok(surface.texts.includes("source · cross-attention") && surface.texts.includes("target"));
  const said = crossView.describe({ trace, seen: trace.nearest({ method: "raw", layer: 0, head: null, query: 1, token: null }) });
  assert.match(said, /source Haus 0\.800, das 0\.100, <\/s> 0\.100$/);
});

test("uncertainty shows weights of the source, and says why there is no rollout", () => {
  const trace = recurrent({ samples: 4 }, { average: [[CROSS]], spread: [[SPREAD]] });
  assert.equal(uncertaintyView.applies(trace), true);
  const { texts } = drawn(uncertaintyView, trace);
  assert.ok(texts.some((text) => text.startsWith("Weights of the source: layer 1")));
  assert.ok(texts.some((text) => text.includes("no rollout through a recurrent decoder")));
});
