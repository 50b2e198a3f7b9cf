// Tokens may be any text: they are drawn short, visible and on one line.

const segmenter = typeof Intl !== "undefined" && Intl.Segmenter ? new Intl.Segmenter() : null;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/;
const LEFT_TO_RIGHT = /[A-Za-z\u00c0-\u058f\u0900-\u1fff\u3040-\ud7ff]/;
// Control characters, and marks that change the direction of the surrounding text.
const HIDDEN =
  /[\u0000-\u0020\u007f-\u00a0\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
const MARKS = /(\p{M}{4})\p{M}+/gu; // no script needs more on one letter; stacked marks would cover other lines
const NAMES = { 9: "⇥", 10: "↵", 13: "↵", 32: "␣", 160: "␣", 127: "␡" };

export const BLANK = /^(?:[\u0120\u010a\u010d\u0109\u2581\s]+|<0x0A>)$/; // how tokenizers name white space: Ġ, Ċ, č, ĉ, ▁
const BLANK_SIGNS = { "\u010a": "↵", "\n": "↵", "\u010d": "", "\r": "", "\u0109": "⇥", "\t": "⇥" };

const seenBefore = new Map();

/** A token for drawing: white space and control characters as visible signs, at most `most` characters as readers count them. */
export function shown(token, most = 18) {
  const text = blankSigns(String(token));
  if (text.length > 64) return cleaned(text, most);
  // The same few words are drawn in every frame.
  const key = `${most} ${text}`;
  let visible = seenBefore.get(key);
  if (visible === undefined) {
    if (seenBefore.size > 20000) seenBefore.clear();
    seenBefore.set(key, (visible = cleaned(text, most)));
  }
  return visible;
}

/** White space as signs; any other text as it is. */
function blankSigns(text) {
  if (!BLANK.test(text)) return text;
  return text === "<0x0A>" ? "↵" : Array.from(text, (sign) => BLANK_SIGNS[sign] ?? "␣").join("") || "↵";
}

function cleaned(text, most) {
  const start = text.length > 12 * most ? text.slice(0, 12 * most) : text; // a letter may have many marks, but not any number
  const few = start.replace(MARKS, "$1");
  const parts = segmenter ? Array.from(segmenter.segment(few), (one) => one.segment) : Array.from(few);
  const cut = parts.length > most || start.length < text.length;
  const short = (cut ? parts.slice(0, most - 1).join("").slice(0, 8 * most) + "…" : few).trim() || few;
  const visible = short.replace(HIDDEN, (sign, place) => {
    const code = sign.codePointAt(0);
    if (code === 32 && place > 0 && place < short.length - 1) return " ";
    if (code === 0x200c || code === 0x200d) return sign; // joiners shape Arabic, Indic scripts and emoji
    return NAMES[code] || (code < 32 ? String.fromCharCode(0x2400 + code) : "·");
  });
  return visible || "∅";
}

/** "rtl" for text whose first strong letter is of a script written from right to left, else "ltr". */
export function direction(text) {
  for (const letter of String(text).slice(0, 64)) {
    if (RIGHT_TO_LEFT.test(letter)) return "rtl";
    if (LEFT_TO_RIGHT.test(letter)) return "ltr";
  }
  return "ltr";
}

/** Whether most of a text's tokens are written from right to left. */
export function mostlyRightToLeft(tokens) {
  let right = 0;
  let left = 0;
  for (const token of tokens.slice(0, 400)) {
    const text = String(token).slice(0, 64);
    if (RIGHT_TO_LEFT.test(text)) right++;
    else if (LEFT_TO_RIGHT.test(text) && !/^[[<].*[\]>]$/.test(text)) left++;
  }
  return right > left;
}

/** A weight with two or three significant digits. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (size === 0) return "0";
  if (size >= 100) return sign + Math.round(size);
  if (size >= 0.9995) return sign + size.toFixed(2);
  if (size >= 0.1) return sign + size.toFixed(3);
  if (size >= 0.001) return sign + size.toFixed(4).replace(/0$/, "");
  const [digits, power] = size.toExponential(1).split("e");
  return `${sign}${digits}·10${superscript(Number(power))}`;
}

function superscript(value) {
  return String(value).replace(/-/g, "⁻").replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
}

/** A weight in words; 0 may mean that the page left it out. */
export function weightWords(value) {
  return value ? number(value) : "left out or 0";
}

/** A token's position, counted from 0; for an encoder–decoder, in its source or its target. */
export function tokenPlace(trace, token) {
  if (!trace.source) return `token ${token}`;
  return token < trace.source ? `source ${token}` : `target ${token - trace.source}`;
}

/** A share as a percentage. */
export function percent(value) {
  const size = 100 * value;
  return `${size >= 10 || size === 0 ? size.toFixed(0) : size.toFixed(size >= 0.1 ? 1 : 2)} %`;
}
