// What all views stand on: bytes, packed fields, the selection and its links, words, colours, the two surfaces.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { deflateRawSync } from "node:zlib";
import { fromBase64, inflate } from "../../src/overt/view/viewer/bytes.js";
import { KINDS, palette, scaled } from "../../src/overt/view/viewer/colour.js";
import { TraceData } from "../../src/overt/view/viewer/data.js";
import { unpack } from "../../src/overt/view/viewer/field.js";
import { strongest } from "../../src/overt/view/viewer/parts.js";
import { Store } from "../../src/overt/view/viewer/store.js";
import { stripView } from "../../src/overt/view/viewer/strip.js";
import { escaped, fitted, SvgSurface, textWidth } from "../../src/overt/view/viewer/surface.js";
import { direction, mostlyRightToLeft, number, percent, shown } from "../../src/overt/view/viewer/words.js";
import { drawn, HALF, METHODS, traceOf } from "./record.js";

// --- bytes and fields

test("base64 comes back byte for byte, of any length, with the browser's word for it or without", () => {
  const own = Uint8Array.fromBase64;
  try {
    for (const way of [own, undefined]) {
      Uint8Array.fromBase64 = way;
      for (const length of [0, 1, 2, 3, 255, 1000]) {
        const bytes = Uint8Array.from({ length }, (_, i) => (i * 37) % 256);
        assert.deepEqual(fromBase64(Buffer.from(bytes).toString("base64")), bytes);
      }
    }
  } finally {
    if (own) Uint8Array.fromBase64 = own;
    else delete Uint8Array.fromBase64;
  }
});

test("deflated bytes are inflated, and broken ones are refused", async () => {
  const bytes = Uint8Array.from({ length: 5000 }, (_, i) => (i * i) % 251);
  assert.deepEqual(await inflate(deflateRawSync(bytes)), bytes);
  await assert.rejects(inflate(Uint8Array.from([255, 255, 255])));
});

/** Bytes as view/pack.py's docstring has them, made by hand: cells of (code, sign) or null where dropped. */
function packedByHand(maps, scales, dropped, wide = false) {
  const [rows, columns] = [maps[0].length, maps[0][0].length];
  const kept = [];
  const bits = [];
  for (const map of maps) for (let j = 0; j < columns; j++) for (let i = 0; i < rows; i++) {
    bits.push(map[i][j] ? 1 : 0);
    if (map[i][j]) kept.push(map[i][j]);
  }
  const asBytes = (list) => Array.from({ length: Math.ceil(list.length / 8) }, (_, i) => list.slice(8 * i, 8 * i + 8).reduce((sum, bit, k) => sum + (bit << (7 - k)), 0));
  const head = new Uint8Array(new Float32Array(scales).buffer);
  const signs = asBytes(kept.map(([, sign]) => (sign < 0 ? 1 : 0)));
  const first = deflateRawSync(Uint8Array.from([...head, ...dropped, ...asBytes(bits), ...signs]));
  const codes = kept.map(([code]) => code);
  const second = deflateRawSync(wide ? new Uint8Array(Uint16Array.from(codes, (code) => 100 * code).buffer) : Uint8Array.from(codes));
  const about = { shape: [maps.length, rows, columns], kept: kept.length, signed: true, bytes: wide ? 2 : 1, steps: wide ? 1000 : 10, unit: 0.02, parts: [first.length, second.length] };
  return [about, Uint8Array.from([...first, ...second])];
}

