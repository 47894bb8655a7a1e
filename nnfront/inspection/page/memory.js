// The memory plan over time: a picture of each method, every buffer a rectangle from the step that makes it to the last that reads it.

const PIECES = ["#7d93dd", "#a47bd6", "#6bb184", "#dba350", "#56aab2", "#d88080", "#8d9a5b", "#c284b8"];

// Heights at which buffers lie: the lowest gap that is free for as long as a buffer lives.
function stacked(buffers) {
  const pieces = buffers.flatMap(([name, module, kind, bytes, ranges]) => ranges.map(([first, last]) => ({name, module, kind, bytes, first, last})));
  pieces.sort((a, b) => a.first - b.first || b.bytes - a.bytes);
  let alive = [];
  for (const piece of pieces) {
    alive = alive.filter((other) => other.last >= piece.first).sort((a, b) => a.low - b.low);
    let low = 0;
    for (const other of alive) { if (other.low - low >= piece.bytes) break; low = Math.max(low, other.low + other.bytes); }
    piece.low = low;
    alive.push(piece);
  }
  return pieces;
}

function startMemory() {
  const place = document.getElementById("memory"), memory = data.memory, body = el("div", {}), choice = el("div", {class: "choice"});
  const names = Object.keys(memory.methods);
  const sizes = Object.entries(memory.sizes).map(([name, number]) => `${name} = ${number.toLocaleString("en")}`).join(", ");
  const fill = (name) => {
    for (const button of choice.children) button.setAttribute("aria-pressed", button.textContent === name);
    const method = memory.methods[name];
    const parts = [["weights", memory.weights, PIECES[0]], ["caches", method.caches, PIECES[3]], ["arguments", method.arguments, PIECES[2]], ["call, at its peak", method.peak, PIECES[5]]];
    const sum = parts.reduce((all, [, bytes]) => all + bytes, 0) || 1;
    body.replaceChildren(
      el("div", {class: "share"}, ...parts.map(([, bytes, colour]) => el("i", {style: `flex: ${bytes / sum} 0 0; background: ${colour}`}))),
      el("p", {class: "keys"}, ...parts.map(([text, bytes, colour]) => el("span", {}, el("i", {style: `background: ${colour}`}), `${text} `, el("b", {}, bytesText(bytes))))),
      el("h3", {}, "What a call holds, step by step"), picture(method));
  };
  choice.append(...names.map((name) => el("button", {onclick: () => fill(name)}, name)));
  place.append(el("div", {class: "filter"}, choice, el("span", {}, sizes ? `for ${sizes}` : "")), body);
  fill(names.includes("decode") ? "decode" : names[0]);
}

// The picture of a method from one step to another; a wheel goes nearer to a step.
function picture(method, from = 0, to = Math.max(1, method.steps.length)) {
  const W = 1200, H = 420, left = 84, right = 12, bottom = 34, top = 16;
  const pieces = stacked(method.buffers), high = Math.max(method.peak, 1, ...pieces.map((piece) => piece.low + piece.bytes));
  const x = (step) => left + ((Math.min(to, Math.max(from, step)) - from) / (to - from)) * (W - left - right);
  const y = (bytes) => H - bottom - (bytes / high) * (H - bottom - top);
  const marks = [];
  for (let i = 0; i <= 4; i++) {
    const at = (high * i) / 4;
    marks.push(svg("line", {class: "axis", x1: left, x2: W - right, y1: y(at), y2: y(at)}), svg("text", {x: left - 8, y: y(at) + 4, "text-anchor": "end"}, bytesText(Math.round(at))));
  }
  for (let i = 0; i <= 6; i++) {
    const step = Math.round(from + ((to - from) * i) / 6);
    marks.push(svg("text", {x: x(step), y: H - 12, "text-anchor": ["start", "middle", "middle", "middle", "middle", "middle", "end"][i]}, `step ${step}`));
  }
  const colours = new Map();
  const rects = pieces.map((piece) => {
    const sort = piece.kind === "workspace" ? "workspace" : pattern(piece.module || piece.name);
    if (!colours.has(sort)) colours.set(sort, PIECES[colours.size % PIECES.length]);
    if (piece.last < from || piece.first >= to) return "";
    const rect = svg("rect", {class: "piece", x: x(piece.first), y: y(piece.low + piece.bytes), width: Math.max(1, x(piece.last + 1) - x(piece.first)), height: Math.max(0.75, y(piece.low) - y(piece.low + piece.bytes)), fill: colours.get(sort), "data-buffer": piece.name});
    rect.addEventListener("pointerenter", (event) => showTip(event, el("b", {}, piece.kind === "copy" ? `copy of ${piece.name}` : piece.name), ` ${bytesText(piece.bytes)}`, el("span", {class: "mono"}, piece.module || "no module"),
      el("span", {class: "mono"}, `steps ${piece.first} to ${piece.last}: ${method.steps[piece.first]?.[0] || ""} … ${method.steps[piece.last]?.[0] || ""}`)));
    rect.addEventListener("pointerleave", hideTip);
    return rect;
  });
  const [kernel, module] = method.steps[method.peak_step] || ["", ""], most = x(method.peak_step + 0.5);
  const peak = method.peak_step >= from && method.peak_step < to ? svg("line", {class: "peak", x1: most, x2: most, y1: top, y2: H - bottom}) : "";
  const plan = svg("svg", {class: "plan", viewBox: `0 0 ${W} ${H}`}, ...marks, ...rects, peak);
  const whole = el("div", {}, plan, el("p", {class: "why"}, `Most, ${bytesText(method.peak)}, at step ${method.peak_step}, when ${kernel} runs${module ? ` in ${module}` : ""}. A wheel goes nearer.`));
  plan.addEventListener("wheel", (event) => {
    event.preventDefault();
    const area = plan.getBoundingClientRect(), steps = method.steps.length;
    const at = from + (to - from) * Math.min(1, Math.max(0, ((event.clientX - area.x) / area.width * W - left) / (W - left - right)));
    const span = Math.min(steps, Math.max(8, (to - from) * Math.exp(event.deltaY * 0.002)));
    const begin = Math.min(steps - span, Math.max(0, at - (at - from) * (span / (to - from))));
    hideTip();
    whole.replaceWith(picture(method, begin, begin + span));
  }, {passive: false});
  return whole;
}
