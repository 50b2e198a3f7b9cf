// The picture and the table of a node's neighbours.
import assert from "node:assert/strict";
import test from "node:test";
import { KINDS, palette } from "../../src/overt/view/viewer/colour.js";
import { TraceData } from "../../src/overt/view/viewer/data.js";
import { nodesFacts, nodesKinds, nodesView } from "../../src/overt/view/viewer/nodes.js";
import { nodesAngles, nodesLabels, nodesOrdered, nodesScene, nodesTies, nodesValue } from "../../src/overt/view/viewer/nodes_layout.js";
import { Store } from "../../src/overt/view/viewer/store.js";
import { VIEWS } from "../../src/overt/view/viewer/views.js";
import { number } from "../../src/overt/view/viewer/words.js";
import { drawn, HALF, METHODS } from "./record.js";

function node(id, hop, raw, rollout, flow, more = {}) {
  return { id, hop, raw, raw_spread: null, rollout, rollout_spread: null, flow, flow_spread: null, ...more };
}

function edge(source, target, layer, share) {
  return { source, target, layer, weight: share, spread: null, share };
}

function traceOfNodes(nodes, edges, more = {}) {
  const methods = METHODS.filter((one) => one.reads === "maps");
  const about = { node: 4, by: "rollout", methods, layers: 2, paths: [], samples: 0, residual: 0, left_out: 0, nodes, edges, ...more };
  return new TraceData({ name: "node 4", kind: "nodes", nodes: about }, async () => new Uint8Array());
}

const NODES = [
  node(4, 0, [0.5, 0.4], 0.3, 0.9),
  node(7, 1, [0.5, 0.6], 0.25, 0.95),
  node(9, 2, [0, 0], 0.4, 0.5),
  node(11, 2, [0, 0], 0.05, 0.1),
];
const EDGES = [edge(4, 4, 1, 0.4), edge(7, 4, 1, 0.6), edge(9, 7, 0, 0.35), edge(7, 9, 0, 0.1), edge(11, 7, 0, 0.05)];

/** A hub with any number of neighbours, the nearer to 1 the stronger. */
function hub(count, more = {}) {
  const nodes = [node(4, 0, [0.2], 0.2, null, { label: 0 })];
  const edges = [];
  for (let i = 0; i < count; i++) {
    nodes.push(node(100 + i, 1, [0.5 / (i + 1)], 0.5 / (i + 1), null, { label: i % 3 }));
    edges.push(edge(100 + i, 4, 0, 0.5 / (i + 1)));
  }
  return traceOfNodes(nodes, edges, more);
}

test("methods are those that the nodes have", () => {
  assert.deepEqual(traceOfNodes(NODES, EDGES).methods, ["raw", "rollout", "flow"]);
  assert.deepEqual(hub(3).methods, ["raw", "rollout"]);
});

test("a method that somebody registered has a column, a fact and an order of its own, by its title", () => {
  const methods = [...METHODS.slice(0, 2), HALF];
  const halves = [0.1, 0.7, 0.2, 0];
  const trace = traceOfNodes(NODES.map((one, i) => ({ ...one, half: halves[i], half_spread: null })), EDGES, { methods });
  assert.deepEqual(trace.methods, ["raw", "rollout", "half"]);
  assert.deepEqual(nodesOrdered(trace.about.nodes, "half").map((one) => one.id), [7, 9, 4, 11]);
  const surface = drawn(nodesView, trace, { method: "half" }, 1200);
  assert.ok(surface.texts.includes("half rollout") && surface.texts.includes("3 neighbours, by half rollout"), surface.texts.join("|"));
  assert.ok(surface.hits.some((hit) => hit.target.select?.method === "half" && hit.target.tip === "order by half rollout"));
  assert.ok(nodesFacts(trace, trace.about.nodes.nodes[1]).includes("half rollout: 0.700"));
  assert.ok(!surface.texts.includes("flow"), "what the index does not tell is not there");
  const only = traceOfNodes([NODES[0], node(12, 1, [0, 0], 0, null, { half: 0.5 })], [], { methods });
  assert.deepEqual(nodesOrdered(only.about.nodes, "raw").map((one) => one.id), [4, 12], "drawn on by that method alone");
});

