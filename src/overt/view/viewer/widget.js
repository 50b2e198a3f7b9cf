// The viewer inside a notebook, over anywidget: the kernel sends index and bytes, and receives the selection.
import { mount } from "./main.js";

/** Called by anywidget. */
export function render({ model, el }) {
  const blocks = model.get("blocks");
  const bytes = (view) => new Uint8Array(view.buffer || view, view.byteOffset || 0, view.byteLength);
  el.style.height = `${model.get("height")}px`;
  let telling = false;
  const tell = (state) => {
    telling = true;
    model.set("selection", state);
    model.save_changes();
    telling = false;
  };
  const handle = mount(
    el,
    { index: model.get("index"), block: async (at) => bytes(blocks[at]) },
    {
      link: false,
      state: model.get("selection"),
      onselect: tell,
    },
  );
  tell(handle.state()); // report the initial selection too
  const heard = () => telling || handle.select(model.get("selection"));
  model.on("change:selection", heard);
  return () => {
    model.off("change:selection", heard);
    handle.destroy();
  };
}
