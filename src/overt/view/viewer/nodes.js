// A node of a graph and what it draws on: rings of neighbours by hop, and a table of all neighbours.
import { KINDS } from "./colour.js";
import { nodesAngles, nodesBend, nodesLabels, nodesOrdered, nodesScene, nodesSpread, nodesTies, nodesValue } from "./nodes_layout.js";
import { drawScale, SCALE_HEIGHT, scaleFor } from "./parts.js";
import { fitted, textWidth } from "./surface.js";
import { number, shown } from "./words.js";

const NODES_SIDE = 760; // minimum width for the table next to the picture
const NODES_PAD = 14;
const NODES_TITLE = 42;
const NODES_KEYS = 54; // below the rings: what areas and widths mean
const NODES_HEAD = 42; // of the table
const NODES_ROW = 22;
const NODES_LEGEND = 18; // a line of classes
const NODES_WIDEST = 6; // lines of edges
const NODES_NARROWEST = 0.6;
const NODES_SMALLEST = 2.5; // radius
const NODES_PALEST = 0.2; // of the scale of colours
const NODES_TOLD = 5; // edges of the node under the pointer that are labelled with their share

/** A node's name for drawing. */
export function nodesName(one, most = 24) {
  return shown(one.name === undefined || one.name === null ? one.id : one.name, most);
}

/** A node's name in a sentence. */
function nodesCalled(one, most) {
  return one.name === undefined || one.name === null ? `node ${one.id}` : nodesName(one, most);
}

function nodesLabel(label) {
  return label === null || label === undefined ? "no class" : String(label);
}

const nodesKept = new WeakMap();

function nodesOnce(trace, key, make) {
  let cache = nodesKept.get(trace);
  if (!cache) nodesKept.set(trace, (cache = new Map()));
  if (!cache.has(key)) {
    if (cache.size > 40) cache.clear(); // after a pane was resized through many widths
    cache.set(key, make());
  }
  return cache.get(key);
}

function nodesMethod(trace, seen) {
  return trace.methods.includes(seen.method) ? seen.method : trace.methods[0];
}

function nodesRows(trace, method) {
  return nodesOnce(trace, `rows/${method}`, () => nodesOrdered(trace.about.nodes, method));
}

function nodesById(trace) {
  return nodesOnce(trace, "by id", () => new Map(trace.about.nodes.nodes.map((one) => [one.id, one])));
}

/** The largest value with its spread, by a method. */
function nodesPeak(trace, method) {
  const reach = (one) => nodesValue(one, method) + (nodesSpread(one, method) || 0);
  return nodesOnce(trace, `peak/${method}`, () => nodesRows(trace, method).reduce((most, one) => Math.max(most, reach(one)), 0) || 1);
}

/**
 * Colours of the classes: null without classes, else `{ of: label → colour, legend: [[word, colour]] }`. The page
 * determines which classes have a colour, so that it is the same for all nodes; the others share the last.
 */
export function nodesKinds(trace) {
  return nodesOnce(trace, "kinds", () => {
    const { nodes, classes } = trace.about.nodes;
    if (!nodes.some((one) => one.label !== undefined)) return null;
    const here = new Set(nodes.map((one) => nodesLabel(one.label)));
    const listed = classes ? classes.map(nodesLabel) : [...here].sort();
    const crowded = listed.length > KINDS.length || [...here].some((label) => !listed.includes(label));
    const colours = new Map(listed.slice(0, KINDS.length - (crowded ? 1 : 0)).map((label, i) => [label, KINDS[i]]));
    const last = KINDS[KINDS.length - 1];
    const legend = [...colours].filter(([label]) => here.has(label));
    if ([...here].some((label) => !colours.has(label))) legend.push(["others", last]);
    return { of: (label) => colours.get(nodesLabel(label)) || last, legend };
  });
}

/** Colours of values; the palest is still visible, because it fills a disc and not a cell among others. */
function nodesScale(theme, peak) {
  const scale = scaleFor(theme, peak, { log: false });
  return { ...scale, css: (value) => scale.css(NODES_PALEST * peak + (1 - NODES_PALEST) * value) };
}

