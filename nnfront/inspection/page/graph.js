// The graph of a method: modules and calls of functions fold and unfold, a wheel zooms, dragging moves.

const HEAD = 28, PAD = 16, NODE_H = 42, MOST = 250, OPEN_AT_FIRST = 12, LEGEND_H = 50;
const KINDS = {product: "product", attention: "attention", norm: "norm", math: "arithmetic", view: "moves data", state: "cache", call: "shared layer", input: "input, result"};
const view = {method: "", open: new Map(), picked: null, x: 0, y: 0, scale: 1, shown: new Map(), edges: []};
const pen = document.createElement("canvas").getContext("2d");

function width(text, font) { pen.font = font; return pen.measureText(text).width; }
function clipped(text, most) { return text.length > most ? `${text.slice(0, most - 1)}…` : text; }
function joined(...parts) { return parts.filter(Boolean).join("."); }
function shortType(type) { return type.replace(/\b(b?)float(\d+)/g, "$1f$2").replace(/\bint(\d+)/g, "i$1").replace(/layer\([^()]*\)/g, "layer"); }
function leaves(tree) { return tree.flatMap((item) => (typeof item === "number" ? [item] : leaves(item.of))); }

// What of a function is seen: nodes, folded groups, and open ones with what is in them.
function seen(tree, place, depth) {
  const graph = data.functions[place.function];
  return tree.map((item) => {
    if (typeof item !== "number") {
      const ids = leaves(item.of), key = `${place.key}/${item.module}:${ids[0]}`;
      const box = {key, ids, place, label: item.label, module: joined(place.module, item.module), group: item};
      box.open = isOpen(key, depth < 1 && item.of.length <= OPEN_AT_FIRST);
      if (box.open) box.items = seen(item.of, place, depth + 1);
      return box;
    }
    const node = graph.nodes[item], key = `${place.key}/${item}`;
    const box = {key, ids: [item], place, node, module: joined(place.module, node.module)};
    if (node.call) {
      box.open = isOpen(key, false);
      if (box.open) {
        const callee = data.functions[node.call];
        const own = callee.params.filter((param) => param.role === "weight" || param.role === "transformed").map((param) => param.name);
        const given = node.weights || [];
        const inside = {key, function: node.call, module: box.module, weights: own.length === given.length ? new Map(own.map((name, i) => [name, given[i]])) : new Map()};
        for (const [name, value] of inside.weights) inside.weights.set(name, place.weights.get(value) || value);
        box.items = seen(callee.tree, inside, depth + 1);
      }
    }
    return box;
  });
}

function isOpen(key, first) { return view.open.has(key) ? view.open.get(key) : first; }

// Sizes and places of boxes, from the inside out. A group has ports for values from outside and for those that are read there.
function arrange(boxes, name, ids) {
  const graph = data.functions[name], owner = new Map();
  const inside = new Set(ids);
  for (const box of boxes) if (box.items) fit(box); else size(box);
  boxes.forEach((box, i) => box.ids.forEach((id) => owner.set(id, i)));
  const into = [], out = new Map(), edges = [], known = new Map();
  for (const box of boxes)
    for (const id of box.ids)
      for (const from of graph.nodes[id].in || [])
        if (!inside.has(from) && !into.includes(from)) into.push(from);
  for (const id of inside) {  // what the same others read leaves by one port
    const outside = (readersOf(name)[id] || []).filter((reader) => !inside.has(reader));
    if (outside.length) out.set(outside.join(), [...(out.get(outside.join()) || []), id]);
  }
  const all = [...into.map(port), ...boxes, ...[...out.keys()].map(port)];
  const add = (from, to, value) => {
    const start = isGroup(all[from]) ? all[from].inner.out.get(value) : "", end = isGroup(all[to]) ? all[to].inner.into.get(value) : "";
    const key = `${from}/${to}/${start}/${end}`;
    if (from !== to && !known.has(key)) known.set(key, edges.push({from, to, value, start, state: isState(graph.nodes[value])}));
  };
  boxes.forEach((box, i) => {
    for (const id of box.ids)
      for (const from of graph.nodes[id].in || [])
        add(inside.has(from) ? owner.get(from) + into.length : into.indexOf(from), i + into.length, from);
  });
  [...out.values()].forEach((ids, i) => ids.forEach((id) => add(owner.get(id) + into.length, all.length - out.size + i, id)));
  const whole = layered(all, edges, into.length, out.size);
  const at = (i) => all[i].x + all[i].w / 2;
  return {
    ...whole, edges, all,
    into: new Map(into.map((id, i) => [id, at(i)])),
    out: new Map([...out.values()].flatMap((ids, i) => ids.map((id) => [id, at(all.length - out.size + i)]))),
  };
}

