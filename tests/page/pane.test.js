// A pane whose view has nothing to show of its trace leads to those that have.
import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { Pane } from "../../src/overt/view/viewer/pane.js";
import { uncertaintyView } from "../../src/overt/view/viewer/uncertainty.js";
import { documented } from "./dom.js";
import { traceOf } from "./record.js";

let leave = null;

beforeEach(() => (leave = documented()));
afterEach(() => leave());

const paned = (offers) => new Pane(uncertaintyView, traceOf({ tokens: ["a"] }, { mean: [[[[1]]]] }), {}, () => "light", "Uncertainty", "", offers);
const offered = (pane) => pane.root.all((one) => one.className === "offers");

test("every trace that has data is a button, which asks for it in this pane; its name is text", () => {
  const shown = [];
  const names = ["<img src=x>", "Bayesian"];
  const pane = paned(names.map((name) => ({ name, show: (where) => shown.push([name, where]) })));
  const [offers] = offered(pane);
  assert.match(offers.textContent, /^These traces on the page have data for Uncertainty:/);
  const buttons = offers.all((one) => one.tagName === "BUTTON");
  assert.deepEqual(buttons.map((one) => one.children), names.map((name) => [name]));
  buttons[1].listeners.click();
  assert.deepEqual(shown, [["Bayesian", pane]]);
});

test("one trace is one", () => {
  assert.match(offered(paned([{ name: "Bayesian", show() {} }]))[0].textContent, /^This trace on the page has data for Uncertainty:/);
});

test("where there is none, nothing is offered", () => {
  assert.deepEqual(offered(paned([])), []);
  assert.deepEqual(offered(paned(undefined)), []);
});