/** Rows of the legend that fit a width: `[[{ x, word, colour }]]`. */
function nodesLegend(kinds, width) {
  const lines = [];
  let x = Infinity;
  for (const [label, colour] of kinds.legend) {
    const word = fitted(shown(label, 30), Math.min(180, width - 20), 11);
    const wide = textWidth(word, 11) + 30;
    if (x + wide > width) {
      lines.push([]);
      x = 0;
    }
    lines[lines.length - 1].push({ x, word, colour });
    x += wide;
  }
  return lines;
}

function nodesFrame(trace, seen, width) {
  const method = nodesMethod(trace, seen);
  return nodesOnce(trace, `frame/${method}/${width}`, () => {
    const beside = width >= NODES_SIDE;
    const column = beside ? Math.round(Math.min(0.5 * width, 680)) : width;
    const kinds = nodesKinds(trace);
    const legend = kinds ? nodesLegend(kinds, column - 2 * NODES_PAD) : null;
    const tall = Math.round(Math.min(Math.max(column - 80, 260), beside ? 500 : 420));
    const start = NODES_TITLE + (legend ? legend.length * NODES_LEGEND + 6 : SCALE_HEIGHT + 6);
    const picture = start + tall + NODES_KEYS;
    const rows = nodesRows(trace, method);
    const table = { x: beside ? column + 10 : NODES_PAD, y: beside ? 8 : picture + 10 };
    table.width = width - table.x - NODES_PAD;
    const note = trace.about.nodes.left_out ? NODES_ROW : 0;
    const end = table.y + NODES_HEAD + rows.length * NODES_ROW + note + 12;
    return { method, beside, column, legend, start, tall, picture, table, rows, end, height: Math.max(picture, end) };
  });
}

/** Positions of everything in the rings, for a picture of a given size. */
function nodesPicture(trace, method, width, height) {
  return nodesOnce(trace, `picture/${method}/${width}/${height}`, () => {
    const about = trace.about.nodes;
    const ties = nodesOnce(trace, "ties", () => nodesTies(about));
    const count = Math.min(width, height) < 340 ? 12 : Math.min(width, height) < 440 ? 16 : 24;
    const scene = nodesScene(about, nodesRows(trace, method), ties, count);
    const hops = new Map(scene.nodes.map((one) => [one.id, one.hop]));
    const angles = nodesAngles(hops, scene.edges);
    const rings = Math.max(1, ...hops.values());
    const free = nodesGap(scene.nodes.filter((one) => one.hop === 1).map((one) => angles.get(one.id)));
    const far = Math.min(width / 2 - 64, height / 2 - 24);
    const [middle, centre] = [width / 2, height / 2];
    const largest = Math.min(Math.max(0.085 * far, 9), 19);
    const peak = nodesPeak(trace, method);
    // Areas, not radii, are proportional: eyes compare areas.
    const radius = (value) => Math.sqrt(NODES_SMALLEST ** 2 + (largest ** 2 - NODES_SMALLEST ** 2) * Math.min(value / peak, 1));
    const discs = new Map();
    for (const one of scene.nodes) {
      const angle = angles.get(one.id) ?? free;
      const out = (far * one.hop) / rings;
      const value = nodesValue(one, method);
      const spread = nodesSpread(one, method);
      const around = radius(value + (spread || 0));
      const [x, y] = [middle + out * Math.cos(angle), centre - out * Math.sin(angle)];
      discs.set(one.id, { one, x, y, angle, inner: radius(value), radius: around, spread, label: fitted(nodesName(one), 96, 11) });
    }
    const rank = ({ one }) => (one.id === about.node ? Infinity : nodesValue(one, method));
    const listed = [...discs.values()].sort((a, b) => rank(b) - rank(a));
    for (const disc of listed) disc.wide = textWidth(disc.label, 11, disc.one.id === about.node ? 700 : 400);
    const places = nodesLabels(listed, { left: 2, right: width - 2, top: 1, bottom: height - 1 });
    listed.forEach((disc, i) => (disc.place = places[i]));
    const lines = scene.edges.map((edge) => {
      const [from, to] = [discs.get(edge.one), discs.get(edge.other)];
      const straight = from.one.hop === 0 || to.one.hop === 0;
      const bent = straight ? null : nodesBend([from.one.hop, to.one.hop], [from.angle, to.angle]);
      const pulled = bent && [middle + (bent[0] * far) / rings, centre - (bent[1] * far) / rings];
      return { ...edge, points: nodesCurve([from.x, from.y], pulled, [to.x, to.y]) };
    });
    return { ...scene, discs, lines, rings, far, middle, centre, radius, peak, ties };
  });
}

