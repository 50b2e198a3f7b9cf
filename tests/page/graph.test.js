import assert from "node:assert/strict";
import test from "node:test";
import { palette } from "../../src/overt/view/viewer/colour.js";
import { graphLayout, graphTotals, graphView } from "../../src/overt/view/viewer/graph.js";
import { GraphEdges, graphPaths, graphRow, GraphTop } from "../../src/overt/view/viewer/graph_paths.js";
import { drawn as drawnAs, fieldOf, HALF, METHODS, traceOf } from "./record.js";

/** As a pane draws it: with the nearest selection that the trace has. */
function drawn(view, trace, state = {}, ...more) {
  const first = { layer: trace.layers - 1, head: null, query: trace.main, token: null, method: "rollout" };
  return drawnAs(view, trace, trace.nearest({ ...first, ...state, group: "" }), ...more);
}

// Numbers that look random and are the same every time.
function dice(seed = 1) {
  let state = seed;
  return () => (state = (state * 48271) % 2147483647) / 2147483647;
}

/** Rows that sum to one, (row, column); `causal` leaves out what comes later. */
function attention(rows, columns, roll, causal = false) {
  return Array.from({ length: rows }, (_, i) => {
    const cells = Array.from({ length: columns }, (_, j) => (causal && j > i ? 0 : roll() ** 3 + 0.01));
    const sum = cells.reduce((a, b) => a + b, 0);
    return cells.map((cell) => cell / sum);
  });
}

function times(a, b) {
  return a.map((row) => b[0].map((_, j) => row.reduce((sum, value, k) => sum + value * b[k][j], 0)));
}

/** (1 − r)·A + r·I. */
function mixed(cells, r) {
  return cells.map((row, i) => row.map((value, j) => (1 - r) * value + (i === j ? r : 0)));
}

function near(found, wanted, within = 1e-6) {
  assert.equal(found.length, wanted.length);
  wanted.forEach((value, i) => assert.ok(Math.abs(found[i] - value) < within, `${i}: ${found[i]} is not ${value}`));
}

const words = ["the", "key", "to", "the", "cabinet"];

function small({ layers = 3, tokens = words, ...about } = {}, extra = () => ({})) {
  const roll = dice(7);
  const maps = Array.from({ length: layers }, () => attention(tokens.length, tokens.length, roll));
  const rollouts = [];
  for (const map of maps) rollouts.push(rollouts.length ? times(mixed(map, 0.5), rollouts.at(-1)) : mixed(map, 0.5));
  const fields = { mean: maps.map((map) => [map]), rollout: rollouts.map((map) => [map]) };
  return { maps, rollouts, trace: traceOf({ tokens, ...about }, { ...fields, ...extra(maps, rollouts) }) };
}

/** An encoder–decoder: two encoder layers, two decoder layers, three source and four target tokens. */
function pair() {
  const roll = dice(3);
  const [source, target] = [3, 4];
  const encoder = [0, 1].map(() => attention(source, source, roll));
  const self = [0, 1].map(() => attention(target, target, roll, true));
  const cross = [0, 1].map(() => attention(target, source, roll));
  const group = { layers: 2, heads: 0, columns: [0, 3] };
  const groups = { encoder: { ...group, rows: [0, 3] }, cross: { ...group, rows: [3, 7] } };
  const one = (maps) => maps.map((map) => [map]);
  const fields = { mean: one(self), "encoder mean": one(encoder), "cross mean": one(cross) };
  const tokens = ["der", "alte", "Schlüssel", "<s>", "the", "old", "key"];
  const trace = traceOf({ tokens, source, kind: "pair", groups }, fields);
  return { trace, encoder, self, cross, source, target };
}

test("the shares that rollout's paths bring to the input are the rollout row", () => {
  const { trace, rollouts } = small();
  for (let layer = 0; layer < 3; layer++) {
    for (let query = 0; query < words.length; query++) near(graphPaths(trace, "rollout", layer, query).totals, rollouts[layer][query]);
  }
});

test("another residual gives another rollout, and the paths follow it", () => {
  const { trace, maps } = small({ residual: 0.2 });
  const wanted = times(mixed(maps[1], 0.2), mixed(maps[0], 0.2));
  near(graphPaths(trace, "rollout", 1, 2).totals, wanted[2]);
  const other = graphPaths(small({ residual: 0.5 }).trace, "rollout", 1, 2).totals;
  assert.ok(other.some((value, i) => Math.abs(value - wanted[2][i]) > 0.01));
});

test("raw paths are products of raw weights", () => {
  const { trace, maps } = small();
  near(graphPaths(trace, "raw", 2, 4).totals, times(maps[2], times(maps[1], maps[0]))[4]);
});

