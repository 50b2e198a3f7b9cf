// The page of `overt judge`: a table of methods, and one text as each method reads it, with words deleted by a slider.
import { palette, scaled } from "./colour.js";
import { element, picker, slider } from "./dom.js";
import { number, percent, shown } from "./words.js";

const judgeFirst = 4; // the step that is shown first: 20 % of the words
const judgeKeys = [
  ["← →", "fewer, more words deleted"],
  ["p n", "previous, next text"],
  ["s", "sort by the next column"],
];

/** The state that the page starts with, or that a link names; what the page does not have is left out. */
export function judgeState(index, link = "") {
  const state = { text: 0, step: Math.min(judgeFirst, index.about.shares.length - 1), sort: index.about.sort };
  for (const [name, value] of new URLSearchParams(link)) {
    if (name === "text" && /^\d{1,6}$/.test(value) && Number(value) < index.texts.length) state.text = Number(value);
    if (name === "step" && /^\d{1,3}$/.test(value) && Number(value) < index.about.shares.length) state.step = Number(value);
    if (name === "sort" && judgeColumns(index).some(({ key }) => key === value)) state.sort = value;
  }
  return state;
}

/** The state as a link. */
export function judgeLink(index, state) {
  const first = judgeState(index);
  const link = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) if (value !== first[name]) link.set(name, String(value));
  return link.toString();
}

/** Columns that methods can be sorted by: name, measures, time. */
export function judgeColumns(index) {
  return [{ key: "name", title: "method", better: "" }, ...index.measures, { key: "seconds", title: "time per text", better: "less", about: "Seconds to score a text, without the deletions that judge it." }];
}

/**
 * Methods, the best by a column first; then those that have other texts by it than all others, those without it last, and
 * equal ones by name. What should be near zero is sorted by its size.
 */
export function judgeSorted(index, sort) {
  const column = judgeColumns(index).find(({ key }) => key === sort);
  const sign = column.better === "more" ? -1 : 1;
  const plain = (method) => (sort === "seconds" ? method.seconds : method.measures[sort]?.[0]) ?? null;
  const value = (method) => (column.better === "zero" && plain(method) !== null ? Math.abs(plain(method)) : plain(method));
  const apart = (method) => Number(judgeApart(method, sort));
  const byName = (a, b) => a.title.localeCompare(b.title, "en");
  return [...index.methods].sort((a, b) => {
    if (sort === "name") return byName(a, b);
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null) || byName(a, b);
    return apart(a) - apart(b) || sign * (x - y) || byName(a, b);
  });
}

/** Whether a method has no place among the others by a column, because its mean is of other texts. */
export function judgeApart(method, sort) {
  return (method.apart ?? []).includes(sort);
}

/** How much of a text is deleted at a step, in words. */
export function judgeDeleted(index, text, step) {
  const share = `${percent(index.about.shares[step])} of the words`;
  return text.counts.length ? `${share}: ${text.counts[step]} of ${text.words.length}` : share;
}

/** Methods that have scores below zero in some text: in all texts, zero is in the middle of their colours. */
export function judgeSigned(index) {
  const below = (text, name) => text.methods[name]?.scores.some((value) => value < 0);
  return new Set(index.methods.map(({ name }) => name).filter((name) => index.texts.some((text) => below(text, name))));
}

/** What deleting words does: which are deleted, the probability of the text's class, and the class that is predicted now. */
export function judgeStep(text, name, step) {
  const own = text.methods[name];
  if (!own) return null;
  const deleted = new Set(own.order.slice(0, text.counts[step]));
  return { deleted, probability: own.probabilities[step], now: own.now[step], top: own.top[step], flipped: own.now[step] !== text.predicted };
}

/**
 * The scale of a method's colours in a text: from the least score to the greatest, so that the order of words is seen where
 * all are nearly as large. Signed scores have zero in the middle, and the largest of either sign has the strongest colour.
 */
export function judgeScale(theme, scores, signed = scores.some((value) => value < 0)) {
  const least = signed ? 0 : Math.min(...scores);
  const greatest = Math.max(...scores.map((value) => (signed ? Math.abs(value) : value)));
  const scale = scaled(theme, greatest - least, { kind: signed ? "signs" : "sizes" });
  return { kind: scale.kind, least, greatest, css: (value) => scale.css(value - least), ink: (value) => scale.ink(value - least) };
}

