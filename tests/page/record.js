// A surface that remembers what was drawn, and fields and traces made by hand.
import { TraceData } from "../../src/overt/view/viewer/data.js";
import { Field } from "../../src/overt/view/viewer/field.js";
import { palette } from "../../src/overt/view/viewer/colour.js";

/** What an index tells of the methods that Overt comes with, in their order. */
export const METHODS = [
  { name: "raw", title: "raw", reads: "maps", value: "weight", paths: true },
  { name: "rollout", title: "rollout", reads: "maps", value: "share", paths: true },
  { name: "flow", title: "flow", reads: "maps", value: "amount", paths: false },
  { name: "blankout", title: "blank-out", reads: "model", value: "effect", paths: false },
  { name: "gradients", title: "gradients", reads: "model", value: "effect", paths: false },
];

/** A method that somebody registered, of which no view has ever heard. */
export const HALF = { name: "half", title: "half rollout", reads: "maps", value: "share", paths: false };

/** Remembers every call: `{ word, at: [...], look }`. */
export class Recorder {
  constructor() {
    this.calls = [];
    this.hits = [];
    for (const word of ["rect", "circle", "line", "curve", "path", "image", "picture", "text"]) {
      this[word] = (...at) => {
        const look = typeof at.at(-1) === "object" && !Array.isArray(at.at(-1)) ? at.pop() : {};
        this.calls.push({ word, at, look });
      };
    }
  }

  hit(x, y, width, height, target) {
    this.hits.push({ x, y, width, height, target });
  }

  clipped(x, y, width, height, inside) {
    inside();
  }

  /** All texts drawn. */
  get texts() {
    return this.calls.filter((call) => call.word === "text").map((call) => call.at[0]);
  }

  of(word) {
    return this.calls.filter((call) => call.word === word);
  }
}

/** A field with exactly these values, (map, row, column), as nested lists: one scale per cell's row, coded coarsely. */
export function fieldOf(values, dropped = 0) {
  const shape = [values.length, values[0].length, values[0][0].length];
  const field = new Field(shape, new Uint8Array(shape[0] * shape[1] * shape[2]), new Float32Array(shape[0] * shape[1]), new Float32Array(shape[0] * shape[1]).fill(dropped), null);
  field.at = (map, row, column) => values[map][row][column];
  field.row = (map, row) => Float32Array.from(values[map][row]);
  field.peak = (map) => Math.max(...values[map].flat().map(Math.abs));
  return field;
}

/** A trace whose fields are here already: `fields` has a list of nested (map, row, column) values per layer. */
export function traceOf(about, fields) {
  const listed = Object.fromEntries(Object.entries(fields).map(([name, layers]) => [name, layers.map((cells, at) => cells && { at, shape: [cells.length, cells[0].length, cells[0][0].length] })]));
  const tokens = about.tokens || [];
  const source = about.source || 0;
  const layers = about.layers ?? (fields.mean || []).length;
  const heads = fields.heads ? fields.heads[0].length : 0;
  const groups = { "": { layers, heads, rows: [source, tokens.length], columns: [source, tokens.length] }, ...about.groups };
  const mixing = { mixing: "attention", mixing_title: "attention", joint: false, unit: false, signed: false };
  const trace = new TraceData({ name: "made", kind: "encoder", ...mixing, methods: METHODS, special: tokens.map(() => 0), layers, heads, main: 0, residual: 0.5, missing: {}, queries: {}, importances: [], ...about, groups, fields: listed }, async () => new Uint8Array());
  for (const [name, some] of Object.entries(fields)) some.forEach((cells, layer) => cells && trace.fields.set(`${name}/${layer}`, fieldOf(cells)));
  return trace;
}

/** Draw a view of a trace, beside another pane if so; returns the recorder. */
export function drawn(view, trace, state = {}, width = 900, part = null, beside = false) {
  const surface = new Recorder();
  const seen = { view: view.id, group: "", layer: trace.layers - 1, head: null, query: trace.main, token: null, method: "rollout", part: "fused", picked: false, log: false, words: false, ...state };
  const { height, width: wide = width } = view.measure({ trace, seen, state: seen, beside, width, screen: 600 });
  const [top, bottom] = part || [0, height];
  view.draw({ surface, trace, seen, state: seen, beside, theme: palette("light"), width: Math.max(wide, width), height, top, bottom, redraw: () => {} });
  return surface;
}
