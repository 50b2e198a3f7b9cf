// The text of a long trace: its tokens joined as they were written, and what is found in it.
import { BLANK, number, percent, shown, tokenPlace } from "./words.js";

const MOST_FOUND = 1e5;

/** A token as it is read in a text: a word piece without its sign, white space as signs, a dot for what continues a character. */
export function passageWord(token, most = 40) {
  const text = String(token);
  if (!text) return "·";
  return shown(text.length > 2 && text.startsWith("##") ? text.slice(2) : text, most);
}

/** Whether a line ends with a token. */
export function endsLine(token) {
  const text = String(token);
  return BLANK.test(text) && /[\u010a\n]|0x0A/.test(text);
}

/** What comes before a token: "0" nothing, "1" a space, "2" the end of a line. */
export function passageBefore(trace, token) {
  const { rows } = trace.about;
  return (rows && rows.before && rows.before[token]) || "1";
}

/** Tokens from `start` to `stop` in one line, as they were written. */
export function passageText(trace, start, stop) {
  let text = "";
  for (let i = Math.max(start, 0); i < Math.min(stop, trace.tokens.length); i++) {
    text += (i > start && passageBefore(trace, i) !== "0" ? " " : "") + passageWord(trace.tokens[i]);
  }
  return text;
}

const joined = new WeakMap();

/** The whole text in lower case, with single spaces for white space, and where each token starts in it. */
function passageJoined(trace) {
  if (!joined.has(trace)) {
    const starts = new Int32Array(trace.tokens.length + 1);
    const parts = [];
    let length = 0;
    let spaced = true;
    trace.tokens.forEach((token, i) => {
      const name = String(token);
      const blank = BLANK.test(name);
      const gap = !spaced && (blank || passageBefore(trace, i) !== "0") ? " " : "";
      const word = blank ? "" : (name.length > 2 && name.startsWith("##") ? name.slice(2) : name).toLowerCase().replace(/\s+/g, " ");
      starts[i] = length + gap.length;
      if (gap + word) spaced = (gap + word).endsWith(" ");
      parts.push(gap + word);
      length += gap.length + word.length;
    });
    starts[trace.tokens.length] = length;
    joined.set(trace, { text: parts.join(""), starts, found: new Map() });
  }
  return joined.get(trace);
}

/** Where a text is found, upper or lower case: `[[first token, one after the last], …]`. */
export function passageFound(trace, wanted) {
  const text = String(wanted || "").toLowerCase().replace(/\s+/g, " ");
  if (!text.trim()) return [];
  const { text: whole, starts, found } = passageJoined(trace);
  if (found.has(text)) return found.get(text);
  const places = [];
  let token = 0;
  for (let at = whole.indexOf(text); at >= 0 && places.length < MOST_FOUND; at = whole.indexOf(text, at + text.length)) {
    // A space before a token belongs to none.
    while (token + 1 < trace.tokens.length && starts[token + 1] <= at + (text.startsWith(" ") ? 1 : 0)) token++;
    let stop = token + 1;
    while (stop < trace.tokens.length && starts[stop] < at + text.trimEnd().length) stop++;
    places.push([token, stop]);
  }
  if (found.size > 32) found.clear();
  found.set(text, places);
  return places;
}

/** Of what was found, the next after a token, or the previous one; at the ends it goes round. */
export function passageNext(places, token, step) {
  if (!places.length) return null;
  const from = token ?? (step > 0 ? -1 : Infinity);
  const next = step > 0 ? places.find(([start]) => start > from) || places[0] : places.findLast(([start]) => start < from) || places[places.length - 1];
  return next[0];
}

/** How many places were found, and which of them holds a token, in words. */
export function foundWords(places, token) {
  if (!places.length) return "not found";
  const here = places.findIndex(([start, stop]) => token !== null && token !== undefined && token >= start && token < stop);
  const many = places.length.toLocaleString("en");
  return here < 0 ? `${many} found` : `${(here + 1).toLocaleString("en")} of ${many}`;
}

/** What a row is of, in words: a token, or one that was generated. */
export function spokenWords(trace, query, most = 40) {
  const token = trace.spokenOf(query);
  return `“${passageWord(trace.tokens[token], most)}” (${tokenPlace(trace, token)}${trace.generated(token) ? ", as it was written" : ""})`;
}

/** Whether a view of a long text shows the mean of a row over layers. Other methods than raw go through them all. */
export function overLayers(seen) {
  return Boolean(seen.averaged) && seen.method === "raw";
}

