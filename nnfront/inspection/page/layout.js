// A layered drawing: boxes in rows, each below what it reads, in an order in which few edges cross.
// `boxes` have w and h and are in an order in which edges lead forward; edges are {from, to} by number,
// with `start`, what tells those of one box apart. `first` boxes make up the first row,
// `last` ones the last. Sets x and y (upper left) of the boxes and `via`, the points between its ends, of each edge. Returns {w, h}.

const GAP_X = 26, GAP_Y = 34, LANE = 10;

function layered(boxes, edges, first, last) {
  const rank = boxes.map(() => (first ? 1 : 0)), readers = boxes.map(() => []);
  for (const edge of edges) readers[edge.from].push(edge.to);
  boxes.forEach((_, i) => {
    if (i < first) rank[i] = 0;
    for (const j of readers[i]) rank[j] = Math.max(rank[j], rank[i] + 1);
  });
  const read = new Set(edges.map((edge) => edge.to));
  for (let i = boxes.length - 1; i >= first; i--)  // what reads nothing stands just above who reads it
    if (!read.has(i) && readers[i].length) rank[i] = Math.max(rank[i], Math.min(...readers[i].map((j) => rank[j])) - 1);
  const bottom = Math.max(0, ...rank.slice(0, boxes.length - last)) + 1;
  for (let i = boxes.length - last; i < boxes.length; i++) rank[i] = bottom;

  const rows = Array.from({length: Math.max(0, ...rank) + 1}, () => []);
  const slots = boxes.map((box, i) => ({w: box.w, h: box.h, row: rank[i], up: [], down: [], box, pull: 1}));
  slots.forEach((slot) => rows[slot.row].push(slot));
  const long = edges.filter((edge) => rank[edge.to] - rank[edge.from] > 1), starts = {};
  for (const edge of long) starts[`${edge.from}/${edge.start}`] = (starts[`${edge.from}/${edge.start}`] || 0) + 1;
  const lanes = new Map();  // edges that start together share a lane, others with those that end where they do
  const link = (above, below) => { if (!below.up.includes(above)) { below.up.push(above); above.down.push(below); } };
  for (const edge of edges) {
    const start = `${edge.from}/${edge.start}`, name = starts[start] > 1 ? start : `to ${edge.to}`;
    let above = slots[edge.from];
    edge.lane = [];
    for (let row = above.row + 1; row < rank[edge.to]; row++) {
      const key = `${name} ${row}`;
      if (!lanes.has(key)) {
        lanes.set(key, {w: LANE, h: 0, row, up: [], down: [], pull: 6});
        rows[row].push(lanes.get(key));
      }
      link(above, lanes.get(key));
      above = lanes.get(key);
      edge.lane.push(above);
    }
    link(above, slots[edge.to]);
  }

  const number = (row) => row.forEach((slot, i) => { slot.at = i; });
  rows.forEach(number);
  const mean = (list, of) => list.reduce((sum, item) => sum + of(item), 0) / list.length;
  for (let sweep = 0; sweep < 6; sweep++) {
    const side = sweep % 2 ? "down" : "up";
    for (const row of sweep % 2 ? [...rows].reverse() : rows) {
      const wish = new Map(row.map((slot) => [slot, slot[side].length ? mean(slot[side], (other) => (other.at + 0.5) / rows[other.row].length) * row.length : slot.at + 0.5]));
      row.sort((a, b) => wish.get(a) - wish.get(b) || a.at - b.at);
      number(row);
    }
  }

  for (const row of rows) {
    let x = 0;
    for (const slot of row) { slot.x = x; x += slot.w + GAP_X; }
    for (const slot of row) slot.x -= (x - GAP_X) / 2;
  }
  for (let sweep = 0; sweep < 12; sweep++)
    for (const row of sweep % 2 ? [...rows].reverse() : rows) settle(row, sweep % 2 ? "down" : "up", mean);

  let y = 0;
  const left = Math.min(...rows.flat().map((slot) => slot.x)), right = Math.max(...rows.flat().map((slot) => slot.x + slot.w));
  for (const row of rows) {
    const high = Math.max(0, ...row.map((slot) => slot.h));
    for (const slot of row) {
      slot.x -= left;
      if (slot.box) Object.assign(slot.box, {x: slot.x, y: y + (high - slot.h) / 2});
      else Object.assign(slot, {top: y, base: y + high});
    }
    y += high + GAP_Y;
  }
  for (const edge of edges) edge.via = edge.lane.flatMap((slot) => [[slot.x + LANE / 2, slot.top], [slot.x + LANE / 2, slot.base]]);
  return {w: right - left, h: y - GAP_Y};
}

// Move a row's slots as near as they come to their neighbours' middle, in their order and with gaps: neighbours that would overlap move as one.
function settle(row, side, mean) {
  const blocks = [];
  let offset = 0;
  for (const slot of row) {
    const beside = slot[side].filter((other) => !other.box === !slot.box);  // boxes keep below boxes, and lanes straight
    const near = beside.length ? beside : slot[side].length ? slot[side] : [slot];
    const pull = slot.pull * (slot[side].length ? 1 : 0.2);
    let block = {slots: [[slot, offset]], weight: pull, wish: mean(near, (other) => other.x + other.w / 2) - slot.w / 2 - offset};
    while (blocks.length && blocks.at(-1).wish > block.wish) {
      const before = blocks.pop(), weight = before.weight + block.weight;
      block = {slots: [...before.slots, ...block.slots], weight, wish: (before.wish * before.weight + block.wish * block.weight) / weight};
    }
    blocks.push(block);
    offset += slot.w + GAP_X;
  }
  for (const block of blocks) for (const [slot, at] of block.slots) slot.x = block.wish + at;
}
