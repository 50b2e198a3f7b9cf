// One drawing interface with two implementations, a canvas and an SVG. Views draw on either.
import { direction } from "./words.js";

const FAMILY = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';
let ruler = null;

/** Width of a text in pixels; an estimate if there is no canvas. */
export function textWidth(text, size = 12, weight = 400) {
  if (!ruler && typeof document !== "undefined") ruler = document.createElement("canvas").getContext("2d");
  if (!ruler) {
    let wide = 0;
    for (const letter of text) wide += letter.codePointAt(0) > 0x2e80 ? 1 : 0.55;
    return wide * size;
  }
  ruler.font = `${weight} ${size}px ${FAMILY}`;
  return ruler.measureText(text).width;
}

/** A text cut to a width, with an ellipsis if it was cut. */
export function fitted(text, width, size = 12, weight = 400) {
  if (textWidth(text, size, weight) <= width) return text;
  const letters = Array.from(text);
  let low = 0;
  let high = letters.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (textWidth(letters.slice(0, middle).join("") + "…", size, weight) <= width) low = middle;
    else high = middle - 1;
  }
  return low ? letters.slice(0, low).join("") + "…" : "…";
}

/** What both surfaces share: the areas that respond to the pointer. */
class Hits {
  constructor() {
    this.hits = [];
  }

  /**
   * Register an area that responds to the pointer.
   * @param {object|Function} target `{ hover: partial selection, select: partial selection, tip: text }`, each
   *   optional; or a function that returns it for a point (x, y), for areas of many cells
   */
  hit(x, y, width, height, target) {
    this.hits.push({ x, y, width, height, target });
  }

  /** The target at a point, the last drawn first. */
  hitAt(x, y) {
    for (let i = this.hits.length - 1; i >= 0; i--) {
      const one = this.hits[i];
      if (!(x >= one.x && x < one.x + one.width && y >= one.y && y < one.y + one.height)) continue;
      return typeof one.target === "function" ? one.target(x, y) : one.target;
    }
    return null;
  }
}

/** Draws on a canvas' 2d context. */
export class CanvasSurface extends Hits {
  constructor(context) {
    super();
    this.context = context;
  }

  /** Fill and stroke the path that `shape` adds. */
  painted({ fill = null, stroke = null, line = 1, opacity = 1 }, shape) {
    const c = this.context;
    c.globalAlpha = opacity;
    c.beginPath();
    shape(c);
    if (fill) {
      c.fillStyle = fill;
      c.fill();
    }
    if (stroke) {
      c.strokeStyle = stroke;
      c.lineWidth = line;
      c.stroke();
    }
    c.globalAlpha = 1;
  }

  rect(x, y, width, height, look = {}) {
    this.painted(look, (c) => (look.radius ? c.roundRect(x, y, width, height, look.radius) : c.rect(x, y, width, height)));
  }

  circle(x, y, radius, look = {}) {
    this.painted(look, (c) => c.arc(x, y, radius, 0, 2 * Math.PI));
  }

  line(x1, y1, x2, y2, { stroke = "#000", line = 1, opacity = 1, dash = null } = {}) {
    const c = this.context;
    c.globalAlpha = opacity;
    c.strokeStyle = stroke;
    c.lineWidth = line;
    c.setLineDash(dash || []);
    c.beginPath();
    c.moveTo(x1, y1);
    c.lineTo(x2, y2);
    c.stroke();
    c.setLineDash([]);
    c.globalAlpha = 1;
  }

  /** A curve that starts and ends horizontally. */
  curve(x1, y1, x2, y2, { stroke = "#000", line = 1, opacity = 1 } = {}) {
    const c = this.context;
    const middle = (x1 + x2) / 2;
    c.globalAlpha = opacity;
    c.strokeStyle = stroke;
    c.lineWidth = line;
    c.beginPath();
    c.moveTo(x1, y1);
    c.bezierCurveTo(middle, y1, middle, y2, x2, y2);
    c.stroke();
    c.globalAlpha = 1;
  }

  /** A line through points [[x, y], …], closed and filled if `fill` is given. */
  path(points, look = {}) {
    this.painted(look, (c) => {
      points.forEach(([x, y], i) => (i ? c.lineTo(x, y) : c.moveTo(x, y)));
      if (look.fill) c.closePath();
    });
  }

  /** Text on one line; y is its middle. `turn` is in degrees, clockwise. */
  text(text, x, y, { size = 12, fill = "#000", align = "left", weight = 400, turn = 0, opacity = 1 } = {}) {
    const c = this.context;
    c.save();
    c.globalAlpha = opacity;
    c.font = `${weight} ${size}px ${FAMILY}`;
    c.fillStyle = fill;
    c.textAlign = align;
    c.textBaseline = "middle";
    c.direction = direction(text);
    c.translate(x, y);
    if (turn) c.rotate((turn * Math.PI) / 180);
    c.fillText(text, 0, 0);
    c.restore();
  }

  /** Pixels `{ width, height, data: Uint8ClampedArray }`, stretched to a place. */
  image(pixels, x, y, width, height, { smooth = false } = {}) {
    const c = this.context;
    c.imageSmoothingEnabled = smooth;
    c.drawImage(asCanvas(pixels), x, y, width, height);
    c.imageSmoothingEnabled = true;
  }

  /** A loaded picture, an `Image` element. */
  picture(element, x, y, width, height, { opacity = 1 } = {}) {
    this.context.globalAlpha = opacity;
    this.context.drawImage(element, x, y, width, height);
    this.context.globalAlpha = 1;
  }