/** The same trace as it would be packed: without the smallest weights of each row, as many as hold `most` of it or less. */
function packed(trace, most = 0.02) {
  for (const [name, field] of trace.fields) {
    const dropped = [];
    const maps = Array.from({ length: field.maps }, (_, map) =>
      Array.from({ length: field.rows }, (_, at) => {
        const row = Array.from(field.row(map, at));
        const order = [...row.keys()].sort((a, b) => row[a] - row[b]);
        const whole = row.reduce((sum, value) => sum + value, 0);
        let gone = 0;
        for (const key of order) {
          if (gone + row[key] > most * whole) break;
          gone += row[key];
          row[key] = 0;
        }
        dropped.push(gone / whole);
        return row;
      }),
    );
    const cut = fieldOf(maps);
    cut.dropped.set(dropped);
    trace.fields.set(name, cut);
  }
  return trace;
}

test("a product of raw weights does not shrink by what packing left out, and says how much that was", () => {
  for (const causal of [false, true]) {
    const roll = dice(11);
    const tokens = Array.from({ length: 30 }, (_, i) => `w${i}`);
    const maps = Array.from({ length: 6 }, () => attention(30, 30, roll, causal));
    const trace = packed(traceOf({ tokens }, { mean: maps.map((map) => [map]) }));
    const whole = maps.reduce((below, map) => (below ? times(map, below) : map), null);
    const { totals, lost } = graphPaths(trace, "raw", 5, 29);
    assert.ok(Math.abs(totals.reduce((a, b) => a + b) - 1) < 1e-6);
    whole[29].forEach((value, i) => assert.ok(Math.abs(totals[i] - value) < 0.02 * value + 1e-4, `${i}: ${totals[i]} is not ${value}`));
    assert.ok(lost > 0.05 && lost < 0.12, `six levels lose near 2 % each, got ${lost}`);
    const early = graphPaths(trace, "raw", 5, 4).totals;
    if (causal) assert.ok(early.slice(5).every((value) => value === 0), "nothing comes from later tokens");
    const seen = { method: "raw", picked: true, layer: 5, query: 29, head: null, token: null };
    assert.equal(graphTotals(trace, seen).lost, lost);
    assert.match(graphView.describe({ trace, seen }), /left out \d[.\d]* % on the way/);
  }
});

test("a picked node's product of raw weights is called one, and is not taken for the raw row", () => {
  const { trace, maps } = small();
  const product = times(maps[2], times(maps[1], maps[0]))[4];
  const best = Math.max(...product).toFixed(3);
  const name = "product of raw weights, layer 3 to the input";
  const state = { method: "raw", picked: true, layer: 2, query: 4 };
  const surface = drawn(graphView, trace, state);
  assert.ok(surface.texts.includes(name), "the scale's title");
  const { x, y } = graphLayout(trace, 900);
  const token = product.indexOf(Math.max(...product));
  assert.match(hitAt(surface, 20, y(token)).tip, new RegExp(`drawn on by “cabinet”, layer 3\n${name}: ${best}$`));
  const said = graphView.describe({ trace, seen: trace.nearest({ ...state, head: null }) });
  assert.ok(said.startsWith(`“cabinet” (token 4) at layer 3 draws on (${name}): ${words[token]} ${best}`), said);
  const row = Math.max(...maps[2][4]).toFixed(3);
  const tip = hitAt(surface, x(3), y(4)).tip;
  assert.match(tip, new RegExp(`^cabinet\ntoken 4, layer 3\nraw weight: .* ${row}.*\n${name}: .* ${best}`), "both, each by its name");
  const plain = drawn(graphView, trace, { ...state, picked: false });
  assert.ok(!plain.texts.some((text) => text.includes("product")));
  assert.match(hitAt(plain, 20, y(0)).tip, new RegExp(`\nraw weight: ${maps[2][4][0].toFixed(3)}`));
});

test("flow is told in amounts", () => {
  const flows = small().rollouts.map((map) => map.map((row) => row.map((value) => 3 * value)));
  const { trace } = small({}, () => ({ flow: flows.map((map) => [map]) }));
  const { y } = graphLayout(trace, 900);
  for (const picked of [false, true]) {
    const surface = drawn(graphView, trace, { method: "flow", picked, layer: 2, query: 1 });
    assert.ok(surface.texts.includes(picked ? "flow of “key”, layer 3, amount" : "flow, amount"));
    assert.match(hitAt(surface, 20, y(1)).tip, new RegExp(`\nflow, amount: ${flows[2][1][1].toFixed(2)}$`));
  }
});

