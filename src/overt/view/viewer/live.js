// What a model writes, while it writes: each word as it comes, over the text coloured by what the word draws on.
import { palette, scaled } from "./colour.js";
import { element } from "./dom.js";
import { number, percent } from "./words.js";

/** The text so far. Pointing at a word shows its row; otherwise the newest is shown. */
export class LiveText {
  /**
   * @param {HTMLElement} root
   * @param {() => string} theme "light" or "dark"
   */
  constructor(root, theme) {
    this.theme = theme;
    this.pieces = []; // elements of all tokens, prompt first
    this.rows = []; // of the words
    this.start = 0; // of the output
    this.pointed = null;
    this.note = element("p", { class: "live-note" });
    this.text = element("p", { class: "live-text", dir: "auto" });
    this.root = element("section", { class: "live", "aria-label": "What the model writes" }, this.note, this.text);
    root.replaceChildren(this.root);
  }

  /** Number of words so far. */
  get count() {
    return this.rows.length;
  }

  /** Take a line of the server's: the prompt, or a word with its row. */
  take(line) {
    if (line.prompt) {
      this.pieces = line.prompt.map((piece) => element("span", {}, piece));
      this.start = this.pieces.length;
      this.text.replaceChildren(...this.pieces);
      return;
    }
    const place = this.rows.length;
    const word = element("span", { class: "live-word", onpointerenter: () => this.point(place), onpointerleave: () => this.point(null) }, line.word);
    this.rows.push(line.row || []);
    this.pieces.push(word);
    this.text.append(word);
    if (this.pointed === null) this.colour(place);
  }

  point(place) {
    this.pointed = place;
    this.colour(place ?? this.rows.length - 1);
  }

  /** Colour the text by a word's row; the scale ends at its largest weight, other than that of the first token. */
  colour(place) {
    const row = this.rows[place];
    if (!row) return;
    const scale = scaled(palette(this.theme()), Math.max(...row.slice(1), 0));
    this.pieces.forEach((piece, i) => {
      const known = i < row.length && row[i] !== null;
      piece.style.backgroundColor = known ? scale.css(row[i]) : "";
      piece.style.color = known ? scale.ink(row[i]) : "";
      piece.title = known ? number(row[i]) : "";
      piece.classList.toggle("live-now", i === this.start + place);
    });
    const first = row.length > 1 ? `; the first token has ${percent(row[0])}` : "";
    this.note.textContent = `raw attention, mean of layers, of “${this.pieces[this.start + place].textContent.trim()}”: from 0 to ${number(scale.top)}${first}`;
  }
}
