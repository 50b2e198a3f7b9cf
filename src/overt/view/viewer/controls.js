// The controls above the panes: those that the visible views use.
import { choice, element, picker, slider, tick } from "./dom.js";
import { foundWords, overLayers, passageFound, passageNext, passageWord } from "./passage.js";
import { shown, tokenPlace } from "./words.js";

const GROUPS = { "": "decoder", encoder: "encoder", cross: "decoder → encoder" };

/** Rebuild the controls. A slider or a search that has the focus stays the same element. */
export function fillControls(viewer) {
  const fresh = controlsOf(viewer);
  viewer.controls.classList.toggle("wraps", viewer.panes.every(({ view }) => view.wraps));
  const old = [...viewer.controls.children];
  const active = viewer.controls.contains(document.activeElement) ? document.activeElement : null;
  if (active && ["range", "search"].includes(active.type) && old.length === fresh.length) {
    old.forEach((control, i) => {
      if (!control.contains(active)) control.replaceWith(fresh[i]);
      else if (active.type === "range") updateSlider(active, fresh[i].querySelector("input"));
      else control.querySelector("output").textContent = fresh[i].querySelector("output").textContent;
    });
    return;
  }
  const label = active && active.getAttribute("aria-label");
  viewer.controls.replaceChildren(...fresh);
  if (!label) return;
  const same = [...viewer.controls.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === label);
  if (same) same.focus();
}

function updateSlider(range, fresh) {
  for (const name of ["max", "aria-valuetext"]) range.setAttribute(name, fresh.getAttribute(name));
  if (range.value !== fresh.value) range.value = fresh.value;
  range.parentElement.querySelector("output").textContent = fresh.getAttribute("aria-valuetext");
}

function controlsOf(viewer) {
  const { store, trace, traces, limits } = viewer;
  const { state } = store;
  const select = (changes) => store.select(changes);
  const uses = (control) => viewer.uses(control);
  const controls = [];
  if (traces.length > 1) {
    const names = traces.map((one, i) => [String(i), shown(one.name, 60)]);
    const others = [["", "–"], ...names.filter(([i]) => Number(i) !== state.trace)];
    controls.push(picker("Trace", names, String(state.trace), (value) => select({ trace: Number(value) })));
    const other = state.other === null ? "" : String(state.other);
    controls.push(picker("Compare with", others, other, (value) => select({ other: value === "" ? null : Number(value) })));
    for (const control of controls) control.classList.add("last"); // on a phone, where they are reached by scrolling
  }
  if (uses("method")) {
    const here = trace.methods;
    const methods = trace.offered.map(({ name, title }) => [name, title, here.includes(name) ? null : trace.why(name)]);
    controls.push(choice("Method", methods, state.method, (method) => select({ method })));
  }
  if (uses("group") && trace.groups.length > 1) {
    controls.push(choice("Attention", trace.groups.map((one) => [one, GROUPS[one]]), state.group, (group) => select({ group })));
  }
  const offered = viewer.panes.flatMap(({ view, trace: shownTrace }) => (view.parts ? view.parts(shownTrace, state) : []));
  const parts = offered.filter(([one], i) => offered.findIndex(([other]) => other === one) === i);
  if (parts.length > 1) controls.push(choice("Part", parts, state.part, (part) => select({ part })));
  if (uses("layer") && limits.layers > 1) {
    const mean = uses("averaged") && overLayers(state);
    const words = (value) => `${value + 1} of ${limits.layers}`;
    const first = mean ? (value) => (value === state.layer ? `mean of ${limits.layers}` : words(value)) : words;
    controls.push(slider("Layer", limits.layers, state.layer, first, (layer) => select({ layer })));
    if (uses("averaged") && state.method === "raw") controls.push(tick("mean of layers", mean, (averaged) => select({ averaged }), "The mean of the rows of all layers"));
  }
  if (uses("head") && limits.heads) controls.push(headPicker(viewer));
  if (uses("query") && (trace.kept ? trace.kept.length : limits.queries) > 1) controls.push(trace.kept ? queryPicker(viewer) : tokenBox(viewer));
  if (uses("words") && [trace, traces[state.other]].some((one) => one && one.hasAside)) {
    const [label, of, first] = trace.sink >= 0 ? ["scale by other tokens", "another token", "the first token, "] : ["scale by words", "a word", ""];
    const title = `The scale ends at the largest weight of ${of}, leaving out ${first}special tokens and the token itself`;
    controls.push(tick(label, viewer.words, (words) => select({ words }), title));
  }
  if (uses("log")) controls.push(tick("log scale", state.log, (log) => select({ log })));
  if (viewer.fits.length > 1) {
    const others = viewer.fits.filter((view) => view.id !== state.view).map((view) => [view.id, view.title]);
    controls.push(picker("Beside", [["", "–"], ...others], state.beside || "", (value) => select({ beside: value || null })));
  }
  if (uses("find")) controls.push(searchBox(viewer)); // last: what it says changes its width
  return controls;
}

