// Layout of a neighbourhood: one node in the middle, the others on rings by hop, with few crossing edges.
// The rules are those of view/nodes.py, so that figure and page agree.

const NODES_FAINTEST = 0.03; // of the heaviest edge; lighter ones are drawn only if a node has no other
const NODES_SWEEPS = 40;

/** A node's value by a method; raw is the top layer's. */
export function nodesValue(one, method) {
  const value = method === "raw" ? one.raw && one.raw[one.raw.length - 1] : one[method];
  return Number.isFinite(value) ? value : 0;
}

/** The spread of that value over posterior samples; null if there are none. */
export function nodesSpread(one, method) {
  const spread = one[`${method}_spread`];
  const top = method === "raw" && spread ? spread[spread.length - 1] : spread;
  return Number.isFinite(top) ? top : null;
}

/** The nodes that are drawn on, and the node itself, the largest value first. */
export function nodesOrdered(about, method) {
  const others = about.methods.map(({ name }) => name).filter((name) => name !== "raw");
  const used = (one) => one.raw.some((value) => value > 0) || others.some((name) => one[name] > 0);
  const listed = about.nodes.filter((one) => one.id === about.node || used(one));
  return listed.sort((a, b) => nodesValue(b, method) - nodesValue(a, method) || a.hop - b.hop || a.id - b.id);
}

/** For each node its neighbours with the largest share over layers and directions: Map of Maps. */
export function nodesTies(about) {
  const tiesOf = new Map(about.nodes.map((one) => [one.id, new Map()]));
  for (const { source, target, share } of about.edges) {
    if (!(share > 0) || source === target) continue;
    for (const [here, there] of [[source, target], [target, source]]) {
      const ties = tiesOf.get(here);
      if (ties && tiesOf.has(there)) ties.set(there, Math.max(ties.get(there) || 0, share));
    }
  }
  return tiesOf;
}

function nodesBest(ties, fits) {
  let best = null;
  for (const [other, share] of ties) {
    if (fits(other) && (!best || share > best.share || (share === best.share && other < best.other))) best = { other, share };
  }
  return best;
}

/**
 * What the picture shows: the node, the first `count` others, the nodes that link them to it, and the edges.
 * @returns {{ nodes: object[], edges: {one: number, other: number, share: number}[], heaviest: number, first: number }}
 */
export function nodesScene(about, ordered, ties, count) {
  const others = ordered.filter((one) => one.id !== about.node);
  const hop = new Map(about.nodes.map((one) => [one.id, one.hop]));
  const inside = new Set([about.node, ...others.slice(0, count).map((one) => one.id)]);
  const rings = Math.max(0, ...[...inside].map((id) => hop.get(id)));
  for (let far = rings; far > 1; far--) {
    // From the outermost ring inwards: each node is linked to one of the next ring inside.
    for (const id of [...inside].filter((one) => hop.get(one) === far).sort((a, b) => a - b)) {
      const before = (other) => hop.get(other) === far - 1;
      if (nodesBest(ties.get(id), (other) => before(other) && inside.has(other))) continue;
      const best = nodesBest(ties.get(id), before);
      if (best) inside.add(best.other);
    }
  }
  const every = [];
  for (const id of inside) {
    for (const [other, share] of ties.get(id)) if (inside.has(other) && id < other) every.push({ one: id, other, share });
  }
  const heaviest = every.reduce((most, edge) => Math.max(most, edge.share), 0) || 1;
  const needed = new Set();
  for (const id of inside) {
    const best = nodesBest(ties.get(id), (other) => inside.has(other) && hop.get(other) < hop.get(id));
    if (best) needed.add(`${Math.min(id, best.other)}/${Math.max(id, best.other)}`);
  }
  const edges = every.filter((edge) => edge.share >= NODES_FAINTEST * heaviest || needed.has(`${edge.one}/${edge.other}`));
  edges.sort((a, b) => a.share - b.share);
  return { nodes: ordered.filter((one) => inside.has(one.id)), edges, heaviest, first: Math.min(count, others.length) };
}

/**
 * An angle for each node but the one in the middle. A node of an outer ring is placed near its strongest neighbour
 * further inside, and a sector's width depends on how many nodes it holds. Sectors are swapped while that shortens edges.
 */