function port() { return {w: 8, h: 1, isPort: true}; }
function isGroup(box) { return box.inner !== undefined && !box.node; }

const readers = new Map();
function readersOf(name) {
  if (!readers.has(name)) {
    const found = {};
    data.functions[name].nodes.forEach((node, id) => (node.in || []).forEach((from) => (found[from] ||= []).push(id)));
    readers.set(name, found);
  }
  return readers.get(name);
}

function isState(node) { return node.kind === "state" && !node.type.startsWith("int"); }

function fit(box) {
  const name = box.node ? box.node.call : box.place.function;
  const ids = box.node ? data.functions[name].nodes.map((_, i) => i) : box.ids;
  const inner = arrange(box.items, name, ids);
  const title = width(titleOf(box), "600 12.5px system-ui, DejaVu Sans, sans-serif") + 70;
  box.inner = inner;
  box.w = Math.max(inner.w, title) + 2 * PAD;
  box.shift = (box.w - inner.w) / 2;
  box.h = inner.h + HEAD + 2 * PAD;
}

function size(box) {
  const [op, more] = textsOf(box);
  box.w = Math.max(70, Math.min(MOST, Math.max(width(op, "600 12.5px system-ui, DejaVu Sans, sans-serif"), width(more, "11px ui-monospace, DejaVu Sans Mono, monospace")) + 26));
  box.h = NODE_H;
}

function titleOf(box) { return box.node ? `${box.node.call}  ${box.module}` : box.label; }

function textsOf(box) {
  const node = box.node;
  if (!node) {
    const graph = data.functions[box.place.function], calls = {};
    for (const id of box.ids) { const name = graph.nodes[id].call; if (name) calls[name] = (calls[name] || 0) + 1; }
    const layers = Object.entries(calls).map(([name, count]) => `${count} × ${name}`).join(", ");
    return [box.label, clipped(layers || `${box.ids.length} ops`, 34)];
  }
  if (node.call) return [clipped(node.call, 32), clipped(node.module || node.name, 34)];
  if (node.op === "input" || node.op === "state" || node.op === "result") return [clipped(node.name, 32), clipped(shortType(node.type), 34)];
  const weight = (node.weights || []).map((name) => name.replace(/\.weight$/, "").split(".").slice(-2).join("."))[0];
  return [node.op, clipped(weight || shortType(node.type), 34)];
}

function draw() {
  const root = {key: view.method, function: view.method, module: "", weights: new Map()};
  const graph = data.functions[view.method];
  const boxes = seen(graph.tree, root, 0);
  const whole = arrange(boxes, view.method, graph.nodes.map((_, i) => i));
  view.w = whole.w; view.h = whole.h;
  view.shown = new Map();
  const world = document.getElementById("world");
  world.replaceChildren(...paint(whole));
  if (view.picked) mark(view.picked);
  look();
}

function paint(whole) {
  const painted = whole.edges.map((edge) => paintEdge(edge, whole.all));
  for (const box of whole.all) if (!box.isPort) painted.push(box.items ? paintGroup(box) : paintNode(box));
  return painted;
}

function paintEdge(edge, all) {
  const from = all[edge.from], to = all[edge.to];
  const start = [from.x + (isGroup(from) ? from.shift + from.inner.out.get(edge.value) : from.w / 2), from.y + from.h];
  const end = [to.x + (isGroup(to) ? to.shift + to.inner.into.get(edge.value) : to.w / 2), to.y];
  let path = `M${start}`, [x, y] = start;
  for (const [nx, ny] of [...edge.via, end]) {
    const bend = (ny - y) / 2;
    path += x === nx ? `L${nx},${ny}` : `C${x},${y + bend} ${nx},${ny - bend} ${nx},${ny}`;
    [x, y] = [nx, ny];
  }
  return svg("path", {class: `edge${edge.state ? " state" : ""}`, d: path, "data-from": from.key || "", "data-to": to.key || ""});
}

