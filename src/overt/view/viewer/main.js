// The viewer: a header with tabs and controls, panes that share one selection, a line that describes the selection.
import { fillControls } from "./controls.js";
import { TraceData } from "./data.js";
import { download, element } from "./dom.js";
import { KEYS, pressed } from "./keys.js";
import { Pane } from "./pane.js";
import { strongest } from "./parts.js";
import { Store } from "./store.js";
import { VIEWS } from "./views.js";
import { number, percent, shown, tokenPlace, weightWords } from "./words.js";

const FIRST = ["nodes", "image", "pictures", "cross", "text"]; // the most informative views, for traces that have them
const SIDE_BY_SIDE = 760; // pixels of width above which page.css puts panes side by side
let mounted = 0;

/**
 * Show a page's traces in an element.
 *
 * @param {HTMLElement} root
 * @param {{index: object, block: (number: number) => Promise<Uint8Array>}} source the index, and packed bytes by number
 * @param {{link?: boolean, state?: object, onselect?: (state: object) => void}} options `link`: keep the selection in
 *   the address (on by default)
 * @returns {{state: () => object, select: (changes: object) => void, settled: () => Promise<void>, svg: (pane?: number) => string, destroy: () => void}}
 */
export function mount(root, source, options = {}) {
  return new Viewer(root, source, options).handle();
}

class Viewer {
  constructor(root, source, options) {
    this.root = root;
    this.index = source.index;
    this.options = { link: true, ...options };
    this.panes = [];
    this.traces = this.index.traces.map((about) => new TraceData(about, source.block, () => this.arrived()));
    for (const trace of this.traces) trace.page = this.traces;
    this.store = new Store(this.begin(), (state) => this.legal(state));
    this.themeChoice = remembered("overt-theme") || "auto";
    this.darkness = globalThis.matchMedia ? matchMedia("(prefers-color-scheme: dark)") : null;
    this.build();
    if (this.options.link) this.readLink();
    if (this.options.state) this.store.select(this.options.state);
    this.store.subscribe((what) => this.changed(what));
    this.listen();
    this.arrange();
    this.reveal();
  }

  begin() {
    const trace = this.traces[0];
    const fits = VIEWS.filter((view) => view.applies(trace) === true);
    const view = fits.find((one) => FIRST.includes(one.id)) || fits[0] || VIEWS[0];
    const room = this.root.getBoundingClientRect().width;
    const wide = room > 1100;
    const beside = { text: "top", pictures: trace.kept ? "text" : "strip" }[view.id] || "strip";
    const second = view.id !== beside && fits.some((one) => one.id === beside);
    return {
      view: view.id,
      beside: wide && second ? beside : null,
      trace: 0,
      other: room > SIDE_BY_SIDE ? (this.index.beside ?? null) : null, // one below the other, neither would have room
      group: "",
      layer: Math.max(trace.layers - 1, 0),
      // The last layer is seldom the one that looks up what a word is copied from.
      averaged: Boolean(trace.written),
      head: null,
      query: trace.main,
      token: null,
      row: null,
      node: null,
      // Over a long text, rollout of a causal model mostly ends in the first token.
      method: trace.methods.includes("rollout") && !trace.kept ? "rollout" : trace.methods[0] || "raw",
      part: "fused",
      picked: false,
      log: false,
      words: null, // as each trace needs it, until the reader chooses
      find: "",
    };
  }

  /** The nearest state that the page can show. */
  legal(state) {
    const within = (value, count, otherwise) => (Number.isInteger(value) && value >= 0 && value < count ? value : otherwise);
    const trace = this.traces[(state.trace = within(state.trace, this.traces.length, 0))];
    state.other = state.other === state.trace ? null : within(state.other, this.traces.length, null);
    if (!VIEWS.some((view) => view.id === state.view)) state.view = VIEWS[0].id;
    if (!VIEWS.some((view) => view.id === state.beside) || state.beside === state.view) state.beside = null;
    if (!trace.groups.includes(state.group)) state.group = trace.home;
    const { layers, heads, queries, tokens, methods } = this.limitsOf(state);
    state.layer = within(state.layer, layers, Math.max(layers - 1, 0));
    state.head = within(state.head, heads, null);
    state.query = within(state.query, queries, Math.max(0, Math.min(trace.main, queries - 1)));
    state.query = trace.keptQuery(state.query);
    state.token = within(state.token, tokens, null);
    state.row = within(state.row, tokens, null);
    state.node = within(state.node, Infinity, null);
    if (methods.length && !methods.includes(state.method)) state.method = methods[0];
    if (!["attention", "convolution", ...this.traces.flatMap((one) => one.parts)].includes(state.part)) state.part = "fused";
    for (const key of ["picked", "log", "averaged"]) state[key] = Boolean(state[key]);
    state.find = String(state.find ?? "").slice(0, 200);
    state.words = (state.words ?? null) === null ? null : Boolean(state.words);
    return state;
  }

