// As much of a browser's document as the form and the controls need: elements with children, values and listeners.

class Made {
  constructor(tag) {
    Object.assign(this, { tagName: tag.toUpperCase(), children: [], attributes: {}, listeners: {}, dataset: {}, style: {} });
    Object.assign(this, { hidden: false, disabled: false, className: "", scrollHeight: 0 });
    if (tag === "input") this.checked = false;
    this.classList = { add() {}, remove() {}, toggle() {} };
    this.written = tag === "select" ? null : "";
  }

  append(...some) {
    this.children.push(...some);
  }

  replaceChildren(...some) {
    this.children = some;
  }

  setAttribute(name, value) {
    this.attributes[name] = value;
    if (["id", "type", "value", "title"].includes(name)) this[name] = value;
    if (name === "checked") this.checked = true;
  }

  removeAttribute(name) {
    delete this.attributes[name];
  }

  getAttribute(name) {
    return this.attributes[name] ?? null;
  }

  addEventListener(type, listener) {
    this.listeners[type] = listener;
  }

  contains() {
    return false;
  }

  focus() {}

  get options() {
    return this.children.filter((one) => one.tagName === "OPTION");
  }

  get selectedIndex() {
    return this.options.findIndex((one) => one.value === this.value);
  }

  get value() {
    if (this.tagName === "SELECT") return this.written ?? this.options[0]?.value ?? "";
    return this.written;
  }

  set value(given) {
    const known = this.tagName !== "SELECT" || this.options.some((one) => one.value === given);
    this.written = known ? given : "";
  }

  get textContent() {
    return this.children.map((one) => (typeof one === "string" ? one : one.textContent)).join("");
  }

  set textContent(text) {
    this.children = [String(text)];
  }

  /** All elements within that answer to a test, in their order. */
  all(fits) {
    return this.children.filter((one) => typeof one !== "string").flatMap((one) => [...(fits(one) ? [one] : []), ...one.all(fits)]);
  }

  querySelector(tag) {
    return this.all((one) => one.tagName === tag.toUpperCase())[0] || null;
  }

  querySelectorAll() {
    return [];
  }
}

/** An element that belongs to nothing. */
export function made(tag = "div") {
  return new Made(tag);
}

/** Put a document in place, whose elements are found by `ids`; returns what takes it away again. */
export function documented(ids = {}) {
  const before = globalThis.document;
  globalThis.document = { createElement: made, getElementById: (id) => ids[id] || null, activeElement: null, body: made("body") };
  return () => (globalThis.document = before);
}
