// A model as a page: what is in the element `data` is shown by tabs, of which each is made when it is first looked at.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const TABS = {graph: ["Graph", ""], weights: ["Weights", () => data.weights.length], kernels: ["Kernels", () => new Set(data.kernels.map((each) => each.kernel)).size], memory: ["Memory", ""], dims: ["Dims", () => data.dims.length]};
const made = new Set();

function element(made, attrs, children) {
  for (const [name, value] of Object.entries(attrs)) if (typeof value === "function") made[name] = value; else if (value !== "") made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== ""));
  return made;
}
function el(tag, attrs, ...children) { return element(document.createElement(tag), attrs, children); }
function svg(tag, attrs, ...children) { return element(document.createElementNS("http://www.w3.org/2000/svg", tag), attrs, children); }

function bytesText(count) {
  if (count === null || count === undefined) return "?";
  for (const [unit, power] of [["TiB", 4], ["GiB", 3], ["MiB", 2], ["KiB", 1]]) if (count >= 1024 ** power) return `${(count / 1024 ** power).toFixed(2)} ${unit}`;
  return `${count} B`;
}
function amount(value, text) { return typeof value === "number" ? text(value) : value; }

function showTip(event, ...content) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...content.filter((part) => part !== ""));
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 12)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 12)}px`;
}
function hideTip() { document.getElementById("tip").hidden = true; }

function show(name) {
  const starts = {graph: startGraph, weights: startWeights, kernels: startKernels, memory: startMemory, dims: startDims};
  hideTip();
  for (const button of document.querySelectorAll("#tabs button")) button.setAttribute("aria-selected", button.dataset.tab === name);
  for (const tab of Object.keys(TABS)) document.getElementById(tab).hidden = tab !== name;
  if (!made.has(name)) { made.add(name); starts[name](); }
}

// Search. An entry is found if it has all words that are typed.

let entries = null;
function index() {
  entries = [];
  const add = (sort, what, where, go, home = "") => entries.push({sort, what, where, go, home, text: `${what} ${where}`.toLowerCase()});
  for (const [name, graph] of Object.entries(data.functions)) {
    const method = data.methods.find((each) => way(each, name));
    if (!method) continue;
    graph.nodes.forEach((node, id) => {
      if (node.kind === "result") return;
      const go = () => { const from = way(view.method, name) ? view.method : method; show("graph"); reveal(from, way(from, name), id); };
      add(node.call ? "layer" : "op", joined(node.module || "", node.op), data.methods.includes(name) ? name : `in ${name}`, go, name);
    });
  }
  for (const weight of data.weights) add("weight", weight.name, weight.type, () => showWeight(weight.name));
  for (const kernel of data.kernels) add("kernel", kernel.kernel, `${kernel.op} in ${kernel.method}`, () => { show("kernels"); document.getElementById("kernels").reveal(kernel); });
  for (const dim of data.dims) add("dim", dim.name, dim.bound.map((bound) => bound.method).join(", "), () => show("dims"));
}

function search(text) {
  if (!entries) index();
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = words.length ? entries.filter((entry) => words.every((word) => entry.text.includes(word))) : [];
  const here = new Map(Object.keys(data.functions).map((name) => [name, way(view.method, name) === null]));  // what the method in view has not comes last
  hits.sort((a, b) => (here.get(a.home) || 0) - (here.get(b.home) || 0) || a.what.length - b.what.length);
  return hits.slice(0, 60);
}

function marked(text, words) {
  const at = words.map((word) => [text.toLowerCase().indexOf(word), word.length]).find(([from]) => from >= 0);
  return at ? [text.slice(0, at[0]), el("mark", {}, text.slice(at[0], at[0] + at[1])), text.slice(at[0] + at[1])] : [text];
}

function startSearch() {
  const box = document.getElementById("search"), list = document.getElementById("found");
  let hits = [], at = 0;
  const select = (number) => { at = number; [...list.children].forEach((item, i) => item.setAttribute("aria-selected", i === at)); list.children[at]?.scrollIntoView({block: "nearest"}); };
  const close = () => { list.hidden = true; };
  const go = (hit) => { close(); box.blur(); hit.go(); };
  const find = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    hits = search(box.value);
    list.replaceChildren(...hits.map((hit) => el("li", {onpointerdown: () => go(hit)}, el("span", {class: "sort"}, hit.sort), el("span", {class: "what"}, ...marked(hit.what, words)), el("span", {class: "where"}, hit.where))));
    if (!hits.length) list.append(el("li", {class: "none"}, "Nothing has all of these words."));
    list.hidden = !words.length;
    select(0);
  };
  box.oninput = find;
  box.onfocus = find;
  box.onblur = close;
  box.onkeydown = (event) => {
    if (event.key === "ArrowDown") { select(Math.min(at + 1, hits.length - 1)); event.preventDefault(); }
    if (event.key === "ArrowUp") { select(Math.max(at - 1, 0)); event.preventDefault(); }
    if (event.key === "Enter" && hits[at]) go(hits[at]);
    if (event.key === "Escape") { box.value = ""; close(); box.blur(); }
  };
  window.addEventListener("keydown", (event) => { if (event.key === "/" && document.activeElement.tagName !== "INPUT") { box.focus(); event.preventDefault(); } });
}

function start() {
  const config = data.config, total = data.weights.reduce((sum, weight) => sum + (weight.bytes || 0), 0);
  document.getElementById("name").textContent = data.name;
  const facts = [config.model_type, config.num_hidden_layers && `${config.num_hidden_layers} layers`, config.dtype || config.torch_dtype, `${bytesText(total)} of weights`, `${data.made_of} for ${data.target}`, `nnfront ${data.nnfront}`];
  document.getElementById("facts").textContent = facts.filter(Boolean).join("  ·  ");
  document.getElementById("tabs").append(...Object.entries(TABS).map(([name, [text, count]]) => el("button", {role: "tab", "data-tab": name, onclick: () => show(name)}, text, count ? el("small", {}, String(count())) : "")));
  startSearch();
  show("graph");
  document.documentElement.dataset.ready = Math.round(performance.now());
}