  /** The limits of a selection: those of the larger of two compared traces. */
  limitsOf(state) {
    const traces = [this.traces[state.trace], this.traces[state.other]].filter(Boolean);
    const views = VIEWS.filter((view) => view.id === state.view || view.id === state.beside);
    const group = views.some((view) => view.controls.includes("group")) ? state.group : "";
    const most = (count) => Math.max(...traces.map(count));
    return {
      layers: most((trace) => (trace.layers ? trace.group(group).layers : 0)),
      heads: most((trace) => (trace.heads ? trace.group(group).heads : 0)),
      queries: most((trace) => trace.queries),
      tokens: most((trace) => trace.tokens.length),
      methods: [...new Set(traces.flatMap((trace) => trace.methods))],
    };
  }

  get limits() {
    return this.limitsOf(this.store.state);
  }

  /** Whether a view on the screen listens to a control. */
  uses = (control) => this.panes.some((pane) => pane.view.controls.includes(control));

  get trace() {
    return this.traces[this.store.state.trace];
  }

  /** Whether the panes that can be scaled by words are; null if some are and some are not. */
  get words() {
    const able = this.panes.filter(({ view, trace }) => view.controls.includes("words") && view.applies(trace) === true && trace.hasAside);
    const on = able.map((pane) => pane.selection.state.words);
    return on.some((one) => one !== on[0]) ? null : Boolean(on[0]);
  }

  /** Printing: paper is white. */
  printed(now) {
    this.printing = now;
    this.frame.dataset.theme = this.theme();
    for (const pane of this.panes) pane.draw();
  }

  theme() {
    if (this.printing) return "light";
    if (this.themeChoice !== "auto") return this.themeChoice;
    return this.darkness && this.darkness.matches ? "dark" : "light";
  }

