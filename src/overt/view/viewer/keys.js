// Keyboard shortcuts.
import { findNext } from "./controls.js";

export const KEYS = [
  ["↑ ↓", "previous, next token; in a long text, the next stronger or weaker"],
  ["← →", "layer below, above"],
  ["a", "mean of layers, in a long text"],
  ["[ ]", "previous, next head"],
  [", .", "previous, next word that was generated"],
  ["Enter", "pick the node of the chosen token and layer, or release it"],
  ["m", "next method"],
  ["1 – 9", "switch to a view"],
  ["g", "log scale"],
  ["w", "scale by words only"],
  ["/", "find in a long text"],
  ["n p", "next, previous place found"],
  ["Esc", "clear the selection"],
  ["?", "this list"],
];

/** Handle a key; other keys are left to the browser. */
export function pressed(viewer, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || viewer.help.open) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const onButton = event.target.tagName === "BUTTON";
  if (onButton && (event.key === "Enter" || event.key === " ")) return;
  if (viewer.tabs.contains(event.target) && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    nextTab(viewer, event.key === "ArrowRight" ? 1 : -1);
    event.preventDefault();
    return;
  }
  const { store, trace, limits } = viewer;
  const { state } = store;
  const actions = {
    ArrowUp: () => store.select(nextRow(viewer, -1)),
    ArrowDown: () => store.select(nextRow(viewer, 1)),
    ArrowLeft: () => store.select({ layer: Math.max(state.layer - 1, 0) }),
    ArrowRight: () => store.select({ layer: Math.max(0, Math.min(state.layer + 1, limits.layers - 1)) }),
    a: () => viewer.uses("averaged") && store.select({ averaged: !state.averaged }),
    "[": () => limits.heads && store.select({ head: turned(state.head, limits.heads, -1) }),
    "]": () => limits.heads && store.select({ head: turned(state.head, limits.heads, 1) }),
    ",": () => store.select(nextWritten(viewer, -1)),
    ".": () => store.select(nextWritten(viewer, 1)),
    Enter: () => store.select({ picked: !state.picked }),
    m: () => trace.methods.length && store.select({ method: trace.methods[(trace.methods.indexOf(state.method) + 1) % trace.methods.length] }),
    g: () => store.select({ log: !state.log }),
    w: () => store.select({ words: !viewer.words }),
    "/": () => viewer.controls.querySelector('input[type="search"]')?.focus(),
    n: () => viewer.uses("find") && findNext(viewer, 1),
    p: () => viewer.uses("find") && findNext(viewer, -1),
    Escape: () => store.select({ picked: false, token: null, node: null }),
    "?": () => viewer.help.showModal(),
  };
  const place = Number(event.key) - 1;
  if (viewer.fits[place]) store.select({ view: viewer.fits[place].id });
  else if (Object.hasOwn(actions, event.key)) actions[event.key]();
  else return;
  event.preventDefault();
}

function nextTab(viewer, step) {
  const { fits, store } = viewer;
  const at = fits.findIndex((view) => view.id === store.state.view);
  store.select({ view: fits[(at + step + fits.length) % fits.length].id });
  viewer.tabs.querySelector('[aria-selected="true"]').focus();
}

/** The row above or below, in the front view's rows. */
function nextRow({ store, trace, limits, front, uses }, step) {
  const { state } = store;
  if (front.view.step) return front.view.step({ trace, state, step });
  if (uses("group") && state.group === "encoder") {
    const row = state.row === null ? (step > 0 ? -1 : trace.source) : state.row;
    return { row: Math.min(Math.max(row + step, 0), trace.source - 1) };
  }
  if (trace.kept) {
    const at = trace.kept.indexOf(trace.keptQuery(state.query));
    return { query: trace.kept[Math.min(Math.max(at + step, 0), trace.kept.length - 1)] };
  }
  return { query: Math.min(Math.max(state.query + step, 0), Math.max(limits.queries - 1, 0)) };
}

/** The query that wrote the word before or after, in a text that was generated. */
function nextWritten({ store, trace }, step) {
  if (!trace.written || !trace.kept) return {};
  const at = trace.kept.indexOf(trace.keptQuery(store.state.query));
  return { query: trace.kept[Math.min(Math.max(at + step, 0), trace.kept.length - 1)], token: null };
}

/** The previous or next head; the mean is between the last and the first. */
function turned(head, count, step) {
  if (head === null) return step > 0 ? 0 : count - 1;
  return head + step < 0 || head + step >= count ? null : head + step;
}