  /** Clip what `inside` draws to a rectangle. */
  clipped(x, y, width, height, inside) {
    const c = this.context;
    c.save();
    c.beginPath();
    c.rect(x, y, width, height);
    c.clip();
    inside();
    c.restore();
  }
}

/** Draws as the text of an SVG. */
export class SvgSurface extends Hits {
  constructor(width, height, paper = null) {
    super();
    this.width = width;
    this.height = height;
    this.parts = [];
    this.clips = 0;
    if (paper) this.rect(0, 0, width, height, { fill: paper });
  }

  rect(x, y, width, height, { fill = null, stroke = null, line = 1, opacity = 1, radius = 0 } = {}) {
    const round = radius ? ` rx="${short(radius)}"` : "";
    const place = `x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"`;
    this.parts.push(`<rect ${place}${round}${paint(fill, stroke, line, opacity)}/>`);
  }

  circle(x, y, radius, { fill = null, stroke = null, line = 1, opacity = 1 } = {}) {
    const place = `cx="${short(x)}" cy="${short(y)}" r="${short(radius)}"`;
    this.parts.push(`<circle ${place}${paint(fill, stroke, line, opacity)}/>`);
  }

  line(x1, y1, x2, y2, { stroke = "#000", line = 1, opacity = 1, dash = null } = {}) {
    const place = `x1="${short(x1)}" y1="${short(y1)}" x2="${short(x2)}" y2="${short(y2)}"`;
    const dashes = dash ? ` stroke-dasharray="${dash.map(short).join(" ")}"` : "";
    this.parts.push(`<line ${place}${dashes}${paint(null, stroke, line, opacity)}/>`);
  }

  curve(x1, y1, x2, y2, { stroke = "#000", line = 1, opacity = 1 } = {}) {
    const middle = short((x1 + x2) / 2);
    const way = `M${short(x1)} ${short(y1)}C${middle} ${short(y1)} ${middle} ${short(y2)} ${short(x2)} ${short(y2)}`;
    this.parts.push(`<path d="${way}"${paint(null, stroke, line, opacity)}/>`);
  }

  path(points, { fill = null, stroke = null, line = 1, opacity = 1 } = {}) {
    const way = points.map(([x, y], i) => `${i ? "L" : "M"}${short(x)} ${short(y)}`).join("") + (fill ? "Z" : "");
    this.parts.push(`<path d="${way}"${paint(fill, stroke, line, opacity)}/>`);
  }

  text(text, x, y, { size = 12, fill = "#000", align = "left", weight = 400, turn = 0, opacity = 1 } = {}) {
    const way = direction(text);
    // The anchor is where a text begins, which for Arabic is its right end.
    const anchor = align === "center" ? "middle" : (align === "left") === (way === "ltr") ? "start" : "end";
    const turned = turn ? ` transform="rotate(${short(turn)} ${short(x)} ${short(y)})"` : "";
    const bold = weight === 400 ? "" : ` font-weight="${Number(weight)}"`;
    const facts = `font-size="${short(size)}" text-anchor="${anchor}" direction="${way}"${bold}${turned}`;
    const place = `x="${short(x)}" y="${short(y)}" dominant-baseline="central"`;
    this.parts.push(`<text ${place} ${facts}${paint(fill, null, 1, opacity)}>${escaped(text)}</text>`);
  }

  image(pixels, x, y, width, height, { smooth = false } = {}) {
    const place = `x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"`;
    const look = `preserveAspectRatio="none" style="image-rendering:${smooth ? "auto" : "pixelated"}"`;
    this.parts.push(`<image ${place} ${look} href="${asCanvas(pixels).toDataURL("image/png")}"/>`);
  }

  picture(element, x, y, width, height, { opacity = 1 } = {}) {
    const place = `x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"`;
    this.parts.push(
      `<image ${place} preserveAspectRatio="none" opacity="${short(opacity)}" href="${escaped(element.src)}"/>`,
    );
  }

  clipped(x, y, width, height, inside) {
    const name = `clip${this.clips++}`;
    const place = `x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"`;
    this.parts.push(`<clipPath id="${name}"><rect ${place}/></clipPath><g clip-path="url(#${name})">`);
    inside();
    this.parts.push("</g>");
  }

  /** The whole drawing. */
  toString() {
    const size = `width="${short(this.width)}" height="${short(this.height)}"`;
    const box = `viewBox="0 0 ${short(this.width)} ${short(this.height)}"`;
    const open = `<svg xmlns="http://www.w3.org/2000/svg" ${size} ${box} font-family="${escaped(FAMILY)}">`;
    return `${open}\n${this.parts.join("\n")}\n</svg>\n`;
  }
}

/** Text that is safe in markup and in quoted attributes; characters that XML forbids are replaced. */
export function escaped(text) {
  return String(text)
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd")
    .replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

function short(value) {
  return String(Math.round(100 * Number(value)) / 100);
}

function paint(fill, stroke, line, opacity) {
  const filled = ` fill="${fill ? escaped(fill) : "none"}"`;
  const drawn = stroke ? ` stroke="${escaped(stroke)}" stroke-width="${short(line)}"` : "";
  return filled + drawn + (opacity < 1 ? ` opacity="${Math.round(1000 * opacity) / 1000}"` : "");
}

const canvases = new WeakMap();

function asCanvas(pixels) {
  let canvas = canvases.get(pixels);
  if (!canvas) {
    canvas = document.createElement("canvas");
    canvas.width = pixels.width;
    canvas.height = pixels.height;
    canvas.getContext("2d").putImageData(new ImageData(pixels.data, pixels.width, pixels.height), 0, 0);
    canvases.set(pixels, canvas);
  }
  return canvas;
}