test("a weight that may have been left out is not said to be 0", () => {
  const trace = traceOf({ tokens: ["a", "b"] }, { mean: [[[[1, 0], [0.5, 0.5]]]] });
  const { y } = graphLayout(trace, 900);
  for (const picked of [false, true]) {
    const state = { method: "raw", query: 0, layer: 0, picked };
    assert.match(hitAt(drawn(graphView, trace, state), 20, y(1)).tip, /: left out or 0$/);
  }
  const seen = { method: "raw", query: 0, layer: 0, head: null, picked: true, token: 1 };
  assert.match(graphView.describe({ trace, seen }), /· “b” left out or 0$/);
});

test("what arrives at a token is what its edges bring", () => {
  const { trace } = small();
  const { reach, edges, total } = graphPaths(trace, "rollout", 2, 1);
  assert.equal(edges.length, total);
  for (let layer = 0; layer < 3; layer++) {
    const sums = words.map(() => 0);
    for (const edge of edges) if (edge.layer === layer) sums[edge.to] += edge.value;
    near(sums, Array.from(reach[layer]));
    assert.ok(Math.abs(sums.reduce((a, b) => a + b) - 1) < 1e-6);
  }
});

test("an encoder–decoder's paths go through self-attention, cross-attention and the encoder", () => {
  const { trace, encoder, self, cross, source, target } = pair();
  const size = source + target;
  // Every level as a whole matrix over all tokens, as the library multiplies them.
  const whole = (fill) => Array.from({ length: size }, (_, i) => Array.from({ length: size }, (_, j) => fill(i, j)));
  const half = (value, same) => 0.5 * value + (same ? 0.5 : 0);
  const levels = [
    ...encoder.map((map) => whole((i, j) => (i < source && j < source ? half(map[i][j], i === j) : Number(i === j && i >= source)))),
    ...self.flatMap((map, layer) => [
      whole((i, j) => (i >= source && j >= source ? half(map[i - source][j - source], i === j) : Number(i === j && i < source))),
      whole((i, j) => (i < source ? Number(i === j) : half(j < source ? cross[layer][i - source][j] : 0, i === j))),
    ]),
  ];
  const product = levels.reduceRight((above, level) => (above ? times(above, level) : level), null);
  for (let query = 0; query < target; query++) near(graphPaths(trace, "rollout", 1, query).totals, product[source + query]);
});

test("raw paths of an encoder–decoder are rollout's without a residual: its last cross-attention, through the encoder", () => {
  const { trace, encoder, cross, source } = pair();
  const through = times(cross[1], times(encoder[1], encoder[0]));
  for (let query = 0; query < 4; query++) {
    const { totals } = graphPaths(trace, "raw", 1, query);
    near(totals, [...through[query], 0, 0, 0, 0]);
    assert.ok(Math.abs(totals.reduce((a, b) => a + b) - 1) < 1e-6, "one distribution, not two");
  }
  const { edges } = graphPaths(trace, "raw", 1, 2);
  assert.ok(edges.length && edges.every((edge) => edge.to < source));
  const said = (method) => drawn(graphView, trace, { method, picked: true, layer: 1, query: 2 }).texts.join(" ");
  assert.match(said("raw"), /without a residual it passes nothing on from the target/);
});

/** One decoder layer whose self-attention and cross-attention share a row: of target 1, 0.5 + 0.1 on the source, 0.4 on the target. */
function joint(about = {}) {
  const fields = { mean: [[[[0.2, 0], [0.1, 0.3]]]], "cross mean": [[[[0.6, 0.2], [0.5, 0.1]]]] };
  const groups = { cross: { layers: 1, heads: 0, rows: [2, 4], columns: [0, 2] } };
  const tokens = ["alt", "neu", "old", "new"];
  return traceOf({ tokens, source: 2, kind: "encoder–decoder", mixing: "value zeroing", mixing_title: "value zeroing", groups, joint: true, residual: 0, ...about }, fields);
}