/** The middle of the widest gap between angles, where the name of the middle node crosses no edge. */
function nodesGap(angles) {
  const turned = angles.map((angle) => ((angle % (2 * Math.PI)) + 2 * Math.PI) % (2 * Math.PI)).sort((a, b) => a - b);
  let best = { wide: 0, angle: -Math.PI / 2 };
  turned.forEach((angle, i) => {
    const wide = (i + 1 < turned.length ? turned[i + 1] : turned[0] + 2 * Math.PI) - angle;
    if (wide > best.wide + 1e-9) best = { wide, angle: angle + wide / 2 };
  });
  return best.angle;
}

/** Points of a line from one place to another, pulled towards a third. */
function nodesCurve(from, pulled, to) {
  if (!pulled) return [from, to];
  return Array.from({ length: 17 }, (_, i) => {
    const t = i / 16;
    return [0, 1].map((axis) => (1 - t) ** 2 * from[axis] + 2 * t * (1 - t) * pulled[axis] + t ** 2 * to[axis]);
  });
}

function nodesLine(part) {
  return { line: NODES_NARROWEST + (NODES_WIDEST - NODES_NARROWEST) * part, opacity: 0.16 + 0.5 * Math.sqrt(part) };
}

/** Rounded down to one significant digit. */
function nodesRound(value) {
  if (!(value > 0)) return 0;
  const unit = 10 ** Math.floor(Math.log10(value));
  return Number((Math.floor(value / unit + 1e-9) * unit).toPrecision(1));
}

function nodesWritten(value, spread) {
  return spread === null || spread === undefined ? number(value) : `${number(value)} ± ${number(spread)}`;
}

/** Everything known about a node, one line each. */
export function nodesFacts(trace, one) {
  const about = trace.about.nodes;
  const lines = [nodesCalled(one, 120)];
  const place = one.id === about.node ? "the node itself" : one.hop === 1 ? "1 hop away" : `${one.hop} hops away`;
  const known = lines[0] === `node ${one.id}` ? "" : `node ${one.id}, `;
  lines.push(`${known}${place}${one.label === undefined ? "" : `, ${shown(nodesLabel(one.label), 60)}`}`);
  one.raw.forEach((value, layer) => {
    lines.push(`${trace.method("raw").title}, layer ${layer + 1}: ${value ? nodesWritten(value, one.raw_spread && one.raw_spread[layer]) : "no edge"}`);
  });
  const others = trace.methods.filter((method) => method !== "raw");
  for (const method of others) lines.push(`${trace.method(method).title}: ${nodesWritten(nodesValue(one, method), nodesSpread(one, method))}`);
  return lines;
}

function nodesTarget(trace, one, state) {
  return { hover: { node: one.id }, select: { node: state.node === one.id ? null : one.id }, tip: nodesFacts(trace, one).join("\n") };
}