  build() {
    this.tabs = element("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
    this.tools = element("div", { class: "tools" });
    this.controls = element("div", { class: "controls" });
    const name = `overt-${++mounted}`;
    this.area = element("main", { class: "panes", id: `${name}-panes`, role: "tabpanel" });
    this.status = element("p", { class: "status", id: `${name}-status`, role: "status", "aria-live": "polite" });
    this.help = element("dialog", { class: "help" });
    this.fillHelp();
    this.themeButton = element("button", { type: "button", onclick: () => this.nextTheme() });
    this.tools.append(
      element("button", { type: "button", title: "Save the first pane as SVG (of a very tall one, the visible part)", onclick: () => this.save("svg") }, "SVG"),
      element("button", { type: "button", title: "Save the first pane as PNG (of a very tall one, the visible part)", onclick: () => this.save("png") }, "PNG"),
      ...(this.options.link && location.protocol !== "about:" ? [element("button", { type: "button", title: "Copy a link to this view", onclick: (event) => this.copyLink(event.currentTarget) }, "Link")] : []),
      this.themeButton,
      element("button", { type: "button", title: "Keyboard shortcuts", "aria-label": "Keyboard shortcuts", onclick: () => this.help.showModal() }, "?"),
    );
    const title = element("h1", { title: shown(this.index.title || "", 1000) || null }, shown(this.index.title || "Overt", 120));
    const head = element("header", { class: "head" }, title, this.tabs, this.tools);
    this.frame = element("div", { class: "overt", "data-theme": this.theme() }, head, this.controls, this.area, this.status, this.help);
    this.root.append(this.frame);
  }

  fillHelp() {
    const list = element("dl");
    for (const [keys, meaning] of KEYS) list.append(element("dt", {}, keys), element("dd", {}, meaning));
    const close = element("button", { type: "button", onclick: () => this.help.close() }, "Close");
    const about = element("p", { class: "about" }, `Made by overt ${this.index.version || ""}. ${(this.index.mass ?? 1) < 1 ? `Each row keeps its largest weights, up to ${percent(this.index.mass)} of its sum; the page shows what was left out.` : "No weights were left out."}`);
    this.help.append(element("h2", {}, "Keyboard shortcuts"), list, about, close);
  }

  listen() {
    this.onkey = (event) => pressed(this, event);
    this.frame.addEventListener("keydown", this.onkey);
    this.onhash = () => this.readLink();
    if (this.options.link) globalThis.addEventListener("hashchange", this.onhash);
    this.ondark = () => this.recolour();
    if (this.darkness) this.darkness.addEventListener("change", this.ondark);
    // On a standalone page, keys work before anything is clicked; a notebook has its own keys.
    this.onbody = (event) => event.target === document.body && pressed(this, event);
    if (this.options.link) document.addEventListener("keydown", this.onbody);
    this.onprint = (event) => this.printed(event.type === "beforeprint");
    for (const type of ["beforeprint", "afterprint"]) globalThis.addEventListener(type, this.onprint);
  }

  readLink() {
    const hash = location.hash.replace(/^#/, "");
    if (hash !== this.store.toHash()) this.store.fromHash(hash);
  }

  writeLink() {
    const hash = this.store.toHash();
    try {
      const here = location.href.split("#")[0];
      if (location.hash.replace(/^#/, "") !== hash) history.replaceState(null, "", hash ? `${here}#${hash}` : here);
    } catch {
      // A page inside a notebook has no address.
    }
  }

  changed(what) {
    if (what === "select") {
      if (this.options.link) this.writeLink();
      if (this.options.onselect) this.options.onselect({ ...this.store.state });
      this.arrange();
      this.reveal();
    }
    for (const pane of this.panes) pane.ask();
    this.say();
  }

  arrived() {
    for (const pane of this.panes) pane.ask();
    this.say();
  }

  /** Create the panes for the state; existing ones are reused. */
  arrange() {
    const { state } = this.store;
    const arrangement = [[state.view, state.trace]];
    if (state.other !== null) arrangement.push([state.view, state.other]);
    if (state.beside) arrangement.push([state.beside, state.trace]);
    const key = arrangement.map((one) => one.join("/")).join(" ");
    if (key !== this.arranged) {
      this.arranged = key;
      const old = this.panes;
      this.panes = arrangement.map(([id, number_]) => {
        const trace = this.traces[number_];
        const existing = old.find((pane) => pane.view.id === id && pane.trace === trace);
        if (existing) return existing;
        const view = VIEWS.find((one) => one.id === id);
        const heading = this.traces.length > 1 ? `${view.title} · ${shown(shortName(trace), 80)}` : view.title;
        return new Pane(view, trace, this.store, () => this.theme(), heading, this.status.id, this.offers(view, trace));
      });
      for (const pane of old) if (!this.panes.includes(pane)) pane.destroy();
      this.area.replaceChildren(...this.panes.map((pane) => pane.root));
      this.area.dataset.panes = String(this.panes.length);
    }
    this.fillTabs();
    fillControls(this);
    this.recolour();
    this.say();
  }

  /** If a trace has no data for a view, the traces on the page that do. */
  offers(view, trace) {
    if (view.applies(trace) === true) return [];
    const traces = this.traces.map((one, at) => ({ one, at })).filter(({ one }) => view.applies(one) === true);
    return traces.map(({ one, at }) => ({ name: shown(one.name, 60), show: (pane) => this.show(pane, at) }));
  }

  /** Show another trace in a pane: on its side of a comparison, or else in all panes. */
  show(pane, trace) {
    const place = this.panes.indexOf(pane);
    const other = place === 1 && this.store.state.other !== null;
    this.store.select(other ? { other: trace } : { trace });
    // The button that was pressed is gone.
    (this.panes[place] || this.front).scroll.focus({ preventScroll: true });
  }

  reveal() {
    for (const pane of this.panes) {
      pane.tip.hidden = true; // it described what was there before
      pane.revealChosen();
    }
  }

  fillTabs() {
    const { state } = this.store;
    const fits = VIEWS.filter((view) => this.traces.some((trace) => view.applies(trace) === true));
    const focused = this.tabs.contains(document.activeElement);
    const byKeys = this.tabs.querySelector(":focus-visible"); // after a click, keys should go to the view
    this.tabs.replaceChildren(
      ...fits.map((view) => {
        const on = view.id === state.view;
        const tab = element("button", { type: "button", role: "tab", "aria-selected": String(on), "aria-controls": this.area.id, "data-view": view.id, tabindex: on ? "0" : "-1", onclick: () => this.store.select({ view: view.id }) }, view.title);
        return tab;
      }),
    );
    this.fits = fits;
    if (byKeys) this.tabs.querySelector('[aria-selected="true"]')?.focus();
    else if (focused) this.front.scroll.focus({ preventScroll: true });
  }

  /** Describe the selection, also for those who cannot see the drawing. */
  say() {
    const pane = this.panes.find((one) => one === this.store.pointing) || this.front;
    const { trace } = pane;
    const view = pane.view.describe ? pane.view : this.front.view;
    const near = (one) => trace.nearest(view.controls.includes("group") ? one : { ...one, group: "" });
    const [seen, state] = [near(this.store.seen), near(this.store.state)];
    const shows = view.applies(trace) === true;
    const text = (view.describe && shows ? view.describe({ trace, seen, state }) : null) ?? rowWords(trace, seen);
    const name = this.store.state.other === null ? "" : `${shown(shortName(trace), 40)}: `;
    this.status.textContent = trace.failed || name + text;
  }

  recolour() {
    this.frame.dataset.theme = this.theme();
    const names = { auto: "Auto", light: "Light", dark: "Dark" };
    this.themeButton.textContent = names[this.themeChoice];
    this.themeButton.title = "Colours: system setting, light or dark";
    for (const pane of this.panes) pane.ask();
  }

  nextTheme() {
    const order = ["auto", "light", "dark"];
    this.themeChoice = order[(order.indexOf(this.themeChoice) + 1) % 3];
    remember("overt-theme", this.themeChoice);
    this.recolour();
  }

  /** The pane of the selected tab. */
  get front() {
    return this.panes[0];
  }

  async save(kind) {
    await this.settled();
    this.front.svg(); // requests what lies beyond the screen
    await this.settled();
    const { state } = this.store;
    const name = `${fileName(this.trace.name)}-${state.view}.${kind}`;
    if (kind === "svg") download(name, new Blob([this.front.svg()], { type: "image/svg+xml" }));
    else download(name, await this.front.png());
  }

  async copyLink(button) {
    this.writeLink();
    try {
      await navigator.clipboard.writeText(location.href);
      button.textContent = "Copied";
    } catch {
      button.textContent = "In the address bar";
    }
    setTimeout(() => (button.textContent = "Link"), 1500);
  }

  /** Resolves when everything requested has arrived and been drawn. */
  async settled() {
    for (let quiet = 0; quiet < 2; ) {
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      const busy = this.traces.some((trace) => !trace.idle) || this.panes.some((pane) => pane.frame);
      quiet = busy ? 0 : quiet + 1;
    }
  }

  handle() {
    return {
      state: () => ({ ...this.store.state }),
      select: (changes) => this.store.select(changes),
      settled: () => this.settled(),
      svg: (pane = 0) => this.panes[pane].svg(),
      destroy: () => {
        for (const pane of this.panes) pane.destroy();
        globalThis.removeEventListener("hashchange", this.onhash);
        document.removeEventListener("keydown", this.onbody);
        for (const type of ["beforeprint", "afterprint"]) globalThis.removeEventListener(type, this.onprint);
        if (this.darkness) this.darkness.removeEventListener("change", this.ondark);
        this.frame.remove();
      },
    };
  }
}

/** A trace's name; of a caption, which is there itself, what wrote it. */
function shortName({ about, name }) {
  return about.caption ? about.caption.model : name;
}

/** What the chosen token draws on, in words. */
function rowWords(trace, seen) {
  if (!trace.methods.length || !trace.queries) return "";
  const { method, layer, query, token } = seen;
  const row = trace.row(method, layer, query, method === "raw" ? seen.head : null);
  const head = method === "raw" && trace.heads ? `, ${seen.head === null ? "mean of heads" : `head ${seen.head + 1}`}` : "";
  const place = trace.source + query;
  const text = `“${shown(trace.tokens[place], 30)}” (${tokenPlace(trace, place)}), layer ${layer + 1} of ${trace.layers}, ${trace.named(method)}${head}: `;
  if (!row) return `${text}…`;
  if (row.missing) return text + row.missing;
  const pointed = token === null || token === undefined ? "" : `“${shown(trace.tokens[token], 20)}” ${weightWords(row.values[token])} · `;
  const most = strongest(row.values, 5).map((one) => `${shown(trace.tokens[one.token], 20)} ${number(one.value)}`).join(", ");
  return text + pointed + (most || "nothing") + (row.lost > 0 ? ` · left out ${percent(row.lost)}` : "");
}

function fileName(text) {
  return String(text).normalize("NFKD").replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 40) || "trace";
}

function remembered(key) {
  try {
    const stored = localStorage.getItem(key);
    return ["auto", "light", "dark"].includes(stored) ? stored : null;
  } catch {
    return null; // pages in frames and on disk may have no storage
  }
}

function remember(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // As above.
  }
}
