// A pane: one view of one trace, on a canvas no larger than the visible part.
import { palette } from "./colour.js";
import { element } from "./dom.js";
import { drawMessage, messageHeight, scaledByWords } from "./parts.js";
import { CanvasSurface, SvgSurface } from "./surface.js";

const TALLEST = 6000; // pixels; a taller view is exported only as far as it is visible
const MINIMAP = 44; // its width
const MESSAGE = 50; // above a message

/** Shows a view, scrolls it, and passes on what the pointer does. */
export class Pane {
  /**
   * @param {object} view see views.js
   * @param {TraceData} trace
   * @param {Store} store
   * @param {() => string} theme "light" or "dark"
   * @param {string} heading
   * @param {string} described id of the element that describes the drawing in words
   * @param {{name: string, show: (pane: Pane) => void}[]} offers traces that have data for the view, if this one has none
   */
  constructor(view, trace, store, theme, heading, described, offers = []) {
    this.view = view;
    this.trace = trace;
    this.store = store;
    this.theme = theme;
    this.frame = 0;
    this.size = { width: 0, height: 0 };
    this.canvas = element("canvas", { class: "drawing" });
    this.spacer = element("div", { class: "spacer" }, this.canvas);
    this.scroll = element("div", { class: "scroll", tabindex: "0", role: "img", "aria-label": heading, "aria-describedby": described }, this.spacer);
    this.minimap = element("canvas", { class: "minimap", "aria-hidden": "true" });
    this.minimap.hidden = true; // an unsized canvas as tall as the pane would be wider than it
    this.tip = element("div", { class: "tip", role: "tooltip" });
    this.tip.hidden = true;
    this.body = element("div", { class: "pane-body" }, this.scroll, this.minimap, this.tip);
    this.root = element("section", { class: "pane", "data-view": view.id }, element("h2", { title: heading }, heading), this.body);
    if (offers.length) {
      this.root.classList.add("lacking");
      this.root.append(this.offered(offers));
    }
    this.listen();
  }

  /** If the view has nothing to show, buttons for traces that have data for it. */
  offered(offers) {
    const buttons = offers.map(({ name, show }) => element("button", { type: "button", onclick: () => show(this) }, name));
    const words = `${offers.length === 1 ? "This trace on the page has" : "These traces on the page have"} data for ${this.view.title}:`;
    return element("div", { class: "offers" }, element("p", {}, words), element("div", { role: "group", "aria-label": words }, ...buttons));
  }

  listen() {
    const scrolled = () => {
      this.tip.hidden = true;
      this.ask();
    };
    this.scroll.addEventListener("scroll", scrolled, { passive: true });
    this.scroll.addEventListener("pointermove", (event) => this.pointed(event));
    this.scroll.addEventListener("pointerleave", () => {
      this.tip.hidden = true;
      this.store.point(null);
    });
    this.scroll.addEventListener("click", (event) => {
      const target = this.under(event);
      if (target && target.select) this.store.select(target.select);
    });
    // A map of the whole at the top of a view: pressing or dragging scrolls there, a click then selects.
    const go = (event) => {
      if (!(event.buttons & 1) || event.pointerType === "touch") return;
      if (event.type === "pointerdown") this.dragging = Number.isFinite(this.under(event)?.scrollTo);
      const target = this.dragging ? this.under(event) : null;
      if (Number.isFinite(target?.scrollTo)) this.scroll.scrollTop = target.scrollTo - (this.size.height + this.cover()) / 2;
    };
    this.scroll.addEventListener("pointerdown", go);
    this.scroll.addEventListener("pointermove", go);
    const jump = (event) => {
      if (!event.buttons && event.type !== "pointerdown") return;
      if (event.type === "pointerdown") this.minimap.setPointerCapture(event.pointerId);
      const box = this.minimap.getBoundingClientRect();
      const part = (event.clientY - box.top) / box.height;
      this.scroll.scrollTop = part * this.content.height - this.size.height / 2;
    };
    this.minimap.addEventListener("pointerdown", jump);
    this.minimap.addEventListener("pointermove", jump);
    if (typeof ResizeObserver !== "undefined") {
      this.observer = new ResizeObserver(() => this.ask());
      this.observer.observe(this.body);
    }
  }