export const nodesView = {
  id: "nodes",
  title: "Neighbours",
  controls: ["method"],

  step({ trace, state, step }) {
    const rows = nodesRows(trace, trace.nearest(state).method);
    const at = rows.findIndex((one) => one.id === state.node);
    const next = at < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + step, 0), rows.length - 1);
    return { node: rows.length ? rows[next].id : null };
  },

  applies(trace) {
    return trace.kind === "nodes" ? true : "this trace is not of a graph’s node: overt.view.pages.node_page(…) shows nodes";
  },

  measure({ trace, seen, width }) {
    return { height: nodesFrame(trace, seen, width).height };
  },

  draw({ surface, trace, seen, state, theme, width, top, bottom }) {
    const frame = nodesFrame(trace, seen, width);
    const kinds = nodesKinds(trace);
    const scale = nodesScale(theme, nodesPeak(trace, frame.method));
    const colour = (one) => (kinds ? kinds.of(one.label) : scale.css(nodesValue(one, frame.method)));
    const scene = { surface, trace, seen, state, theme, frame, kinds, scale, colour, top, bottom };
    // Next to a long table, the picture stays visible.
    const y = frame.beside ? Math.max(0, Math.min(top, bottom - frame.picture)) : 0;
    if (y < bottom && y + frame.picture > top) nodesDrawPicture(scene, y);
    nodesDrawTable(scene);
  },

  minimap({ trace, seen, width }) {
    const { rows, method, table, height } = nodesFrame(trace, seen, width);
    const peak = nodesPeak(trace, method);
    const step = Math.max(1, Math.ceil(rows.length / 400));
    return rows.filter((_, i) => i % step === 0).map((one, i) => ({
      at: (table.y + NODES_HEAD + (i * step + 0.5) * NODES_ROW) / height,
      size: nodesValue(one, method) / peak,
      chosen: one.id === seen.node,
    }));
  },

  placeOf({ trace, seen, state, width }) {
    const { beside, rows, table } = nodesFrame(trace, seen, width);
    const row = rows.findIndex((one) => one.id === state.node);
    return beside && row >= 0 ? table.y + NODES_HEAD + row * NODES_ROW : NaN; // below the picture, scrolling there would hide it
  },

  describe({ trace, seen }) {
    const about = trace.about.nodes;
    const pointed = nodesById(trace).get(seen.node);
    const own = nodesById(trace).get(about.node);
    if (pointed && pointed !== own) return `what ${nodesCalled(own, 30)} draws on: ${nodesFacts(trace, pointed).join(" · ")}`;
    const method = nodesMethod(trace, seen);
    const rows = nodesRows(trace, method);
    const first = rows.filter((one) => nodesValue(one, method) > 0).slice(0, 5);
    const values = first.map((one) => `${one === own ? "itself" : nodesName(one, 20)} ${nodesWritten(nodesValue(one, method), nodesSpread(one, method))}`);
    return `what ${nodesCalled(own, 30)} draws on, ${nodesCount(rows.length - 1)}, by ${trace.method(method).title}: ${values.join(", ") || "nothing"}`;
  },
};

function nodesCount(count) {
  return count === 1 ? "1 neighbour" : `${count} neighbours`;
}

function nodesDrawPicture(scene, y) {
  const { surface, trace, seen, state, theme, frame, colour } = scene;
  const about = trace.about.nodes;
  const picture = nodesPicture(trace, frame.method, frame.column, frame.tall);
  const others = frame.rows.length - 1;
  const own = nodesById(trace).get(about.node);
  const room = frame.column - 2 * NODES_PAD;
  surface.text(fitted(`What ${nodesCalled(own, 40)} draws on`, room, 13, 650), NODES_PAD, y + 14, { size: 13, fill: theme.ink, weight: 650 });
  const drawn = picture.first < others ? `${picture.first} of ${nodesCount(others)} drawn` : nodesCount(others);
  const more = about.left_out ? `, ${about.left_out} more not on the page` : "";
  const focus = picture.discs.has(seen.node) ? seen.node : null;
  const hidden = focus === null && nodesById(trace).get(seen.node);
  const absent = hidden && `${nodesCalled(hidden, 24)} is not drawn: only ${picture.first} of ${nodesCount(others)} are`;
  const said = absent || `${drawn}${more}, by ${trace.method(frame.method).title}`;
  surface.text(fitted(said, room, 11), NODES_PAD, y + 31, { size: 11, fill: theme.soft });
  if (frame.legend) {
    frame.legend.forEach((line, i) => {
      const at = y + NODES_TITLE + i * NODES_LEGEND + 8;
      for (const { x, word, colour: fill } of line) {
        surface.circle(NODES_PAD + x + 5, at, 5, { fill, stroke: theme.ink, line: 0.6 });
        surface.text(word, NODES_PAD + x + 15, at, { size: 11, fill: theme.ink });
      }
    });
  } else drawScale(surface, theme, scene.scale, NODES_PAD, y + NODES_TITLE, `colour: ${trace.method(frame.method).title}`, Math.min(180, room));
  const down = y + frame.start;
  if (state.node !== null && state.node !== undefined) surface.hit(0, down, frame.column, frame.tall, { select: { node: null } });
  for (let hop = 1; hop <= picture.rings; hop++) {
    surface.circle(picture.middle, down + picture.centre, (picture.far * hop) / picture.rings, { stroke: theme.line });
  }
  const ofFocus = (edge) => focus !== null && (edge.one === focus || edge.other === focus);
  const near = focus === null ? null : new Set([focus, ...picture.lines.filter(ofFocus).flatMap((edge) => [edge.one, edge.other])]);
  for (const edge of [...picture.lines.filter((one) => !ofFocus(one)), ...picture.lines.filter(ofFocus)]) {
    const look = nodesLine(edge.share / picture.heaviest);
    const points = edge.points.map(([px, py]) => [px, down + py]);
    if (ofFocus(edge)) surface.path(points, { stroke: theme.accent, line: Math.max(look.line, 1.2), opacity: 0.9 });
    else surface.path(points, { stroke: theme.ink, line: look.line, opacity: near ? 0.3 * look.opacity : look.opacity });
  }
  for (const disc of picture.discs.values()) nodesDrawDisc(scene, disc, down, !near || near.has(disc.one.id), focus === disc.one.id, colour(disc.one));
  for (const disc of picture.discs.values()) nodesDrawLabel(scene, disc, down, near, focus, own);
  if (focus !== null) nodesDrawShares(scene, picture.lines.filter(ofFocus), down);
  nodesDrawKeys(scene, picture, down + frame.tall);
}

