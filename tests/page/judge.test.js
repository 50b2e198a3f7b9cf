// The page of `overt judge`: order of methods, what deleting words does, and links to a state.
import assert from "node:assert/strict";
import { test } from "node:test";
import { palette } from "../../src/overt/view/viewer/colour.js";
import { judgeColumns, judgeDeleted, judgeDigits, judgeLink, judgeScale, judgeSigned, judgeSorted, judgeState, judgeStep, judgeTime } from "../../src/overt/view/viewer/judge.js";

const method = (title, comp, suff, seconds) => ({ name: title, title, texts: 2, seconds, control: false, measures: { ...(comp === null ? {} : { comp: [comp, comp - 0.1, comp + 0.1, false] }), suff: [suff, null, null, false] } });
const INDEX = {
  title: "test",
  about: { facts: [], notes: [], intervals: "", shares: [0, 0.1, 0.2, 0.3, 0.4, 0.5], classes: ["no", "yes"], texts: 2, sort: "comp" },
  measures: [
    { key: "comp", title: "comp.", better: "more", about: "" },
    { key: "suff", title: "suff.", better: "less", about: "" },
  ],
  methods: [method("rollout", 0.2, 0.1, 0.5), method("flow", 0.4, 0.3, 2), method("LIME", null, 0.05, 9), method("given", 0.4, 0.2, null)],
  refused: [],
  texts: [
    {
      name: "1",
      words: ["a", "good", "plot", "x"],
      cut: 0,
      label: 1,
      predicted: 1,
      probability: 0.9,
      counts: [0, 1, 1, 2, 2, 2],
      methods: { flow: { scores: [0, 3, 1, 0], order: [1, 2], probabilities: [0.9, 0.4, 0.4, 0.3, 0.3, 0.3], now: [1, 0, 0, 0, 0, 0], top: [0.9, 0.6, 0.6, 0.7, 0.7, 0.7] } },
    },
    { name: "2", words: ["b"], cut: 3, label: null, predicted: 0, probability: 0.8, counts: [0, 1, 1, 1, 1, 1], methods: {} },
  ],
};
const names = (sort) => judgeSorted(INDEX, sort).map(({ title }) => title);

test("methods come the best first, whichever way is better, and those without a number last", () => {
  assert.deepEqual(names("comp"), ["flow", "given", "rollout", "LIME"], "equal ones by name");
  assert.deepEqual(names("suff"), ["LIME", "rollout", "given", "flow"]);
  assert.deepEqual(names("seconds"), ["rollout", "flow", "LIME", "given"]);
  assert.deepEqual(names("name"), ["flow", "given", "LIME", "rollout"]);
  assert.deepEqual(INDEX.methods.map(({ title }) => title), ["rollout", "flow", "LIME", "given"], "the index stays as it is");
  assert.deepEqual(judgeColumns(INDEX).map(({ key }) => key), ["name", "comp", "suff", "seconds"]);
});

test("a step deletes as many words as the text says, in the method's order", () => {
  const [text, other] = INDEX.texts;
  assert.deepEqual([...judgeStep(text, "flow", 0).deleted], []);
  assert.equal(judgeStep(text, "flow", 0).flipped, false);
  const { deleted, probability, flipped, now, top } = judgeStep(text, "flow", 3);
  assert.deepEqual([[...deleted], probability, flipped, now, top], [[1, 2], 0.3, true, 0, 0.7]);
  assert.equal(judgeStep(other, "flow", 3), null, "it was not judged on this text");
});

test("a link leads back to its state, and one that is wrong to the first", () => {
  const state = { text: 1, step: 5, sort: "seconds" };
  assert.deepEqual(judgeState(INDEX, judgeLink(INDEX, state)), state);
  assert.equal(judgeLink(INDEX, judgeState(INDEX)), "");
  assert.deepEqual(judgeState(INDEX, "text=2&step=6&sort=__proto__"), judgeState(INDEX));
  assert.deepEqual(judgeState(INDEX, "text=-1&step=1e1&sort="), judgeState(INDEX));
});

test("what should be near zero is sorted by its size, whatever its sign", () => {
  const left = { a: -0.6, b: 0.02, c: -0.1, d: 1 };
  const methods = Object.entries(left).map(([title, value]) => ({ title, measures: { shuffled: [value, null, null, false] } }));
  const index = { ...INDEX, measures: [{ key: "shuffled", title: "ρ shuffled", better: "zero" }], methods };
  assert.deepEqual(judgeSorted(index, "shuffled").map(({ title }) => title), ["b", "c", "a", "d"]);
});

test("a method of other texts stands below those of all, by the columns where it has others", () => {
  const methods = INDEX.methods.map((method) => (method.title === "flow" ? { ...method, apart: ["comp"] } : method));
  const order = (sort) => judgeSorted({ ...INDEX, methods }, sort).map(({ title }) => title);
  assert.deepEqual(order("comp"), ["given", "rollout", "flow", "LIME"]);
  assert.deepEqual(order("suff"), names("suff"));
  assert.deepEqual(order("seconds"), names("seconds"));
});

test("what is deleted is said in words, and without a number where there is none", () => {
  const [text] = INDEX.texts;
  assert.match(judgeDeleted(INDEX, text, 2), /^20\s% of the words: 1 of 4$/);
  assert.doesNotMatch(judgeDeleted(INDEX, { ...text, counts: [] }, 2), /undefined|:/);
});

test("shades run from the least to the greatest score, so that scores that are nearly equal are told apart", () => {
  const theme = palette("light");
  const close = judgeScale(theme, [10, 10.1, 10.2]);
  const far = judgeScale(theme, [0, 0.1, 0.2]);
  assert.equal(close.kind, "sizes");
  assert.deepEqual([10, 10.2].map(close.css), [0, 0.2].map(far.css), "the least is palest, the greatest strongest");
  assert.equal(new Set([10, 10.1, 10.2].map(close.css)).size, 3);
  assert.equal(close.css(10), judgeScale(theme, [7, 7]).css(7), "equal scores mark no word");
});

test("of signed scores zero is in the middle, also in a text without one below it", () => {
  const theme = palette("dark");
  const zero = judgeScale(theme, [0, -3, 1]).css(0);
  assert.equal(judgeScale(theme, [0, -3, 1]).kind, "signs");
  assert.equal(judgeScale(theme, [0, -3, 1]).greatest, 3);
  const above = judgeScale(theme, [2, 3], true);
  assert.equal(above.css(0), zero);
  assert.notEqual(above.css(2), zero, "two is above the middle");
  const texts = [{ methods: { flow: { scores: [1, 2] }, LIME: { scores: [1] } } }, { methods: { flow: { scores: [-1] } } }];
  assert.deepEqual([...judgeSigned({ ...INDEX, texts })], ["flow"]);
});

test("times and measures are short", () => {
  assert.deepEqual([0.1234, -0.5, -0.0002, 0].map(judgeDigits), ["0.123", "−0.500", "0.000", "0.000"]);
  assert.deepEqual([null, 0.0001, 0.25, 1.23, 31.4].map(judgeTime), ["–", "1 ms", "250 ms", "1.2 s", "31 s"]);
});