export function nodesAngles(hops, edges) {
  const parent = new Map();
  const strongest = new Map();
  for (const { one, other, share } of edges) {
    const [inner, outer] = hops.get(one) <= hops.get(other) ? [one, other] : [other, one];
    if (hops.get(inner) < 1 || hops.get(inner) === hops.get(outer)) continue;
    if (share > (strongest.get(outer) ?? -1)) {
      strongest.set(outer, share);
      parent.set(outer, inner);
    }
  }
  const root = (one) => (parent.has(one) ? root(parent.get(one)) : one);
  const order = [...hops.keys()].filter((one) => hops.get(one) > 0 && !parent.has(one));
  const members = new Map(order.map((one) => [one, []]));
  for (const one of parent.keys()) members.get(root(one)).push(one);
  const between = new Map();
  for (const { one, other } of edges) {
    if (!hops.get(one) || !hops.get(other)) continue;
    const [first, second] = [root(one), root(other)].sort((a, b) => a - b);
    if (first !== second) between.set(`${first}/${second}`, { first, second, count: (between.get(`${first}/${second}`)?.count || 0) + 1 });
  }
  const size = (one) => Math.max(1, 0.85 * members.get(one).length);
  const turn = (2 * Math.PI) / Math.max(order.reduce((sum, one) => sum + size(one), 0), 1);
  const placed = () => {
    let start = 0;
    return new Map(order.map((one) => [one, Math.PI / 2 - ((start += size(one)) - size(one) / 2) * turn]));
  };
  const length = () => {
    const at = placed();
    let sum = 0;
    for (const { first, second, count } of between.values()) sum += count * (1 - Math.cos(at.get(first) - at.get(second)));
    return sum;
  };
  let shortest = length();
  for (let sweep = 0, before = Infinity; sweep < NODES_SWEEPS && shortest < before; sweep++) {
    before = shortest;
    for (let i = 0; i < order.length; i++) {
      for (let j = i + 1; j < order.length; j++) {
        [order[i], order[j]] = [order[j], order[i]];
        const tried = length();
        if (tried < shortest - 1e-9) shortest = tried;
        else [order[i], order[j]] = [order[j], order[i]];
      }
    }
  }
  const angles = placed();
  const near = new Map([...hops.keys()].map((one) => [one, []]));
  for (const { one, other } of edges) {
    near.get(one).push(other);
    near.get(other).push(one);
  }
  for (const one of order) {
    const middle = angles.get(one);
    const lean = (member) => {
      const others = near.get(member).filter((other) => hops.get(other)).map((other) => angles.get(root(other)));
      return others.reduce((sum, angle) => sum + Math.sin(angle - middle), 0) / Math.max(1, others.length);
    };
    const leans = new Map(members.get(one).map((member) => [member, lean(member)]));
    const held = members.get(one).sort((a, b) => leans.get(b) - leans.get(a) || a - b);
    held.forEach((member, i) => angles.set(member, middle + size(one) * turn * (0.5 - (i + 0.5) / held.length)));
  }
  return angles;
}

/** The control point of an edge, in units of rings: inwards along a ring, but past the middle; null if straight. */
export function nodesBend(hops, angles) {
  let apart = (angles[1] - angles[0]) % (2 * Math.PI);
  if (apart > Math.PI) apart -= 2 * Math.PI;
  if (apart < -Math.PI) apart += 2 * Math.PI;
  if (hops[0] !== hops[1] && Math.abs(apart) < Math.PI / 2) return null;
  const middle = angles[0] + apart / 2;
  const far = ((hops[0] + hops[1]) / 2) * (0.5 + 0.4 * Math.cos(apart / 2));
  return [far * Math.cos(middle), far * Math.sin(middle)];
}

/**
 * Places for labels, the most important first, each next to its disc where there is room; null where there is none.
 * @param {{x: number, y: number, radius: number, angle: number, wide: number}[]} discs
 * @param {{left: number, right: number, top: number, bottom: number}} box that labels stay in
 */
export function nodesLabels(discs, box, tall = 14) {
  const taken = [];
  const clear = (one, own) =>
    one.left >= box.left && one.right <= box.right && one.top >= box.top && one.bottom <= box.bottom &&
    taken.every((other) => one.right <= other.left || one.left >= other.right || one.bottom <= other.top || one.top >= other.bottom) &&
    discs.every((disc) => {
      if (disc === own) return true;
      const x = Math.min(Math.max(disc.x, one.left), one.right) - disc.x;
      const y = Math.min(Math.max(disc.y, one.top), one.bottom) - disc.y;
      return x * x + y * y > (disc.radius + 1) ** 2;
    });
  return discs.map((disc) => {
    for (const turned of [0, 1, -1, 2, -2, 3, -3, 4]) {
      const angle = disc.angle + (turned * Math.PI) / 4;
      const [across, up] = [Math.cos(angle), Math.sin(angle)];
      const x = disc.x + across * (disc.radius + 4);
      const y = disc.y - up * (disc.radius + 4 + (Math.abs(across) > 0.3 ? 0 : tall / 2 - 2));
      const align = across > 0.3 ? "left" : across < -0.3 ? "right" : "center";
      const left = align === "left" ? x : align === "right" ? x - disc.wide : x - disc.wide / 2;
      const place = { left, right: left + disc.wide, top: y - tall / 2, bottom: y + tall / 2 };
      if (!clear(place, disc)) continue;
      taken.push(place);
      return { x, y, align, ...place };
    }
    return null;
  });
}
