// The tokens with the largest weights, each in the text around it, and how much of the row they hold.
import { drawNote, noteLines, peakOf, scaleFor } from "./parts.js";
import { headWords, holding, layerWords, overLayers, passageDescribe, passageRow, passageStep, passageText, passageTip, passageWord, ranking, shareWords, spokenWords } from "./passage.js";
import { fitted, textWidth } from "./surface.js";
import { number } from "./words.js";

const TOP_MOST = 100;
const TOP_ROW = 28;
const TOP_EDGE = 14;
const TOP_WEIGHT = 76;
const TOP_PLACE = 58;
const TOP_SINK = 0.2; // share of a row from which on the first token is worth a word
const TOP_AROUND = 14; // tokens before and after

/** What the largest weights hold, in sentences. */
export function topNotes(trace, seen, values) {
  const { order, sums, total } = ranking(values);
  if (!(total > 0)) return ["All weights are zero."];
  const many = Math.min(TOP_MOST, order.length);
  const count = (share) => {
    const least = holding(values, share);
    return least === 1 ? "1 token" : `${least.toLocaleString("en")} tokens`;
  };
  const notes = [`The ${many} largest of ${order.length.toLocaleString("en")} weights hold ${shareWords(sums[many - 1] / total)} of the row: half of it is in ${count(0.5)}, 90 % in ${count(0.9)}.`];
  const first = trace.sink >= 0 ? Math.abs(values[trace.sink]) : 0;
  if (first > TOP_SINK * total) {
    // It is among the largest.
    const rest = total - first > 1e-6 * total ? `; of the rest, the other ${many - 1} hold ${shareWords((sums[many - 1] - first) / (total - first))}` : "";
    notes.push(`The first token alone holds ${shareWords(first / total)}, as it often does in causal models, whatever it says${rest}.`);
  }
  const field = trace.about.fields[seen.head !== null && trace.has(`${seen.method} heads`) ? `${seen.method} heads` : seen.method];
  if (field && (overLayers(seen) ? field : [field[seen.layer]]).some((one) => one && one.bytes === 1)) notes.push("Weights are rounded: to within 4 % of themselves plus 8 % of the row’s median.");
  return notes;
}

function topLayout(trace, seen, width) {
  const row = passageRow(trace, seen);
  const values = row && row.values;
  const notes = values ? topNotes(trace, seen, values) : [];
  const lines = notes.reduce((sum, note) => sum + 16 * noteLines(note, width - 2 * TOP_EDGE, 12).length + 4, 0);
  const shown_ = values ? Array.from(ranking(values).order.subarray(0, TOP_MOST)).filter((token) => values[token]) : [];
  const start = 34 + lines;
  return { row, values, notes, listed: shown_, start, height: start + shown_.length * TOP_ROW + 20 };
}

export const topView = {
  id: "top",
  title: "Top tokens",
  controls: ["query", "method", "layer", "averaged", "head", "words", "log"],
  byWords: true,

  applies(trace) {
    return trace.about.rows && trace.tokens.length ? true : "this trace has maps: the line at the bottom names the largest weights";
  },

  measure({ trace, seen, width }) {
    return { height: topLayout(trace, seen, width).height };
  },

  draw({ surface, trace, seen, theme, width, top, bottom }) {
    const { row, values, notes, listed, start } = topLayout(trace, seen, width);
    const query = trace.source + seen.query;
    const title = `${trace.named(seen.method)} of ${spokenWords(trace, seen.query, 24)}, ${layerWords(trace, seen)}${headWords(trace, seen)}`;
    surface.text(fitted(title, width - 2 * TOP_EDGE, 13, 600), TOP_EDGE, 18, { size: 13, fill: theme.ink, weight: 600 });
    if (!values) {
      drawNote(surface, theme, row ? row.missing : "…", TOP_EDGE, 34, width - 2 * TOP_EDGE, { size: 12 });
      return;
    }
    let y = 32;
    for (const note of notes) y += drawNote(surface, theme, note, TOP_EDGE, y, width - 2 * TOP_EDGE, { size: 12 }) + 4;
    const signed = values.some((one) => one < 0);
    const scale = scaleFor(theme, peakOf(trace, values, seen, query), seen, signed ? "signs" : "sizes");
    listed.forEach((token, i) => {
      const line = start + i * TOP_ROW;
      if (line > bottom || line + TOP_ROW < top) return;
      topDrawRow({ surface, trace, seen, theme, width, values, row, query, scale, signed }, token, line);
    });
  },

  placeOf({ trace, seen, state, width }) {
    const { listed, start } = topLayout(trace, seen, width);
    const place = state.token === null ? -1 : listed.indexOf(state.token);
    return place < 0 ? NaN : start + place * TOP_ROW;
  },

  minimap: false, // it is short
  step: passageStep,
  describe: passageDescribe,
};

/** One token in its text: its weight and place, then the text, with the token in the middle. */
function topDrawRow({ surface, trace, seen, theme, width, values, row, query, scale, signed }, token, y) {
  const middle = y + TOP_ROW / 2;
  const chosen = token === seen.token;
  const value = values[token];
  if (chosen) surface.rect(4, y + 1, width - 8, TOP_ROW - 2, { fill: theme.raised, stroke: theme.accent, radius: 5 });
  const bar = TOP_WEIGHT - 12;
  const part = signed ? Math.abs(2 * scale.part(value) - 1) : scale.part(value);
  surface.rect(TOP_EDGE, y + TOP_ROW - 7, bar, 3, { fill: theme.line, radius: 1.5 });
  surface.rect(TOP_EDGE, y + TOP_ROW - 7, Math.max(bar * part, 1), 3, { fill: theme.edge, radius: 1.5 });
  surface.text(number(value), TOP_EDGE, middle - 3, { size: 12, fill: theme.ink });
  surface.text(String(token), TOP_EDGE + TOP_WEIGHT + TOP_PLACE - 14, middle, { size: 11, fill: theme.soft, align: "right" });
  const left = TOP_EDGE + TOP_WEIGHT + TOP_PLACE;
  const room = width - left - TOP_EDGE;
  const word = fitted(passageWord(trace.tokens[token], 30), room / 2, 13, 600);
  const wide = textWidth(word, 13, 600) + 8;
  const x = left + (room - wide) / 2;
  surface.rect(x, y + 4, wide, TOP_ROW - 8, { fill: scale.css(value), radius: 3, stroke: token === query ? theme.select : null });
  surface.text(word, x + wide / 2, middle, { size: 13, fill: scale.ink(value), align: "center", weight: 600 });
  const glued = (i) => (trace.about.rows.before[i] === "0" ? 1 : 5);
  surface.clipped(left, y, Math.max(x - left, 0), TOP_ROW, () => surface.text(passageText(trace, token - TOP_AROUND, token), x - glued(token), middle, { size: 13, fill: theme.soft, align: "right" }));
  surface.clipped(x + wide, y, Math.max(left + room - x - wide, 0), TOP_ROW, () => surface.text(passageText(trace, token + 1, token + 1 + TOP_AROUND), x + wide + glued(token + 1), middle, { size: 13, fill: theme.soft }));
  surface.hit(0, y, width, TOP_ROW, { hover: { token }, select: { token }, tip: passageTip(trace, seen, row, token) });
}