function nodesDrawDisc({ surface, trace, state, theme }, disc, down, lit, chosen, fill) {
  const [x, y] = [disc.x, down + disc.y];
  const own = disc.one.id === trace.about.nodes.node;
  surface.circle(x, y, disc.radius, { fill: theme.paper }); // edges end at the disc
  if (disc.spread > 0) surface.circle(x, y, disc.radius, { fill, opacity: lit ? 0.4 : 0.12 });
  surface.circle(x, y, disc.inner, { fill, stroke: chosen ? theme.accent : theme.ink, line: chosen || own ? 2 : 0.8, opacity: lit ? 1 : 0.25 });
  if (disc.one.id === state.node) surface.circle(x, y, disc.radius + 3, { stroke: theme.accent, line: 1.5 });
  const half = Math.max(disc.radius, 8) + 1; // small discs can be pointed at, too
  surface.hit(x - half, y - half, 2 * half, 2 * half, nodesTarget(trace, disc.one, state));
}

function nodesAbove({ x, y, radius, wide }) {
  const at = y - radius - 9;
  return { x, y: at, align: "center", left: x - wide / 2, right: x + wide / 2, top: at - 7, bottom: at + 7 };
}

function nodesDrawLabel({ surface, trace, state, theme }, disc, down, near, focus, own) {
  const lit = !near || near.has(disc.one.id);
  const chosen = disc.one.id === focus;
  // A name without room is shown while its node is pointed at.
  const place = disc.place || (chosen ? nodesAbove(disc) : null);
  if (!place) return;
  surface.rect(place.left - 1, down + place.top, place.right - place.left + 2, place.bottom - place.top, { fill: theme.paper, opacity: 0.72, radius: 3 });
  const weight = disc.one === own || chosen ? 700 : 400;
  surface.text(disc.label, place.x, down + place.y, { size: 11, fill: chosen ? theme.accent : theme.ink, align: place.align, weight, opacity: lit ? 1 : 0.3 });
  if (lit) surface.hit(place.left, down + place.top, place.right - place.left, place.bottom - place.top, nodesTarget(trace, disc.one, state));
}

function nodesDrawShares({ surface, theme }, lines, down) {
  for (const { points, share } of lines.slice(-NODES_TOLD)) {
    const end = points[points.length - 1];
    if (Math.hypot(end[0] - points[0][0], end[1] - points[0][1]) < 60) continue; // it would hide the edge and its ends
    const [x, y] = points.length > 2 ? points[8] : [(points[0][0] + points[1][0]) / 2, (points[0][1] + points[1][1]) / 2];
    const text = number(share);
    const wide = textWidth(text, 10, 600) + 6;
    surface.rect(x - wide / 2, down + y - 7, wide, 14, { fill: theme.paper, stroke: theme.accent, line: 0.8, radius: 4, opacity: 0.95 });
    surface.text(text, x, down + y, { size: 10, fill: theme.accent, align: "center", weight: 600 });
  }
}