/** The row that a view of a long text shows; of one layer, if it is given. */
export function passageRow(trace, seen, layer = null) {
  const head = seen.method === "raw" ? seen.head : null;
  if (layer === null && overLayers(seen)) return trace.meanRow(seen.method, seen.query, head);
  return trace.row(seen.method, layer ?? seen.layer, seen.query, head);
}

/** Which layer a row is of, in words; or of how many it is the mean. */
export function layerWords(trace, seen) {
  if (!overLayers(seen)) return `layer ${seen.layer + 1} of ${trace.layers}`;
  const count = trace.layersOf(seen.method).length;
  return `mean of ${count === 1 ? "1 layer" : `${count} layers`}`;
}

/** Whose weights a row has, where there are several heads; otherwise empty. */
export function headWords(trace, seen) {
  if (seen.method !== "raw" || !trace.heads) return "";
  return `, ${seen.head === null || seen.head === undefined ? "mean of heads" : `head ${seen.head + 1}`}`;
}

const rankings = new WeakMap();

/** Tokens by the size of their values, the running sum of the sizes, and each token's place: `{ order, sums, total, rank }`. */
export function ranking(values) {
  if (!rankings.has(values)) {
    const sizes = values.map(Math.abs);
    const count = sizes.length;
    const order = Uint32Array.from({ length: count }, (_, i) => i).sort((a, b) => sizes[b] - sizes[a] || a - b);
    const sums = new Float64Array(count);
    let total = 0;
    order.forEach((token, i) => (sums[i] = total += sizes[token]));
    const rank = new Uint32Array(count);
    order.forEach((token, i) => (rank[token] = i));
    rankings.set(values, { order, sums, total, rank });
  }
  return rankings.get(values);
}

/** How few tokens hold a share of a row. */
export function holding(values, share) {
  const { sums, total } = ranking(values);
  let low = 0;
  let high = sums.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sums[middle] < share * total * (1 - 1e-9)) low = middle + 1;
    else high = middle;
  }
  return Math.min(low + 1, sums.length);
}

/** A share as a percentage, which is 100 only where nothing is missing, and 0 only where there is nothing. */
export function shareWords(share) {
  if (share > 0 && share < 5e-5) return "under 0.01 %";
  return share >= 0.995 && share < 1 - 1e-6 ? `${Math.min(100 * share, 99.99).toFixed(2)} %` : percent(share);
}

/** A token's value in words: its share of the row, and its place among all. */
export function rankWords(values, token) {
  const { rank, total } = ranking(values);
  const share = total > 0 ? `, ${shareWords(Math.abs(values[token]) / total)} of the row` : "";
  return `${number(values[token])}${share}, number ${(rank[token] + 1).toLocaleString("en")} of ${values.length.toLocaleString("en")}`;
}

/** What is known of a token of a long text, in lines. */
export function passageTip(trace, seen, row, token) {
  return [passageWord(trace.tokens[token], 60), tokenPlace(trace, token), ...(row && row.values ? [rankWords(row.values, token)] : [])].join("\n");
}

/** The chosen token in words, with the text around it; without one, the largest weights. */
export function passageDescribe({ trace, seen }) {
  const row = passageRow(trace, seen);
  if (!row || !row.values) return null;
  const what = `${trace.named(seen.method)}, ${layerWords(trace, seen)}${headWords(trace, seen)}, of ${spokenWords(trace, seen.query)}`;
  if (seen.token === null || seen.token === undefined) {
    const most = Array.from(ranking(row.values).order.subarray(0, 5), (token) => `“${passageWord(trace.tokens[token])}” (${tokenPlace(trace, token)}) ${number(row.values[token])}`);
    return `${what}: ${most.join(", ")}`;
  }
  const where = `“${passageWord(trace.tokens[seen.token])}” (${tokenPlace(trace, seen.token)})`;
  return `${where}: ${rankWords(row.values, seen.token)} · ${what} · … ${passageText(trace, seen.token - 10, seen.token + 11)} …`;
}

/** What the keys ↑ and ↓ select: the next stronger or weaker token. */
export function passageStep({ trace, state, step }) {
  const near = trace.nearest(state);
  const row = passageRow(trace, near);
  if (!row || !row.values) return {};
  const { order, rank } = ranking(row.values);
  const at = near.token === null || near.token === undefined ? -1 : rank[near.token];
  return { token: order[Math.min(Math.max(at + step, 0), order.length - 1)] };
}
