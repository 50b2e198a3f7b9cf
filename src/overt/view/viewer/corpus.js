// The page of a corpus: tables of what the model draws on over all sentences, and examples to open.
import { palette, scaled } from "./colour.js";
import { choice, element, picker } from "./dom.js";
import { number, percent, shown } from "./words.js";

const MEASURES = { mean: "mean", ratio: "× even", contrast: "contrast" };
const ROWS = 60; // at first; more on request
const EXAMPLES = 25;

/** The state that the page starts with, or that a link names; what the page does not have is left out. */
export function corpusState(index, link = "") {
  const table = index.tables[0];
  const method = (index.methods.find(({ name }) => name === "rollout") ?? index.methods[0]).name; // as on other pages
  const state = { by: table.by, method, group: 0, sort: null, find: "", token: null, example: null };
  for (const [name, value] of new URLSearchParams(link)) {
    if (name === "by" && index.tables.some((one) => one.by === value)) state.by = value;
    if (name === "method" && index.methods.some((one) => one.name === value)) state.method = value;
    if (name === "sort" && (Object.hasOwn(MEASURES, value) || value === "sentences" || value === "name")) state.sort = value;
    if (name === "group" && /^\d+$/.test(value)) state.group = Number(value);
    if (name === "find" || name === "token") state[name] = value;
    if (name === "example" && index.examples.some((one) => String(one.row) === value)) state.example = Number(value);
  }
  return corpusLegal(index, state);
}

/** A layer in words: counted from 1, or, where its number is negative, from the top. */
export function corpusLayer(layer) {
  if (layer === -1) return "top layer";
  return layer < 0 ? `layer ${-layer} from the top` : `layer ${layer + 1}`;
}

function corpusLegal(index, state) {
  const table = index.tables.find((one) => one.by === state.by);
  if (state.group >= table.groups.length) state.group = 0;
  if (state.sort === "contrast" && !table.grouped) state.sort = null;
  return state;
}

/** The state as a link. */
export function corpusLink(index, state) {
  const first = corpusState(index);
  const link = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value !== null && value !== first[name]) link.set(name, String(value));
  }
  return link.toString();
}

/** How a table is sorted, unless the reader says otherwise. */
export function corpusSort(table, state) {
  return state.sort ?? (table.grouped ? "contrast" : table.by === "position" ? "name" : "mean");
}

/** Rows of a table that the state asks for, sorted: special tokens and others. */
export function corpusRows(table, state) {
  const sort = corpusSort(table, state);
  const find = state.find.trim().toLowerCase();
  const rows = table.rows.filter(
    (row) => state.method in row.of && (!table.grouped || row.group === state.group) && (!find || String(row.name).toLowerCase().includes(find)),
  );
  const size = (row) => (sort === "sentences" ? row.sentences : row.of[state.method][sort]?.[0] ?? -Infinity);
  const byName = (a, b) => (typeof a.name === "number" ? a.name - b.name : String(a.name).localeCompare(String(b.name), "en"));
  rows.sort((a, b) => (sort === "name" ? 0 : size(b) - size(a)) || byName(a, b));
  return { special: rows.filter((row) => row.special), others: rows.filter((row) => !row.special) };
}

/** Examples that the state asks for: with the selected token, of the selected group, with the text that is searched for. */
export function corpusExamples(index, state) {
  const table = index.tables.find((one) => one.by === state.by);
  const group = table.grouped ? table.groups[state.group].name : null;
  const find = state.find.trim().toLowerCase();
  return index.examples.filter((one) => {
    if (group !== null && one.groups[table.by] !== group) return false;
    if (state.token !== null && !one.tokens.includes(state.token)) return false;
    return !find || one.shown.join("").toLowerCase().includes(find) || one.tokens.some((token) => token.toLowerCase().includes(find));
  });
}

/** The scale of an example's colours: its largest word has the strongest; special tokens may be beyond. */
export function corpusScale(theme, example, method) {
  const values = example.values[method];
  const words = values.filter((_, i) => !example.special[i] && i !== example.query);
  const top = Math.max(...(words.length ? words : values).map(Math.abs), 0);
  return scaled(theme, top, { kind: values.some((value) => value < 0) ? "signs" : "sizes" });
}