function headPicker({ store, trace, limits, panes }) {
  const { state } = store;
  const heads = Array.from({ length: limits.heads }, (_, i) => [String(i), String(i + 1)]);
  const value = state.head === null ? "" : String(state.head);
  const control = picker("Head", [["", "mean"], ...heads], value, (one) => store.select({ head: one === "" ? null : Number(one) }));
  // All methods except raw use the mean of the heads.
  const listens = ({ view }) => view.controls.includes("head") && (!view.controls.includes("method") || state.method === "raw");
  if (!panes.some(listens)) {
    control.querySelector("select").disabled = true;
    control.title = `${trace.method(state.method).title} uses the mean of the heads`;
  }
  return control;
}

/** The queries that a trace has rows of. */
function queryPicker({ store, trace }) {
  const { query } = trace.nearest(store.state);
  const options = trace.kept.map((one) => {
    const token = trace.spokenOf(one);
    return [String(one), `${token - trace.source} ${trace.tokens[token] ? shown(trace.tokens[token], 14) : passageWord("")}`];
  });
  return picker(trace.written ? "Word" : trace.source ? "Target" : "Token", options, String(query), (value) => store.select({ query: Number(value) }));
}

/** Find the next or previous place where the text of the search occurs. */
export function findNext({ store, trace }, step) {
  const token = passageNext(passageFound(trace, store.state.find), store.state.token, step);
  if (token !== null) store.select({ token });
}

/** Finds text: each letter goes to the first place from here on; Enter and Shift+Enter to the next and the previous. */
function searchBox(viewer) {
  const { store, trace } = viewer;
  const { find, token } = store.state;
  const box = element("input", { type: "search", "aria-label": "Find", placeholder: "Find in the text", spellcheck: "false", autocomplete: "off", maxlength: "200" });
  box.value = find;
  box.addEventListener("input", () => {
    const places = passageFound(trace, box.value);
    const from = store.state.token === null ? null : store.state.token - 1; // what is found here already stays
    store.select({ find: box.value, ...(places.length ? { token: passageNext(places, from, 1) } : {}) });
  });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    findNext(viewer, event.shiftKey ? -1 : 1);
  });
  const places = passageFound(trace, find);
  const words = element("output", { class: "found", "aria-live": "polite" }, find.trim() ? foundWords(places, token) : "");
  const button = (sign, label, step) => element("button", { type: "button", "aria-label": label, title: label, disabled: !places.length, onclick: () => findNext(viewer, step) }, sign);
  return element("div", { class: "control find" }, box, button("‹", "Previous found", -1), button("›", "Next found", 1), words);
}

function tokenBox({ store, trace, limits }) {
  const { query } = trace.nearest(store.state);
  // Words of a caption are counted from 1, as the line below the panes counts them; tokens from 0, as tokenizers do.
  const [label, first] = trace.about.caption ? ["Word", 1] : [trace.source ? "Target" : "Token", 0];
  const box = element("input", { type: "number", min: String(first), max: String(limits.queries - 1 + first), "aria-label": first ? label : "Token" });
  box.value = String(store.state.query + first);
  box.addEventListener("change", () => store.select({ query: Math.min(Math.max((Math.round(Number(box.value)) || 0) - first, 0), limits.queries - 1) }));
  const token = trace.source + query;
  const word = element("output", { dir: "auto", title: tokenPlace(trace, token) }, shown(trace.tokens[token], 14));
  return element("label", { class: "control" }, element("span", {}, label), box, word);
}