test("of a row that cross-attention and self-attention share, the target's part passes through to it", () => {
  const rolled = (about) => graphPaths(joint(about), "rollout", 0, 1);
  near(rolled().totals, [0.5, 0.1, 0.1, 0.3]);
  near(graphPaths(joint(), "raw", 0, 1).totals, [0.5, 0.1, 0.1, 0.3]);
  // Cross: 0.7 · (0.5, 0.1 | 0.4 to itself) + 0.3 to itself. Self: 0.7 · (0.1, 0.3) / 0.4 + 0.3 to itself.
  const through = 0.7 * 0.4 + 0.3;
  near(rolled({ residual: 0.3, unit: true }).totals, [0.35, 0.07, through * 0.7 * 0.25, through * (0.7 * 0.75 + 0.3)]);
  // Where rows are not divided before the residual joins, they are after: 0.28 + 0.3 of self-attention.
  near(rolled({ residual: 0.3 }).totals, [0.35, 0.07, (through * 0.07) / 0.58, (through * 0.51) / 0.58]);
  near(graphPaths(joint({ joint: false }), "raw", 0, 1).totals, [0.5, 0.1, 0, 0]); // two rows: nothing passes
  const { edges, lost } = rolled();
  assert.deepEqual(edges.map((edge) => [edge.from, edge.to]).sort(), [[3, 0], [3, 1], [3, 2], [3, 3]]);
  assert.equal(lost, 0);
});

test("two layers of shared rows are the product of whole levels", () => {
  const roll = dice(9);
  const [source, target] = [3, 4];
  const size = source + target;
  const rows = [0, 1].map(() => attention(target, size, roll).map((row, i) => {
    const seen = row.map((value, j) => (j - source > i ? 0 : value));
    const sum = seen.reduce((a, b) => a + b, 0);
    return seen.map((value) => value / sum);
  }));
  const encoder = attention(source, source, roll);
  const self = rows.map((map) => map.map((row) => row.slice(source)));
  const cross = rows.map((map) => map.map((row) => row.slice(0, source)));
  const groups = { encoder: { layers: 1, heads: 0, rows: [0, 3], columns: [0, 3] }, cross: { layers: 2, heads: 0, rows: [3, 7], columns: [0, 3] } };
  const fields = { mean: self.map((map) => [map]), "cross mean": cross.map((map) => [map]), "encoder mean": [[encoder]] };
  const tokens = ["der", "alte", "Schlüssel", "<s>", "the", "old", "key"];
  const whole = (fill) => Array.from({ length: size }, (_, i) => Array.from({ length: size }, (_, j) => fill(i, j)));
  for (const residual of [0, 0.4]) {
    const trace = traceOf({ tokens, source, kind: "encoder–decoder", groups, joint: true, unit: true, residual }, fields);
    const mix = (value, same) => (1 - residual) * value + (same ? residual : 0);
    const total = (row) => row.reduce((a, b) => a + b, 0);
    const levels = [
      whole((i, j) => (i < source ? (j < source ? mix(encoder[i][j], i === j) : 0) : Number(i === j))),
      ...self.flatMap((map, layer) => [
        whole((i, j) => (i >= source && j >= source ? mix(map[i - source][j - source] / total(map[i - source]), i === j) : Number(i === j))),
        whole((i, j) => (i < source ? Number(i === j) : mix(j < source ? cross[layer][i - source][j] : i === j ? total(map[i - source]) : 0, i === j))),
      ]),
    ];
    const product = levels.reduceRight((above, level) => (above ? times(above, level) : level), null);
    for (let query = 0; query < target; query++) {
      near(graphPaths(trace, "rollout", 1, query).totals, product[source + query]);
      if (!residual) near(graphPaths(trace, "raw", 1, query).totals, product[source + query]);
    }
  }
});

test("what packing left out of shared rows is made up for in both", () => {
  const trace = joint();
  for (const field of trace.fields.values()) {
    const row = field.row;
    field.row = (map, i) => row(map, i).map((value) => 0.95 * value);
    field.dropped.fill(0.05);
  }
  const { totals, lost } = graphPaths(trace, "rollout", 0, 1);
  near(totals, [0.5, 0.1, 0.1, 0.3]);
  assert.ok(Math.abs(lost - 0.05) < 1e-6, `0.05 of either part is 0.05 of the row, got ${lost}`);
});

test("a shared row is not said to keep the target from passing", () => {
  const said = (trace) => drawn(graphView, trace, { method: "raw", picked: true, layer: 0, query: 1 }).texts.join(" ");
  assert.doesNotMatch(said(joint()), /passes nothing on from the target/);
  assert.match(said(joint({ joint: false })), /passes nothing on from the target/);
});

test("tokens of an encoder–decoder are counted from 0 in source and target", () => {
  const { trace } = pair();
  const { x, y } = graphLayout(trace, 900);
  const surface = drawn(graphView, trace, { method: "raw" });
  assert.match(hitAt(surface, 20, y(2)).tip, /^Schlüssel\nsource 2\n/);
  assert.match(hitAt(surface, 20, y(5)).tip, /^old\ntarget 2\n/);
  assert.match(hitAt(surface, x(1), y(5)).tip, /^old\ntarget 2, layer 1\n/);
});

