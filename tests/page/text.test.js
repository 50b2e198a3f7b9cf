// Long texts, as rows: layout, search, ranking, the map of the whole text, and what the views say of them.
import assert from "node:assert/strict";
import { test } from "node:test";
import { fillControls, findNext } from "../../src/overt/view/viewer/controls.js";
import { pressed } from "../../src/overt/view/viewer/keys.js";
import { foundWords, holding, passageFound, passageNext, passageText, passageWord, ranking, shareWords } from "../../src/overt/view/viewer/passage.js";
import { beyondScale, columnPeaks, textLines, textView } from "../../src/overt/view/viewer/text.js";
import { topNotes, topView } from "../../src/overt/view/viewer/top.js";
import { VIEWS } from "../../src/overt/view/viewer/views.js";
import { documented, made } from "./dom.js";
import { drawn, traceOf } from "./record.js";

const TOKENS = ["The", "im", "mun", "ity", "of", "cells", ".", "Ċ", "The", "CELLS", "end"];
const BEFORE = "01001100011";
const RAW = [0.6, 0.01, 0.02, 0.03, 0.04, 0.15, 0.01, 0.01, 0.02, 0.06, 0.05];
const ROLLOUT = [0.9, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01];
const LAST = TOKENS.length - 1;

/** A trace with rows of the last token at two layers, the same at both except for the method. */
function long(about = {}, fields = {}) {
  const rows = { queries: [LAST], before: BEFORE };
  return traceOf({ kind: "causal", tokens: TOKENS, main: LAST, rows, queries: { raw: [LAST], rollout: [LAST] }, ...about }, { raw: [[[RAW]], [[RAW]]], rollout: [[[ROLLOUT]], [[ROLLOUT]]], ...fields });
}

/** A trace of many tokens, all of one word. */
function many(count) {
  const values = Array.from({ length: count }, (_, i) => 1 / (i + 1));
  const rows = { queries: [count - 1], before: "1".repeat(count) };
  return traceOf({ kind: "causal", layers: 1, tokens: Array(count).fill("word"), main: count - 1, rows, queries: { raw: [count - 1] } }, { raw: [[[values]]] });
}

const seen = (trace, more = {}) => ({ group: "", layer: 1, head: null, query: LAST, token: null, method: "raw", words: false, log: false, find: "", ...more });

test("a trace of rows has its own views, and those of maps say why they have nothing", () => {
  const trace = long({ layers: 2 });
  const fit = VIEWS.filter((view) => view.applies(trace) === true).map((view) => view.id);
  assert.deepEqual(fit, ["text", "top", "strip"]);
  for (const id of ["graph", "heads"]) assert.match(VIEWS.find((view) => view.id === id).applies(trace), /rows of some tokens in place of maps/);
  assert.deepEqual(trace.methods, ["raw", "rollout"]);
  const maps = traceOf({ tokens: ["a", "b"] }, { mean: [[[[1, 0], [0, 1]]]] });
  for (const view of [textView, topView]) assert.match(view.applies(maps), /this trace has maps/);
});

test("rows are read for the queries that there are, and the nearest stands for others", () => {
  const rows = { queries: [2, LAST], before: BEFORE };
  const other = RAW.map((one) => one / 2);
  const trace = long({ layers: 1, rows, queries: { raw: [2, LAST] } }, { raw: [[[other, RAW]]], "raw heads": [[[RAW, other], [other, RAW]]] });
  const near = (values) => Array.from(values, (one) => Math.round(1e6 * one) / 1e6);
  assert.deepEqual(near(trace.row("raw", 0, 2).values), near(other));
  assert.deepEqual(near(trace.row("raw", 0, LAST).values), near(RAW));
  assert.deepEqual(near(trace.row("raw", 0, LAST, 0).values), near(other), "of a head");
  assert.deepEqual([0, 5, 7, LAST].map((query) => trace.keptQuery(query)), [2, 2, LAST, LAST]);
  assert.equal(trace.nearest(seen(trace, { query: 4 })).query, 2);
});

test("text is joined as it was written, and found across tokens in either case", () => {
  const trace = long({ layers: 2 });
  assert.equal(passageText(trace, 0, 7), "The immunity of cells.");
  assert.equal(passageText(trace, -5, 3), "The immun");
  assert.deepEqual(passageFound(trace, "IMMUNITY"), [[1, 4]]);
  assert.deepEqual(passageFound(trace, "munity  of"), [[2, 5]]);
  assert.deepEqual(passageFound(trace, "cells"), [[5, 6], [9, 10]]);
  assert.deepEqual(passageFound(trace, " cells"), [[5, 6], [9, 10]]);
  assert.deepEqual(passageFound(trace, "the "), [[0, 1], [8, 9]]);
  for (const nothing of ["", "  ", null, "absent"]) assert.deepEqual(passageFound(trace, nothing), []);
  assert.equal(passageWord("##s"), "s");
  assert.deepEqual(["Ċ", "ĊĊ", "Ġ", "▁▁", "ĉ", "<0x0A>", "čĊ"].map((one) => passageWord(one)), ["↵", "↵↵", "␣", "␣␣", "⇥", "↵", "↵"]);
  assert.deepEqual(passageFound(trace, "cells. the cells"), [[5, 10]], "over the end of a line");
});