function paintNode(box) {
  const kind = box.node ? (KINDS[box.node.kind] || box.node.kind === "result" || box.node.kind === "if" ? box.node.kind : "math") : "group";
  const colour = kind === "group" ? "math" : kind, [op, more] = textsOf(box);
  const folded = !box.node || box.node.call;
  const face = {width: box.w, height: box.h, rx: box.node && box.node.kind === "input" ? 20 : 8, style: `fill: var(--${colour}); stroke: var(--${colour}-line)`};
  const stack = folded ? [svg("rect", {...face, x: 6, y: 6}), svg("rect", {...face, x: 3, y: 3})] : [];
  const item = svg("g", {class: `node ${kind}`, transform: `translate(${box.x},${box.y})`, "data-key": box.key, "data-module": box.module, tabindex: 0, role: "button", "aria-label": `${op} ${box.module}`},
    ...stack, svg("rect", {...face, class: "face"}),
    svg("text", {class: "op", x: box.w / 2, y: 18, "text-anchor": "middle"}, op),
    svg("text", {class: "more", x: box.w / 2, y: 33, "text-anchor": "middle"}, more));
  view.shown.set(box.key, {box, item});
  return item;
}

function paintGroup(box) {
  const frame = svg("rect", {class: "frame", width: box.w, height: box.h, rx: 12});
  const head = svg("g", {class: "head"}, svg("rect", {width: box.w, height: HEAD}),
    svg("text", {x: 14, y: 19, style: "font-weight: 600"}, `▾ ${box.node ? box.node.call : box.label}`),
    svg("text", {class: "count", x: box.w - 14, y: 19, "text-anchor": "end"}, box.node ? clipped(box.module, 40) : ""));
  const inside = svg("g", {transform: `translate(${box.shift},${HEAD + PAD})`}, ...paint(box.inner));
  const stubs = [];
  if (!box.node) {  // lines go on from the frame to the ports
    const nodes = data.functions[box.place.function].nodes, line = (value, d) => svg("path", {class: `edge${isState(nodes[value]) ? " state" : ""}`, d});
    for (const [value, x] of box.inner.into) stubs.push(line(value, `M${box.shift + x},0V${HEAD + PAD}`));
    for (const [value, x] of box.inner.out) stubs.push(line(value, `M${box.shift + x},${box.h - PAD}V${box.h}`));
  }
  const item = svg("g", {class: `group${box.node ? " call" : ""}`, transform: `translate(${box.x},${box.y})`, "data-key": box.key, "data-module": box.module}, frame, ...stubs, inside, head);
  view.shown.set(box.key, {box, item});
  return item;
}

// Looking at it.

function look() { document.getElementById("world").setAttribute("transform", `translate(${view.x},${view.y}) scale(${view.scale})`); }

function fitAll() {
  const {clientWidth: w, clientHeight: h} = document.getElementById("canvas");
  view.scale = Math.min(1.15, Math.max(0.35, Math.min((w - 60) / view.w, (h - 2 * LEGEND_H) / view.h)));
  view.x = (w - view.w * view.scale) / 2;
  view.y = Math.max(24, (h - LEGEND_H - view.h * view.scale) / 2);
  look();
}

function zoom(factor, x, y) {
  const scale = Math.min(4, Math.max(0.04, view.scale * factor));
  view.x = x - (x - view.x) * (scale / view.scale);
  view.y = y - (y - view.y) * (scale / view.scale);
  view.scale = scale;
  look();
}

function placeOf(key) {
  const item = view.shown.get(key).item;
  const own = item.getBoundingClientRect(), canvas = document.getElementById("canvas").getBoundingClientRect();
  return {x: own.x - canvas.x, y: own.y - canvas.y, w: own.width, h: own.height};
}

function toggle(key) {
  const {box} = view.shown.get(key), before = placeOf(key);
  if (box.node && !box.node.call) return;
  view.open.set(key, !box.open);
  draw();
  const after = placeOf(key);  // what was clicked stays where it is, but for what would be below the edge
  const below = box.open ? 0 : before.y + after.h + LEGEND_H - document.getElementById("canvas").clientHeight;
  view.x += before.x - after.x + (before.w - after.w) / 2;
  view.y += before.y - after.y - Math.max(0, Math.min(below, before.y - PAD));
  look();
}