test("weights that packing left out are made up for", () => {
  const { trace, rollouts } = small();
  for (const field of trace.fields.values()) {
    const row = field.row;
    field.row = (map, i) => row(map, i).map((value) => 0.98 * value);
    field.dropped.fill(0.02);
  }
  near(graphPaths(trace, "rollout", 2, 0).totals, rollouts[2][0]);
});

test("the largest are kept as sorting would keep them", () => {
  const roll = dice(5);
  const sizes = Array.from({ length: 5000 }, () => roll() ** 4);
  const top = new GraphTop(100);
  for (const size of sizes) top.add({ size });
  assert.deepEqual(top.rising().map((one) => one.size), [...sizes].sort((a, b) => a - b).slice(-100));
});

test("no layer is left without edges because others are stronger", () => {
  const found = new GraphEdges(4, 80);
  for (let i = 0; i < 800; i++) found.add({ size: (i + 1) / 10 ** (i % 4), layer: i % 4, from: i, to: i });
  const edges = found.rising();
  assert.equal(edges.length, 80);
  for (let layer = 0; layer < 4; layer++) assert.ok(edges.filter((edge) => edge.layer === layer).length >= 10);
  assert.ok(edges.filter((edge) => edge.layer === 0).length > 40);
});

test("a row's entries come strongest first", () => {
  const { trace, maps } = small();
  const { tokens, values, count } = graphRow(trace, "raw", 1, 3);
  assert.equal(count, 5);
  near(Array.from(values), [...maps[1][3]].sort((a, b) => b - a));
  assert.equal(tokens[0], maps[1][3].indexOf(Math.max(...maps[1][3])));
});

test("without a picked node every weight is one line between two columns, the strongest on top", () => {
  const { trace, rollouts } = small();
  const surface = drawn(graphView, trace);
  const curves = surface.of("curve");
  assert.equal(curves.length, 3 * 25);
  const { x, y } = graphLayout(trace, 900);
  const flat = rollouts.flatMap((map, layer) => map.flatMap((row, from) => row.map((value, to) => ({ value, layer, from, to }))));
  const best = flat.sort((a, b) => b.value - a.value)[0];
  assert.deepEqual(curves.at(-1).at, [x(best.layer + 1), y(best.from), x(best.layer), y(best.to)]);
  const widths = curves.map((curve) => curve.look.line);
  assert.deepEqual(widths, [...widths].sort((a, b) => a - b));
  assert.ok(surface.texts.includes("rollout"));
  assert.ok(surface.texts.includes(best.value.toFixed(3)), "the scale ends at the largest weight");
});

test("the strongest line has the colour of the scale's end", () => {
  const { trace } = small();
  const edge = palette("light").edge;
  const parts = [1, 3, 5].map((at) => parseInt(edge.slice(at, at + 2), 16));
  assert.equal(drawn(graphView, trace).of("curve").at(-1).look.stroke, `rgb(${parts.join(",")})`);
});

test("a head's lines are not those of the mean", () => {
  const { trace } = small({}, (maps) => ({ heads: maps.map((map) => [map, map.map((row) => [...row].reverse())]) }));
  const lines = (state) => JSON.stringify(drawn(graphView, trace, { method: "raw", ...state }).of("curve"));
  assert.equal(lines({ head: 0 }), lines({ head: null }));
  assert.notEqual(lines({ head: 1 }), lines({ head: null }));
  assert.ok(drawn(graphView, trace, { method: "raw", head: 1 }).texts.includes("raw, head 2"));
});

test("a picked node shows its own paths and nothing above it", () => {
  const { trace } = small();
  const { x, y } = graphLayout(trace, 900);
  const curves = drawn(graphView, trace, { picked: true, layer: 1, query: 4 }).of("curve");
  assert.equal(curves.length, 5 + 25);
  const upper = curves.filter((curve) => curve.at[0] === x(2));
  assert.equal(upper.length, 5);
  for (const curve of upper) assert.equal(curve.at[1], y(4));
  assert.ok(!curves.some((curve) => curve.at[0] > x(2)));
});

test("flow goes in straight lines to the input, and the drawing says why", () => {
  const flows = small().rollouts;
  const { trace } = small({}, () => ({ flow: flows.map((map) => [map]) }));
  const { x, y } = graphLayout(trace, 900);
  const surface = drawn(graphView, trace, { method: "flow", picked: true, layer: 2, query: 1 });
  assert.equal(surface.of("curve").length, 0);
  const ends = surface.of("line").filter((line) => line.at[0] === x(3) && line.at[2] === x(0));
  assert.deepEqual(new Set(ends.map((line) => line.at[3])), new Set(words.map((_, i) => y(i))));
  for (const line of ends) assert.equal(line.at[1], y(1));
  assert.ok(surface.texts.includes("flow is not a sum over paths: its amounts are drawn straight to the input"));
});