function drawn(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

const count = (value) => value.toLocaleString("en");
const half = ([value, , high]) => (high === null || high === undefined ? "" : `± ${number(high - value)}`);

class CorpusView {
  constructor(root, index) {
    this.index = index;
    this.state = corpusState(index, location.hash.slice(1));
    this.rows = ROWS;
    this.examples = EXAMPLES;
    this.frame = element("div", { class: "overt corpus" });
    root.replaceChildren(this.frame);
    this.darkness = matchMedia("(prefers-color-scheme: dark)");
    this.darkness.addEventListener("change", () => this.draw());
    addEventListener("hashchange", () => {
      this.state = corpusState(index, location.hash.slice(1));
      this.draw();
    });
    this.build();
    this.draw();
    if (this.state.example !== null) this.frame.querySelector("article.open")?.scrollIntoView({ block: "start" });
  }

  build() {
    const { about } = this.index;
    const facts = [`${count(about.sentences)} sentences`, `${count(about.tokens)} tokens`, about.input, this.where()];
    this.controls = element("div", { class: "controls" });
    this.find = element("input", { type: "search", "aria-label": "Search", placeholder: "Search tokens and examples", spellcheck: "false", autocomplete: "off", maxlength: "100" });
    this.find.value = this.state.find;
    this.find.addEventListener("input", () => this.select({ find: this.find.value }));
    this.left = element("section", { class: "half", "aria-label": "Tables" });
    this.right = element("section", { class: "half", "aria-label": "Examples" });
    const warnings = [about.incomplete, about.filtered ? "a filter was applied: these are some of the corpus’s sentences" : null].filter(Boolean);
    this.frame.append(
      element("header", { class: "head" }, element("h1", {}, this.index.title), element("span", { class: "facts" }, facts.filter(Boolean).join(" · "))),
      ...warnings.map((text) => element("p", { class: "warning", role: "note" }, text)),
      this.controls,
      element("main", { class: "halves" }, this.left, this.right),
    );
  }

  where() {
    const { layer, queries } = this.index.about;
    const names = { cls: "the first token’s row", last: "the last token’s row" };
    const query = queries === null ? "the main token’s row" : names[queries] ?? (typeof queries === "number" ? `token ${queries}’s row` : "");
    return query ? `${corpusLayer(layer)}, ${query}` : corpusLayer(layer);
  }

  select(changes) {
    const before = this.state;
    this.state = corpusLegal(this.index, { ...before, ...changes });
    if (["by", "method", "group", "find", "sort"].some((name) => before[name] !== this.state[name])) this.rows = ROWS;
    if (["by", "group", "find", "token"].some((name) => before[name] !== this.state[name])) this.examples = EXAMPLES;
    const link = corpusLink(this.index, this.state);
    history.replaceState(null, "", link ? `#${link}` : location.pathname + location.search);
    this.draw();
  }

  get table() {
    return this.index.tables.find((one) => one.by === this.state.by);
  }

  draw() {
    this.frame.dataset.theme = this.darkness.matches ? "dark" : "light";
    this.theme = palette(this.frame.dataset.theme);
    this.drawControls();
    this.drawLeft();
    this.drawRight();
  }

  drawControls() {
    const { index, state, table } = this;
    const active = this.controls.contains(document.activeElement) ? document.activeElement : null;
    const label = active?.getAttribute("aria-label");
    const { missing } = index.about;
    const offered = [...index.tables.map(({ by, title }) => [by, title]), ...Object.entries(missing).map(([by, why]) => [by, { label: "Labels", error: "Errors" }[by] ?? by, why])];
    const controls = [
      choice("By", offered, state.by, (by) => this.select({ by, group: 0, sort: null })),
      choice("Method", index.methods.map(({ name, title }) => [name, title]), state.method, (method) => this.select({ method })),
    ];
    if (table.grouped && table.groups.length > 1) {
      const names = table.groups.map(({ name }, i) => [String(i), shown(name, 40)]);
      controls.push(picker("Group", names, String(state.group), (value) => this.select({ group: Number(value) })));
    }
    const search = this.controls.querySelector(".find") ?? element("div", { class: "control find" }, this.find);
    // The search stays the same element, so that typing goes on.
    for (const old of [...this.controls.children]) if (old !== search) old.remove();
    this.controls.prepend(...controls);
    if (!search.isConnected) this.controls.append(search);
    if (this.find.value !== state.find) this.find.value = state.find;
    if (label && active !== this.find) [...this.controls.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === label)?.focus();
  }

  drawLeft() {
    const { table, state, index } = this;
    const { about } = index;
    const found = corpusRows(table, state);
    const what = table.by === "position" ? "positions" : "tokens";
    const kept = table.grouped ? "" : `${count(found.others.length)} ${what}`;
    const left = table.all - table.rows.length;
    const facts = [
      kept,
      `each in ${about.least} or more sentences${table.grouped ? " of its group" : ""}`,
      left > 0 ? `${count(left)} more are not on this page, being at the top of no list` : null,
      about.left_out ? `${count(about.left_out)} sentences with attributions that are no numbers are left out` : null,
      about.bad ? `${count(about.bad)} bad ${about.bad === 1 ? "row is" : "rows are"} in the folder’s errors` : null,
    ];
    const parts = [element("p", { class: "soft" }, facts.filter(Boolean).join("; "))];
    if (table.grouped) parts.push(this.groupTable());
    if (table.by === "position" && found.others.length > 1) parts.push(this.positionChart(found.others));
    parts.push(this.rowTable(found), this.explained());
    const scroll = this.left.scrollTop;
    this.left.replaceChildren(...parts);
    this.left.scrollTop = scroll;
  }

  explained() {
    const { covers, even } = this.index.about;
    const contrast = "Contrast: × even in this group less × even in all other sentences. Special: the share of a sentence’s attribution that falls on special tokens. ";
    const order = "Rows at the top of a sorted table are there because they are large, in part by chance. ";
    return element("details", { open: true }, element("summary", {}, "What the numbers mean"), element("p", {}, `Mean: attribution of one occurrence. ${even} ${this.table.grouped ? contrast : ""}`), element("p", {}, `${covers} ${order}`));
  }

  groupTable() {
    const { table, state, index } = this;
    const head = [table.title, "sentences", "tokens each", ...index.methods.map(({ title }) => `special, ${title}`)];
    const body = table.groups.map((group, i) => {
      const name = element("button", { type: "button", class: "key", onclick: () => this.select({ group: i }) }, shown(group.name, 40));
      const cells = index.methods.map((method) => element("td", {}, percent(group.on_special[method.name][0]), " ", element("span", { class: "range optional" }, this.halfShare(group.on_special[method.name]))));
      return element("tr", { "aria-selected": String(i === state.group) }, element("td", {}, name), element("td", {}, count(group.sentences)), element("td", {}, group.tokens.toFixed(1)), ...cells);
    });
    const groups = element("table", { class: "groups" }, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {}, text)))), element("tbody", {}, ...body));
    return element("div", { class: "rows" }, groups);
  }

  halfShare([value, , high]) {
    return high === null ? "" : `± ${(100 * (high - value)).toFixed(1)}`;
  }

  rowTable({ special, others }) {
    const { table, state } = this;
    const sort = corpusSort(table, state);
    const measure = sort in MEASURES ? sort : table.grouped ? "contrast" : table.by === "position" ? "ratio" : "mean";
    const measures = Object.keys(MEASURES).filter((name) => name !== "contrast" || table.grouped);
    const heading = (key, title, left = false) => {
      const pressed = key === sort;
      const button = element("button", { type: "button", "aria-label": `Sort by ${title}`, onclick: () => this.select({ sort: key }) }, `${title}${pressed ? (key === "name" ? " ▴" : " ▾") : ""}`);
      return element("th", { class: left ? "left" : null, "aria-sort": pressed ? (key === "name" ? "ascending" : "descending") : null }, button);
    };
    const head = element(
      "tr",
      {},
      heading("name", table.by === "position" ? "position" : "token", true),
      heading("sentences", "sentences"),
      ...measures.map((name) => heading(name, MEASURES[name])),
      element("th", { class: "left" }, element("span", { class: "optional" }, this.legend(measure))),
    );
    const bodies = [];
    if (special.length) bodies.push(element("tbody", {}, ...special.map((row) => this.row(row, measures, measure, special))));
    const first = others.slice(0, this.rows);
    bodies.push(element("tbody", {}, ...first.map((row) => this.row(row, measures, measure, others))));
    const parts = [element("table", {}, element("thead", {}, head), ...bodies)];
    if (!special.length && !others.length) parts.push(element("p", { class: "soft" }, state.find ? "no row has this text" : "no row is in as many sentences"));
    if (others.length > first.length) {
      const more = () => {
        this.rows += 200;
        this.drawLeft();
      };
      parts.push(element("p", {}, element("button", { type: "button", class: "more", onclick: more }, `${count(others.length - first.length)} more`)));
    }
    return element("div", { class: "rows" }, ...parts);
  }

  legend(measure) {
    const sign = drawn("svg", { viewBox: "0 0 20 11", class: "sign", "aria-hidden": "true" }, drawn("line", { class: "interval", x1: 1, x2: 19, y1: 5.5, y2: 5.5 }), drawn("circle", { class: "point", cx: 10, cy: 5.5, r: 3.2 }));
    const even = drawn("svg", { viewBox: "0 0 8 11", class: "sign", "aria-hidden": "true" }, drawn("line", { class: "even", x1: 4, x2: 4, y1: 0, y2: 11 }));
    const words = { mean: "even", ratio: "1", contrast: "0" }[measure];
    return element("span", { class: "soft" }, sign, ` ${MEASURES[measure]}, 95 %`, even, words);
  }

  row(row, measures, measure, all) {
    const { state, table } = this;
    const of = row.of[state.method];
    const chosen = table.by !== "position" && state.token === row.name;
    const name = String(row.name);
    const key = table.by === "position" ? name : element("button", { type: "button", class: "key", title: `${name}: show examples`, "aria-pressed": String(chosen), onclick: () => this.select({ token: chosen ? null : name, example: null }) }, shown(name, 24));
    const cell = (value) => element("td", {}, number(value[0]), " ", element("span", { class: "range optional" }, half(value)));
    const occurring = `${count(row.occurrences)} occurrences in ${count(row.sentences)} sentences`;
    return element(
      "tr",
      { class: row.special ? "special" : null, "aria-selected": chosen ? "true" : null },
      element("td", {}, key),
      element("td", { title: occurring }, count(row.sentences)),
      ...measures.map((one) => cell(of[one])),
      element("td", { class: "chart" }, this.interval(of, measure, all)),
    );
  }

  /** A value with its interval and what to compare it with, on the scale of all rows. */
  interval(of, measure, all) {
    const mark = { mean: of.even, ratio: 1, contrast: 0 }[measure];
    const [low, high] = this.reach(measure, all);
    const x = (value) => `${(high > low ? 2 + (96 * (Math.min(Math.max(value, low), high) - low)) / (high - low) : 50).toFixed(2)}%`;
    const [value, from, to] = of[measure];
    const svg = drawn("svg", { role: "img", "aria-label": `${number(value)} ${half(of[measure])}` });
    if (value === null) return svg;
    svg.append(drawn("line", { class: "axis", x1: "2%", x2: "98%", y1: 8.5, y2: 8.5 }), drawn("line", { class: "even", x1: x(mark), x2: x(mark), y1: 3, y2: 14 }));
    if (from !== null) svg.append(drawn("line", { class: "interval", x1: x(from), x2: x(to), y1: 8.5, y2: 8.5 }));
    svg.append(drawn("circle", { class: "point", cx: x(value), cy: 8.5, r: 3.4 }));
    return svg;
  }

  /** The ends of a measure’s scale: of all rows by this method, a few wide intervals apart. */
  reach(measure, all) {
    const { method } = this.state;
    const key = `${measure}/${method}`;
    if (this.reached?.all === all && key in this.reached) return this.reached[key];
    const ends = all.flatMap((row) => row.of[method][measure].concat(measure === "mean" ? [row.of[method].even] : [])).filter((value) => value !== null);
    ends.sort((a, b) => a - b);
    const at = (part) => ends[Math.min(Math.max(Math.round(part * (ends.length - 1)), 0), ends.length - 1)] ?? 0;
    const mark = { mean: 0, ratio: 1, contrast: 0 }[measure];
    const found = measure === "contrast" ? [Math.min(at(0.01), mark), Math.max(at(0.99), mark)] : [Math.min(0, at(0.01)), Math.max(at(all.length > 20 ? 0.995 : 1), mark)];
    this.reached = { all, [key]: found };
    return found;
  }

  positionChart(rows) {
    const { method } = this.state;
    const sort = corpusSort(this.table, this.state);
    const measure = sort === "mean" ? "mean" : "ratio";
    const [wide, tall, left, below] = [640, 210, 44, 34];
    const byPlace = [...rows].sort((a, b) => a.name - b.name);
    const last = byPlace.at(-1).name;
    const first = byPlace[0].name;
    const values = byPlace.map((row) => ({ at: row.name, ...row.of[method] }));
    const high = Math.max(...values.map((one) => Math.max(one[measure][2] ?? one[measure][0], measure === "mean" ? one.even : 1)));
    const x = (place) => left + ((wide - left - 12) * (place - first)) / Math.max(last - first, 1);
    const y = (value) => tall - below - ((tall - below - 14) * Math.min(Math.max(value, 0), high)) / high;
    const svg = drawn("svg", { viewBox: `0 0 ${wide} ${tall}`, class: "positions", role: "img", "aria-label": `${MEASURES[measure]} by position` });
    const line = (pick) => values.map((one) => `${x(one.at).toFixed(1)},${y(pick(one)).toFixed(1)}`);
    const known = values.filter((one) => one[measure][1] !== null);
    const edge = (k, list) => list.map((one) => `${x(one.at).toFixed(1)},${y(one[measure][k]).toFixed(1)}`);
    svg.append(
      drawn("line", { class: "axis", x1: left, x2: wide - 12, y1: tall - below, y2: tall - below }),
      drawn("polygon", { class: "band", points: [...edge(1, known), ...edge(2, [...known].reverse())].join(" ") }),
      drawn("polyline", { class: "dashed", points: line((one) => (measure === "mean" ? one.even : 1)).join(" ") }),
      drawn("polyline", { class: "curve", points: line((one) => one[measure][0]).join(" ") }),
    );
    const text = (words, attributes) => svg.append(drawn("text", attributes, words));
    const step = Math.max(1, Math.ceil((last - first) / 10));
    for (let place = first; place <= last; place += step) text(String(place), { x: x(place), y: tall - below + 14, "text-anchor": "middle" });
    for (const part of [0, 0.5, 1]) text(number(high * part), { x: left - 6, y: y(high * part) + 4, "text-anchor": "end" });
    text("position of the word (special tokens are counted, but not shown)", { x: (left + wide) / 2, y: tall - 4, "text-anchor": "middle" });
    text(`${MEASURES[measure]} with 95 % interval; dashed: an even spread`, { x: left + 4, y: 10 });
    return svg;
  }

  drawRight() {
    const { index, state } = this;
    const found = corpusExamples(index, state);
    const parts = [element("h2", {}, "Examples"), element("p", { class: "soft" }, `The page has ${index.about.sample}.`)];
    const chips = [];
    const chip = (text, clear) => chips.push(element("span", { class: "chip" }, text, element("button", { type: "button", "aria-label": `Clear ${text}`, onclick: clear }, "×")));
    if (state.token !== null) chip(`with “${shown(state.token, 24)}”`, () => this.select({ token: null }));
    const groups = this.table.grouped ? ` in ${this.table.title}: ${shown(this.table.groups[state.group].name, 40)}` : "";
    parts.push(element("p", {}, `${count(found.length)} here${groups} `, ...chips));
    const listed = found.slice(0, this.examples);
    const opened = index.examples.find((one) => one.row === state.example);
    if (opened && !listed.includes(opened)) listed.unshift(opened);
    parts.push(...listed.map((one) => this.example(one)));
    if (found.length > this.examples) {
      const more = () => {
        this.examples += 50;
        this.drawRight();
      };
      parts.push(element("p", {}, element("button", { type: "button", class: "more", onclick: more }, `${count(found.length - this.examples)} more`)));
    }
    if (!found.length && !opened) parts.push(element("p", { class: "soft" }, "No example on this page has this; the corpus may: overt.corpus.open(…).filter(…)."));
    const shades = "Shades: the darkest is the sentence’s largest word; special tokens, in italics, may be beyond. Framed: the token whose row this is. A token’s number is in its tip.";
    parts.push(element("p", { class: "soft" }, shades));
    const scroll = this.right.scrollTop;
    this.right.replaceChildren(...parts);
    this.right.scrollTop = scroll;
  }

  example(one) {
    const { state, index } = this;
    const open = one.row === state.example;
    const predicted = one.prediction !== undefined ? `predicted ${shown(one.prediction, 30)}${one.probability === null ? "" : ` (${percent(one.probability)})`}` : null;
    const wrong = one.groups.error === "wrong";
    const header = element(
      "header",
      {},
      element("span", {}, `row ${count(one.row)}`),
      one.label !== undefined ? element("span", {}, `label ${shown(one.groups.label ?? one.label, 30)}`) : null,
      predicted ? element("span", { class: wrong ? "wrong" : null }, `${predicted}${wrong ? ", wrong" : ""}`) : null,
      one.cut ? element("span", {}, "cut: only its beginning was read") : null,
      element("span", { class: "fill" }),
      element("button", { type: "button", "aria-expanded": String(open), onclick: () => this.select({ example: open ? null : one.row }) }, open ? "close" : "open"),
    );
    if (!open) return element("article", {}, header, this.words(one, state.method));
    const lines = index.methods.flatMap(({ name, title }) => [element("span", { class: "name" }, title), this.words(one, name)]);
    const columns = Object.entries(one.columns).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]);
    return element("article", { class: "open" }, header, element("div", { class: "by-method" }, ...lines), columns.length ? element("dl", {}, ...columns) : null);
  }

  words(one, method) {
    const values = one.values[method];
    const scale = corpusScale(this.theme, one, method);
    const total = values.reduce((sum, value) => sum + value, 0);
    const line = element("div", { class: "words", dir: "auto" });
    one.tokens.forEach((token, i) => {
      const text = one.shown[i];
      if (text.startsWith(" ")) line.append(" ");
      const kinds = ["token", one.special[i] ? "special" : "", i === one.query ? "query" : "", this.marks(token) ? "found" : ""].filter(Boolean).join(" ");
      const tip = `${token} (token ${i}): ${number(values[i])}, ${number((values[i] * values.length) / total)} × even`;
      const span = element("span", { class: kinds, title: tip, onclick: () => this.select({ token: this.state.token === token ? null : token }) }, shown(text.trimStart(), 60));
      span.style.background = scale.css(values[i]);
      span.style.color = scale.ink(values[i]);
      line.append(span);
    });
    return line;
  }

  marks(token) {
    const find = this.state.find.trim().toLowerCase();
    return token === this.state.token || (find && token.toLowerCase().includes(find));
  }
}

const corpusRoot = globalThis.document?.getElementById("overt");
if (corpusRoot) {
  const view = new CorpusView(corpusRoot, JSON.parse(document.getElementById("overt-index").textContent));
  globalThis.overt = { state: () => view.state, select: (changes) => view.select(changes), settled: async () => {} };
}
