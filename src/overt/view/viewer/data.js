// A trace as views see it: fields that are unpacked when first looked at, and rows of the methods.
import { unpack } from "./field.js";

const MOST_HELD = 6e7; // cells unpacked at a time; older fields are unpacked again when they are wanted
const MOST_COMING = 2e7; // cells unpacked side by side
const MOST_ROWS = 1e7; // values of rows that are kept

/** One trace of the page's index. */
export class TraceData {
  /**
   * @param {object} about its entry in the index
   * @param {(number: number) => Promise<Uint8Array>} block gives packed bytes
   * @param {() => void} arrived is called when something that was asked for has come
   */
  constructor(about, block, arrived = () => {}) {
    this.about = about;
    this.block = block;
    this.arrived = arrived;
    this.fields = new Map();
    this.held = 0; // cells of all fields
    this.rows = new Map(); // rows outlive their fields: a view of all layers needs one of each
    this.rowValues = 0;
    this.waiting = new Map();
    this.coming = 0; // cells of those
    this.unreadable = new Set(); // not asked for again: each answer would ask for a redraw, which asks again
    this.failed = null;
    this.name = about.name;
    this.kind = about.kind;
    this.tokens = about.tokens || [];
    this.special = about.special || [];
    this.source = about.source || 0; // tokens of the source come first
    this.queries = this.tokens.length - this.source;
    this.layers = about.layers || 0;
    this.heads = about.heads || 0;
    this.main = about.main || 0;
    this.drowned = about.drowned || null; // the method and the special token that leave the words pale, and what it and a word have
    this.told = (about.nodes || about).methods || []; // of every method that is known, here or not, in their order
  }

  /** Groups of maps: "" the trace's own, and for an encoder–decoder "encoder" and "cross". */
  get groups() {
    return Object.keys(this.about.groups || {});
  }

  /** What a group has: layers, heads, and which tokens its rows and columns are, as [start, stop]. */
  group(name = "") {
    return this.about.groups[name] || this.about.groups[""];
  }

  /** The nearest selection that this trace can have. */
  nearest(state) {
    const last = (value, count) => Math.max(0, Math.min(value, count - 1));
    const group = this.groups.includes(state.group) ? state.group : "";
    const { layers, heads } = this.layers ? this.group(group) : { layers: 1, heads: 0 };
    return {
      ...state,
      group,
      layer: last(state.layer, layers),
      head: state.head === null || state.head === undefined || state.head >= heads ? null : state.head,
      query: last(state.query, Math.max(this.queries, 1)),
      token: state.token < this.tokens.length ? state.token : null,
      method: this.methods.includes(state.method) ? state.method : this.methods[0] || "raw",
    };
  }

  /** Whether the page holds a field. */
  has(name) {
    return Boolean(this.about.fields && this.about.fields[name]);
  }

  /** A layer's field if it is here, else null; then it is on its way, and `arrived` will be called. */
  field(name, layer) {
    const list = this.about.fields && this.about.fields[name];
    const about = list && list[layer];
    if (!about) return null;
    const key = `${name}/${layer}`;
    const found = this.fields.get(key);
    if (found) {
      found.read = true;
      this.fields.delete(key); // what was used last goes last
      this.fields.set(key, found);
      return found;
    }
    const cells = about.shape.reduce((product, size) => product * size, 1);
    const room = !this.waiting.size || this.coming + cells <= MOST_COMING;
    if (room && !this.waiting.has(key) && !this.unreadable.has(key)) {
      const coming = this.block(about.at)
        .then((bytes) => unpack(about, bytes))
        .then((field) => {
          this.fields.set(key, field);
          this.held += field.codes.length;
          for (const [old, { codes, read }] of this.fields) {
            if (this.held <= MOST_HELD) break;
            if (!read) continue; // who asked for it has not seen it yet
            this.fields.delete(old);
            this.held -= codes.length;
          }
        })
        .catch((error) => {
          this.unreadable.add(key);
          this.failed = `the weights of ${name}, layer ${layer + 1}, cannot be read: ${error.message || error}`;
        })
        .finally(() => {
          this.waiting.delete(key);
          this.coming -= cells;
          this.arrived();
        });
      this.waiting.set(key, coming);
      this.coming += cells;
    }
    return null;
  }

  /** A promise of a field; of null where there is none, or none that can be read. */
  async fetched(name, layer) {
    const key = `${name}/${layer}`;
    for (;;) {
      const found = this.field(name, layer);
      if (found || this.unreadable.has(key) || !this.waiting.size) return found;
      await (this.waiting.get(key) || Promise.race(this.waiting.values()));
    }
  }