test("only this view is for nodes, and it is for nothing else", () => {
  const trace = traceOfNodes(NODES, EDGES);
  for (const view of VIEWS) assert.equal(view.applies(trace) === true, view.id === "nodes", view.id);
  assert.match(nodesView.applies(new TraceData({ name: "", kind: "encoder", tokens: ["a"] }, async () => new Uint8Array())), /node_page/);
});

test("a method orders the rows; raw is the top layer's", () => {
  const about = traceOfNodes(NODES, EDGES).about.nodes;
  assert.deepEqual(nodesOrdered(about, "rollout").map((one) => one.id), [9, 4, 7, 11]);
  assert.deepEqual(nodesOrdered(about, "flow").map((one) => one.id), [7, 4, 9, 11]);
  assert.deepEqual(nodesOrdered(about, "raw").map((one) => one.id), [7, 4, 9, 11]);
  assert.equal(nodesValue(NODES[1], "raw"), 0.6);
});

test("an edge's share is that of its stronger direction, and loops are none", () => {
  const ties = nodesTies(traceOfNodes(NODES, EDGES).about.nodes);
  assert.equal(ties.get(7).get(9), 0.35);
  assert.equal(ties.get(4).has(4), false);
});

test("a node is not drawn without those it hangs on", () => {
  const about = traceOfNodes(NODES, EDGES).about.nodes;
  const ordered = nodesOrdered(about, "rollout");
  const scene = nodesScene(about, ordered, nodesTies(about), 1);
  assert.deepEqual(scene.nodes.map((one) => one.id).sort((a, b) => a - b), [4, 7, 9], "9 is the first, and 7 leads to it");
  assert.deepEqual(scene.edges.map((one) => [one.one, one.other]), [[7, 9], [4, 7]]);
});

test("nodes of a ring stand apart, and an outer one by the one it hangs on", () => {
  const hops = new Map([[0, 0], [1, 1], [2, 1], [3, 1], [4, 2], [5, 2]]);
  const edges = [[0, 1], [0, 2], [0, 3], [1, 4], [3, 5], [1, 3]].map(([one, other]) => ({ one, other, share: 1 }));
  const angles = nodesAngles(hops, edges);
  const apart = (a, b) => Math.acos(Math.cos(angles.get(a) - angles.get(b)));
  for (const [a, b] of [[1, 2], [2, 3], [1, 3]]) assert.ok(apart(a, b) > 1, `${a} and ${b}`);
  assert.ok(apart(1, 4) < 1e-9 && apart(3, 5) < 1e-9);
});

test("labels keep clear of each other and of discs", () => {
  const discs = Array.from({ length: 12 }, (_, i) => ({ x: 100 + 22 * i, y: 100, radius: 8, angle: Math.PI / 2, wide: 60 }));
  const places = nodesLabels(discs, { left: 0, right: 500, top: 0, bottom: 200 }).filter(Boolean);
  assert.ok(places.length > 2 && places.length < 12, "some have no room");
  places.forEach((a, i) => places.slice(i + 1).forEach((b) => assert.ok(a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top)));
});

test("the area of a disc is its value by the method", () => {
  const trace = traceOfNodes(NODES, EDGES);
  for (const method of ["raw", "rollout", "flow"]) {
    const discs = drawn(nodesView, trace, { method }).of("circle").filter((call) => call.look.opacity === 1);
    const areas = discs.map((call) => call.at[2] ** 2).sort((a, b) => b - a);
    const values = NODES.map((one) => nodesValue(one, method)).sort((a, b) => b - a);
    const least = 2.5 ** 2; // of what has no value, so that it is seen
    values.forEach((value, i) => assert.ok(Math.abs((areas[i] - least) / (areas[0] - least) - value / values[0]) < 1e-9, `${method} ${value}`));
  }
});

