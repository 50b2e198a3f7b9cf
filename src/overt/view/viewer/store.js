// The selection that all views share: what is chosen, what the pointer is over, and how links encode it.

/** What a link may contain, and how to read it. Other parts of the state are not in links. */
const READERS = {
  view: String,
  beside: (text) => (text === "none" ? null : text),
  trace: whole,
  other: (text) => (text === "none" ? null : whole(text)),
  group: String,
  layer: whole,
  averaged: (text) => text === "1",
  head: (text) => (text === "mean" ? null : whole(text)),
  query: whole,
  token: whole,
  row: whole,
  node: (text) => (text === "none" ? null : whole(text)),
  method: String,
  part: String,
  picked: (text) => text === "1",
  log: (text) => text === "1",
  words: (text) => text === "1",
  find: String,
};

function whole(text) {
  const value = Number(text);
  return Number.isInteger(value) && value >= 0 ? value : undefined;
}

/** Changes of a state, in which a layer that is named takes the place of the mean of layers. */
function single(changes, state) {
  return state.averaged && "layer" in changes && !("averaged" in changes) ? { ...changes, averaged: false } : changes;
}

/** The selection, with listeners for its changes. */
export class Store {
  /** @param {object} first the initial state, which also fills in what a link leaves out */
  constructor(first, legal = (state) => state) {
    this.first = { ...first };
    this.legal = legal;
    this.state = legal({ ...first });
    this.hover = null;
    this.pointing = null; // the pane that the pointer is in
    this.listeners = new Set();
  }

  /** What views draw: the selection, overridden by what the pointer is over. */
  get seen() {
    return this.hover ? { ...this.state, ...this.hover } : this.state;
  }

  /** Change the selection; what is not named stays. Whoever chooses a layer does not want the mean of all. */
  select(changes) {
    this.state = this.legal({ ...this.state, ...single(changes, this.state) });
    this.hover = null;
    this.tell("select");
  }

  /** Show something while the pointer is over it, in a pane; null ends that. */
  point(changes, pane = null) {
    this.pointing = changes ? pane : null;
    const same = JSON.stringify(changes || null) === JSON.stringify(this.hover);
    if (same) return;
    this.hover = changes || null;
    this.tell("hover");
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  tell(what) {
    for (const listener of [...this.listeners]) listener(what);
  }

  /** The state as the fragment of a link; only what differs from the initial state. */
  toHash() {
    const parts = [];
    for (const key of Object.keys(READERS)) {
      const value = this.state[key];
      if (value === undefined || value === this.first[key]) continue;
      const text = value === null ? (key === "head" ? "mean" : "none") : value === true ? "1" : value === false ? "0" : value;
      parts.push(`${key}=${encodeURIComponent(text)}`);
    }
    return parts.join("&");
  }

  /** Select what a link says; the rest is as in the initial state. Invalid parts are ignored. */
  fromHash(hash) {
    const found = {};
    for (const part of String(hash).replace(/^#/, "").split("&")) {
      const [key, text] = part.split("=");
      if (!Object.hasOwn(READERS, key) || text === undefined) continue;
      let value;
      try {
        value = READERS[key](decodeURIComponent(text));
      } catch {
        continue;
      }
      if (value !== undefined) found[key] = value;
    }
    this.select({ ...this.first, ...single(found, this.first) });
  }
}
