// Weights, kernels and dims as tables whose rows unfold.

function table(heads, rows) {
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads.map(([text, kind]) => el("th", {class: kind || ""}, text)))), el("tbody", {}, ...rows));
}

// A row that unfolds: `inside` makes the rows below it when they are first wanted.
function folding(cells, inside, attrs = {}) {
  const row = el("tr", {class: "fold", "aria-expanded": "false", ...attrs}, ...cells);
  let below = null;
  row.unfold = (open) => {
    if (open && !below) below = inside();
    row.setAttribute("aria-expanded", open);
    if (open) row.after(...below); else below?.forEach((each) => { each.unfold?.(false); each.remove(); });
  };
  row.onclick = () => row.unfold(row.getAttribute("aria-expanded") !== "true");
  return row;
}

function cell(content, kind = "") { return el("td", {class: kind}, content ?? ""); }
function pattern(text) { return text.replace(/(^|\.)\d+(?=\.|$)/g, "$1*"); }

function groupsOf(list, keyOf) {
  const groups = new Map();
  for (const item of list) { const key = keyOf(item); if (!groups.has(key)) groups.set(key, []); groups.get(key).push(item); }
  return [...groups.values()];
}

function startWeights() {
  const place = document.getElementById("weights"), body = el("div", {});
  const filter = el("input", {placeholder: "Filter by name, format or formula", "aria-label": "Filter weights", oninput: () => fill()});
  const total = data.weights.reduce((sum, weight) => sum + (weight.bytes || 0), 0);
  const fill = () => {
    const wanted = filter.value.toLowerCase();
    const kept = data.weights.filter((weight) => `${weight.name} ${weight.format} ${weight.formula || ""}`.toLowerCase().includes(wanted));
    const rows = groupsOf(kept, (weight) => [pattern(weight.name), weight.type, weight.format, pattern(weight.formula || "")].join("|"))
      .map((group) => (group.length === 1 ? weightRow(group[0]) : weightGroup(group)));
    body.replaceChildren(table([["Weight"], ["Type"], ["Stored as"], ["Bytes", "number"], ["Made by"]], rows));
  };
  place.append(el("div", {class: "filter"}, filter, el("span", {}, `${data.weights.length} weights, ${bytesText(total)}`)), body);
  fill();
  place.reveal = (name) => { filter.value = name; fill(); const row = body.querySelector("tr.fold"); row?.unfold(true); row?.classList.add("picked"); };
}

function weightGroup(group) {
  const numbers = group.map((weight) => weight.name.match(/(?<=(^|\.))\d+(?=\.|$)/)?.[0]);
  const sum = group.every((weight) => weight.bytes !== null) ? group.reduce((all, weight) => all + weight.bytes, 0) : null;
  const first = group[0];
  const name = el("span", {}, pattern(first.name), el("span", {class: "times"}, `× ${group.length}  (${numbers[0]} … ${numbers.at(-1)})`));
  const cells = [cell(name, "mono"), cell(first.type, "mono type"), cell(el("span", {class: "pill"}, first.format)), cell(bytesText(sum), "number"), cell(first.formula ? pattern(first.formula) : "as it is", "mono why")];
  return folding(cells, () => group.map((weight) => { const row = weightRow(weight); row.classList.add("inside"); return row; }), {"data-weight": pattern(first.name)});
}

function weightRow(weight) {
  const cells = [cell(weight.name, "mono"), cell(weight.type, "mono type"), cell(el("span", {class: "pill"}, weight.format)), cell(bytesText(weight.bytes), "number"), cell(weight.formula || "as it is", "mono why")];
  return folding(cells, () => {
    const sources = [...weight.sources.map((source) => [source, "from"]), ...(weight.stored ? [[weight.stored, "in the artefact"]] : [])];
    const rows = sources.map(([source, how]) => el("tr", {class: "inside source-row"}, cell(`${how} ${source.name}`, "mono"), cell(source.type, "mono type"), cell(source.format ? el("span", {class: "pill"}, source.format) : ""), cell(bytesText(source.bytes), "number"), cell(source.file || "", "mono why")));
    const link = nodeReading(weight.name);
    rows.push(el("tr", {class: "inside"}, el("td", {colspan: 5}, el("span", {class: "why"}, `read by ${weight.methods.join(", ") || "no method"} `), link ? el("button", {onclick: (event) => { event.stopPropagation(); show("graph"); reveal(...link); }}, "Show in the graph") : "")));
    return rows;
  }, {"data-weight": weight.name});
}