test("pale discs and whiskers are one spread more", () => {
  const spread = NODES.map((one) => ({ ...one, raw_spread: [0.1, 0.1], rollout_spread: 0.1, flow_spread: 0.05 }));
  const surface = drawn(nodesView, traceOfNodes(spread, EDGES, { samples: 8 }), { method: "rollout" }, 1200);
  const pale = surface.of("circle").filter((call) => call.look.opacity === 0.4);
  assert.equal(pale.length, 4);
  const whiskers = surface.of("line").filter((call) => call.at[1] === call.at[3] && call.look.line === undefined && call.look.stroke === "#1c2430");
  // The bar of 0.4 and its whisker to 0.5, which is where the column ends.
  const bars = surface.of("rect").filter((call) => call.look.opacity === 1);
  const widest = bars.reduce((a, b) => (a.at[2] > b.at[2] ? a : b));
  const own = whiskers.find((call) => Math.abs(call.at[1] - (widest.at[1] + widest.at[3] / 2)) < 1 && call.at[0] > widest.at[0] && call.at[2] > widest.at[0] + widest.at[2]);
  const unit = widest.at[2] / 0.4;
  assert.ok(Math.abs(own.at[0] - (widest.at[0] + 0.3 * unit)) < 0.5 && Math.abs(own.at[2] - (widest.at[0] + 0.5 * unit)) < 0.5);
  assert.ok(surface.texts.some((text) => /8 posterior samples/.test(text)));
  assert.equal(drawn(nodesView, traceOfNodes(NODES, EDGES)).of("circle").filter((call) => call.look.opacity === 0.4).length, 0);
});

test("pointing at a node lights its edges and dims the others", () => {
  const trace = traceOfNodes(NODES, EDGES);
  const paths = (surface) => surface.of("path");
  assert.ok(paths(drawn(nodesView, trace)).every((call) => call.look.stroke !== palette("light").accent));
  const lit = paths(drawn(nodesView, trace, { node: 9 }));
  assert.deepEqual(lit.map((call) => call.look.stroke === palette("light").accent), [false, false, true], "its own come last, on top");
  const before = Math.max(...paths(drawn(nodesView, trace)).map((call) => call.look.opacity));
  assert.ok(lit[1].look.opacity < before / 2);
});

test("hits lead to nodes, and again lets go; headings choose the method", () => {
  const trace = traceOfNodes(NODES, EDGES);
  const targets = drawn(nodesView, trace, { node: 7 }).hits.map((hit) => hit.target);
  assert.deepEqual(targets.find((one) => one.hover?.node === 9).select, { node: 9 });
  assert.deepEqual(targets.find((one) => one.hover?.node === 7).select, { node: null });
  assert.deepEqual(targets.filter((one) => one.select?.method).map((one) => one.select.method), ["raw", "rollout", "flow"]);
});

test("a tip has every number of a node", () => {
  const one = { ...NODES[1], raw_spread: [0.011, 0.012], rollout_spread: 0.013, flow_spread: 0.014, name: "Ada", label: "x" };
  const text = nodesFacts(traceOfNodes([NODES[0], one], []), one).join("\n");
  for (const value of [0.5, 0.6, 0.25, 0.95, 0.011, 0.012, 0.013, 0.014]) assert.ok(text.includes(number(value)), String(value));
  assert.match(text, /Ada\nnode 7, 1 hop away, x/);
});

test("a hub draws few of many: in the picture, and of the table what is on the screen", () => {
  const trace = hub(5000);
  const surface = drawn(nodesView, trace, {}, 1200, [20000, 20700]);
  assert.ok(surface.texts.includes("24 of 5000 neighbours drawn, by rollout"));
  assert.ok(surface.hits.length < 200, `${surface.hits.length} hits`);
  assert.ok(surface.hits.every((hit) => hit.y + hit.height > 19900 && hit.y < 20800), "picture and heading stay in sight");
  const narrow = drawn(nodesView, trace, {}, 500, [20000, 20700]);
  assert.equal(narrow.of("path").length, 0, "beneath the picture there is none");
});