function mark(key) {
  for (const old of document.querySelectorAll("#world .picked")) old.classList.remove("picked");
  for (const old of document.querySelectorAll("#world .lit")) old.classList.remove("lit");
  view.picked = key;
  const found = view.shown.get(key);
  if (!found) return;
  found.item.classList.add("picked");
  for (const edge of document.querySelectorAll("#world .edge"))
    if (edge.dataset.from === key || edge.dataset.to === key) edge.classList.add("lit");
}

function pick(key) {
  mark(key);
  const found = view.shown.get(key);
  if (found) describe(found.box);
}

// Unfold what a node is in, and bring it to the middle. `steps` are the calls that lead to its function.
function reveal(method, steps, id) {
  choose(method);
  let name = method, key = method;
  [...steps, id].forEach((step, i) => {
    unfold(data.functions[name].tree, key, step);
    key = `${key}/${step}`;
    if (i < steps.length) { view.open.set(key, true); name = data.functions[name].nodes[step].call; }
  });
  draw();
  pick(key);
  const canvas = document.getElementById("canvas"), scale = Math.max(0.9, Math.min(1.1, view.scale));
  zoom(scale / view.scale, 0, 0);
  const at = placeOf(key);
  view.x += (canvas.clientWidth - at.w) / 2 - at.x;
  view.y += (canvas.clientHeight - at.h) / 2 - at.y;
  look();
}

function unfold(tree, key, id) {
  for (const item of tree)
    if (typeof item !== "number" && leaves(item.of).includes(id)) {
      view.open.set(`${key}/${item.module}:${leaves(item.of)[0]}`, true);
      unfold(item.of, key, id);
    }
}

// The first way from a method to a function, as the calls that lead there; null if there is none.
function way(method, name, seenBefore = new Set()) {
  if (method === name) return [];
  if (seenBefore.has(method)) return null;
  seenBefore.add(method);
  const nodes = data.functions[method].nodes;
  for (let i = 0; i < nodes.length; i++) {
    if (!nodes[i].call) continue;
    const rest = way(nodes[i].call, name, seenBefore);
    if (rest) return [i, ...rest];
  }
  return null;
}

function unfoldAll() {
  const once = new Set();
  const visit = (name, key) => {
    const open = (tree) => {
      for (const item of tree) {
        if (typeof item !== "number") { view.open.set(`${key}/${item.module}:${leaves(item.of)[0]}`, true); open(item.of); continue; }
        const callee = data.functions[name].nodes[item].call;
        if (callee && !once.has(callee)) { once.add(callee); view.open.set(`${key}/${item}`, true); visit(callee, `${key}/${item}`); }
      }
    };
    open(data.functions[name].tree);
  };
  visit(view.method, view.method);
  draw();
  fitAll();
}

function foldAll() {
  for (const [key, {box}] of view.shown) if (box.open) view.open.set(key, false);
  draw();
  fitAll();
}

function choose(method) {
  if (view.method === method) return;
  view.method = method;
  for (const button of document.querySelectorAll("#methods button")) button.setAttribute("aria-pressed", button.textContent === method);
  const graph = data.functions[method];
  const given = graph.params.filter((param) => param.role === "input" || param.role === "state").map((param) => `${param.name}: ${shortType(param.type)}`);
  document.getElementById("signature").textContent = `(${given.join(", ")}) → ${shortType(graph.result)}`;
  describe(null);
  draw();
  fitAll();
}