for (const wide of [false, true]) {
  test(`a field made by hand reads as its format says, its codes of ${wide ? "two bytes" : "one byte"}`, async () => {
    const maps = [[[[10, 1], null, [20, -1]], [null, [1, 1], [255, 1]]], [[null, null, null], [[30, -1], [10, 1], [10, -1]]]];
    const field = await unpack(...packedByHand(maps, [0.5, 0.001, 0, 2], [0, 255, 51, 102], wide));
    const near = (found, wanted) => assert.ok(Math.abs(found - wanted) <= 1e-6 * Math.abs(wanted), `${found} is not ${wanted}`);
    near(field.at(0, 0, 0), 0.5);
    near(field.at(0, 0, 2), -1.5);
    assert.equal(field.at(0, 0, 1), 0);
    near(field.at(0, 1, 2), 0.001 * (2 ** 25.5 - 1));
    assert.deepEqual(Array.from(field.row(1, 0)), [0, 0, 0]);
    assert.deepEqual(Array.from(field.row(1, 1)), [-14, 2, -2]);
    near(field.peak(0), 0.001 * (2 ** 25.5 - 1));
    near(field.peak(1), 14);
    near(field.peak(1), 14); // and when it was kept
    near(field.lost(0, 1), 0.02);
    near(field.lost(1, 0), 0.004);
  });
}

const given = process.env.OVERT_FIELDS;
test("fields packed by Python read here as they read there", { skip: given ? false : "run by tests/test_page_js.py" }, async () => {
  const cases = JSON.parse(readFileSync(given, "utf8"));
  assert.ok(cases.length > 5);
  for (const { name, about, data, cells, dropped } of cases) {
    const field = await unpack(about, fromBase64(data));
    const [maps, rows, columns] = about.shape;
    let peak = 0;
    for (let map = 0; map < maps; map++) {
      for (let i = 0; i < rows; i++) {
        const row = field.row(map, i);
        assert.equal(row.length, columns);
        for (let j = 0; j < columns; j++) {
          const wanted = cells[map][i][j];
          peak = Math.max(peak, Math.abs(wanted));
          assert.ok(Math.abs(row[j] - wanted) <= 1e-5 * Math.abs(wanted), `${name}: ${row[j]} is not ${wanted}`);
          assert.equal(row[j], Math.fround(field.at(map, i, j)));
        }
        assert.ok(Math.abs(field.lost(map, i) - dropped[map][i]) < 1e-6);
      }
    }
    const highest = Math.max(0, ...Array.from({ length: maps }, (_, map) => field.peak(map)));
    assert.ok(Math.abs(highest - peak) <= 1e-5 * peak, name);
    assert.equal(field.broken, about.broken || 0);
  }
});

test("a trace unpacks a field once, says when it has come, and why when it has not", async () => {
  const [about, bytes] = packedByHand([[[[10, 1], [20, 1]], [[10, 1], null]]], [0.5, 1], [0, 0]);
  let asked = 0;
  let arrived = 0;
  const block = async () => (asked++, bytes);
  const entry = { name: "t", tokens: ["a", "b"], layers: 1, groups: { "": { layers: 1, heads: 0 } }, fields: { mean: [{ at: 0, ...about }], bad: [{ at: 0, ...about, parts: [3, 3] }] } };
  const trace = new TraceData(entry, block, () => arrived++);
  assert.equal(trace.row("raw", 0, 0), null);
  assert.equal(trace.row("raw", 0, 1), null);
  assert.equal(trace.idle, false);
  assert.ok(await trace.fetched("mean", 0));
  assert.deepEqual([asked, arrived, trace.idle], [1, 1, true]);
  assert.deepEqual(Array.from(trace.row("raw", 0, 0).values), [0.5, 1.5]);
  assert.equal(await trace.fetched("bad", 0), null);
  assert.match(trace.failed, /^the weights of bad, layer 1, cannot be read: /);
  assert.equal(await trace.fetched("nothing", 0), null);
});