  under(event) {
    if (!this.surface) return null;
    const box = this.canvas.getBoundingClientRect();
    return this.surface.hitAt(event.clientX - box.left + this.scroll.scrollLeft, event.clientY - box.top + this.scroll.scrollTop);
  }

  pointed(event) {
    const target = this.under(event);
    this.scroll.style.cursor = target && target.select ? "pointer" : "";
    const tip = target && target.tip;
    this.tip.hidden = !tip;
    if (tip) {
      this.tip.textContent = tip;
      const box = this.body.getBoundingClientRect();
      const x = event.clientX - box.left;
      const y = event.clientY - box.top;
      const left = x + 14 + this.tip.offsetWidth > box.width ? x - 14 - this.tip.offsetWidth : x + 14;
      this.tip.style.left = `${Math.max(0, left)}px`;
      this.tip.style.top = `${Math.min(y + 14, Math.max(0, box.height - this.tip.offsetHeight - 2))}px`;
    }
    // A finger that scrolls points at nothing.
    if (event.pointerType !== "touch") this.store.point(target && target.hover ? target.hover : null, this);
  }

  /** Redraw in the next frame. */
  ask() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  /** The selection within this trace's limits: a compared trace may be shorter, or have fewer layers. */
  get selection() {
    const grouped = this.view.controls.includes("group");
    const near = (state) => ({ ...this.trace.nearest(grouped ? state : { ...state, group: "" }), words: scaledByWords(this.view, this.trace, state) });
    return { seen: near(this.store.seen), state: near(this.store.state) };
  }

  /** Whether another pane stands beside this one, rather than below it. */
  get beside() {
    const area = this.root.parentElement;
    return Boolean(area) && area.children.length > 1 && this.root.offsetWidth < 0.75 * area.clientWidth;
  }

  scene(surface, width, top, bottom) {
    const { trace } = this;
    const theme = palette(this.theme());
    return { surface, trace, ...this.selection, beside: this.beside, theme, width, top, bottom, height: this.content.height, redraw: () => this.ask() };
  }

  measured(width) {
    const fit = this.view.applies(this.trace);
    if (fit !== true) return { width, height: MESSAGE + messageHeight(fit, width), why: fit };
    return { width, ...this.view.measure({ trace: this.trace, ...this.selection, beside: this.beside, width, screen: this.size.height }) };
  }

  drawOn(surface, width, top, bottom) {
    const scene = this.scene(surface, width, top, bottom);
    const problem = this.content.why || this.trace.failed;
    if (problem) drawMessage(surface, scene.theme, problem, width, top + MESSAGE);
    else this.view.draw(scene);
  }