// What is known of a box, at the side.
function describe(box) {
  const side = document.getElementById("details");
  if (!box) {
    side.replaceChildren(el("h2", {}, view.method), el("p", {class: "why"}, "Click an op for its type, weights, kernels and source line. Stacked boxes unfold. A wheel zooms, dragging moves."));
    return;
  }
  const node = box.node || {}, parts = [el("h2", {}, node.op || box.label), el("p", {class: "path"}, box.module || node.name || "")];
  const facts = [["value", node.name], ["type", node.type], ["attributes", (node.attrs || []).join(", ")], ["ops", box.node ? "" : String(box.ids.length)], ["method", view.method]];
  parts.push(el("dl", {}, ...facts.filter(([, value]) => value).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
  if (!box.node || node.call) parts.push(el("p", {}, el("button", {onclick: () => toggle(box.key)}, box.open ? "Fold" : "Unfold")));
  const names = (node.weights || []).map((name) => box.place.weights.get(name) || name);
  if (names.length) parts.push(el("h3", {}, "Weights"), ...names.map((name) => el("button", {class: "link", onclick: () => showWeight(name)}, name)));
  const [module, kernels] = kernelsAt(box.module, !box.node || node.call);
  if (kernels.length) parts.push(el("h3", {}, module === box.module ? "Kernels of this module" : `Kernels of ${module}`), ...kernels.map(kernelCard));
  if (node.at !== undefined) parts.push(el("h3", {}, "Source"), sourceOf(data.lines[node.at]));
  side.replaceChildren(...parts);
}

// The kernels of a module, with those of modules inside it if that is asked for; without any, those of the nearest module around it.
function kernelsAt(module, all) {
  const mine = data.kernels.filter((kernel) => kernel.method === view.method);
  for (let name = module; name; name = name.split(".").slice(0, -1).join(".")) {
    const found = mine.filter((kernel) => kernel.modules.some((each) => each === name || (all && each.startsWith(`${name}.`))));
    if (found.length) return [name, found];
  }
  return ["", []];
}

function kernelCard(kernel) {
  return el("div", {class: "kernel"}, el("b", {}, `${kernel.op} → ${kernel.kernel}`), el("p", {class: "why"}, kernel.why), refusals(kernel));
}

function sourceOf(line) {
  const name = line.file.split("/").slice(-2).join("/");
  const text = line.text.map((row, i) => el("span", {class: line.first + i === line.line ? "here" : ""}, el("i", {}, String(line.first + i)), row));
  return el("div", {}, el("p", {class: "path", title: line.file}, `${name}:${line.line}`), line.text.length ? el("pre", {class: "source"}, ...text) : "");
}

function startGraph() {
  const canvas = document.getElementById("canvas"), methods = document.getElementById("methods");
  methods.append(...data.methods.map((name) => el("button", {onclick: () => choose(name)}, name)));
  document.getElementById("legend").append(...Object.entries(KINDS).map(([kind, text]) => el("li", {}, el("i", {style: `background: var(--${kind}); border-color: var(--${kind}-line)`}), text)));
  const middle = () => [canvas.clientWidth / 2, canvas.clientHeight / 2];
  document.getElementById("closer").onclick = () => zoom(1.3, ...middle());
  document.getElementById("farther").onclick = () => zoom(1 / 1.3, ...middle());
  document.getElementById("fit").onclick = fitAll;
  document.getElementById("fold").onclick = foldAll;
  document.getElementById("unfold").onclick = unfoldAll;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const area = canvas.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY * 0.0015), event.clientX - area.x, event.clientY - area.y);
  }, {passive: false});
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = {x: event.clientX, y: event.clientY, moved: false}; });
  window.addEventListener("pointermove", (event) => {
    if (!drag) return;
    if (Math.abs(event.clientX - drag.x) + Math.abs(event.clientY - drag.y) > 3) drag.moved = true;
    if (!drag.moved) return;
    view.x += event.clientX - drag.x; view.y += event.clientY - drag.y;
    drag.x = event.clientX; drag.y = event.clientY;
    look();
  });
  window.addEventListener("pointerup", () => { setTimeout(() => { drag = null; }); });
  const keyOf = (target) => target.closest("[data-key]")?.dataset.key;
  canvas.addEventListener("click", (event) => {
    const key = keyOf(event.target);
    if (!key || drag?.moved) return;
    const {box} = view.shown.get(key);
    if (box.items && !event.target.closest(".head")) return;
    if (!box.node || box.node.call) toggle(key);
    pick(key);
  });
  canvas.addEventListener("keydown", (event) => { if (event.key === "Enter") { const key = keyOf(event.target); toggle(key); pick(key); } });
  canvas.addEventListener("pointerover", (event) => {
    const key = keyOf(event.target), box = key && view.shown.get(key)?.box;
    if (!box || box.items && !event.target.closest(".head")) { hideTip(); return; }
    const node = box.node || {}, line = node.at === undefined ? null : data.lines[node.at];
    showTip(event, el("b", {}, node.op || box.label), el("span", {class: "mono"}, box.module), el("span", {class: "mono"}, node.type || textsOf(box)[1]),
      line ? el("span", {class: "mono"}, `${line.file.split("/").at(-1)}:${line.line}`) : "");
  });
  canvas.addEventListener("pointerleave", hideTip);
  choose(data.methods.includes("decode") ? "decode" : data.methods[0]);
}
