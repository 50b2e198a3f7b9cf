// The viewer: a head with tabs and controls, panes that share one selection, a line that says what is chosen.
import { TraceData } from "./data.js";
import { choice, download, element, picker, slider, tick } from "./dom.js";
import { Pane } from "./pane.js";
import { strongest } from "./parts.js";
import { Store } from "./store.js";
import { VIEWS } from "./views.js";
import { number, percent, shown } from "./words.js";

const KEYS = [
  ["↑ ↓", "the token before, after"],
  ["← →", "the layer below, above"],
  ["[ ]", "the head before, after"],
  ["m", "the next method"],
  ["1 – 9", "a view"],
  ["g", "log scale"],
  ["w", "scale by words alone"],
  ["Esc", "let go of what was picked"],
  ["?", "this list"],
];

/**
 * Show a page's traces in an element.
 *
 * @param {HTMLElement} root
 * @param {{index: object, block: (number: number) => Promise<Uint8Array>}} source the index, and packed bytes by number
 * @param {{link?: boolean, state?: object, onselect?: (state: object) => void}} options `link`: keep the selection in
 *   the address, which is on unless said otherwise
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
    const view = fits[0] || VIEWS[0];
    const wide = globalThis.innerWidth === undefined || innerWidth > 1100;
    const strip = view.id !== "strip" && fits.some((one) => one.id === "strip");
    return {
      view: view.id,
      beside: wide && strip ? "strip" : null,
      trace: 0,
      other: null,
      group: "",
      layer: Math.max(trace.layers - 1, 0),
      head: null,
      query: trace.main,
      token: null,
      node: null,
      method: trace.methods.includes("rollout") ? "rollout" : trace.methods[0] || "raw",
      part: "fused",
      picked: false,
      log: false,
      words: false,
    };
  }

  /** The nearest state that the page can show. */
  legal(state) {
    const within = (value, count, otherwise) => (Number.isInteger(value) && value >= 0 && value < count ? value : otherwise);
    const trace = this.traces[(state.trace = within(state.trace, this.traces.length, 0))];
    state.other = state.other === state.trace ? null : within(state.other, this.traces.length, null);
    if (!VIEWS.some((view) => view.id === state.view)) state.view = VIEWS[0].id;
    if (!VIEWS.some((view) => view.id === state.beside) || state.beside === state.view) state.beside = null;
    if (!trace.groups.includes(state.group)) state.group = "";
    const layers = trace.layers ? trace.group(state.group).layers : 0;
    state.layer = within(state.layer, layers, Math.max(layers - 1, 0));
    state.head = within(state.head, trace.heads ? trace.group(state.group).heads : 0, null);
    state.query = within(state.query, Math.max(trace.queries, 1), Math.min(trace.main, Math.max(trace.queries - 1, 0)));
    state.token = within(state.token, trace.tokens.length, null);
    state.node = within(state.node, Infinity, null);
    if (trace.methods.length && !trace.methods.includes(state.method)) state.method = trace.methods[0];
    if (!["attention", "convolution", "fused"].includes(state.part)) state.part = "fused";
    state.picked = Boolean(state.picked);
    state.log = Boolean(state.log);
    state.words = Boolean(state.words);
    return state;
  }

  get trace() {
    return this.traces[this.store.state.trace];
  }

  theme() {
    if (this.themeChoice !== "auto") return this.themeChoice;
    return this.darkness && this.darkness.matches ? "dark" : "light";
  }

  build() {
    this.tabs = element("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
    this.tools = element("div", { class: "tools" });
    this.controls = element("div", { class: "controls" });
    this.area = element("main", { class: "panes" });
    this.status = element("p", { class: "status", role: "status", "aria-live": "polite" });
    this.help = element("dialog", { class: "help" });
    this.fillHelp();
    this.themeButton = element("button", { type: "button", onclick: () => this.nextTheme() });
    this.tools.append(
      element("button", { type: "button", title: "The view as a vector picture", onclick: () => this.save("svg") }, "SVG"),
      element("button", { type: "button", title: "The view as a picture", onclick: () => this.save("png") }, "PNG"),
      ...(this.options.link ? [element("button", { type: "button", title: "An address that leads back here", onclick: (event) => this.copyLink(event.currentTarget) }, "Link")] : []),
      this.themeButton,
      element("button", { type: "button", title: "Keys", "aria-label": "Keys", onclick: () => this.help.showModal() }, "?"),
    );
    const title = element("h1", {}, shown(this.index.title || "Overt", 120));
    const head = element("header", { class: "head" }, title, this.tabs, this.tools);
    this.frame = element("div", { class: "overt", "data-theme": this.theme() }, head, this.controls, this.area, this.status, this.help);
    this.root.append(this.frame);
  }

  fillHelp() {
    const list = element("dl");
    for (const [keys, meaning] of KEYS) list.append(element("dt", {}, keys), element("dd", {}, meaning));
    const close = element("button", { type: "button", onclick: () => this.help.close() }, "Close");
    const about = element("p", { class: "about" }, `Made by overt ${this.index.version || ""}. A row keeps its largest weights up to ${percent(this.index.mass ?? 1)} of its sum; what was left out is said beside it.`);
    this.help.append(element("h2", {}, "Keys"), list, about, close);
  }

  listen() {
    this.onkey = (event) => this.key(event);
    this.frame.addEventListener("keydown", this.onkey);
    this.onhash = () => this.readLink();
    if (this.options.link) globalThis.addEventListener("hashchange", this.onhash);
    this.ondark = () => this.recolour();
    if (this.darkness) this.darkness.addEventListener("change", this.ondark);
    // Keys work before anything was clicked.
    this.onbody = (event) => event.target === document.body && this.key(event);
    document.addEventListener("keydown", this.onbody);
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
      // A page inside a notebook has no address of its own.
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

  /** The panes that the state asks for; those that stay are kept. */
  arrange() {
    const { state } = this.store;
    const wanted = [[state.view, state.trace]];
    if (state.other !== null) wanted.push([state.view, state.other]);
    if (state.beside) wanted.push([state.beside, state.trace]);
    const key = wanted.map((one) => one.join("/")).join(" ");
    if (key !== this.arranged) {
      this.arranged = key;
      const old = this.panes;
      this.panes = wanted.map(([id, number_]) => {
        const trace = this.traces[number_];
        const kept = old.find((pane) => pane.view.id === id && pane.trace === trace);
        if (kept) return kept;
        const view = VIEWS.find((one) => one.id === id);
        const heading = this.traces.length > 1 ? `${view.title} · ${shown(trace.name, 80)}` : view.title;
        return new Pane(view, trace, this.store, () => this.theme(), heading);
      });
      for (const pane of old) if (!this.panes.includes(pane)) pane.destroy();
      this.area.replaceChildren(...this.panes.map((pane) => pane.root));
      this.area.dataset.panes = String(this.panes.length);
    }
    this.fillTabs();
    this.fillControls();
    this.recolour();
    this.say();
  }

  reveal() {
    for (const pane of this.panes) {
      pane.tip.hidden = true; // it told of what was there before
      pane.revealChosen();
    }
  }

  fillTabs() {
    const { state } = this.store;
    const fits = VIEWS.filter((view) => this.traces.some((trace) => view.applies(trace) === true));
    const focused = this.tabs.querySelector(":focus-visible"); // by keys: who clicked wants the keys for the view
    this.tabs.replaceChildren(
      ...fits.map((view) => {
        const on = view.id === state.view;
        const tab = element("button", { type: "button", role: "tab", "aria-selected": String(on), "data-view": view.id, tabindex: on ? "0" : "-1", onclick: () => this.store.select({ view: view.id }) }, view.title);
        return tab;
      }),
    );
    this.fits = fits;
    if (focused) this.tabs.querySelector('[aria-selected="true"]')?.focus();
  }

  fillControls() {
    const { store, trace } = this;
    const { state } = store;
    const views = this.panes.map((pane) => pane.view);
    const uses = (control) => views.some((view) => (view.controls || []).includes(control));
    const focused = document.activeElement && this.controls.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    // A slider that is being dragged must not be replaced under the finger.
    if (focused && document.activeElement.type === "range" && this.controlsFor === this.arranged + state.trace + state.group) {
      return;
    }
    this.controlsFor = this.arranged + state.trace + state.group;
    const made = [];
    if (this.traces.length > 1) {
      const names = this.traces.map((one, i) => [String(i), shown(one.name, 60)]);
      made.push(picker("Trace", names, String(state.trace), (value) => store.select({ trace: Number(value) })));
      made.push(picker("Compare with", [["", "–"], ...names.filter(([i]) => Number(i) !== state.trace)], state.other === null ? "" : String(state.other), (value) => store.select({ other: value === "" ? null : Number(value) })));
    }
    if (uses("method") && trace.methods.length > 1) made.push(choice("Method", trace.methods.map((one) => [one, one]), state.method, (method) => store.select({ method })));
    if (uses("group") && trace.groups.length > 1) {
      const titles = { "": "decoder", encoder: "encoder", cross: "decoder → encoder" };
      made.push(choice("Attention", trace.groups.map((one) => [one, titles[one]]), state.group, (group) => store.select({ group })));
    }
    if (uses("part")) made.push(choice("Part", ["attention", "convolution", "fused"].map((one) => [one, one]), state.part, (part) => store.select({ part })));
    const layers = trace.layers ? trace.group(state.group).layers : 0;
    if (uses("layer") && layers > 1) made.push(slider("Layer", layers, state.layer, (value) => `${value + 1} of ${layers}`, (layer) => store.select({ layer })));
    if (uses("head") && trace.heads) {
      const heads = Array.from({ length: trace.group(state.group).heads }, (_, i) => [String(i), String(i + 1)]);
      made.push(picker("Head", [["", "mean"], ...heads], state.head === null ? "" : String(state.head), (value) => store.select({ head: value === "" ? null : Number(value) })));
    }
    if (uses("query") && trace.queries > 1) {
      const box = element("input", { type: "number", min: "0", max: String(trace.queries - 1), "aria-label": "Token", onchange: () => store.select({ query: Math.min(Math.max(Number(box.value) || 0, 0), trace.queries - 1) }) });
      box.value = String(state.query);
      made.push(element("label", { class: "control" }, element("span", {}, "Token"), box, element("output", { dir: "auto" }, shown(trace.tokens[trace.source + state.query], 14))));
    }
    if (uses("words") && trace.special.some(Boolean)) made.push(tick("scale by words", state.words, (words) => store.select({ words }), "The scale ends at the largest weight of a word, without special tokens and the token itself"));
    if (uses("log")) made.push(tick("log scale", state.log, (log) => store.select({ log })));
    if (this.fits.length > 1) {
      const others = this.fits.filter((view) => view.id !== state.view).map((view) => [view.id, view.title]);
      made.push(picker("Beside", [["", "–"], ...others], state.beside || "", (value) => store.select({ beside: value || null })));
    }
    this.controls.replaceChildren(...made);
    if (focused) {
      const again = [...this.controls.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === focused);
      if (again) again.focus();
    }
  }

  /** Say what is chosen, for everybody and for those who cannot see the drawing. */
  say() {
    const { seen, state } = this.store;
    const { trace } = this;
    const view = VIEWS.find((one) => one.id === state.view);
    let text = view.describe && view.applies(trace) === true ? view.describe({ trace, seen, state }) : null;
    if (text === null && trace.methods.length && trace.queries) {
      const row = trace.row(seen.method, seen.layer, seen.query, seen.method === "raw" ? seen.head : null);
      const head = seen.method === "raw" && trace.heads ? `, ${seen.head === null ? "mean of heads" : `head ${seen.head + 1}`}` : "";
      text = `“${shown(trace.tokens[trace.source + seen.query], 30)}” (token ${seen.query}), layer ${seen.layer + 1} of ${trace.layers}, ${seen.method}${head}: `;
      if (!row) text += "…";
      else if (row.missing) text += row.missing;
      else {
        text += strongest(row.values, 5).map((one) => `${shown(trace.tokens[one.token], 20)} ${number(one.value)}`).join(", ");
        if (row.lost > 0) text += ` · left out ${percent(row.lost)}`;
        if (seen.token !== null && seen.token !== undefined) text += ` · “${shown(trace.tokens[seen.token], 20)}” ${number(row.values[seen.token])}`;
      }
    }
    this.status.textContent = trace.failed || text || "";
  }

  recolour() {
    this.frame.dataset.theme = this.theme();
    const names = { auto: "Auto", light: "Light", dark: "Dark" };
    this.themeButton.textContent = names[this.themeChoice];
    this.themeButton.title = "Colours: as the system has them, light, dark";
    for (const pane of this.panes) pane.ask();
  }

  nextTheme() {
    const order = ["auto", "light", "dark"];
    this.themeChoice = order[(order.indexOf(this.themeChoice) + 1) % 3];
    remember("overt-theme", this.themeChoice);
    this.recolour();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.help.open) return;
    const inTabs = this.tabs.contains(event.target);
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const { store, trace } = this;
    const { state } = store;
    const heads = trace.heads ? trace.group(state.group).heads : 0;
    if (inTabs && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
      const at = this.fits.findIndex((view) => view.id === state.view);
      const next = this.fits[(at + (event.key === "ArrowRight" ? 1 : -1) + this.fits.length) % this.fits.length];
      store.select({ view: next.id });
      this.tabs.querySelector('[aria-selected="true"]').focus();
      event.preventDefault();
      return;
    }
    const turn = (value, count, step) => (value === null ? (step > 0 ? 0 : count - 1) : value + step < 0 || value + step >= count ? null : value + step);
    const actions = {
      ArrowUp: () => store.select({ query: Math.max(state.query - 1, 0) }),
      ArrowDown: () => store.select({ query: Math.min(state.query + 1, Math.max(trace.queries - 1, 0)) }),
      ArrowLeft: () => store.select({ layer: Math.max(state.layer - 1, 0) }),
      ArrowRight: () => store.select({ layer: state.layer + 1 < (trace.layers ? trace.group(state.group).layers : 1) ? state.layer + 1 : state.layer }),
      "[": () => heads && store.select({ head: turn(state.head, heads, -1) }),
      "]": () => heads && store.select({ head: turn(state.head, heads, 1) }),
      m: () => trace.methods.length && store.select({ method: trace.methods[(trace.methods.indexOf(state.method) + 1) % trace.methods.length] }),
      g: () => store.select({ log: !state.log }),
      w: () => store.select({ words: !state.words }),
      Escape: () => store.select({ picked: false, token: null, node: null }),
      "?": () => this.help.showModal(),
    };
    const place = Number(event.key) - 1;
    if (this.fits[place]) store.select({ view: this.fits[place].id });
    else if (Object.hasOwn(actions, event.key)) actions[event.key]();
    else return;
    event.preventDefault();
  }

  /** The pane whose view is the one on top of the page. */
  get front() {
    return this.panes[0];
  }

  async save(kind) {
    await this.settled();
    this.front.svg(); // asks for what lies beyond the screen
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

  /** When everything that was asked for is here and drawn. */
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
        if (this.darkness) this.darkness.removeEventListener("change", this.ondark);
        this.frame.remove();
      },
    };
  }
}

function fileName(text) {
  return String(text).normalize("NFKD").replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 40) || "trace";
}

function remembered(key) {
  try {
    const found = localStorage.getItem(key);
    return ["auto", "light", "dark"].includes(found) ? found : null;
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