test("of a character in pieces, the first piece has it, and it is found there", () => {
  const rows = { queries: [4], before: "10010" };
  const trace = traceOf({ layers: 1, tokens: ["今", "", "天", "safe", ""], rows }, { raw: [[[[1, 0, 0, 0, 0]]]] });
  assert.deepEqual(passageFound(trace, "今天"), [[0, 3]]);
  assert.deepEqual(passageFound(trace, "天 safe"), [[2, 4]]);
  assert.equal(passageWord(trace.tokens[1]), "·");
});

test("letters that grow in lower case do not move what comes after", () => {
  const tokens = ["İİİ", "key", "İ", "lock"];
  const rows = { queries: [3], before: "1111" };
  const trace = traceOf({ layers: 1, tokens, rows }, { raw: [[[[1, 0, 0, 0]]]] });
  assert.deepEqual(passageFound(trace, "key"), [[1, 2]]);
  assert.deepEqual(passageFound(trace, "lock"), [[3, 4]]);
});

test("the next place found goes round at the ends", () => {
  const places = [[2, 3], [5, 6], [9, 10]];
  const steps = (token, step) => passageNext(places, token, step);
  assert.deepEqual([steps(null, 1), steps(2, 1), steps(7, 1), steps(9, 1)], [2, 5, 9, 2]);
  assert.deepEqual([steps(null, -1), steps(9, -1), steps(7, -1), steps(2, -1)], [9, 5, 5, 9]);
  assert.equal(passageNext([], 3, 1), null);
  assert.deepEqual([foundWords(places, 5), foundWords(places, 4), foundWords([], 0)], ["2 of 3", "3 found", "not found"]);
});

test("lines keep words whole, end where the text does, and hold every token once, in order", () => {
  const trace = long({ layers: 2 });
  for (const width of [150, 220, 900]) {
    const { lines, x, wide, line } = textLines(trace, width);
    assert.deepEqual(lines.flatMap(({ start, stop }) => Array.from({ length: stop - start }, (_, i) => start + i)), TOKENS.map((_, i) => i));
    assert.ok(line[1] === line[2] && line[2] === line[3], `immunity is broken at ${width}`);
    assert.ok(line[8] > line[7], "a line ends with the sign for it");
    for (let i = 0; i < TOKENS.length; i++) {
      assert.ok(x[i] >= 0 && x[i] + wide[i] <= width, `token ${i} at ${width}`);
      if (i && line[i] === line[i - 1]) assert.ok(x[i] >= x[i - 1] + wide[i - 1] - 1e-3, "tokens overlap");
    }
  }
  const { lines } = textLines(many(5000), 300);
  assert.ok(lines.length > 100 && lines.every(({ start, stop }) => stop > start));
});

test("a word wider than the line is broken, and none is lost", () => {
  const tokens = Array(60).fill("longword");
  const rows = { queries: [59], before: "0".repeat(60) };
  const trace = traceOf({ layers: 1, tokens, rows }, { raw: [[[tokens.map(() => 1 / 60)]]] });
  const { lines, x, wide } = textLines(trace, 300);
  assert.ok(lines.length > 5);
  tokens.forEach((_, i) => assert.ok(x[i] + wide[i] <= 300));
});

test("of a long text only what is on the screen is drawn", () => {
  const trace = many(20000);
  const surface = drawn(textView, trace, { method: "raw", find: "" }, 800, [5000, 5600]);
  const words = surface.of("text").filter((call) => call.at[0] === "word");
  assert.ok(words.length > 100 && words.length < 600, `${words.length} words`);
  assert.ok(words.every((call) => call.at[2] > 4950 && call.at[2] < 5650));
});

test("tokens rank by size, and few hold most: against sorting by hand", () => {
  const values = Float32Array.from([0.1, -0.4, 0.2, 0.2, 0.1]);
  const { order, rank, total } = ranking(values);
  assert.deepEqual([...order], [1, 2, 3, 0, 4]);
  assert.deepEqual([...rank], [3, 0, 1, 2, 4]);
  assert.ok(Math.abs(total - 1) < 1e-6);
  assert.deepEqual([0.4, 0.41, 0.6, 0.81, 1].map((share) => holding(values, share)), [1, 2, 2, 4, 5]);
});

