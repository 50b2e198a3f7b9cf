// Building elements without markup: text is never parsed.

/** An element with properties, listeners (`onclick: f`) and children; strings become text. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** A select with options `[[value, title], …]`. */
export function picker(label, options, value, onchange) {
  const select = element("select", { "aria-label": label, onchange: () => onchange(select.value) });
  for (const [key, title] of options) {
    const option = element("option", {}, title);
    option.value = key;
    select.append(option);
  }
  select.value = value;
  return element("label", { class: "control" }, element("span", {}, label), select);
}

/** A group of buttons, one of which is pressed. */
export function choice(label, options, value, onchange) {
  const group = element("div", { class: "choice", role: "group", "aria-label": label });
  for (const [key, title, off] of options) {
    const button = element("button", { type: "button", "aria-label": `${label}: ${title}`, "aria-pressed": String(key === value), onclick: () => onchange(key) }, title);
    if (off) {
      button.disabled = true;
      button.title = off;
    }
    group.append(button);
  }
  return element("div", { class: "control" }, element("span", {}, label), group);
}

/** A slider over whole numbers, with the current value in words. */
export function slider(label, count, value, title, oninput) {
  const range = element("input", { type: "range", min: "0", max: String(Math.max(count - 1, 0)), step: "1", "aria-label": label });
  range.value = String(value);
  const words = element("output", {}, title(value));
  range.addEventListener("input", () => {
    words.textContent = title(Number(range.value));
    range.setAttribute("aria-valuetext", words.textContent);
    oninput(Number(range.value));
  });
  range.setAttribute("aria-valuetext", title(value));
  return element("label", { class: "control" }, element("span", {}, label), range, words);
}

/** A checkbox; null is indeterminate, and becomes checked. */
export function tick(label, value, onchange, title = null) {
  const box = element("input", { type: "checkbox", "aria-label": label, onchange: () => onchange(box.checked) });
  box.checked = Boolean(value);
  box.indeterminate = value === null;
  return element("label", { class: "control tick", title }, box, element("span", {}, label));
}

/** Download a file. */
export function download(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