test("a method that no view has heard of is drawn in straight lines, by its title and its measure", () => {
  const halves = small().rollouts.map((map) => map.map((row) => row.map((value) => 0.5 * value)));
  const { trace } = small({ methods: [...METHODS, HALF] }, () => ({ half: halves.map((map) => [map]) }));
  const { x, y } = graphLayout(trace, 900);
  const plain = drawn(graphView, trace, { method: "half" });
  assert.equal(plain.of("curve").length, 3 * 25);
  assert.ok(plain.texts.includes("half rollout, share"));
  const state = { method: "half", picked: true, layer: 2, query: 1 };
  const surface = drawn(graphView, trace, state);
  assert.equal(surface.of("curve").length, 0);
  const ends = surface.of("line").filter((line) => line.at[0] === x(3) && line.at[2] === x(0));
  assert.deepEqual(new Set(ends.map((line) => line.at[3])), new Set(words.map((_, i) => y(i))));
  assert.ok(surface.texts.includes("half rollout of “key”, layer 3, share"), surface.texts.join("|"));
  assert.ok(surface.texts.includes("half rollout is not a sum over paths: its shares are drawn straight to the input"));
  assert.match(hitAt(surface, 20, y(1)).tip, new RegExp(`\nhalf rollout, share: ${halves[2][1][1].toFixed(3)}$`));
  assert.match(graphView.describe({ trace, seen: trace.nearest({ ...state, head: null }) }), /draws on \(half rollout, share\): /);
});

test("one that is a sum over paths is drawn like rollout, with the residual", () => {
  const { rollouts } = small();
  const twin = { ...HALF, name: "twin", title: "twin", paths: true };
  const { trace } = small({ methods: [...METHODS, twin] }, () => ({ twin: rollouts.map((map) => [map]) }));
  const curves = (method) => JSON.stringify(drawn(graphView, trace, { method, picked: true, layer: 2, query: 4 }).of("curve"));
  assert.ok(curves("twin").length > 100);
  assert.equal(curves("twin"), curves("rollout"));
});

test("maps that are not attention are said to be what they are", () => {
  const about = { mixing: "norm", mixing_title: "norm of what is added", unit: true };
  const { trace } = small(about, (maps, rollouts) => ({ flow: rollouts.map((map) => [map]) }));
  const titles = { raw: "raw norm of what is added", rollout: "rollout over norm of what is added", flow: "flow over norm of what is added, amount" };
  for (const [method, title] of Object.entries(titles)) assert.ok(drawn(graphView, trace, { method }).texts.includes(title), method);
  const told = (method) => graphView.describe({ trace, seen: trace.nearest({ method, picked: true, layer: 1, query: 1, head: null }) });
  assert.match(told("raw"), /draws on \(product of raw weights, norm of what is added, layer 2 to the input\): /);
  assert.match(told("rollout"), /draws on \(rollout over norm of what is added, share\): /);
  const plain = small().trace;
  assert.ok(!drawn(graphView, plain, { method: "rollout" }).texts.some((text) => text.includes("attention")));
});

test("rows that do not sum to one are divided by their sum before the residual joins where the index says so", () => {
  const map = [[0.2, 0.4], [3, 1]];
  const paths = (more) => graphPaths(traceOf({ tokens: ["a", "b"], residual: 0.5, ...more }, { mean: [[map]] }), "rollout", 0, 1).totals;
  near(paths({ unit: true }), [0.375, 0.625]);
  near(paths({}), [1.5 / 2.5, 1 / 2.5]); // after it
  near(paths({ signed: true }), [1.5, 1]); // as they are
  near(paths({ unit: true, signed: true }), [0.375, 0.625]);
});

test("rows that the page has not are said, the others drawn", () => {
  const flows = small().rollouts;
  const { trace } = small({ queries: { flow: [2] } }, () => ({ flow: flows.map((map) => [[map[2]]]) }));
  const surface = drawn(graphView, trace, { method: "flow" });
  const { y } = graphLayout(trace, 900);
  assert.deepEqual(new Set(surface.of("curve").map((curve) => curve.at[1])), new Set([y(2)]));
  assert.ok(surface.texts.some((text) => text.includes("the page has flow for one query only")));
  const picked = drawn(graphView, trace, { method: "flow", picked: true, query: 0 });
  assert.ok(picked.texts.some((text) => text.includes("the page has flow for one query only")));
});

