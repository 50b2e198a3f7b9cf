// The server's form: it offers what /api/models tells of, and asks for what is ticked.
import assert from "node:assert/strict";
import { after, test } from "node:test";
import { documented, made } from "./dom.js";
import { HALF, METHODS } from "./record.js";

const MIXINGS = [
  { name: "own", title: "somebody’s own", passes: 0 },
  { name: "attention", title: "attention", passes: 0 },
  { name: "slow", title: "value zeroing", passes: 1 },
];
const FACTS = {
  models: [{ name: "small", kind: "text", decoder: false, judges: true, layers: 2 }, { name: "eyes", kind: "image", decoder: false, layers: 2 }],
  methods: [...METHODS, HALF],
  mixings: MIXINGS,
  images: ["image/png"],
  limits: { characters: 1000, image_bytes: 1000 },
};

const asked = [];
const page = made();
const leave = documented({ serve: page });
after(leave);
Object.assign(globalThis, { window: made(), location: { search: "", hash: "" }, matchMedia: () => ({ matches: false }) });
globalThis.fetch = async (address, request) => {
  if (address === "/api/models") return { json: async () => FACTS };
  asked.push({ address, request });
  return { ok: false, status: 422, headers: new Map(), json: async () => ({ error: "not today" }) };
};
const { ServeForm, serveAsked, serveLines, serveSends } = await import("../../src/overt/view/viewer/serve.js");

const ticked = (form) => form.methods.filter((box) => box.checked).map((box) => box.value);

async function sent(form) {
  asked.length = 0;
  await form.run();
  return JSON.parse(asked[0].request.body);
}

test("every method is offered by its title; what runs the model is not ticked", () => {
  const root = made();
  const form = new ServeForm(root, FACTS);
  const boxes = root.all((one) => one.className === "serve-box");
  assert.deepEqual(boxes.map((one) => one.textContent), ["raw", "rollout", "flow", "blank-out", "gradients", "half rollout"]);
  assert.deepEqual(ticked(form), ["raw", "rollout", "flow", "half"]);
});

test("every mixing is offered, the one that is taken unasked first chosen, and one that runs the model says so", () => {
  const form = new ServeForm(made(), FACTS);
  assert.deepEqual(form.mixing.options.map((one) => [one.value, one.textContent]), [
    ["own", "somebody’s own"],
    ["attention", "attention"],
    ["slow", "value zeroing (runs the model for each token)"],
  ]);
  assert.equal(form.mixing.value, "attention");
});

test("what is ticked and chosen is asked for, by name", async () => {
  const form = new ServeForm(made(), FACTS);
  form.text.value = "the key";
  assert.deepEqual(await sent(form), { model: "small", text: "the key", methods: ["raw", "rollout", "flow", "half"], mixing: "attention" });
  for (const box of form.methods) box.checked = ["half", "gradients"].includes(box.value);
  form.mixing.value = "slow";
  assert.deepEqual(await sent(form), { model: "small", text: "the key", methods: ["gradients", "half"], mixing: "slow" });
  assert.equal(form.status.textContent, "not today");
});

test("a link ticks its methods and chooses its mixing; of names that nobody knows it keeps what was there", async () => {
  const form = new ServeForm(made(), FACTS);
  asked.length = 0;
  await form.follow(serveAsked("?model=small&text=the+key&method=half&method=blankout&mixing=own"));
  assert.deepEqual(ticked(form), ["blankout", "half"]);
  assert.deepEqual(JSON.parse(asked[0].request.body), { model: "small", text: "the key", methods: ["blankout", "half"], mixing: "own" });
  await form.follow(serveAsked("?text=the+key&mixing=nothing"));
  assert.equal(form.mixing.value, "own");
  const fresh = new ServeForm(made(), FACTS);
  await fresh.follow(serveAsked("?text=the+key"));
  assert.deepEqual(ticked(fresh), ["raw", "rollout", "flow", "half"], "a link without methods leaves the ticks");
});

