// The scale of the words: where a special token leaves them pale, strip and graph start with it and say so.
import assert from "node:assert/strict";
import { test } from "node:test";
import { palette } from "../../src/overt/view/viewer/colour.js";
import { fillControls } from "../../src/overt/view/viewer/controls.js";
import { graphView } from "../../src/overt/view/viewer/graph.js";
import { pressed } from "../../src/overt/view/viewer/keys.js";
import { Pane } from "../../src/overt/view/viewer/pane.js";
import { drawScale, scaledByWords, scaleFor, wordsNote } from "../../src/overt/view/viewer/parts.js";
import { Store } from "../../src/overt/view/viewer/store.js";
import { stripView } from "../../src/overt/view/viewer/strip.js";
import { VIEWS } from "../../src/overt/view/viewer/views.js";
import { documented, made } from "./dom.js";
import { drawn, Recorder, traceOf } from "./record.js";

const TOKENS = ["[CLS]", "key", "lies", "[SEP]"];
const ROWS = [[0.8, 0.05, 0.03, 0.12], [0.7, 0.2, 0.04, 0.06], [0.7, 0.05, 0.2, 0.05], [0.6, 0.05, 0.05, 0.3]];
const FOUND = { method: "rollout", token: 0, special: 0.8, word: 0.05 };
const WHY = "Scaled by words: by rollout “[CLS]” draws on itself with 0.800 at layer 1, on words with at most 0.050; larger values are drawn like the end of the scale.";
const CHOSEN = "Scaled by words: larger values are drawn like the end of the scale.";

function sunk(about = {}) {
  return traceOf({ tokens: TOKENS, special: [1, 0, 0, 1], drowned: FOUND, ...about }, { mean: [[ROWS]], rollout: [[ROWS]] });
}

const tops = (surface) => surface.of("text").filter((call) => call.look.size === 10 && call.look.align === "right").map((call) => call.at[0]);
const said = (surface) => surface.texts.join(" ");

test("strip, graph and the views of long texts start with the words’ scale where they are drowned, other views and traces do not", () => {
  const ids = VIEWS.filter((view) => scaledByWords(view, sunk(), { words: null })).map((view) => view.id);
  assert.deepEqual(ids, ["graph", "text", "top", "strip"]);
  assert.equal(scaledByWords(stripView, sunk({ drowned: null }), { words: null }), false);
});

test("what somebody chose holds for every view and trace", () => {
  for (const view of VIEWS) {
    for (const words of [true, false]) {
      for (const trace of [sunk(), sunk({ drowned: null })]) assert.equal(scaledByWords(view, trace, { words }), words);
    }
  }
});

test("a link has the choice, and nothing before there is one", () => {
  const store = new Store({ words: null });
  assert.equal(store.toHash(), "");
  for (const [words, hash] of [[true, "words=1"], [false, "words=0"]]) {
    store.select({ words });
    assert.equal(store.toHash(), hash);
    const again = new Store({ words: null });
    again.fromHash(hash);
    assert.equal(again.state.words, words);
  }
  store.fromHash("");
  assert.equal(store.state.words, null);
});

test("strip and graph say why their scale is that of the words, and what becomes of the rest", () => {
  for (const view of [stripView, graphView]) {
    const by = drawn(view, sunk(), { words: true });
    assert.ok(said(by).includes(WHY), said(by));
    assert.ok(!said(drawn(view, sunk(), { words: false })).includes("Scaled"));
    assert.ok(said(drawn(view, sunk({ drowned: null }), { words: true })).includes(CHOSEN), "without a reason that it does not have");
  }
  assert.deepEqual(tops(drawn(stripView, sunk(), { words: true })), ["0.050", "0.050"]);
  assert.deepEqual(tops(drawn(stripView, sunk(), { words: false })), ["0.800", "0.800"]);
});