test("rollout's paths need no rollout row", () => {
  const { trace, rollouts } = small({ queries: { rollout: [0] } });
  near(graphTotals(trace, { method: "rollout", picked: true, layer: 2, query: 3 }).values, rollouts[2][3]);
  assert.ok(graphTotals(trace, { method: "rollout", picked: false, layer: 2, query: 3 }).missing);
});

function hitAt(surface, x, y) {
  return surface.hits.findLast((hit) => x >= hit.x && x < hit.x + hit.width && y >= hit.y && y < hit.y + hit.height).target;
}

test("nodes, heads of columns and tokens lead where they should", () => {
  const { trace } = small();
  const { x, y } = graphLayout(trace, 900);
  const surface = drawn(graphView, trace);
  const node = hitAt(surface, x(2), y(4));
  assert.deepEqual(node.select, { query: 4, layer: 1, token: null, picked: true });
  assert.deepEqual(node.hover, { query: 4, layer: 1, token: 4, picked: true });
  assert.match(node.tip, /^cabinet\ntoken 4, layer 2\nrollout, share: /);
  assert.deepEqual(hitAt(surface, x(0), y(1)).select, { query: 1, token: null });
  assert.deepEqual(hitAt(surface, 20, y(3)).select, { query: 3, token: null });
  assert.deepEqual(hitAt(surface, 20, y(3)).hover, { token: 3 });
  assert.deepEqual(hitAt(surface, x(1), y(0) - 30).select, { layer: 0 });
  const picked = drawn(graphView, trace, { picked: true, layer: 1, query: 4 });
  assert.deepEqual(hitAt(picked, x(2), y(4)).select, { picked: false });
  assert.equal(hitAt(picked, x(2), y(3)).select.picked, true);
});

test("heads of columns stay on the screen and cover what scrolls beneath", () => {
  const tokens = Array.from({ length: 60 }, (_, i) => `w${i}`);
  const { trace } = small({ tokens });
  const { x } = graphLayout(trace, 900);
  const surface = drawn(graphView, trace, {}, 900, [400, 800]);
  const head = surface.of("text").find((call) => call.at[0] === "2" && call.at[1] === x(2));
  assert.ok(head.at[2] > 400 && head.at[2] < 424);
  assert.deepEqual(hitAt(surface, x(2), 410).select, { layer: 1 });
  assert.deepEqual(hitAt(surface, 30, 410), {});
});

test("the token that the pointer is over is marked in every column", () => {
  const { trace } = small();
  const { x, y } = graphLayout(trace, 900);
  const rings = drawn(graphView, trace, { token: 2 }).of("circle").filter((call) => call.look.stroke && call.at[1] === y(2));
  assert.deepEqual(rings.map((call) => call.at[0]), [0, 1, 2, 3].map(x));
  const paper = drawn(graphView, trace, { token: 2 }).of("circle").filter((call) => call.look.fill === palette("light").paper && call.at[2] > 5);
  assert.ok(rings.every((ring) => paper.some((call) => call.at[0] === ring.at[0] && call.at[1] === ring.at[1])), "with paper around it");
});

test("a long text draws few things, and says how many edges it has left out", () => {
  const tokens = Array.from({ length: 3000 }, (_, i) => `w${i}`);
  const layers = Array.from({ length: 4 }, () => [[[0]]]);
  const trace = traceOf({ tokens, layers: 4 }, { mean: layers });
  let asked = 0;
  const row = Float32Array.from(tokens, (_, i) => 1 / (i + 3));
  trace.row = () => (asked++, { values: row, lost: 0 });
  const surface = drawn(graphView, trace, { method: "raw" }, 900, [30000, 30600]);
  assert.ok(asked <= 4 * 40, `${asked} rows`);
  assert.ok(surface.of("curve").length <= 3000 && surface.of("curve").length > 1000);
  assert.ok(surface.calls.length < 4000);
  assert.ok(surface.texts.some((text) => /^3 000 of \d{3} \d{3} edges from the tokens on the screen/.test(text)));
  const before = asked;
  drawn(graphView, trace, { method: "raw" }, 900, [30000, 30600]);
  assert.ok(asked <= before + 1, "rows are kept"); // one for the bars
  assert.ok(graphView.minimap({ trace, seen: { method: "raw", layer: 0, query: 5, head: null }, width: 900 }).length <= 400);
});

test("nothing is said of edges left out where all are drawn", () => {
  assert.ok(!drawn(graphView, small().trace).texts.some((text) => text.includes(" edges")));
});