test("what the page left out is said", () => {
  const texts = drawn(nodesView, hub(3, { left_out: 41 })).texts.join("\n");
  assert.match(texts, /41 more not on the page/);
  assert.match(texts, /41 more neighbours/);
});

test("classes have words and the page's colours; without classes there is a scale", () => {
  const trace = hub(6, { classes: [2, 1, 0] });
  assert.deepEqual(nodesKinds(trace).legend, [["2", KINDS[0]], ["1", KINDS[1]], ["0", KINDS[2]]]);
  const texts = drawn(nodesView, trace).texts;
  for (const word of ["0", "1", "2"]) assert.ok(texts.includes(word));
  const plain = drawn(nodesView, traceOfNodes(NODES, EDGES)).texts;
  assert.ok(plain.includes("colour: rollout") && plain.includes(number(0.4)));
});

test("classes without a colour of their own share the last", () => {
  const nodes = Array.from({ length: 12 }, (_, i) => node(i + 4, i ? 1 : 0, [0.1], 0.1, null, { label: `k${i}` }));
  const kinds = nodesKinds(traceOfNodes(nodes, [], { classes: ["k3", "k4", "k5", "k6", "k7", "k8", "k9"] }));
  assert.equal(kinds.of("k3"), KINDS[0]);
  assert.equal(kinds.of("k1"), KINDS[7]);
  assert.deepEqual(kinds.legend.at(-1), ["others", KINDS[7]]);
});

test("names and classes are drawn as visible signs", () => {
  const nodes = [node(4, 0, [1], 1, null, { name: "a\u202eb", label: "c\nd" }), node(5, 1, [0.5], 0.5, null, { name: "", label: "\u0000" })];
  const surface = drawn(nodesView, traceOfNodes(nodes, [edge(5, 4, 0, 0.5)]), { node: 4 }, 1200);
  const said = [...surface.texts, ...surface.hits.map((hit) => hit.target.tip || "").map((tip) => tip.replaceAll("\n", ""))].join("");
  assert.doesNotMatch(said, /[\u202e\u0000\n]/);
  assert.ok(surface.texts.includes("a·b") && surface.texts.includes("∅"));
});

test("a node alone is drawn alone", () => {
  const trace = traceOfNodes([node(4, 0, [1], 1, 1)], [edge(4, 4, 0, 1)]);
  const surface = drawn(nodesView, trace);
  assert.ok(surface.texts.includes("0 neighbours, by rollout"));
  assert.match(nodesView.describe({ trace, seen: { method: "flow" } }), /what node 4 draws on, 0 neighbours, by flow: itself 1\.00/);
});

test("the status names the strongest, or the one that is pointed at", () => {
  const trace = traceOfNodes(NODES, EDGES);
  assert.match(nodesView.describe({ trace, seen: { method: "rollout" } }), /^what node 4 draws on, 3 neighbours, by rollout: 9 0\.400, itself 0\.300, 7 0\.250/);
  assert.match(nodesView.describe({ trace, seen: { method: "rollout", node: 7 } }), /what node 4 draws on: node 7 · 1 hop away · .*flow: 0\.950/);
});

test("a link holds the node", () => {
  const store = new Store({ node: null });
  store.select({ node: 17 });
  assert.equal(store.toHash(), "node=17");
  const other = new Store({ node: null });
  other.fromHash("node=17");
  assert.equal(other.state.node, 17);
});

test("keys walk the table", () => {
  const trace = traceOfNodes(NODES, EDGES);
  const state = { method: "rollout", node: null, layer: 0, query: 0, head: null, token: null, group: "" };
  const first = nodesView.step({ trace, state, step: 1 }).node;
  const order = nodesOrdered(trace.about.nodes, "rollout").map((one) => one.id);
  assert.equal(first, order[0]);
  assert.equal(nodesView.step({ trace, state: { ...state, node: order[0] }, step: 1 }).node, order[1]);
  assert.equal(nodesView.step({ trace, state: { ...state, node: order[0] }, step: -1 }).node, order[0], "the end is the end");
});
