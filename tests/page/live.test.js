// Words as they are written: lines from a body in pieces, the text so far, and its colours.
import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { LiveText } from "../../src/overt/view/viewer/live.js";
import { documented, made } from "./dom.js";

let leave = null;
beforeEach(() => (leave = documented()));
afterEach(() => leave());

function living() {
  const live = new LiveText(made(), () => "light");
  live.take({ prompt: ["The", " code", " is"] });
  live.take({ word: " 7", row: [0.8, 0.15, 0.05] });
  live.take({ word: "4", row: [0.7, 0.05, 0.05, 0.2] });
  return live;
}

test("words follow the prompt, and the newest colours the text", () => {
  const live = living();
  assert.equal(live.text.children.map((one) => one.textContent).join(""), "The code is 74");
  assert.equal(live.count, 2);
  const [the, code, , seven, four] = live.pieces;
  assert.equal(seven.title, "0.200");
  assert.notEqual(seven.style.backgroundColor, code.style.backgroundColor);
  assert.equal(the.style.backgroundColor, seven.style.backgroundColor, "the first token is beyond the scale");
  assert.equal(four.style.backgroundColor, "", "a word does not draw on itself");
  assert.match(live.note.textContent, /mean of layers, of “4”: from 0 to 0\.200; the first token has 70 %/);
});

test("pointing at a word shows its row, also while others come", () => {
  const live = living();
  const [, code, , seven] = live.pieces;
  seven.listeners.pointerenter();
  assert.equal(code.title, "0.150");
  assert.equal(seven.style.backgroundColor, "");
  live.take({ word: "2", row: [0.5, 0.1, 0.1, 0.1, 0.2] });
  assert.equal(code.title, "0.150");
  seven.listeners.pointerleave();
  assert.equal(code.title, "0.100");
});

test("a row that is not known leaves the text as it was", () => {
  const live = living();
  live.take({ word: "?", row: [] });
  assert.equal(live.count, 3);
  assert.equal(live.pieces[0].style.backgroundColor, "");
});