test("many layers on a phone make the drawing wider, not the columns too narrow", () => {
  for (const layers of [1, 6, 12, 48]) {
    const { trace } = small({ layers });
    const { width } = graphView.measure({ trace, width: 390 });
    const layout = graphLayout(trace, Math.max(width, 390));
    assert.ok(layout.step >= 34, `${layers} layers: ${layout.step}`);
    assert.ok(layout.x(layers) < Math.max(width, 390));
    assert.equal(width > 390, layers > 8);
    assert.equal(graphView.measure({ trace, width }).width, width, "measuring again changes nothing");
  }
});

test("an encoder–decoder has its source above a gap, and nodes for the target alone", () => {
  const { trace } = pair();
  const { x, y } = graphLayout(trace, 900);
  assert.ok(y(3) - y(2) > y(2) - y(1));
  const surface = drawn(graphView, trace, { method: "raw" });
  const above = surface.of("circle").filter((call) => call.at[0] > x(0));
  assert.ok(above.length && above.every((call) => call.at[1] >= y(3)));
  assert.ok(surface.of("curve").some((call) => call.at[0] === x(2) && call.at[3] < y(3)), "cross-attention is drawn");
  assert.deepEqual(hitAt(surface, x(1), y(4)).select, { query: 1, layer: 0, token: null, picked: true });
  assert.equal(hitAt(surface, 20, y(0)).select, undefined);
  assert.ok(surface.texts.includes("source") && surface.texts.includes("target"));
});

test("the status says what a picked node draws on", () => {
  const { trace, rollouts } = small();
  const seen = { method: "rollout", picked: true, layer: 1, query: 1, head: null, token: null };
  const best = rollouts[1][1].map((value, i) => [value, words[i]]).sort((a, b) => b[0] - a[0])[0];
  const text = graphView.describe({ trace, seen });
  assert.ok(text.startsWith(`“key” (token 1) at layer 2 draws on (rollout, share): ${best[1]} ${best[0].toFixed(3)}`), text);
  assert.equal(graphView.describe({ trace, seen: { ...seen, picked: false } }), null);
});

test("negative weights have a colour of their own, on a scale with both signs", () => {
  const trace = traceOf({ tokens: ["a", "b"], signed: true }, { mean: [[[[0.5, -0.25], [0.1, 0.2]]]] });
  const surface = drawn(graphView, trace, { method: "raw" });
  const colours = surface.of("curve").map((call) => call.look.stroke);
  assert.equal(new Set(colours).size, 4);
  assert.ok(surface.texts.includes("−0.500"));
});

test("scaled by words, the scale ends at the largest weight of a word", () => {
  const map = [[0.1, 0.2, 0.7], [0.3, 0.6, 0.1], [0.2, 0.15, 0.65]];
  const trace = traceOf({ tokens: ["a", "b", "[SEP]"], special: [0, 0, 1] }, { mean: [[map]] });
  assert.ok(drawn(graphView, trace, { method: "raw" }).texts.includes("0.700"));
  const surface = drawn(graphView, trace, { method: "raw", words: true });
  assert.ok(surface.texts.includes("0.300") && !surface.texts.includes("0.700"));
});

test("tokens are drawn fit to be seen", () => {
  const { trace } = small({ tokens: ["a\nb", "\u202eevil", "x".repeat(5000), "<script>", ""] });
  const surface = drawn(graphView, trace, { picked: true });
  for (const text of surface.texts) assert.ok(!/[\n\u202e]/.test(text) && text.length < 200, text);
  for (const hit of surface.hits) if (hit.target.tip) assert.ok(hit.target.tip.length < 500 && !hit.target.tip.includes("\u202e"));
});

test("while maps are on their way the rest is drawn", () => {
  const { trace } = small();
  trace.fields.clear();
  trace.block = () => new Promise(() => {});
  for (const picked of [false, true]) {
    const surface = drawn(graphView, trace, { picked });
    assert.equal(surface.of("curve").length, 0);
    assert.ok(surface.texts.includes("cabinet"));
  }
  assert.ok(graphView.describe({ trace, seen: { method: "raw", picked: true, layer: 0, query: 0, head: null } }).endsWith("…"));
});

test("a trace without tokens says why there is nothing", () => {
  assert.equal(graphView.applies(small().trace), true);
  assert.match(graphView.applies(traceOf({ tokens: [] }, {})), /no layers of tokens/);
});

test("the chosen token is where it is drawn", () => {
  const { trace } = small();
  const { y } = graphLayout(trace, 900);
  const place = graphView.placeOf({ trace, state: { query: 3 }, width: 900 });
  assert.ok(place < y(3) && place > y(2));
});