/** A measure with three digits; what rounds to zero has no sign. */
export function judgeDigits(value) {
  const text = Math.abs(value).toFixed(3);
  return value < 0 && text !== "0.000" ? `−${text}` : text;
}

/** Seconds in few words. */
export function judgeTime(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 0.995 ? `${Math.max(1, Math.round(1000 * seconds))} ms` : `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
}

function judgeDrawn(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/** The page. */
export class JudgeView {
  /**
   * @param {HTMLElement} root
   * @param {object} index
   * @param {{link?: boolean}} options whether the address follows the state
   */
  constructor(root, index, { link = true } = {}) {
    this.index = index;
    this.linked = link;
    this.state = judgeState(index, link ? location.hash.slice(1) : "");
    this.frame = element("div", { class: "overt judge" });
    root.replaceChildren(this.frame);
    this.signed = judgeSigned(index);
    this.stop = new AbortController();
    const { signal } = this.stop;
    this.darkness = matchMedia("(prefers-color-scheme: dark)");
    this.darkness.addEventListener("change", () => this.draw(), { signal });
    if (link) {
      addEventListener("hashchange", () => {
        this.state = judgeState(index, location.hash.slice(1));
        this.draw();
      }, { signal });
    }
    addEventListener("keydown", (event) => this.pressed(event), { signal });
    addEventListener("resize", () => this.hint(), { signal });
    this.build();
    this.draw();
  }

  /** Listen no more. */
  destroy() {
    this.stop.abort();
  }

  build() {
    const { about, index } = { about: this.index.about, index: this.index };
    this.table = element("section", { class: "ranking", "aria-label": "Methods" });
    this.controls = element("div", { class: "controls" });
    this.reading = element("section", { class: "reading", "aria-label": "One text, by all methods" });
    const keys = judgeKeys.flatMap(([key, what]) => [element("dt", {}, key), element("dd", {}, what)]);
    const meanings = index.measures.flatMap(({ title, about: what }) => [element("dt", {}, title), element("dd", {}, what)]);
    this.frame.append(
      element("header", { class: "head" }, element("h1", {}, index.title), element("span", { class: "facts" }, about.facts.join(" · "))),
      ...about.notes.map((text) => element("p", { class: "note", role: "note" }, text)),
      this.table,
      element("details", {}, element("summary", {}, "What the columns mean"), element("p", { class: "soft" }, about.intervals), element("dl", {}, ...meanings)),
      this.controls,
      this.reading,
      element("details", {}, element("summary", {}, "Keys"), element("dl", {}, ...keys)),
    );
  }

  select(changes) {
    this.state = { ...this.state, ...changes };
    if (this.linked) {
      const link = judgeLink(this.index, this.state);
      history.replaceState(null, "", link ? `#${link}` : location.pathname + location.search);
    }
    this.draw();
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    // A table that is in use is scrolled by arrows.
    if (event.target.classList?.contains("rows") && event.key.startsWith("Arrow")) return;
    const { index, state } = this;
    const columns = judgeColumns(index);
    const texts = index.texts.length;
    const actions = {
      ArrowLeft: () => this.select({ step: Math.max(state.step - 1, 0) }),
      ArrowRight: () => this.select({ step: Math.min(state.step + 1, index.about.shares.length - 1) }),
      p: () => this.select({ text: (state.text + texts - 1) % texts }),
      n: () => this.select({ text: (state.text + 1) % texts }),
      s: () => this.select({ sort: columns[(columns.findIndex(({ key }) => key === state.sort) + 1) % columns.length].key }),
    };
    if (!Object.hasOwn(actions, event.key)) return;
    actions[event.key]();
    event.preventDefault();
  }

  draw() {
    this.frame.dataset.theme = this.darkness.matches ? "dark" : "light";
    this.theme = palette(this.frame.dataset.theme);
    const label = this.frame.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.drawTable();
    this.drawControls();
    this.drawReading();
    // Elements are made anew, and the one that was in use is in use again.
    if (label) [...this.frame.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === label)?.focus();
  }

  drawTable() {
    const { index, state } = this;
    const columns = judgeColumns(index);
    const head = columns.map(({ key, title, better, about, texts }) => {
      const sorted = key === state.sort;
      const arrow = { more: " ↑", less: " ↓", zero: " → 0" }[better] ?? "";
      const button = element("button", { type: "button", "aria-label": `Sort by ${title}`, title: about ?? null, onclick: () => this.select({ sort: key }) }, `${title}${arrow}`);
      return element("th", { scope: "col", "aria-sort": sorted ? ({ more: "descending", zero: "other" }[better] ?? "ascending") : null }, button, texts ? element("span", { class: "range", title: about }, `${texts} texts`) : null);
    });
    const body = judgeSorted(index, state.sort).map((method) => {
      const cells = index.measures.map(({ key }) => this.cell(method.measures[key], method));
      const name = element("th", { scope: "row", title: method.about ?? null }, method.title);
      const some = method.texts < index.about.texts ? element("span", { class: "range" }, ` ${method.texts} of ${index.about.texts} texts`) : null;
      if (some) name.append(some);
      const kinds = [method.control ? "control-row" : "", judgeApart(method, state.sort) ? "apart" : ""].filter(Boolean).join(" ");
      return element("tr", { class: kinds || null }, name, ...cells, element("td", {}, judgeTime(method.seconds)));
    });
    const refused = index.refused.map(({ title, reason }) =>
      element("tr", { class: "refused" }, element("th", { scope: "row" }, title), element("td", { colspan: String(columns.length - 1) }, element("span", {}, `– ${reason}`))));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body, ...refused));
    const left = this.table.firstElementChild?.scrollLeft ?? 0;
    const rows = element("div", { class: "rows", role: "group", "aria-label": "Table of methods", onscroll: () => this.hint() }, table);
    const some = index.methods.some((method) => judgeApart(method, state.sort)) ? element("p", { class: "soft" }, "Below the line: of fewer texts, and not to be compared with the others by this column.") : null;
    this.table.replaceChildren(rows, element("p", { class: "soft more", "aria-hidden": "true" }, "more columns: scroll the table →"), ...(some ? [some] : []));
    rows.scrollLeft = left;
    this.hint();
  }

  /** Whether the table goes on beyond its right edge, which fades then. */
  hint() {
    const rows = this.table.firstElementChild;
    const wide = rows.scrollWidth > rows.clientWidth + 1;
    this.table.classList.toggle("wide", wide);
    this.table.classList.toggle("goes-on", wide && rows.scrollLeft + rows.clientWidth < rows.scrollWidth - 1);
    rows.tabIndex = wide ? 0 : -1;
  }

  cell(values, method) {
    if (!values || values[0] === null) return element("td", {}, "–");
    const [value, low, high, best, texts, chance] = values;
    const about = texts === undefined || texts === this.index.about.texts ? null : `${method.title}: of ${texts} of ${this.index.about.texts} texts`;
    const half = low === null ? "" : ` ± ${((high - low) / 2).toFixed(3)}`;
    return element("td", { class: best ? "best" : null, title: about }, `${judgeDigits(value)}${chance ? "°" : ""}`, element("span", { class: "range" }, half));
  }

  drawControls() {
    const { index, state } = this;
    const { shares } = index.about;
    const text = index.texts[state.text];
    const names = index.texts.map(({ name, words }, i) => [String(i), `${name}: ${shown(words.slice(0, 12).join(" "), 48)}`]);
    const deleted = (step) => judgeDeleted(index, text, step);
    const turn = (step, sign, title) =>
      element("button", { type: "button", "aria-label": title, onclick: () => this.select({ text: (state.text + step + names.length) % names.length }) }, sign);
    // A slider that is being dragged stays the same element.
    if (this.range?.dataset.text !== String(state.text)) {
      this.range = slider("Delete", shares.length, state.step, deleted, (step) => this.select({ step }));
      this.range.classList.add("delete");
      this.range.dataset.text = String(state.text);
    }
    const input = this.range.querySelector("input");
    if (input.value !== String(state.step)) {
      input.value = String(state.step);
      input.setAttribute("aria-valuetext", deleted(state.step));
      this.range.querySelector("output").textContent = deleted(state.step);
    }
    const pick = picker("Text", names, String(state.text), (value) => this.select({ text: Number(value) }));
    const turns = names.length > 1 ? [turn(-1, "‹", "Previous text"), turn(1, "›", "Next text")] : [];
    for (const old of [...this.controls.children]) if (old !== this.range) old.remove();
    this.controls.prepend(...(names.length > 1 ? [pick] : []), ...turns);
    if (!this.range.isConnected) this.controls.append(this.range);
  }

  drawReading() {
    const { index, state } = this;
    const text = index.texts[state.text];
    const name = (label) => shown(index.about.classes[label], 40);
    const facts = [
      `predicted ${name(text.predicted)} (${percent(text.probability)})`,
      text.label === null ? null : text.label === text.predicted ? "which is right" : `the label is ${name(text.label)}`,
      text.cut ? `${text.cut} words at its end are cut: the model does not take more` : null,
    ];
    const rows = judgeSorted(index, state.sort).map((method) => this.method(method, text));
    const note = element("p", { class: "soft" }, `Bars: probability of “${name(text.predicted)}” with the struck words deleted; the tick is that of the whole text. Curves: the same from 0 to ${percent(index.about.shares.at(-1))} of the words. Shades: from the lowest to the highest score of the text, by each method for itself; of scores with signs, zero is the middle and orange is below it.`);
    this.reading.replaceChildren(element("h2", {}, `Text ${text.name}`), element("p", { class: "facts" }, facts.filter(Boolean).join("; ")), note, ...rows);
  }

  method(method, text) {
    const found = judgeStep(text, method.name, this.state.step);
    const title = element("h3", {}, method.title);
    if (!found) return element("article", { class: "method" }, title, element("p", { class: "soft" }, "was not judged on this text"));
    const name = shown(this.index.about.classes[found.now], 30);
    const said = element("p", { class: "said" }, percent(found.probability));
    const turned = found.flipped ? element("p", { class: "said turned" }, element("strong", {}, `now ${name}, ${percent(found.top).replace(" ", "\u00a0")}`)) : null;
    return element("article", { class: "method", "data-method": method.name }, title, this.bar(text, found), said, this.curve(text, method.name), turned, this.words(text, method.name, found.deleted));
  }

  bar(text, found) {
    const at = `${(100 * text.probability).toFixed(2)}%`;
    const svg = judgeDrawn("svg", { class: "bar", role: "img", "aria-label": `${percent(found.probability)}, from ${percent(text.probability)}` });
    svg.append(
      judgeDrawn("rect", { class: "track", x: 0, y: 2, width: "100%", height: 10, rx: 3 }),
      judgeDrawn("rect", { class: found.flipped ? "fill flipped" : "fill", x: 0, y: 2, width: `${(100 * found.probability).toFixed(2)}%`, height: 10, rx: 3 }),
      judgeDrawn("line", { class: "whole", x1: at, x2: at, y1: 0, y2: 14 }),
    );
    return svg;
  }

  curve(text, name) {
    const { probabilities } = text.methods[name];
    const [wide, tall] = [96, 26];
    const x = (i) => (3 + ((wide - 6) * i) / Math.max(probabilities.length - 1, 1)).toFixed(1);
    const y = (value) => (tall - 3 - (tall - 6) * value).toFixed(1);
    const svg = judgeDrawn("svg", { class: "curve", viewBox: `0 0 ${wide} ${tall}`, "aria-hidden": "true" });
    svg.append(
      judgeDrawn("line", { class: "axis", x1: 3, x2: wide - 3, y1: y(0), y2: y(0) }),
      judgeDrawn("polyline", { points: probabilities.map((value, i) => `${x(i)},${y(value)}`).join(" ") }),
      judgeDrawn("circle", { cx: x(this.state.step), cy: y(probabilities[this.state.step]), r: 2.8 }),
    );
    return svg;
  }

  words(text, name, deleted) {
    const { scores } = text.methods[name];
    const scale = judgeScale(this.theme, scores, this.signed.has(name));
    const line = element("div", { class: "words", dir: "auto" });
    text.words.forEach((word, i) => {
      if (i) line.append(" ");
      const gone = deleted.has(i);
      const span = element(gone ? "del" : "span", { class: "word", title: `${shown(word, 40)}: ${number(scores[i])}` }, shown(word, 60));
      span.style.background = scale.css(scores[i]);
      span.style.color = scale.ink(scores[i]);
      line.append(span);
    });
    return line;
  }
}
