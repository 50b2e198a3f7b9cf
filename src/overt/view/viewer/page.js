// The self-contained page, which holds the index and the packed bytes as text.
import { fromBase64 } from "./bytes.js";
import { mount } from "./main.js";

const packed = [...document.querySelectorAll("script.overt-block")];
const index = JSON.parse(document.getElementById("overt-index").textContent);

globalThis.overt = mount(document.getElementById("overt"), {
  index,
  block: async (at) => fromBase64(packed[at].textContent.trim()),
});