  draw() {
    this.frame = 0;
    const width = this.scroll.clientWidth;
    const height = this.scroll.clientHeight;
    if (!width || !height || !this.root.isConnected) return;
    this.size = { width, height };
    this.content = this.measured(width);
    const wide = Math.max(this.content.width, width);
    const tall = Math.max(this.content.height, 1);
    this.spacer.style.width = wide > width ? `${wide}px` : "100%";
    this.spacer.style.height = `${Math.max(tall, height - 2)}px`;
    const dense = globalThis.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * dense) || this.canvas.height !== Math.round(height * dense)) {
      this.canvas.width = Math.round(width * dense);
      this.canvas.height = Math.round(height * dense);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    const { scrollLeft: left, scrollTop: top } = this.scroll;
    const context = this.canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.setTransform(dense, 0, 0, dense, -left * dense, -top * dense);
    this.surface = new CanvasSurface(context);
    this.drawOn(this.surface, wide, top, top + height);
    const narrow = !this.minimap.hidden;
    this.drawMinimap(tall, height, dense);
    if (narrow === this.minimap.hidden) {
      this.late = true; // lines break elsewhere beside the minimap
      this.ask();
    } else if (this.late) this.revealChosen();
  }

  drawMinimap(tall, height, dense) {
    const wanted = tall > 1.5 * height && this.view.minimap !== false;
    this.minimap.hidden = !wanted;
    if (!wanted) return;
    const theme = palette(this.theme());
    this.minimap.width = MINIMAP * dense;
    this.minimap.height = height * dense;
    this.minimap.style.width = `${MINIMAP}px`;
    this.minimap.style.height = `${height}px`;
    const context = this.minimap.getContext("2d");
    context.setTransform(dense, 0, 0, dense, 0, 0);
    const marks = this.view.minimap && !this.content.why ? this.view.minimap({ trace: this.trace, ...this.selection, beside: this.beside, width: this.content.width }) : [];
    // marks: [{ at: 0…1 along the content, size: 0…1, chosen }]
    for (const { at, size, chosen } of marks) {
      context.globalAlpha = chosen ? 1 : 0.25 + 0.75 * size;
      context.fillStyle = chosen ? theme.select : theme.edge;
      const wide = Math.max(2, size * (MINIMAP - 8));
      context.fillRect(MINIMAP - 4 - wide, at * height - (chosen ? 1 : 0), wide, chosen ? 3 : 1.5);
    }
    context.globalAlpha = 0.16;
    context.fillStyle = theme.ink;
    context.fillRect(0, (this.scroll.scrollTop / tall) * height, MINIMAP, Math.max(4, (height / tall) * height));
    context.globalAlpha = 1;
  }

  /** Scroll to the chosen token, now or once the view has been laid out. */
  revealChosen() {
    this.late = !this.content;
    if (this.late || !this.view.placeOf || this.content.why) return;
    const width = Math.max(this.content.width, this.size.width);
    const y = this.view.placeOf({ trace: this.trace, ...this.selection, width });
    if (Number.isFinite(y)) this.reveal(y);
  }

  /** Height of what stays at the top of the view, above what scrolls. */
  cover() {
    return this.view.covered && this.content && !this.content.why ? this.view.covered({ trace: this.trace, ...this.selection, width: Math.max(this.content.width, this.size.width) }) : 0;
  }

  /** Scroll so that a place of the content is visible. */
  reveal(y, size = 24) {
    const { scrollTop: top, clientHeight: height } = this.scroll;
    const cover = this.cover();
    if (cover) {
      const hidden = y < top + cover || y + size > top + height;
      if (hidden) this.scroll.scrollTop = Math.max(0, y - (cover + height - size) / 2);
    } else if (y < top + 40) this.scroll.scrollTop = Math.max(0, y - 60);
    else if (y + size > top + height - 30) this.scroll.scrollTop = y + size + 60 - height;
  }

  /** The area that is exported: the whole drawing, or only the visible part of a very tall one. */
  exported() {
    this.draw();
    const whole = this.content.height <= TALLEST;
    const wide = Math.max(this.content.width, this.size.width);
    const top = whole ? 0 : this.scroll.scrollTop;
    const tall = whole ? Math.max(this.content.height, 60) : this.size.height;
    return { wide, top, tall };
  }

  /** The view as an SVG. */
  svg() {
    const { wide, top, tall } = this.exported();
    const theme = palette(this.theme());
    const surface = new SvgSurface(wide, tall, theme.paper);
    if (top) surface.parts.push(`<g transform="translate(0 ${-Math.round(top)})">`);
    this.drawOn(surface, wide, top, top + tall);
    if (top) surface.parts.push("</g>");
    return surface.toString();
  }

  /** The view as a PNG at twice its size, as a promise of a blob. */
  async png() {
    const { wide, top, tall } = this.exported();
    const canvas = element("canvas");
    canvas.width = 2 * wide;
    canvas.height = 2 * tall;
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    context.fillStyle = palette(this.theme()).paper;
    context.fillRect(0, 0, wide, tall);
    context.translate(0, -top);
    this.drawOn(new CanvasSurface(context), wide, top, top + tall);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  destroy() {
    if (this.observer) this.observer.disconnect();
    cancelAnimationFrame(this.frame);
    this.root.remove();
  }
}
