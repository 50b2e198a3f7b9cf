// A trace for the views: fields that are unpacked when first viewed, and rows of the methods.
import { unpack } from "./field.js";

const MOST_HELD = 6e7; // cells held unpacked; older fields are unpacked again when needed
const MOST_COMING = 2e7; // cells unpacked side by side
const MOST_ROWS = 1e7; // values of rows that are kept

/** One trace of the page's index. */
export class TraceData {
  /**
   * @param {object} about its entry in the index
   * @param {(number: number) => Promise<Uint8Array>} block returns packed bytes
   * @param {() => void} arrived called when something requested has arrived
   */
  constructor(about, block, arrived = () => {}) {
    this.about = about;
    this.page = [this]; // all traces of its page
    this.block = block;
    this.arrived = arrived;
    this.fields = new Map();
    this.held = 0; // cells of all fields
    this.rows = new Map(); // rows outlive their fields: a view of all layers needs one of each
    this.rowValues = 0;
    this.means = new Map(); // rows averaged over layers
    this.waiting = new Map();
    this.coming = 0; // cells of those
    this.unreadable = new Set(); // not requested again: each arrival causes a redraw, which would request it again
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
    this.drowned = about.drowned || null; // the method and special token that leave the words pale, with its value and the largest of a word
    this.kept = about.rows ? about.rows.queries : null; // the queries of a trace that has rows in place of maps
    this.sink = about.rows && !this.source && this.tokens.length > 1 ? 0 : -1; // the first token, which often draws most in a long text
    this.written = (about.rows && about.rows.generated) || null; // tokens that the model generated, as [start, stop]
    this.told = (about.nodes || about).methods || []; // every registered method, on the page or not, in order
  }

  /** Groups of maps: "" the trace's own, and for an encoder–decoder "encoder" and "cross". */
  get groups() {
    return Object.keys(this.about.groups || {});
  }

  /** Whether the trace has no maps of its own: a recurrent decoder has only cross-attention. */
  get recurrent() {
    return this.groups.length > 0 && !this.groups.includes("");
  }

  /** The group that is shown unless another is chosen. */
  get home() {
    return this.recurrent ? "cross" : "";
  }

  /** A group's layers and heads, and the tokens of its rows and columns, as [start, stop]. */
  group(name = "") {
    return this.about.groups[name] || this.about.groups[this.home];
  }

  /** The nearest selection within this trace's limits. */
  nearest(state) {
    const last = (value, count) => Math.max(0, Math.min(value, count - 1));
    const group = this.groups.includes(state.group) ? state.group : this.home;
    const { layers, heads } = this.layers ? this.group(group) : { layers: 1, heads: 0 };
    return {
      ...state,
      group,
      layer: last(state.layer, layers),
      head: state.head === null || state.head === undefined || state.head >= heads ? null : state.head,
      query: this.keptQuery(last(state.query, Math.max(this.queries, 1))),
      token: state.token < this.tokens.length ? state.token : null,
      method: this.methods.includes(state.method) ? state.method : this.methods[0] || "raw",
    };
  }

  /** Of a trace with rows of some queries, the one nearest to a query. */
  keptQuery(query) {
    if (!this.kept || this.kept.includes(query)) return query;
    return this.kept.reduce((best, one) => (Math.abs(one - query) < Math.abs(best - query) ? one : best));
  }

  /** Whether the model generated a token. */
  generated(token) {
    return this.written !== null && token >= this.written[0] && token < this.written[1];
  }

  /** The query that a token's row is of: of a token that was generated, the one before it, which wrote it. */
  queryOf(token) {
    return token - this.source - (this.generated(token) ? 1 : 0);
  }

  /** The token that a query's row speaks of: the one that it wrote, or itself. */
  spokenOf(query) {
    const token = this.source + query;
    return this.generated(token + 1) ? token + 1 : token;
  }

  /** Whether a token is left out by the words' scale, whatever the query. */
  aside(token) {
    return Boolean(this.special[token]) || token === this.sink;
  }