function nodesDrawKeys({ surface, trace, theme, frame, kinds, scale }, picture, y) {
  const { method, column } = frame;
  const soft = { size: 10, fill: theme.soft };
  const parts = column < 420 ? [1] : [0.25, 1];
  const keys = parts.map((part) => nodesRound(part * picture.peak));
  const shares = picture.lines.length ? parts.map((part) => nodesRound(part * picture.heaviest)) : [];
  const { title } = trace.method(method);
  const words = [...keys.map((value) => `${title} ${number(value)}`), ...shares.map((value) => `edge ${number(value)}`)];
  const signs = [...keys.map((value) => 2 * picture.radius(value)), ...shares.map(() => 24)];
  const wide = words.map((word, i) => signs[i] + 6 + textWidth(word, 10) + 16);
  let x = Math.max(NODES_PAD, (column - wide.reduce((sum, one) => sum + one, 0)) / 2);
  words.forEach((word, i) => {
    if (i < keys.length) {
      surface.circle(x + signs[i] / 2, y + 18, signs[i] / 2, { fill: kinds ? theme.paper : scale.css(keys[i]), stroke: theme.ink, line: 0.8 });
    } else {
      surface.line(x, y + 18, x + 24, y + 18, { stroke: theme.ink, ...nodesLine(shares[i - keys.length] / picture.heaviest) });
    }
    surface.text(word, x + signs[i] + 6, y + 18, soft);
    x += wide[i];
  });
  const samples = trace.about.nodes.samples;
  const pale = samples ? `pale: one standard deviation more, over ${samples} posterior samples` : "area: how much is drawn on a node; width: how much comes over an edge";
  surface.text(fitted(pale, column - 2 * NODES_PAD, 10), column / 2, y + 44, { ...soft, align: "center" });
}

function nodesColumns(trace, table) {
  const { methods } = trace;
  const classes = nodesKinds(trace) !== null && table.width >= 520;
  const hop = 36;
  const named = Math.min(Math.max(0.24 * table.width, 84), 170);
  const kind = classes ? Math.min(0.18 * table.width, 120) : 0;
  const start = table.x + named + kind + hop;
  const wide = (table.x + table.width - start) / methods.length;
  return { named, kind, hop, start, wide, kindAt: table.x + named, hopAt: start - hop };
}

function nodesDrawTable(scene) {
  const { surface, trace, theme, frame, top, bottom } = scene;
  const { table, rows } = frame;
  const columns = nodesColumns(trace, table);
  const start = table.y + NODES_HEAD;
  const first = Math.max(0, Math.floor((top - start) / NODES_ROW));
  const last = Math.min(rows.length, Math.ceil((bottom - start) / NODES_ROW));
  for (let i = first; i < last; i++) nodesDrawRow(scene, columns, rows[i], start + i * NODES_ROW);
  const { left_out: left } = trace.about.nodes;
  const end = start + rows.length * NODES_ROW;
  if (left && end < bottom && end + NODES_ROW > top) {
    const said = `${left} more ${left === 1 ? "neighbour" : "neighbours"}: node_page(…, top=None) includes all`;
    surface.text(fitted(said, table.width, 11), table.x, end + NODES_ROW / 2, { size: 11, fill: theme.soft });
  }
  if (start - NODES_HEAD > bottom || frame.end < top) return;
  // The heading stays visible above a long table.
  const y = Math.min(Math.max(table.y, top), Math.max(table.y, end - NODES_ROW));
  surface.rect(table.x - 8, y - (y > table.y ? 0 : 8), table.width + 8 + NODES_PAD, NODES_HEAD, { fill: theme.paper });
  if (y > table.y) surface.hit(table.x - 8, y, table.width + 22, NODES_HEAD, {});
  surface.text("neighbour", table.x + 14, y + 10, { size: 11, fill: theme.soft });
  if (columns.kind) surface.text("class", columns.kindAt, y + 10, { size: 11, fill: theme.soft });
  surface.text("hop", columns.hopAt + 12, y + 10, { size: 11, fill: theme.soft, align: "center" });
  trace.methods.forEach((method, i) => {
    const x = columns.start + i * columns.wide;
    const chosen = method === frame.method;
    const { title: name } = trace.method(method);
    const title = method === "raw" && columns.wide > 96 ? `${name}, top layer` : name;
    surface.text(fitted(title, columns.wide - 6, 11, chosen ? 700 : 400), x, y + 10, { size: 11, fill: chosen ? theme.accent : theme.ink, weight: chosen ? 700 : 400 });
    const { room } = nodesCell(trace, columns.wide);
    surface.text("0", x, y + 28, { size: 9, fill: theme.soft });
    surface.text(number(nodesPeak(trace, method)), x + room, y + 28, { size: 9, fill: theme.soft, align: "right" });
    surface.hit(x, y, columns.wide - 6, 36, { select: { method }, tip: `order by ${name}` });
  });
  surface.line(table.x - 4, y + NODES_HEAD - 4, table.x + table.width, y + NODES_HEAD - 4, { stroke: theme.line });
}

