// Packed maps; view/pack.py describes the format.
import { inflate } from "./bytes.js";

const tables = new Map();

/** The value of each code, for a number of steps per doubling. */
function sizesOf(bytes, steps) {
  const key = `${bytes}/${steps}`;
  if (!tables.has(key)) {
    const size = (_, code) => (code ? 2 ** (code / steps) - 1 : 0);
    tables.set(key, Float32Array.from({ length: 256 ** bytes }, size));
  }
  return tables.get(key);
}

/** Maps of one layer, (map, row, column), kept as codes: a quarter of the size of floats. */
export class Field {
  constructor(shape, codes, scales, dropped, signs, broken = 0, steps = 10) {
    [this.maps, this.rows, this.columns] = shape;
    this.codes = codes;
    this.sizes = sizesOf(codes.BYTES_PER_ELEMENT, steps);
    this.scales = scales;
    this.dropped = dropped; // share of each row's mass that is not here, (map, row)
    this.signs = signs; // null, or 1 where a cell is negative
    this.broken = broken; // number of cells that were NaN or infinite
    this.peaks = new Float32Array(this.maps).fill(-1);
  }

  /** One weight. */
  at(map, row, column) {
    const line = map * this.rows + row;
    const cell = line * this.columns + column;
    const size = this.scales[line] * this.sizes[this.codes[cell]];
    return this.signs && this.signs[cell] ? -size : size;
  }

  /** The weights of one row. */
  row(map, row) {
    const line = map * this.rows + row;
    const start = line * this.columns;
    const values = new Float32Array(this.columns);
    const scale = this.scales[line];
    for (let j = 0; j < this.columns; j++) {
      const size = scale * this.sizes[this.codes[start + j]];
      values[j] = this.signs && this.signs[start + j] ? -size : size;
    }
    return values;
  }

  /** The share of a row's mass that was dropped. */
  lost(map, row) {
    return this.dropped[map * this.rows + row];
  }

  /** The largest absolute weight of a map. */
  peak(map) {
    if (this.peaks[map] >= 0) return this.peaks[map];
    let peak = 0;
    for (let i = 0; i < this.rows; i++) {
      const line = map * this.rows + i;
      let code = 0;
      for (let j = line * this.columns; j < (line + 1) * this.columns; j++) if (this.codes[j] > code) code = this.codes[j];
      peak = Math.max(peak, this.scales[line] * this.sizes[code]);
    }
    return (this.peaks[map] = peak);
  }
}

/** The field that packed bytes hold, as a promise; `about` is the metadata from `pack`. */
export async function unpack(about, bytes) {
  const [maps, rows, columns] = about.shape;
  const [first, codes] = await Promise.all([
    inflate(bytes.subarray(0, about.parts[0])),
    inflate(bytes.subarray(about.parts[0], about.parts[0] + about.parts[1])),
  ]);
  const lines = maps * rows;
  const cells = lines * columns;
  const scales = new Float32Array(first.slice(0, 4 * lines).buffer);
  const dropped = Float32Array.from(first.subarray(4 * lines, 5 * lines), (byte) => (byte * about.unit) / 255);
  const bits = first.subarray(5 * lines, 5 * lines + ((cells + 7) >> 3));
  const negative = about.signed ? first.subarray(5 * lines + ((cells + 7) >> 3)) : null;
  const wide = about.bytes === 2;
  const values = wide ? new Uint16Array(codes.buffer, codes.byteOffset, codes.length >> 1) : codes;
  const dense = wide ? new Uint16Array(cells) : new Uint8Array(cells);
  const signs = negative ? new Uint8Array(cells) : null;
  let bit = 0;
  let next = 0;
  for (let map = 0; map < maps; map++) {
    for (let column = 0; column < columns; column++) {
      let cell = map * rows * columns + column;
      for (let row = 0; row < rows; row++, bit++, cell += columns) {
        if (!(bits[bit >> 3] & (128 >> (bit & 7)))) continue;
        dense[cell] = values[next];
        if (signs && negative[next >> 3] & (128 >> (next & 7))) signs[cell] = 1;
        next++;
      }
    }
  }
  return new Field(about.shape, dense, scales, dropped, signs, about.broken || 0, about.steps);
}