  /** Whether nothing is on its way. */
  get idle() {
    return this.waiting.size === 0;
  }

  /** What is told of the methods that read maps: a page may have rows of them. */
  get offered() {
    return this.told.filter((one) => one.reads === "maps");
  }

  /** Names of those that the page has. */
  get methods() {
    const nodes = this.kind === "nodes" ? this.about.nodes.nodes : null;
    const here = (name) => (nodes ? nodes.some((one) => (one[name] ?? null) !== null) : this.has(name === "raw" ? "mean" : name));
    return this.offered.map((one) => one.name).filter(here);
  }

  /**
   * What the index tells of a method.
   * @returns {{name: string, title: string, value: string, paths: boolean}} `value`: what its numbers are, "weight",
   *   "share", "amount" or "effect"; `paths`: whether a row is the sum over paths down the layers
   */
  method(name) {
    return this.told.find((one) => one.name === name) || { name, title: name, value: "share", paths: false };
  }

  /** What the maps are where they are not attention itself; else nothing. */
  get mapsTitle() {
    const { mixing, mixing_title: title } = this.about;
    return title && mixing !== "attention" ? title : "";
  }

  /** A method by its title, with what it reads where that is not attention itself. */
  named(name) {
    const { title } = this.method(name);
    if (!this.mapsTitle) return title;
    return name === "raw" ? `${title} ${this.mapsTitle}` : `${title} over ${this.mapsTitle}`;
  }

  /** What a method's numbers are called. */
  measure(name) {
    return `${this.named(name)}, ${this.method(name).value}`;
  }

  /** Rows of a method that the page holds: null for all, or a list of queries. */
  rowsOf(method) {
    return (this.about.queries && this.about.queries[method]) || null;
  }

  /** Where a map lies: its field and its number there, or null while it comes. A head of null is the mean. */
  map(group, layer, head = null) {
    const prefix = group ? `${group} ` : "";
    const single = head !== null && this.has(`${prefix}heads`);
    const field = this.field(`${prefix}${single ? "heads" : "mean"}`, layer);
    return field && { field, map: single ? head : 0 };
  }

  /**
   * What a query draws on by a method, over all tokens.
   * @returns {{values: Float32Array, lost: number} | {missing: string} | null} null while it comes
   */
  row(method, layer, query, head = null) {
    const key = `${method}/${layer}/${query}/${head}`;
    let found = this.rows.get(key);
    if (found) {
      this.rows.delete(key);
    } else {
      found = this.unpackedRow(method, layer, query, head);
      if (!found || !found.values) return found;
      this.rowValues += found.values.length;
      for (const [old, { values }] of this.rows) {
        if (this.rowValues <= MOST_ROWS) break;
        this.rows.delete(old);
        this.rowValues -= values.length;
      }
    }
    this.rows.set(key, found);
    return found;
  }

  unpackedRow(method, layer, query, head) {
    const list = this.about.fields && this.about.fields[method === "raw" ? "mean" : method];
    if (list && !list[layer]) return { missing: this.why("layers") };
    if (method === "raw") {
      const own = this.map("", layer, head);
      if (!own) return null;
      const values = own.field.row(own.map, query);
      if (!this.has("cross mean")) return { values, lost: own.field.lost(own.map, query) };
      const cross = this.map("cross", layer, head);
      if (!cross) return null;
      const whole = new Float32Array(this.tokens.length);
      whole.set(cross.field.row(cross.map, query));
      whole.set(values, this.source);
      return { values: whole, lost: Math.max(own.field.lost(own.map, query), cross.field.lost(cross.map, query)) };
    }
    if (!this.has(method)) return { missing: this.why(method) };
    const rows = this.rowsOf(method);
    const place = rows ? rows.indexOf(query) : query;
    if (place < 0) {
      const few = rows.length === 1 ? "one query" : `${rows.length} queries`;
      return { missing: `the page has ${this.method(method).title} of ${few} only: t.html(…, queries="all") has it of all` };
    }
    const field = this.field(method, layer);
    return field && { values: field.row(0, place), lost: field.lost(0, place) };
  }

  /** Why something is not in the page. */
  why(name) {
    return (this.about.missing && this.about.missing[name]) || `the page has no ${this.method(name).title}`;
  }

  /**
   * Importances of the input tokens: `[{ method, title, target, values }]`. Where the page has none of this query,
   * `values` is null and `only` says of which it has some.
   */
  importances(query) {
    return (this.about.importances || []).map(({ method, title, target, queries, values }) => {
      const place = queries ? queries.indexOf(query) : 0;
      const only = place < 0 ? queries : null;
      return { method, title, target, only, values: place < 0 ? null : values[place] };
    });
  }
}
