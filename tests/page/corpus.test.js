// The page of a corpus: what its tables and examples hold for a state, and links to it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { palette } from "../../src/overt/view/viewer/colour.js";
import { corpusExamples, corpusLayer, corpusLink, corpusRows, corpusScale, corpusSort, corpusState } from "../../src/overt/view/viewer/corpus.js";

const of = (mean, ratio, contrast) => ({ mean: [mean, mean - 0.1, mean + 0.1], even: 0.2, ratio: [ratio, ratio, ratio], ...(contrast === undefined ? {} : { contrast: [contrast, null, null] }) });
const row = (name, sentences, mean, ratio, more = {}) => ({ name, special: false, group: 0, sentences, occurrences: sentences, of: { raw: of(mean, ratio), rollout: of(1 - mean, ratio) }, ...more });
const example = (row_, tokens, values, groups = {}) => ({ row: row_, tokens, shown: tokens.map((one) => ` ${one}`), special: tokens.map((one) => (one.startsWith("[") ? 1 : 0)), query: 0, cut: false, values: { raw: values, rollout: values }, columns: {}, groups });

const INDEX = {
  title: "test",
  methods: [{ name: "raw", title: "raw" }, { name: "rollout", title: "rollout" }],
  tables: [
    { by: "token", grouped: false, groups: [{ name: null }], rows: [row("good", 30, 0.3, 0.5), row("Bad", 50, 0.1, 2), row("[CLS]", 60, 0.6, 3, { special: true }), row("plot", 12, 0.3, 1)] },
    { by: "position", grouped: false, groups: [{ name: null }], rows: [row(10, 5, 0.5, 1), row(2, 9, 0.1, 1), row(1, 9, 0.2, 1)] },
    {
      by: "label",
      grouped: true,
      groups: [{ name: "no" }, { name: "yes" }],
      rows: [
        { ...row("good", 9, 0.3, 1), group: 1, of: { raw: of(0.3, 1, 0.5), rollout: of(0.3, 1, null) } },
        { ...row("plot", 9, 0.3, 1), group: 1, of: { raw: of(0.3, 1, 0.7), rollout: of(0.3, 1, 0.1) } },
        { ...row("good", 9, 0.3, 1), group: 0, of: { raw: of(0.3, 1, -0.5) } },
      ],
    },
  ],
  examples: [
    example(4, ["[CLS]", "good", "plot"], [0.8, 0.15, 0.05], { label: "yes" }),
    example(9, ["[CLS]", "Bad", "plot"], [0.1, 0.2, 0.7], { label: "no" }),
  ],
};
const names = (rows) => rows.map(({ name }) => name);
const state = (changes = {}) => ({ ...corpusState(INDEX), ...changes });

test("rows are sorted by the chosen measure, and special tokens are apart", () => {
  const found = corpusRows(INDEX.tables[0], state({ method: "raw" }));
  assert.deepEqual(names(found.special), ["[CLS]"]);
  assert.deepEqual(names(found.others), ["good", "plot", "Bad"], "equals by name");
  assert.deepEqual(names(corpusRows(INDEX.tables[0], state({ method: "rollout" })).others), ["Bad", "good", "plot"]);
  assert.deepEqual(names(corpusRows(INDEX.tables[0], state({ sort: "ratio" })).others), ["Bad", "plot", "good"]);
  assert.deepEqual(names(corpusRows(INDEX.tables[0], state({ sort: "sentences" })).others), ["Bad", "good", "plot"]);
  assert.deepEqual(names(corpusRows(INDEX.tables[1], state({ by: "position" })).others), [1, 2, 10], "as numbers");
});

test("a search finds tokens in any case", () => {
  assert.deepEqual(names(corpusRows(INDEX.tables[0], state({ find: " BA" })).others), ["Bad"]);
  assert.deepEqual(corpusExamples(INDEX, state({ find: "bad" })).map((one) => one.row), [9]);
  assert.deepEqual(corpusExamples(INDEX, state({ find: "good plot" })).map((one) => one.row), [4], "as the text has it");
});

test("a group has its own rows, by contrast, those without one last", () => {
  const table = INDEX.tables[2];
  assert.equal(corpusSort(table, state()), "contrast");
  assert.deepEqual(names(corpusRows(table, state({ by: "label", group: 1, method: "raw" })).others), ["plot", "good"]);
  assert.deepEqual(names(corpusRows(table, state({ by: "label", group: 1, method: "rollout" })).others), ["plot", "good"]);
  assert.deepEqual(names(corpusRows(table, state({ by: "label", group: 0, method: "rollout" })).others), [], "no such method here");
  assert.deepEqual(corpusExamples(INDEX, state({ by: "label", group: 1 })).map((one) => one.row), [4]);
});

test("a link leads back to its state, and one that is wrong to the first", () => {
  const chosen = state({ by: "label", group: 1, token: "a&b=c#", find: "ü", method: "raw", example: 9 });
  assert.deepEqual(corpusState(INDEX, corpusLink(INDEX, chosen)), chosen);
  assert.equal(corpusLink(INDEX, state()), "");
  assert.deepEqual(corpusState(INDEX, "by=colour&method=guess&group=7&sort=x&example=5"), state());
  assert.equal(corpusState(INDEX, "sort=constructor").sort, null, "which every object has");
  assert.equal(corpusState(INDEX, "sort=contrast").sort, null, "which tokens have none of");
});

test("the strongest colour is that of the largest word, which special tokens do not pale", () => {
  const scale = corpusScale(palette("light"), INDEX.examples[0], "raw");
  assert.equal(scale.top, 0.15);
  assert.equal(scale.css(0.8), scale.css(0.15));
  assert.notEqual(scale.css(0.05), scale.css(0.15));
  assert.equal(corpusScale(palette("light"), example(1, ["a", "b"], [0.5, -0.5]), "raw").kind, "signs");
});

test("layers are counted from 1, or from the top", () => {
  assert.deepEqual([-1, -3, 0, 5].map(corpusLayer), ["top layer", "layer 3 from the top", "layer 1", "layer 6"]);
});