test("the sentence names another token than the query, and patches of images", () => {
  const note = (about) => wordsNote(sunk(about), { words: true, query: 0 });
  assert.match(note({ drowned: { ...FOUND, token: 3 } }), /“\[CLS\]” draws on “\[SEP\]” with 0\.800 at layer 1, on words/);
  assert.match(note({ main: 1 }), /“key” draws on “\[CLS\]” with/);
  assert.match(note({ grid: [1, 2] }), /on patches with at most/);
});

test("where no token is special, or none is a word, there is nothing to say", () => {
  const seen = { words: true, query: 0 };
  assert.equal(wordsNote(sunk({ special: [0, 0, 0, 0], drowned: null }), seen), "");
  assert.equal(wordsNote(sunk({ special: [1, 1, 1, 1], drowned: null }), seen), "");
  assert.equal(wordsNote(sunk({ special: [1, 0, 1, 1], drowned: null }), { ...seen, query: 1 }), "", "the query itself does not count");
});

test("the strip has room for the sentence, however narrow it is", () => {
  const rest = (words, width) => {
    const surface = drawn(stripView, sunk(), { words }, width);
    return Math.min(...surface.of("text").filter((call) => call.at[0] === "[CLS]").map((call) => call.at[2]));
  };
  for (const width of [300, 900]) {
    const last = drawn(stripView, sunk(), { words: true }, width).of("text").findLast((call) => WHY.includes(call.at[0]) && call.look.size === 11);
    assert.ok(last.at[2] + 6 < rest(true, width) - 6, `${width}`);
    assert.ok(rest(true, width) > rest(false, width), "and none without it");
  }
});

test("a pane gives its view the choice, or what the trace needs", () => {
  const leave = documented();
  try {
    const store = new Store({ layer: 0, query: 0, head: null, token: null, method: "rollout", group: "", words: null });
    const pane = (trace) => new Pane(stripView, trace, store, () => "light", "", "");
    const [deep, plain] = [pane(sunk()), pane(sunk({ drowned: null }))];
    const words = () => [deep, plain].map(({ selection: { seen, state } }) => [seen.words, state.words]);
    assert.deepEqual(words(), [[true, true], [false, false]]);
    store.select({ words: false });
    assert.deepEqual(words(), [[false, false], [false, false]]);
    store.select({ words: true });
    assert.deepEqual(words(), [[true, true], [true, true]]);
  } finally {
    leave();
  }
});

test("the box shows what is drawn: ticked, not ticked, or neither where panes differ; ticking chooses", () => {
  const leave = documented();
  try {
    for (const [words, ticked, mixed] of [[true, true, false], [false, false, false], [null, false, true]]) {
      const selected = [];
      const store = { state: { other: null, words: null }, select: (changes) => selected.push(changes) };
      const viewer = { controls: made(), store, trace: sunk(), traces: [sunk()], limits: {}, uses: (one) => one === "words", panes: [], fits: [], words };
      fillControls(viewer);
      const [box] = viewer.controls.all((one) => one.type === "checkbox");
      assert.deepEqual([box.checked, box.indeterminate], [ticked, mixed]);
      box.checked = !box.checked; // as a click does
      box.listeners.change();
      assert.deepEqual(selected, [{ words: !ticked }]);
    }
  } finally {
    leave();
  }
});

test("the key w turns round what is drawn, whoever chose it", () => {
  for (const [words, next] of [[true, false], [false, true], [null, true]]) {
    const selected = [];
    const store = { state: { words: null }, select: (changes) => selected.push(changes) };
    const viewer = { store, words, limits: {}, fits: [], help: {}, tabs: made(), trace: sunk() };
    pressed(viewer, { key: "w", target: made(), preventDefault() {} });
    assert.deepEqual(selected, [{ words: next }]);
  }
});

test("numbers of a scale do not touch: a narrow one leaves out that in the middle", () => {
  const numbers = (width) => {
    const surface = new Recorder();
    const theme = palette("light");
    drawScale(surface, theme, scaleFor(theme, 0.0518, {}), 0, 0, "", width);
    return surface.texts.slice(1);
  };
  assert.deepEqual(numbers(160), ["0", "0.0259", "0.0518"]);
  assert.deepEqual(numbers(70), ["0", "0.0518"]);
});