// The first node of a method that reads a weight.
function nodeReading(name) {
  for (const method of [view.method, ...data.methods]) {
    const id = data.functions[method].nodes.findIndex((node) => (node.weights || []).includes(name));
    if (id >= 0) return [method, [], id];
  }
  return null;
}

function showWeight(name) { show("weights"); document.getElementById("weights").reveal(name); }

function refusals(kernel) {
  if (!kernel.refused.length) return "";
  return el("ul", {class: "refused"}, ...kernel.refused.map((text) => { const [name, ...why] = text.split(": "); return el("li", {}, el("code", {}, name), ` refused: ${why.join(": ")}`); }));
}

function startKernels() {
  const place = document.getElementById("kernels"), body = el("div", {}), choice = el("div", {class: "choice"});
  const methods = [...new Set(data.kernels.map((kernel) => kernel.method))];
  const fill = (method, wanted) => {
    for (const button of choice.children) button.setAttribute("aria-pressed", button.textContent === method);
    const rows = data.kernels.filter((kernel) => kernel.method === method).map((kernel) => {
      const times = kernel.modules.length > 1 ? el("span", {class: "times"}, `× ${kernel.modules.length}`) : "";
      const cells = [cell(el("span", {}, kernel.op, times), "mono"), cell(kernel.kernel, "mono"), cell(amount(kernel.bytes, bytesText), "number mono"), cell(amount(kernel.flops, (n) => n.toLocaleString("en")), "number mono"), cell(el("span", {}, kernel.why, kernel.refused.length ? el("span", {class: "times"}, `${kernel.refused.length} refused`) : ""), "why")];
      const row = folding(cells, () => [el("tr", {class: "inside"}, el("td", {colspan: 5}, refusals(kernel), el("p", {class: "mono"}, kernel.modules.filter(Boolean).join("  "))))], {"data-kernel": kernel.kernel});
      if (kernel === wanted) { row.classList.add("picked"); setTimeout(() => { row.unfold(true); row.scrollIntoView({block: "center"}); }); }
      return row;
    });
    body.replaceChildren(table([["Op"], ["Kernel"], ["Bytes", "number"], ["Flops", "number"], ["Why"]], rows));
  };
  choice.append(...methods.map((method) => el("button", {onclick: () => fill(method)}, method)));
  place.append(el("div", {class: "filter"}, choice, el("span", {}, "bytes and flops of one call of each")), body);
  if (data.compiled.length)
    place.append(el("h3", {}, "Machine code in the artefact"), table([["Kernel"], ["Architecture"], ["Threads", "number"], ["Bytes", "number"]], data.compiled.map((each) => el("tr", {}, cell(each.kernel, "mono"), cell(each.arch), cell(each.threads, "number"), cell(bytesText(each.bytes), "number")))));
  place.reveal = (kernel) => fill(kernel.method, kernel);
  fill(methods.includes("decode") ? "decode" : methods[0]);
}

function startDims() {
  const text = (dim) => {
    const range = dim.max === null ? `at least ${dim.min}` : `${dim.min} to ${dim.max.toLocaleString("en")}`;
    return dim.multiple_of > 1 ? `${range}, a multiple of ${dim.multiple_of}` : range;
  };
  document.getElementById("dims").append(...data.dims.map((dim) => el("div", {class: "dim", "data-dim": dim.name}, el("h2", {}, dim.name), el("p", {}, text(dim)),
    el("ul", {}, ...dim.bound.map((bound) => el("li", {}, el("b", {}, bound.method), " binds it by ", el("code", {}, bound.by)))))));
}