test("Enter asks for a trace, with Ctrl or Cmd too; Shift+Enter, other keys and an input method’s Enter do not", () => {
  for (const held of [{}, { ctrlKey: true }, { metaKey: true }, { ctrlKey: true, shiftKey: true }]) assert.equal(serveSends({ key: "Enter", ...held }), true, JSON.stringify(held));
  for (const event of [{ shiftKey: true }, { altKey: true }, { isComposing: true }, { isComposing: true, ctrlKey: true }, { keyCode: 229 }]) {
    assert.equal(serveSends({ key: "Enter", ...event }), false, JSON.stringify(event));
  }
  for (const key of ["a", " ", "Tab", "Escape"]) assert.equal(serveSends({ key }), false, key);
});

test("both boxes send on Enter, once for a key that is held down, and say so", () => {
  const form = new ServeForm(made(), FACTS);
  let runs = 0;
  form.run = () => runs++;
  for (const box of [form.text, form.decoder]) {
    runs = 0;
    let kept = 0;
    const press = (event) => box.listeners.keydown({ key: "Enter", preventDefault: () => kept++, ...event });
    press({});
    press({ repeat: true });
    assert.deepEqual([runs, kept], [1, 2], "and neither breaks the line");
    press({ shiftKey: true });
    press({ isComposing: true });
    assert.deepEqual([runs, kept], [1, 2], "these are the browser’s");
    const hint = form.form.all((one) => one.id === box.getAttribute("aria-describedby"));
    assert.deepEqual(hint.map((one) => one.textContent), ["Enter to trace, Shift+Enter for a new line"]);
  }
});

test("the keys are said once: beside the sentence, else beside the decoder’s text", () => {
  const form = new ServeForm(made(), FACTS);
  assert.equal(form.decoderHint.hidden, true);
  form.model.value = "eyes";
  form.showModel();
  assert.equal(form.decoderHint.hidden, false);
});

test("the page starts with the form", () => {
  assert.ok(page.all((one) => one.tagName === "FORM").length === 1, page.textContent);
});

test("a classifier's explanations can be judged, those of others cannot", async () => {
  const form = new ServeForm(made(), FACTS);
  assert.equal(form.judge.hidden, false);
  form.text.value = "the key";
  asked.length = 0;
  await form.runJudge();
  assert.equal(asked[0].address, "/api/judge");
  assert.deepEqual(JSON.parse(asked[0].request.body), { model: "small", text: "the key" });
  asked.length = 0;
  await form.follow(serveAsked("?model=small&text=a&judge=1"));
  assert.deepEqual(asked.map(({ address }) => address), ["/api/judge"], "a link judges again");
  form.model.value = "eyes";
  form.showModel();
  assert.equal(form.judge.hidden, true);
});

test("a model that writes is asked to, and lines are read wherever the body is cut", async () => {
  const facts = { ...FACTS, models: [{ ...FACTS.models[0], writes: true }, FACTS.models[1]], limits: { ...FACTS.limits, tokens: 100 } };
  const form = new ServeForm(made(), facts);
  assert.equal(form.generateField.hidden, false);
  assert.deepEqual(form.generate.options.map((one) => one.value), ["", "16", "32", "64"]);
  form.text.value = "the key";
  assert.equal("generate" in (await sent(form)), false);
  form.offerLength("7");
  assert.equal((await sent(form)).generate, 7);
  form.offerLength("many");
  assert.equal(form.generate.value, "7");
  form.model.value = "eyes";
  form.showModel();
  assert.equal(form.generateField.hidden, true);
  assert.equal(serveAsked("?generate=8").generate, "8");
  const bytes = new TextEncoder().encode('{"prompt":["é"]}\n{"word":"✓"}\n{"index":{}}');
  for (const size of [1, 3, 100]) {
    const body = new ReadableStream({
      start(control) {
        for (let at = 0; at < bytes.length; at += size) control.enqueue(bytes.slice(at, at + size));
        control.close();
      },
    });
    const lines = [];
    for await (const line of serveLines(body)) lines.push(line);
    assert.deepEqual(lines, [{ prompt: ["é"] }, { word: "✓" }, { index: {} }]);
  }
});
