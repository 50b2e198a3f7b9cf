// The selection that all views share: what is chosen, what the pointer is over, and how links name it.

/** What a link may say, with how to read it. The others are not for links. */
const READERS = {
  view: String,
  beside: (text) => (text === "none" ? null : text),
  trace: whole,
  other: (text) => (text === "none" ? null : whole(text)),
  group: String,
  layer: whole,
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
};

function whole(text) {
  const value = Number(text);
  return Number.isInteger(value) && value >= 0 ? value : undefined;
}

/** The chosen state, with those who want to know when it changes. */
export class Store {
  /** @param {object} first the state to begin with; what a link leaves out is as in it */
  constructor(first, legal = (state) => state) {
    this.first = { ...first };
    this.legal = legal;
    this.state = legal({ ...first });
    this.hover = null;
    this.pointing = null; // the pane that the pointer is in
    this.listeners = new Set();
  }

  /** What views draw: the chosen state under what the pointer is over. */
  get seen() {
    return this.hover ? { ...this.state, ...this.hover } : this.state;
  }

  /** Choose; whatever is not named stays. */
  select(changes) {
    this.state = this.legal({ ...this.state, ...changes });
    this.hover = null;
    this.tell("select");
  }

  /** Look at something for as long as the pointer is there, in a pane; null ends it. */
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

  /** The state as the part of a link behind #; only what differs from the beginning. */
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

  /** Choose what a link says; what it does not say is as at the beginning. Nonsense is passed over. */
  fromHash(hash) {
    const found = { ...this.first };
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
    this.select(found);
  }
}
