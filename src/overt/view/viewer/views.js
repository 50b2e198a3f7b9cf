// Every view, in the order of its tabs. A view is an object:
//   id, title
//   controls: which of method, group, layer, averaged, head, query, part, words, log, find it uses
//   parts(trace, state): [[name, title]] of what its control "part" offers
//   byWords: whether it starts with the words' scale if a special token drowns them out, optional
//   applies(trace): true, or why there is nothing to show
//   measure({ trace, seen, state, width, screen }): { height, width? } of the whole drawing
//   draw({ surface, trace, seen, state, theme, width, height, top, bottom, redraw }): draw what lies between top and bottom
//   minimap({ trace, seen, state, width }): [{ at, size, chosen }], optional; false for none at all
//   placeOf({ trace, seen, state, width }): y of the chosen token, optional
//   covered({ trace, seen, state, width }): height of what stays at the top of the pane, above what scrolls, optional
//   step({ trace, state, step }): what the keys ↑ and ↓ select, optional; else the previous or next token
//   describe({ trace, seen }): a line for the status, optional
import { captionView } from "./caption.js";
import { crossView } from "./cross.js";
import { evolutionView } from "./evolution.js";
import { graphView } from "./graph.js";
import { headsView } from "./heads.js";
import { imageView } from "./image.js";
import { nodesView } from "./nodes.js";
import { picturesView } from "./pictures.js";
import { stripView } from "./strip.js";
import { textView } from "./text.js";
import { topView } from "./top.js";
import { uncertaintyView } from "./uncertainty.js";

export const VIEWS = [graphView, picturesView, textView, topView, stripView, headsView, crossView, evolutionView, uncertaintyView, imageView, nodesView, captionView];