test("rows of an encoder–decoder are over the source, then the target; rows that are not there say so", () => {
  const about = { tokens: ["s", "t", "u"], source: 1, queries: { rollout: [1] }, missing: { flow: "too long" } };
  const trace = traceOf(about, { mean: [[[[1, 0], [0.25, 0.75]]]], "cross mean": [[[[1], [1]]]], rollout: [[[[0.5, 0.25, 0.25]]]] });
  assert.deepEqual(Array.from(trace.row("raw", 0, 1).values), [1, 0.25, 0.75]);
  assert.deepEqual(Array.from(trace.row("rollout", 0, 1).values), [0.5, 0.25, 0.25]);
  assert.match(trace.row("rollout", 0, 0).missing, /rollout for one query only/);
  assert.equal(trace.row("flow", 0, 0).missing, "too long");
  assert.deepEqual(trace.methods, ["raw", "rollout"]);
});

// --- the selection and its links

const FIRST = { view: "graph", beside: "strip", trace: 0, other: null, group: "", layer: 5, head: null, query: 0, token: null, method: "rollout", part: "fused", picked: false, log: false, words: false };

test("a link says what differs from the beginning, and leads back to it", () => {
  const store = new Store(FIRST);
  assert.equal(store.toHash(), "");
  const states = [{ layer: 0 }, { head: 3, query: 7 }, { beside: null }, { other: 2, trace: 1 }, { token: 0, picked: true, log: true, words: true }, { method: "raw & = # %", group: "cross" }];
  for (const changes of states) {
    store.select({ ...FIRST, ...changes });
    const again = new Store(FIRST);
    again.fromHash(`#${store.toHash()}`);
    assert.deepEqual(again.state, { ...FIRST, ...changes });
  }
});

test("what a link leaves out is as at the beginning, not as it was", () => {
  const store = new Store(FIRST);
  store.select({ layer: 2, head: 1 });
  store.fromHash("layer=3");
  assert.deepEqual([store.state.layer, store.state.head], [3, null]);
});

test("nonsense in a link is passed over", () => {
  const store = new Store(FIRST);
  const links = ["", "#", "&&&", "=", "layer", "layer=-1", "layer=1.5", "layer=NaN", "layer=Infinity", "layer=0x", "%", "view=%E0%A4%A", "__proto__=1", "constructor=2", "toString=3", "hover=1", "a=b=c", "\u0000=\u0000", "x".repeat(1e5)];
  for (const link of links) {
    store.fromHash(link);
    assert.deepEqual(store.state, FIRST, link.slice(0, 40));
  }
  assert.equal({}.layer, undefined);
});

test("pointing covers what is chosen until it ends; the same again tells nobody", () => {
  const store = new Store(FIRST);
  const told = [];
  const leave = store.subscribe((what) => told.push(what));
  store.point({ query: 4 });
  store.point({ query: 4 });
  assert.equal(store.seen.query, 4);
  assert.equal(store.state.query, 0);
  store.point(null);
  store.point(null);
  assert.equal(store.seen.query, 0);
  store.point({ query: 4 });
  store.select({ layer: 1 });
  assert.equal(store.seen.query, 0);
  leave();
  store.select({ layer: 2 });
  assert.deepEqual(told, ["hover", "hover", "hover", "select"]);
});

// --- words

const FAMILY = "👨‍👩‍👧‍👦";
const HOSTILE = ["<script>alert(1)</script>", "a\u0000b\u0007", "\u2028\u2029", "\ud800", "x\udc00", "\u202egnp.exe\u202c", "\u2066a\u2069", "Z" + "\u0351".repeat(500), "\u200b", "\ufeff", " ", "", "\n", "\u00a0", "Ä".normalize("NFD"), FAMILY, "a".repeat(1e7), "\u0301".repeat(40)];