test("a column of the map shows its largest token, as counted one by one", () => {
  const values = Float32Array.from({ length: 103 }, (_, i) => ((i * 37) % 101) / 101);
  const peaks = columnPeaks(values, 10);
  let from = 0;
  for (let column = 0; column < 10; column++) {
    const stop = Math.floor(((column + 1) * 103) / 10);
    const want = Math.max(...values.subarray(from, stop));
    assert.equal(values[peaks[column]], want);
    from = stop;
  }
  assert.equal(from, 103);
  assert.deepEqual([...columnPeaks(values, 103)], Array.from(values, (_, i) => i));
});

test("the scale without the first token and itself says what lies beyond it", () => {
  const trace = long({ layers: 2 });
  const tops = (words) => drawn(textView, trace, seen(trace, { words })).of("text").filter((call) => call.look.size === 10 && call.look.align === "right").map((call) => call.at[0]);
  assert.ok(tops(true).includes("0.150") && !tops(true).includes("0.600"), `${tops(true)}`);
  assert.ok(tops(false).includes("0.600"));
  const said = drawn(textView, trace, seen(trace, { words: true })).texts.join(" ");
  assert.match(said, /beyond the scale, in its last colour: “The” \(token 0\) 0\.600/);
  assert.ok(!drawn(textView, trace, seen(trace)).texts.join(" ").includes("beyond the scale"));
  assert.equal(beyondScale(trace, seen(trace, { words: true }), Float32Array.from(RAW), 0.7, LAST), "no token is beyond the scale");
});

test("the list has the largest first, in their text, and says how much they hold", () => {
  const trace = long({ layers: 2 });
  const surface = drawn(topView, trace, seen(trace));
  const numbers = surface.of("text").filter((call) => call.look.size === 11 && call.look.align === "right").map((call) => Number(call.at[0]));
  assert.deepEqual(numbers.slice(0, 4), [0, 5, 9, 10]);
  assert.ok(surface.texts.includes("The immunity of"), "before “cells”");
  assert.ok(surface.texts.some((text) => text.startsWith(".↵The CELLS")), "and after it");
  const notes = topNotes(trace, seen(trace), Float32Array.from(RAW));
  assert.match(notes[0], /^The 11 largest of 11 weights hold 100 % of the row: half of it is in 1 token, 90 % in 5 tokens\.$/);
  assert.match(notes[1], /^The first token alone holds 60 %, .*; of the rest, the other 10 hold 100 %\.$/);
  assert.deepEqual(topNotes(trace, seen(trace), new Float32Array(11)), ["All weights are zero."]);
});

test("shares are 0 or 100 per cent only where they are", () => {
  assert.deepEqual([1, 0.9999999, 0.99407, 0.99999, 0.5, 1e-6, 0].map(shareWords), ["100 %", "100 %", "99 %", "99.99 %", "50 %", "under 0.01 %", "0 %"]);
  assert.equal(shareWords(0.9965), "99.65 %");
});

test("a token that is clicked is chosen; the map of the whole goes to a place and chooses its largest", () => {
  const trace = long({ layers: 2 });
  for (const view of [textView, topView]) {
    const surface = drawn(view, trace, seen(trace));
    const chosen = surface.hits.map(({ x, y, width, height, target }) => (typeof target === "function" ? target(x + width / 2, y + height / 2) : target));
    assert.ok(chosen.some((target) => target && target.select && Number.isInteger(target.select.token)), view.id);
  }
  const surface = drawn(textView, trace, seen(trace));
  const { x, y, width, height, target } = surface.hits.at(-1);
  const aim = target(x + width * 0.5, y + 1);
  assert.deepEqual(aim.select, { layer: 0, token: 5 });
  assert.ok(Number.isFinite(aim.scrollTo));
  assert.match(aim.tip, /layer 1, token 5\n“cells” \(token 5\) 0\.150/);
  assert.equal(target(x + width * 2, y + height - 1).select.token, LAST, "and not beyond the end");
});

test("arrows go down and up the ranking, and the line at the bottom says where one is", () => {
  const trace = long({ layers: 2 });
  const step = (token, by) => textView.step({ trace, state: seen(trace, { token }), step: by }).token;
  assert.deepEqual([step(null, 1), step(0, 1), step(5, 1), step(5, -1), step(0, -1)], [0, 5, 9, 0, 0]);
  const said = textView.describe({ trace, seen: seen(trace, { token: 5 }) });
  assert.match(said, /^“cells” \(token 5\): 0\.150, 15 % of the row, number 2 of 11 · raw, layer 2 of 2, of “end” \(token 10\) · … The immunity of cells\./);
  assert.match(textView.describe({ trace, seen: seen(trace) }), /^raw, layer 2 of 2, of “end” \(token 10\): “The” \(token 0\) 0\.600, “cells”/);
});

