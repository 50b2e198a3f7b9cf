// The server's page: a form to request a trace, above the viewer that shows it.
import { fromBase64 } from "./bytes.js";
import { element } from "./dom.js";
import { JudgeView } from "./judge.js";
import { LiveText } from "./live.js";
import { mount } from "./main.js";

const serveTries = 5; // when the server is busy
const serveLengths = [16, 32, 64, 128, 256]; // tokens that a model may be asked to write
const serveMixing = "attention"; // the server's default if a link names none

/**
 * What a link requests: {model, text, decoder, methods, layers, mixing, generate, picture, judge}, null for what it leaves out.
 * @param {string} search the query string
 */
export function serveAsked(search) {
  const query = new URLSearchParams(search);
  const methods = query.getAll("method").flatMap((one) => one.split(","));
  return {
    model: query.get("model"),
    text: query.get("text"),
    decoder: query.get("decoder"),
    methods: methods.length ? methods : null,
    layers: query.get("layers"),
    mixing: query.get("mixing"),
    generate: query.get("generate"),
    picture: query.get("picture"),
    judge: query.get("judge"),
  };
}

/**
 * Whether a key requests a trace: Enter does, Shift+Enter starts a new line, and the Enter that ends the composition of a
 * character does neither (229 is its code in Safari, where the composition is over by then).
 * @param {KeyboardEvent} event
 */
export function serveSends(event) {
  if (event.key !== "Enter" || event.isComposing || event.keyCode === 229) return false;
  return event.ctrlKey || event.metaKey || !(event.shiftKey || event.altKey);
}

/** Lines of JSON, as values, from a body that may be cut anywhere. */
export async function* serveLines(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (done ? decoder.decode() : decoder.decode(value, { stream: true }))).split("\n");
    rest = done ? "" : lines.pop();
    for (const line of lines) if (line) yield JSON.parse(line);
    if (done) return;
  }
}

/** The form and everything it does. */
export class ServeForm {
  /**
   * @param {HTMLElement} root
   * @param {{models: object[], methods: object[], mixings: object[], images: string[], limits: object}} facts of /api/models
   */
  constructor(root, facts) {
    this.facts = facts;
    this.file = null;
    this.link = null;
    this.viewer = null;
    this.running = null;
    this.root = root;
    this.build(root);
    this.listen();
    this.showModel();
  }

  build(root) {
    const { models, methods, mixings, images } = this.facts;
    this.model = element("select", { id: "serve-model" });
    for (const one of models) this.model.append(element("option", { value: one.name }, one.name));
    this.text = element("textarea", {
      id: "serve-text",
      rows: 2,
      maxLength: this.facts.limits.characters,
      placeholder: "Type a sentence",
      spellcheck: "false",
      autocapitalize: "off",
      enterkeyhint: "go",
    });
    this.decoder = element("textarea", {
      id: "serve-decoder",
      rows: 1,
      maxLength: this.facts.limits.characters,
      placeholder: "if empty, the model generates it",
      spellcheck: "false",
      enterkeyhint: "go",
    });
    this.choose = element("input", { id: "serve-file", type: "file", accept: images.join(",") });
    this.thumb = element("img", { alt: "", hidden: true });
    this.dropText = element("span", {}, "Drop an image, paste one, or choose a file");
    this.drop = element("label", { class: "serve-drop", for: "serve-file" }, this.choose, this.thumb, this.dropText);
    // Methods that run the model are slow: off by default.
    this.methods = methods.map(({ name, reads }) => element("input", { type: "checkbox", value: name, checked: reads === "maps" }));
    this.layers = element("select", { id: "serve-layers" });
    this.mixing = element("select", { id: "serve-mixing" });
    for (const { name, title, passes } of mixings) {
      this.mixing.append(element("option", { value: name }, passes > 0 ? `${title} (runs the model for each token)` : title));
    }
    this.mixing.value = serveMixing;
    this.generate = element("select", { id: "serve-generate" }, element("option", { value: "" }, "nothing"));
    for (const count of serveLengths.filter((one) => one <= this.facts.limits.tokens)) this.generate.append(element("option", { value: String(count) }, `up to ${count} tokens`));
    this.stop = element("button", { type: "button", hidden: true, title: "Stop writing, and keep what is there" }, "Stop");
    this.go = element("button", { type: "submit", class: "serve-go" }, "Trace");
    this.judge = element("button", { type: "button", title: "Delete the words that each method names, and see what that does to the prediction" }, "Judge");
    this.copy = element("button", { type: "button", disabled: true }, "Copy link");
    this.status = element("p", { class: "serve-status", role: "status", "aria-live": "polite" });
    this.view = element("div", { class: "serve-view" });

    const field = (name, input, more = "") =>
      element("div", { class: `serve-field ${more}` }, element("label", { for: input.id }, name), input);
    const typed = (name, box, hint) => {
      box.setAttribute("aria-describedby", hint.id);
      const line = element("div", { class: "serve-line" }, element("label", { for: box.id }, name), hint);
      return element("div", { class: "serve-field serve-wide" }, line, box);
    };
    const [hint, decoderHint] = [this.text, this.decoder].map(({ id }) => element("span", { id: `${id}-keys` }, "Enter to trace, Shift+Enter for a new line"));
    this.textField = typed("Sentence", this.text, hint);
    this.decoderField = typed("Decoder", this.decoder, decoderHint);
    this.decoderHint = decoderHint;
    this.imageField = element("div", { class: "serve-field serve-wide" }, this.drop);
    this.generateField = field("Let it write", this.generate);
    this.modelField = field("Model", this.model, "serve-model");
    const boxes = this.methods.map((box, i) => element("label", { class: "serve-box" }, box, methods[i].title));
    this.form = element(
      "form",
      { class: "serve-form", noValidate: true, autocomplete: "off" },
      this.modelField,
      this.textField,
      this.imageField,
      this.decoderField,
      element(
        "div",
        { class: "serve-row" },
        element(
          "div",
          { class: "serve-field", role: "group", "aria-label": "Methods" },
          element("span", { class: "serve-title" }, "Methods"),
          element("div", { class: "serve-boxes" }, ...boxes),
        ),
        this.generateField,
        field("Layers", this.layers),
        field("Maps", this.mixing),
        element("div", { class: "serve-buttons" }, this.go, this.stop, this.judge, this.copy),
      ),
      this.status,
    );
    root.replaceChildren(
      element("header", { class: "serve-head" }, element("h1", {}, "Overt"), element("p", {}, "which tokens a model’s attention draws on")),
      this.form,
      this.view,
    );
  }

  listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault(); // the page's policy forbids submitting forms
      this.run();
    });
    for (const box of [this.text, this.decoder]) {
      box.addEventListener("keydown", (event) => {
        if (!serveSends(event)) return;
        event.preventDefault();
        if (!event.repeat) this.run(); // a key held down sends one request
      });
      box.addEventListener("input", () => this.grow(box));
    }
    this.model.addEventListener("change", () => this.showModel());
    this.stop.addEventListener("click", () => this.running?.abort());
    this.judge.addEventListener("click", () => this.runJudge());
    this.copy.addEventListener("click", () => this.copyLink());
    this.choose.addEventListener("change", () => this.take(this.choose.files[0]));
    // A picture that misses the zone would otherwise replace the page.
    for (const name of ["dragover", "drop"]) {
      window.addEventListener(name, (event) => {
        if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
        event.preventDefault();
        const images = this.current().kind === "image";
        event.dataTransfer.dropEffect = images ? "copy" : "none";
        this.drop.classList.toggle("serve-over", images && name === "dragover");
        if (images && name === "drop") this.take(event.dataTransfer.files[0]);
      });
    }
    window.addEventListener("dragleave", () => this.drop.classList.remove("serve-over"));
    window.addEventListener("paste", (event) => {
      const file = event.clipboardData?.files[0];
      if (file && this.current().kind === "image") this.take(file);
    });
  }

  /** The chosen model. */
  current() {
    return this.facts.models.find((one) => one.name === this.model.value) ?? this.facts.models[0];
  }

  showModel() {
    const { kind, decoder, judges, layers, writes } = this.current();
    this.judge.hidden = !judges;
    this.generateField.hidden = !writes;
    this.modelField.hidden = this.facts.models.length < 2;
    this.textField.hidden = kind !== "text";
    this.imageField.hidden = kind !== "image";
    this.decoderField.hidden = !decoder;
    this.decoderHint.hidden = kind === "text"; // already shown above
    const previous = this.layers.value;
    this.layers.replaceChildren(element("option", { value: "" }, layers ? `all ${layers}` : "all"));
    for (let n = 1; n < (layers ?? 13); n += 1) {
      this.layers.append(element("option", { value: String(n) }, n === 1 ? "the last" : `the last ${n}`));
    }
    this.layers.value = previous;
    if (this.layers.selectedIndex < 0) this.layers.value = "";
  }

  /** Choose how much the model is to write, as a link says, even if it is not among the usual numbers. */
  offerLength(count) {
    if (!/^\d{1,6}$/.test(count ?? "")) return;
    if (![...this.generate.options].some((one) => one.value === count)) this.generate.append(element("option", { value: count }, `up to ${count} tokens`));
    this.generate.value = count;
  }

  recolour(theme) {
    this.root.dataset.theme = theme;
  }

  grow(box) {
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight + 2}px`;
  }

  take(file) {
    if (!file) return;
    const { images, limits } = this.facts;
    if (!images.includes(file.type)) {
      this.say(`${file.type || "this file"} is not a supported image: use PNG, JPEG, WebP, GIF or BMP`, "error");
      return;
    }
    if (file.size > limits.image_bytes) {
      this.say(`the image is ${(file.size / 2 ** 20).toFixed(1)} MiB, the limit is ${limits.image_bytes / 2 ** 20} MiB`, "error");
      return;
    }
    this.file = file;
    if (this.thumb.src) URL.revokeObjectURL(this.thumb.src);
    this.thumb.src = URL.createObjectURL(file);
    this.thumb.hidden = false;
    this.dropText.textContent = file.name || "pasted image";
    this.run();
  }

  say(line, kind = "") {
    this.status.textContent = line;
    this.status.className = `serve-status ${kind && `serve-${kind}`}`;
  }

  /** Fill the form from a link and request its trace. */
  async follow(link) {
    if (link.picture) {
      await this.fetched(() => fetch(`/api/picture?${new URLSearchParams({ name: link.picture })}`));
      return;
    }
    if (link.model && !this.facts.models.some((one) => one.name === link.model)) {
      this.say(`the link names the model “${link.model}”, which is not served here`, "error");
      return;
    }
    if (link.model) this.model.value = link.model;
    this.showModel();
    if (link.methods) for (const box of this.methods) box.checked = link.methods.includes(box.value);
    if (link.layers) this.layers.value = link.layers;
    if (this.layers.selectedIndex < 0) this.layers.value = "";
    if (this.facts.mixings.some(({ name }) => name === link.mixing)) this.mixing.value = link.mixing;
    if (link.decoder) this.decoder.value = link.decoder;
    this.offerLength(link.generate);
    if (link.text && this.current().kind === "text") {
      this.text.value = link.text;
      this.grow(this.text);
      await (link.judge && this.current().judges ? this.runJudge() : this.run());
    } else {
      (this.current().kind === "text" ? this.text : this.choose).focus();
    }
  }

  /** Request the trace that the form describes. */
  async run() {
    const { name, kind, decoder, writes } = this.current();
    const methods = this.methods.filter((box) => box.checked).map((box) => box.value);
    if (!methods.length) return this.say("choose at least one method", "error");
    const fed = decoder && this.decoder.value.trim() ? this.decoder.value : null;
    const layers = this.layers.value ? Number(this.layers.value) : null;
    let address = "/api/trace";
    let request = null;
    if (kind === "image") {
      if (!this.file) return this.say("choose an image first", "error");
      const fields = { model: name, methods: methods.join(","), mixing: this.mixing.value };
      if (layers) fields.layers = layers;
      if (fed) fields.decoder = fed;
      address += `?${new URLSearchParams(fields)}`;
      request = { method: "POST", headers: { "Content-Type": this.file.type }, body: this.file };
    } else {
      if (!this.text.value.trim()) {
        this.text.focus();
        return this.say("type a sentence first", "error");
      }
      const body = { model: name, text: this.text.value, methods, mixing: this.mixing.value };
      if (layers) body.layers = layers;
      if (fed) body.decoder = fed;
      if (writes && this.generate.value) body.generate = Number(this.generate.value);
      request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    }
    const doing = kind === "text" && writes && this.generate.value ? "writing" : "tracing";
    return this.fetched((signal) => fetch(address, { ...request, signal }), doing);
  }

  /** Request what deleting the words of each method does to the prediction. */
  async runJudge() {
    if (!this.text.value.trim()) {
      this.text.focus();
      return this.say("type a sentence first", "error");
    }
    const body = JSON.stringify({ model: this.current().name, text: this.text.value });
    const request = { method: "POST", headers: { "Content-Type": "application/json" }, body };
    return this.fetched((signal) => fetch("/api/judge", { ...request, signal }), "judging");
  }

  /** Send, wait, show. A newer request replaces an older one. */
  async fetched(send, doing = "tracing") {
    const old = this.running;
    const control = new AbortController();
    this.running = control;
    old?.abort();
    this.live = null;
    this.stop.hidden = doing !== "writing";
    const began = performance.now();
    this.say(`${doing}…`, "busy");
    this.form.setAttribute("aria-busy", "true");
    const watch = setInterval(() => this.tell(control, doing), 1000);
    try {
      const answer = await this.answered(send, control.signal);
      if (this.running !== control) return;
      this.show(answer);
      const took = (performance.now() - began) / 1000;
      this.say(`took ${took.toFixed(took < 1 ? 2 : 1)} s${answer.link ? "" : "; too long for a link"}`);
    } catch (error) {
      if (this.running !== control) return;
      if (control.signal.aborted) return void this.say(`stopped${this.live ? ` after ${this.live.count} tokens` : ""}`);
      this.say(error instanceof TypeError ? "the server does not answer: is it still running?" : error.message, "error");
    } finally {
      clearInterval(watch);
      if (this.running === control) {
        this.running = null;
        this.stop.hidden = true;
        this.form.removeAttribute("aria-busy");
      }
    }
  }

  async answered(send, signal) {
    for (let tries = 1; ; tries += 1) {
      const response = await send(signal);
      let answer = null;
      try {
        const lines = response.ok && response.headers.get("Content-Type") === "application/x-ndjson";
        answer = lines ? await this.lastLine(response.body, signal) : await response.json();
      } catch (error) {
        if (signal.aborted) throw error;
        throw new Error(`the server’s answer cannot be read (status ${response.status})`);
      }
      if (response.ok && !answer.error) return answer;
      const wait = Number(response.headers.get("Retry-After"));
      if (response.status !== 503 || !wait || tries >= serveTries) throw new Error(answer.error);
      this.say(`${answer.error} (trying again in ${wait} s)`, "busy");
      // At a random time: clients refused together should not return together.
      await new Promise((resolve) => setTimeout(resolve, 1000 * wait * (0.5 + Math.random())));
      if (signal.aborted) throw new Error("replaced by a newer request");
    }
  }

  /** Show words as they are written; the last line is the answer. */
  async lastLine(body, signal) {
    for await (const line of serveLines(body)) {
      if (signal.aborted) throw new Error("replaced by a newer request");
      if (line.index || line.error) return line;
      this.written(line);
    }
    throw new Error("the answer ends too early");
  }

  written(line) {
    if (!this.live) {
      this.viewer?.destroy();
      this.viewer = null;
      this.themes?.disconnect();
      this.view.classList.remove("serve-judged");
      this.live = new LiveText(this.view, () => this.root.dataset.theme);
    }
    this.live.take(line);
    const count = this.live.count;
    this.say(`writing… ${count} ${count === 1 ? "token" : "tokens"}`, "busy");
  }

  /** While waiting for an answer, show how many requests are waiting. */
  async tell(control, doing) {
    try {
      const { waiting } = await (await fetch("/health", { signal: control.signal })).json();
      if (this.running === control && waiting > 0) this.say(`${doing}… ${waiting} in the queue`, "busy");
    } catch {
      // The request itself will report what is wrong.
    }
  }

  show(answer) {
    this.link = answer.link;
    this.copy.disabled = !answer.link;
    if (answer.link) history.replaceState(null, "", answer.link + location.hash);
    this.viewer?.destroy();
    const root = element("div", {});
    this.view.replaceChildren(root);
    this.view.classList.toggle("serve-judged", Boolean(answer.judged));
    this.viewer = answer.judged
      ? new JudgeView(root, answer.judged, { link: false })
      : mount(root, { index: answer.index, block: async (n) => fromBase64(answer.blocks[n]) });
    // The viewer knows whether it is light or dark; the form follows.
    this.themes?.disconnect();
    const frame = root.querySelector(".overt");
    this.themes = new MutationObserver(() => this.recolour(frame.dataset.theme));
    this.themes.observe(frame, { attributeFilter: ["data-theme"] });
    this.recolour(frame.dataset.theme);
  }

  async copyLink() {
    const whole = new URL(this.link + location.hash, location.origin).href;
    try {
      await navigator.clipboard.writeText(whole);
      this.say("link copied");
    } catch {
      // Without https or clipboard permission, show the link to be copied by hand.
      const box = element("input", { value: whole, readOnly: true, "aria-label": "link to this trace" });
      this.status.replaceChildren(box);
      box.select();
    }
  }
}

/** Start the page. */
async function serveStart() {
  const root = document.getElementById("serve");
  const link = serveAsked(location.search);
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  try {
    const form = new ServeForm(root, await (await fetch("/api/models")).json());
    await form.follow(link);
  } catch (error) {
    root.append(element("p", { class: "serve-status serve-error" }, `the page cannot start: ${error.message}`));
  }
}

serveStart();