test("every token is shown, short, on one line, without controls or marks that turn text around", () => {
  for (const token of HOSTILE) {
    for (const most of [2, 18, 40, 120]) {
      const text = shown(token, most);
      assert.ok(text.length > 0 && text.length <= 12 * most + 1, `${text.length} of ${most}`);
      // eslint-disable-next-line no-control-regex
      assert.doesNotMatch(text, /[\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/);
      assert.ok(text.trim().length > 0);
    }
  }
});

test("what is seen of a token can be told apart", () => {
  assert.equal(shown("key"), "key");
  assert.equal(shown(""), "∅");
  assert.equal(shown(" "), "␣");
  assert.equal(shown("\u0120"), "␣"); // as byte-level tokenizers name it
  assert.equal(shown("\u010a\u010a"), "↵↵");
  assert.equal(shown("\u0120Paris"), "\u0120Paris");
  assert.equal(shown("\n"), "↵");
  assert.equal(shown("\t"), "⇥");
  assert.equal(shown("\u0000"), "␀");
  assert.equal(shown("a b"), "a b");
  assert.equal(shown("\u202eabc"), "·abc");
  assert.equal(shown(FAMILY), FAMILY);
  assert.equal(shown("می‌خواهم"), "می‌خواهم"); // its joiner shapes it
  assert.equal(shown("x".repeat(18)), "x".repeat(18));
  assert.equal(shown("x".repeat(19)), "x".repeat(17) + "…");
  assert.equal(shown(FAMILY.repeat(5), 3), FAMILY.repeat(2) + "…");
  assert.equal(shown(null), "null");
  assert.equal(shown("Z" + "\u0351".repeat(50) + "b"), "Z" + "\u0351".repeat(4) + "b"); // marks that would cover other lines
});

test("direction is that of the first strong letter", () => {
  const ways = { key: "ltr", "مفتاح": "rtl", "מפתח": "rtl", "123": "ltr", "(מפתח": "rtl", "##ing": "ltr", "鍵": "ltr", "": "ltr" };
  for (const [text, way] of Object.entries(ways)) assert.equal(direction(text), way, text);
  assert.equal(mostlyRightToLeft(["[CLS]", "מפתח", "אבד", "key", "[SEP]"]), true);
  assert.equal(mostlyRightToLeft(["the", "key", "מפתח"]), false);
  assert.equal(mostlyRightToLeft([]), false);
});

test("numbers have two or three digits that count, whatever their size", () => {
  const wanted = [[0, "0"], [0.5, "0.500"], [-0.123, "−0.123"], [0.0123, "0.0123"], [0.012, "0.012"], [1.5, "1.50"], [1234.5, "1235"], [1e-5, "1.0·10⁻⁵"], [-2.34e-12, "−2.3·10⁻¹²"], [NaN, "–"], [null, "–"], [undefined, "–"]];
  for (const [value, text] of wanted) assert.equal(number(value), text);
  for (const [value, text] of [[0, "0 %"], [0.0123, "1.2 %"], [0.5, "50 %"], [0.0002, "0.02 %"]]) assert.equal(percent(value), text);
});

// --- colours

const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
const places = Array.from({ length: 101 }, (_, i) => i / 100);

for (const name of ["light", "dark"]) {
  const theme = palette(name);
  const away = theme.dark ? 1 : -1; // the way from paper to the strongest colour

  test(`${name}: larger is stronger, by lightness alone`, () => {
    for (const kind of ["sizes", "spreads"]) {
      for (const log of [false, true]) {
        const scale = scaled(theme, 0.8, { kind, log });
        const found = places.map((place) => luminance(scale.rgb(scale.value(place))));
        for (let i = 1; i < found.length; i++) assert.ok(away * (found[i] - found[i - 1]) >= 0, `${kind} falls back at ${places[i]}`);
        assert.ok(contrast(found[0], found[100]) > 10, kind);
      }
    }
  });

  test(`${name}: signs grow stronger both ways from zero, in hues that differ`, () => {
    const scale = scaled(theme, 2, { kind: "signs" });
    for (const sign of [1, -1]) {
      const found = places.map((place) => luminance(scale.rgb(2 * sign * place)));
      for (let i = 1; i < found.length; i++) assert.ok(away * (found[i] - found[i - 1]) >= -1e-3, `${sign} falls back at ${places[i]}`);
    }
    const [up, down] = [scale.rgb(1), scale.rgb(-1)];
    assert.ok(up[2] > up[0] && down[0] > down[2], "blue is positive, orange negative");
  });

  test(`${name}: ink can be read on every colour of every scale, and on the paper`, () => {
    for (const kind of ["sizes", "spreads", "signs"]) {
      const scale = scaled(theme, 1, { kind });
      for (const place of places) {
        const value = scale.value(place);
        const found = contrast(luminance(scale.rgb(value)), luminance(hex(scale.ink(value))));
        assert.ok(found >= 4, `${kind} at ${place}: ${found.toFixed(2)}`);
      }
    }
    for (const ink of ["ink", "soft", "accent"]) {
      for (const paper of ["paper", "raised"]) {
        const found = contrast(luminance(hex(theme[ink])), luminance(hex(theme[paper])));
        assert.ok(found >= 4.5, `${ink} on ${paper}: ${found.toFixed(2)}`);
      }
    }
  });
}

test("a scale's value and part undo each other, and no value falls off it", () => {
  for (const log of [false, true]) {
    for (const kind of ["sizes", "signs"]) {
      const scale = scaled(palette("light"), 0.25, { kind, log });
      for (const place of [0.1, 0.3, 0.5, 0.75, 1]) assert.ok(Math.abs(scale.part(scale.value(place)) - place) < 1e-9, `${kind} ${log} ${place}`);
      for (const value of [0, 1e-30, 1e30, -1e30, Infinity]) assert.match(scale.css(value), /^rgb\(\d+,\d+,\d+\)$/, `${kind} ${log} ${value}`);
      assert.equal(scale.part(1e9), 1);
    }
  }
  assert.equal(scaled(palette("light"), 0).top, 1);
});

test("kinds have colours of their own", () => assert.equal(new Set(KINDS).size, KINDS.length));

// --- surfaces

test("text in an SVG is escaped, whatever it says", () => {
  for (const token of [...HOSTILE.filter((one) => one.length < 1e5), `"><img src=x onerror=alert(1)>`, "</text></svg>", "]]>", "&amp;", "a'b\"c"]) {
    const surface = new SvgSurface(100, 50, "#fff");
    surface.text(token, 1, 2, { fill: `"><script>` });
    const inside = surface.toString().match(/<text [^<>]*>([^<>]*)<\/text>/);
    assert.ok(inside, JSON.stringify(token));
    assert.doesNotMatch(surface.toString(), /<(script|img)/);
    // eslint-disable-next-line no-control-regex
    assert.doesNotMatch(inside[1], /[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/);
    assert.ok(inside[1].isWellFormed ? inside[1].isWellFormed() : true);
  }
  assert.equal(escaped(`<&>"'`), "&#60;&#38;&#62;&#34;&#39;");
  assert.equal(escaped("a\u0000\ud800b😀"), "a\ufffd\ufffdb😀");
});

test("a text that runs from right to left is anchored at its right end", () => {
  const anchors = (text) => ["left", "center", "right"].map((align) => {
    const surface = new SvgSurface(10, 10);
    surface.text(text, 0, 0, { align });
    return surface.toString().match(/text-anchor="(\w+)" direction="(\w+)"/).slice(1).join(" ");
  });
  assert.deepEqual(anchors("key"), ["start ltr", "middle ltr", "end ltr"]);
  assert.deepEqual(anchors("מפתח"), ["end rtl", "middle rtl", "start rtl"]);
});

test("numbers that are none do not break a drawing", () => {
  const surface = new SvgSurface(10, 10);
  surface.rect(0, 0, 1e-9, 5, { fill: "#000", stroke: "#111", radius: 3, opacity: 0.12345 });
  surface.path([[0, 0], [1, 1], [2, 0]], { fill: "#000" });
  surface.clipped(0, 0, 5, 5, () => surface.curve(0, 0, 5, 5));
  surface.line(0, 0, 1, 1, { dash: [2, 3] });
  surface.circle(1, 1, 1 / 3);
  const text = surface.toString();
  assert.doesNotMatch(text, /NaN|undefined|null|\de-/);
  assert.match(text, /<clipPath id="clip0">/);
  assert.match(text, /opacity="0.123"/);
  assert.equal(text.match(/<g /g).length, text.match(/<\/g>/g).length);
});

test("the last thing drawn answers first", () => {
  const surface = new SvgSurface(10, 10);
  surface.hit(0, 0, 10, 10, "under");
  surface.hit(2, 2, 3, 3, "over");
  assert.equal(surface.hitAt(3, 3), "over");
  assert.equal(surface.hitAt(5, 5), "under");
  assert.equal(surface.hitAt(10, 5), null);
});

test("a text is cut to a width, never within a letter", () => {
  assert.equal(fitted("key", 1000), "key");
  const cut = fitted("😀".repeat(30), 100, 12);
  assert.ok(textWidth(cut, 12) <= 100 && cut.endsWith("…"));
  assert.ok(/^(😀)+…$/u.test(cut));
  assert.equal(fitted("key", 0), "…");
});

test("the strongest values come largest first, by size, without zeros", () => {
  const values = Float32Array.from([0, 0.5, -2, 0.25, 0]);
  assert.deepEqual(strongest(values, 2), [{ token: 2, value: -2 }, { token: 1, value: 0.5 }]);
  assert.equal(strongest(values, 9).length, 3);
});

test("large fields are unpacked a few at a time, all come, and rows outlive their fields", async () => {
  const [about, bytes] = packedByHand([[[[10, 1], [20, 1]], [[10, 1], null]]], [0.5, 1], [0, 0]);
  const layers = 12;
  const fields = { mean: Array.from({ length: layers }, () => ({ at: 0, ...about })) };
  const large = fields.mean.map((one) => ({ ...one, shape: [1, 4e3, 2e3], at: 1 })); // as they say; nobody reads them
  const entry = { name: "t", tokens: ["a", "b"], layers, groups: { "": { layers, heads: 0 } }, fields: { ...fields, large } };
  let asked = 0;
  const trace = new TraceData(entry, async () => (asked++, bytes));
  for (let layer = 0; layer < layers; layer++) assert.equal(trace.field("large", layer), null);
  assert.equal(asked, 2, "of eight million cells each");
  for (const coming of [...trace.waiting.values()]) await coming;
  for (let layer = 0; layer < layers; layer++) assert.ok(await trace.fetched("mean", layer));
  for (let layer = 0; layer < layers; layer++) assert.ok(trace.row("raw", layer, 0).values);
  trace.fields.clear();
  asked = 0;
  for (let layer = 0; layer < layers; layer++) assert.ok(trace.row("raw", layer, 0).values, "kept");
  assert.equal(asked, 0);
});

test("importances say of which tokens the page has them", () => {
  const importances = [{ method: "gradients", title: "gradients", target: "the next token", queries: [2, 0], values: [[1, 2, 3], [3, 2, 1]] }];
  const trace = traceOf({ tokens: ["a", "b", "c"], importances }, { mean: [[[[1, 0, 0], [0, 1, 0], [0, 0, 1]]]] });
  assert.deepEqual(trace.importances(0)[0].values, [3, 2, 1]);
  assert.deepEqual(trace.importances(1)[0], { method: "gradients", title: "gradients", target: "the next token", only: [2, 0], values: null });
  const strip = drawn(stripView, trace, { query: 1, method: "raw" });
  assert.ok(strip.texts.includes("the page has it only for token 2, token 0"), strip.texts.join("|"));
});

test("what is not in the page is said under the strip", () => {
  const trace = traceOf({ tokens: ["a", "b"], missing: { blankout: "no blank-out: the model has no outputs" } }, { mean: [[[[1, 0], [0, 1]]]] });
  assert.ok(drawn(stripView, trace, { method: "raw" }).texts.includes("no blank-out: the model has no outputs"));
});

test("a method that no view has heard of is one of the trace's where the page has it, and has its strip", () => {
  const map = [[1, 0], [0.25, 0.75]];
  const methods = [...METHODS, HALF];
  const trace = traceOf({ tokens: ["a", "b"], methods }, { mean: [[map]], half: [[[[0.5, 0.125], [0.25, 0.5]]]] });
  assert.deepEqual(trace.methods, ["raw", "half"]);
  assert.deepEqual(trace.offered.map((one) => one.name), ["raw", "rollout", "flow", "half"]);
  assert.equal(trace.measure("half"), "half rollout, share");
  assert.equal(trace.nearest({ layer: 0, query: 0, method: "half", group: "" }).method, "half");
  assert.deepEqual(Array.from(trace.row("half", 0, 1).values), [0.25, 0.5]);
  const surface = drawn(stripView, trace, { query: 1, method: "half" });
  assert.ok(surface.texts.includes("half rollout") && surface.texts.includes("half rollout, share"), surface.texts.join("|"));
  assert.ok(surface.texts.includes("raw, weight"));
  const cells = surface.hits.filter((hit) => typeof hit.target === "function").map((hit) => hit.target(hit.x + 1));
  assert.deepEqual(cells.map((one) => one.select.method), ["raw", "half"]);
  assert.match(cells[1].tip, /^a: 0\.250\nhalf rollout, share, layer 1$/);
  const without = traceOf({ tokens: ["a", "b"], methods, missing: { half: "half rollout takes long" } }, { mean: [[map]] });
  assert.deepEqual(without.methods, ["raw"]);
  assert.ok(drawn(stripView, without, { method: "raw" }).texts.includes("half rollout takes long"));
  const few = traceOf({ tokens: ["a", "b"], methods, queries: { half: [0] } }, { mean: [[map]], half: [[[[1, 0]]]] });
  assert.match(few.row("half", 0, 1).missing, /the page has half rollout for one query only/);
  assert.equal(traceOf({ tokens: ["a"], methods }, {}).row("half", 0, 0).missing, "the page has no half rollout");
});

test("the strip has room for the names of methods, and long ones do not run into the numbers of layers", () => {
  const long = { ...HALF, title: "a name that is much too long for its place" };
  const trace = traceOf({ tokens: ["a", "b"], methods: [...METHODS, long] }, { mean: [[[[1, 0], [0, 1]]]], half: [[[[1, 0], [0, 1]]]] });
  const surface = drawn(stripView, trace, { method: "raw" }, 390);
  const name = surface.of("text").find((call) => call.at[0].startsWith("a name that") && call.look.weight === 600);
  const layer = surface.of("text").find((call) => call.at[0] === "1" && call.look.align === "right");
  assert.ok(name.at[1] + textWidth(name.at[0], 12, 600) < layer.at[1] - 6, name.at[0]);
});

test("maps that are not attention are named with their methods, attention is not", () => {
  const map = [[1, 0], [0.25, 0.75]];
  const made = (about) => traceOf({ tokens: ["a", "b"], ...about }, { mean: [[map]], rollout: [[map]] });
  const norms = made({ mixing: "norm", mixing_title: "norm of what is added" });
  assert.equal(norms.measure("raw"), "raw norm of what is added, weight");
  assert.equal(norms.measure("rollout"), "rollout over norm of what is added, share");
  assert.equal(made().measure("rollout"), "rollout, share");
  assert.ok(drawn(stripView, norms).texts.includes("maps: norm of what is added"));
  assert.ok(!drawn(stripView, made()).texts.some((text) => text.startsWith("maps")));
});

test("a selection is fitted to the trace that shows it", () => {
  const trace = traceOf({ tokens: ["a", "b"] }, { mean: [[[[1, 0], [0, 1]]]] });
  const near = trace.nearest({ layer: 7, query: 9, token: 5, head: 3, method: "flow", group: "encoder" });
  assert.deepEqual(near, { layer: 0, query: 1, token: null, head: null, method: "raw", group: "" });
});