test("the search goes to what is found as one types, and the keys n and p go on", () => {
  const leave = documented();
  try {
    const trace = long({ layers: 2 });
    const store = { state: { ...seen(trace), other: null }, select: (changes) => Object.assign(store.state, changes) };
    const viewer = { controls: made(), store, trace, traces: [trace], limits: {}, uses: (one) => one === "find", panes: [], fits: [], help: {}, tabs: made() };
    fillControls(viewer);
    const [box] = viewer.controls.all((one) => one.type === "search");
    box.value = "cells";
    box.listeners.input();
    assert.deepEqual([store.state.find, store.state.token], ["cells", 5]);
    box.value = "cell";
    box.listeners.input();
    assert.equal(store.state.token, 5, "what is found here stays");
    box.listeners.keydown({ key: "Enter", preventDefault() {} });
    assert.equal(store.state.token, 9);
    fillControls(viewer);
    const [words] = viewer.controls.all((one) => one.tagName === "OUTPUT");
    assert.equal(words.textContent, "2 of 2");
    for (const [key, token] of [["n", 5], ["p", 9], ["p", 5]]) {
      pressed(viewer, { key, target: made(), preventDefault() {} });
      assert.equal(store.state.token, token, key);
    }
    box.value = "absent";
    box.listeners.input();
    assert.equal(store.state.token, 5, "nothing found, nowhere to go");
    findNext(viewer, 1);
    assert.equal(store.state.token, 5);
  } finally {
    leave();
  }
});

/** A text whose last three tokens were generated: rows of the queries before them. */
function generated() {
  const rows = { queries: [7, 8, 9], before: BEFORE, generated: [8, 11] };
  const shifted = [RAW, RAW.map((one, i) => (i === 5 ? 0.4 : one)), RAW.map((one, i) => (i === 2 ? 0.4 : one))];
  return long({ layers: 1, main: 7, rows, queries: { raw: [7, 8, 9], rollout: [7, 8, 9] } }, { raw: [[shifted]], rollout: [[shifted]] });
}

test("a generated word has the row of the query before it, which wrote it", () => {
  const trace = generated();
  assert.deepEqual([7, 8, 10].map((token) => trace.generated(token)), [false, true, true]);
  assert.deepEqual([3, 8, 10].map((token) => trace.queryOf(token)), [3, 7, 9]);
  assert.deepEqual([3, 7, 9].map((query) => trace.spokenOf(query)), [3, 8, 10]);
  assert.equal(long({ layers: 2 }).spokenOf(LAST), LAST, "text that was given speaks of itself");
  assert.match(textView.describe({ trace, seen: seen(trace, { layer: 0, query: 8 }) }), /of “CELLS” \(token 9, as it was written\): “The” \(token 0\) 0.6/);
});

test("pointing at a generated word shows its row, and at another token that token", () => {
  const trace = generated();
  const surface = drawn(textView, trace, { layer: 0, method: "raw", query: 7, find: "" });
  const laid = textLines(trace, 900);
  const answer = (token) => {
    const lines = surface.hits.filter(({ x, width, target }) => typeof target === "function" && laid.x[token] >= x && laid.x[token] < x + width);
    const found = lines.map(({ target }) => target(laid.x[token] + 1, 0)).filter((one) => one && one.hover);
    return found.find(({ tip }) => tip.includes(`token ${token}`));
  };
  assert.deepEqual(answer(9).select, { query: 8, token: null });
  assert.match(answer(9).tip, /CELLS\ntoken 9, generated/);
  assert.deepEqual(answer(4).select, { token: 4 });
});

test("the keys . and , go through the generated words, and the list names them", () => {
  const leave = documented();
  try {
    const trace = generated();
    const store = { state: { ...seen(trace), layer: 0, query: 7, other: null }, select: (changes) => Object.assign(store.state, changes) };
    const viewer = { controls: made(), store, trace, traces: [trace], limits: { layers: 1 }, uses: (one) => one === "query", panes: [], fits: [], help: {}, tabs: made() };
    for (const [key, query] of [[".", 8], [".", 9], [".", 9], [",", 8]]) {
      pressed(viewer, { key, target: made(), preventDefault() {} });
      assert.equal(store.state.query, query, key);
    }
    fillControls(viewer);
    const names = viewer.controls.all((one) => one.tagName === "OPTION").map((one) => one.textContent);
    assert.deepEqual(names, ["8 The", "9 CELLS", "10 end"]);
    viewer.trace = long({ layers: 2 });
    pressed(viewer, { key: ".", target: made(), preventDefault() {} });
    assert.equal(store.state.query, 8, "elsewhere they do nothing");
  } finally {
    leave();
  }
});