/** How a method's cell is divided: width of the bar, and whether the spread follows the number. */
function nodesCell(trace, wide) {
  const spread = trace.about.nodes.samples > 0 && wide >= 168;
  const said = spread ? 92 : wide >= 84 ? 40 : 0;
  return { spread, said, room: Math.max(wide - said - 16, 20) };
}

function nodesDrawRow(scene, columns, one, y) {
  const { surface, trace, seen, state, theme, frame, colour } = scene;
  const { table } = frame;
  const middle = y + NODES_ROW / 2;
  const own = one.id === trace.about.nodes.node;
  const chosen = one.id === seen.node;
  if (chosen) surface.rect(table.x - 6, y, table.width + 12, NODES_ROW, { fill: theme.select, opacity: theme.dark ? 0.22 : 0.12, radius: 4 });
  surface.circle(table.x + 4, middle, 4, { fill: colour(one), stroke: theme.ink, line: 0.6 });
  const name = nodesName(one) + (own ? " (itself)" : "");
  surface.text(fitted(name, columns.named - 22, 12, own ? 700 : 400), table.x + 14, middle, { size: 12, fill: chosen ? theme.accent : theme.ink, weight: own ? 700 : 400 });
  if (columns.kind) surface.text(fitted(shown(nodesLabel(one.label), 30), columns.kind - 8, 11), columns.kindAt, middle, { size: 11, fill: theme.soft });
  surface.text(String(one.hop), columns.hopAt + 12, middle, { size: 11, fill: theme.soft, align: "center" });
  trace.methods.forEach((method, i) => {
    const x = columns.start + i * columns.wide;
    const { spread: both, said, room } = nodesCell(trace, columns.wide);
    const [value, spread] = [nodesValue(one, method), nodesSpread(one, method)];
    const at = (size) => x + (room * Math.min(Math.max(size, 0), nodesPeak(trace, method))) / nodesPeak(trace, method);
    surface.line(x, y, x, y + NODES_ROW, { stroke: theme.line });
    if (value > 0) {
      surface.rect(x, y + 5, Math.max(at(value) - x, 0.5), NODES_ROW - 10, { fill: colour(one), opacity: method === frame.method ? 1 : 0.6 });
      if (spread > 0) {
        surface.line(at(value - spread), middle, at(value + spread), middle, { stroke: theme.ink });
        for (const end of [value - spread, value + spread]) surface.line(at(end), middle - 3, at(end), middle + 3, { stroke: theme.ink });
      }
    }
    if (said) {
      const text = !value ? "·" : both ? nodesWritten(value, spread) : number(value);
      surface.text(text, x + room + 6, middle, { size: 10, fill: chosen ? theme.ink : theme.soft });
    }
  });
  surface.hit(table.x - 6, y, table.width + 12, NODES_ROW, nodesTarget(trace, one, state));
}