  /** Whether the words' scale differs from that of all tokens, whatever the query. */
  get hasAside() {
    return this.sink >= 0 || this.special.some(Boolean);
  }

  /** The field of the maps' means; the one of raw rows, in a trace that has no maps. */
  get mean() {
    if (this.kept) return "raw";
    return this.recurrent ? "cross mean" : "mean";
  }

  /** What the page has of each map: the parts of its mechanisms, itself ("fused"), and its spread over samples. */
  get parts() {
    if (this.source) return ["fused"]; // a row spans several maps
    const names = Object.keys(this.about.fields || {}).filter((name) => name.startsWith("part ") && !name.endsWith(" heads"));
    return [...names.map((name) => name.slice(5)), "fused", ...(this.has("spread") ? ["spread"] : [])];
  }

  /** Whether the page holds a field. */
  has(name) {
    return Boolean(this.about.fields && this.about.fields[name]);
  }

  /** A layer's field if it has been unpacked; else null, and `arrived` is called once it has. */
  field(name, layer) {
    const list = this.about.fields && this.about.fields[name];
    const about = list && list[layer];
    if (!about) return null;
    const key = `${name}/${layer}`;
    const unpacked = this.fields.get(key);
    if (unpacked) {
      unpacked.read = true;
      this.fields.delete(key); // the most recently used goes last
      this.fields.set(key, unpacked);
      return unpacked;
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
            if (!read) continue; // not read yet by whoever requested it
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

  /** A promise of a field, or of null if there is none or it cannot be read. */
  async fetched(name, layer) {
    const key = `${name}/${layer}`;
    for (;;) {
      const field = this.field(name, layer);
      if (field || this.unreadable.has(key) || !this.waiting.size) return field;
      await (this.waiting.get(key) || Promise.race(this.waiting.values()));
    }
  }

  /** Whether nothing is being unpacked. */
  get idle() {
    return this.waiting.size === 0;
  }

  /** The methods that read maps, of which a page may have rows. */
  get offered() {
    return this.told.filter((one) => one.reads === "maps");
  }

  /** Names of the methods that the page has. */
  get methods() {
    const nodes = this.kind === "nodes" ? this.about.nodes.nodes : null;
    const here = (name) => (nodes ? nodes.some((one) => (one[name] ?? null) !== null) : this.has(name === "raw" ? this.mean : name));
    return this.offered.map((one) => one.name).filter(here);
  }

  /**
   * The index's entry for a method.
   * @returns {{name: string, title: string, value: string, paths: boolean}} `value`: what its numbers are, "weight",
   *   "share", "amount" or "effect"; `paths`: whether a row is the sum over paths down the layers
   */
  method(name) {
    return this.told.find((one) => one.name === name) || { name, title: name, value: "share", paths: false };
  }

  /** What the maps hold if it is not attention itself; otherwise empty. */
  get mapsTitle() {
    const { mixing, mixing_title: title } = this.about;
    return title && mixing !== "attention" ? title : "";
  }

  /** A method's title, with what it reads if that is not attention itself. */
  named(name) {
    const { title } = this.method(name);
    if (!this.mapsTitle) return title;
    return name === "raw" ? `${title} ${this.mapsTitle}` : `${title} over ${this.mapsTitle}`;
  }

  /** What a method's numbers are. */
  measure(name) {
    return `${this.named(name)}, ${this.method(name).value}`;
  }

  /** Rows of a method that the page holds: null for all, or a list of queries. */
  rowsOf(method) {
    return (this.about.queries && this.about.queries[method]) || null;
  }

  /** A map's field and its number there, or null until it is unpacked. A head of null is the mean. */
  map(group, layer, head = null) {
    const prefix = group ? `${group} ` : "";
    const single = head !== null && this.has(`${prefix}heads`);
    const field = this.field(`${prefix}${single ? "heads" : "mean"}`, layer);
    return field && { field, map: single ? head : 0 };
  }

  /**
   * What a query draws on by a method, over all tokens; or its row of "part …" or "spread", as in `fields`.
   * @returns {{values: Float32Array, lost: number} | {missing: string} | null} null until it is unpacked
   */
  row(method, layer, query, head = null) {
    const key = `${method}/${layer}/${query}/${head}`;
    let row = this.rows.get(key);
    if (row) {
      this.rows.delete(key);
    } else {
      row = this.unpackedRow(method, layer, query, head);
      if (!row || !row.values) return row;
      this.rowValues += row.values.length;
      for (const [old, { values }] of this.rows) {
        if (this.rowValues <= MOST_ROWS) break;
        this.rows.delete(old);
        this.rowValues -= values.length;
      }
    }
    this.rows.set(key, row);
    return row;
  }

  /** The layers that the page has of a method. */
  layersOf(method) {
    const list = (this.about.fields && this.about.fields[method === "raw" ? this.mean : method]) || [];
    return list.flatMap((one, layer) => (one ? [layer] : []));
  }

  /** The mean of a method's rows over the layers that the page has; like `row`. */
  meanRow(method, query, head = null) {
    const key = `${method}/mean/${query}/${head}`;
    const cached = this.means.get(key);
    if (cached) return cached;
    // All are asked for at once.
    const rows = this.layersOf(method).map((layer) => this.row(method, layer, query, head));
    const missing = rows.find((row) => row && row.missing);
    if (missing || !rows.length) return missing || { missing: this.why(method) };
    if (rows.includes(null)) return null;
    const values = new Float32Array(this.tokens.length);
    for (const row of rows) for (let i = 0; i < values.length; i++) values[i] += row.values[i] / rows.length;
    const mean = { values, lost: rows.reduce((sum, row) => sum + row.lost, 0) / rows.length };
    if (this.means.size * values.length > MOST_ROWS) this.means.clear();
    this.means.set(key, mean);
    return mean;
  }

  unpackedRow(method, layer, query, head) {
    if (method === "spread" || method.startsWith("part ")) return this.unpackedPart(method, layer, query, head);
    const list = this.about.fields && this.about.fields[method === "raw" ? this.mean : method];
    if (list && !list[layer]) return { missing: this.why("layers") };
    if (method === "raw" && !this.kept) {
      const own = this.map(this.home, layer, head);
      if (!own) return null;
      const values = own.field.row(own.map, query);
      if (this.recurrent) {
        const source = new Float32Array(this.tokens.length);
        source.set(values);
        return { values: source, lost: own.field.lost(own.map, query) };
      }
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
      return { missing: `the page has ${this.method(method).title} for ${few} only: t.html(…, queries="all") includes all` };
    }
    const single = this.kept && head !== null && this.has(`${method} heads`);
    const field = this.field(single ? `${method} heads` : method, layer);
    const map = single ? head : 0;
    return field && { values: field.row(map, place), lost: field.lost(map, place) };
  }

  unpackedPart(name, layer, query, head) {
    const heads = `${name} heads`;
    const single = head !== null && this.has(heads);
    const list = (this.about.fields && this.about.fields[name]) || [];
    if (!list[layer]) return { missing: `layer ${layer + 1} has no ${name.replace("part ", "")}` };
    const field = this.field(single ? heads : name, layer);
    const map = single ? head : 0;
    return field && { values: field.row(map, query), lost: field.lost(map, query) };
  }

  /** Why something is not on the page. */
  why(name) {
    return (this.about.missing && this.about.missing[name]) || `the page has no ${this.method(name).title}`;
  }

  /**
   * Importances of the input tokens: `[{ method, title, target, values }]`. If the page has none for this query,
   * `values` is null and `only` lists the queries that it has.
   */
  importances(query) {
    return (this.about.importances || []).map(({ method, title, target, queries, values }) => {
      const place = queries ? queries.indexOf(query) : 0;
      const only = place < 0 ? queries : null;
      return { method, title, target, only, values: place < 0 ? null : values[place] };
    });
  }
}
