// The document and how it is read. Data reaches the page by textContent and attributes only.

const audit = JSON.parse(document.getElementById("document").textContent);
const rows = audit.rows;
const ofImages = audit.inputs.what === "images";
const columns = ofImages ? audit.columns.map(ofPatches) : audit.columns;
const KIND_TITLES = {encoder: "encoder", decoder: "decoder", cross: "cross-attention"};
const GROUP_TITLES = {
  "weights": "weights", "estimation": "estimation", "what-if": "what if",
  "geometry": "geometry", "stability": "stability", "recipe": "recipe",
};
const SIDES = {encoder: ["encoder", "encoder"], decoder: ["decoder", "decoder"],
  cross: ["decoder", "encoder"]};  // whose tokens ask, whose are asked

// Patches have no line to be apart on: their order is that of reading, row by row.
function ofPatches(column) {
  const ordered = ["mass_previous", "mass_next", "distance"].includes(column.name);
  const countsTokens = ["entropy", "entropy_share", "effective_support", "mass_self"].includes(column.name);
  if (!ordered && !countsTokens) return column;
  const worded = (text) => text.replace(/\btokens\b/g, "patches").replace(/\btoken\b/g, "patch");
  const unit = column.name === "distance" ? "patches, in reading order" : worded(column.unit);
  const order = ordered && column.name !== "distance" ? ", in reading order" : "";
  return {...column, unit, title: worded(column.title) + order,
    explain: worded(column.explain) + (ordered ? " Patches are counted in reading order, row by row." : "")};
}

const keyOf = (row) => `${row.kind}/${row.layer}/${row.head}`;
const layerKey = (row) => `${row.kind}/${row.layer}`;
const byKey = new Map(rows.map((row) => [keyOf(row), row]));
const kinds = [...new Set(rows.map((row) => row.kind))];
const groups = [...new Set(columns.map((column) => column.group))];
const columnNamed = new Map(columns.map((column) => [column.name, column]));

const layers = new Map();  // "kind/layer" -> its rows, in the order of every per-head list
for (const row of rows) {
  if (!layers.has(layerKey(row))) layers.set(layerKey(row), []);
  layers.get(layerKey(row)).push(row);
}
const placeInLayer = (row) => layers.get(layerKey(row)).indexOf(row);

function layersOf(kind) {
  const ofKind = [...layers.values()].filter((members) => members[0].kind === kind);
  return ofKind.sort((one, other) => one[0].layer - other[0].layer);
}

// A column of the document, or one of ours with a function `value`.
const valueOf = (row, column) => {
  const value = column.value ? column.value(row) : row[column.name];
  return value === undefined ? null : value;
};
const valuesOf = (column) => rows.map((row) => valueOf(row, column)).filter((x) => x !== null);

function headTitle(row) {
  const kind = kinds.length > 1 ? `${KIND_TITLES[row.kind] ?? row.kind}, ` : "";
  return `${kind}layer ${row.layer} head ${row.head}`;
}

// ---- numbers in words

function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return tidy(value.toExponential(1));
  if (size >= 1000) return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
  return tidy(String(Number(value.toPrecision(3))));
}

function tidy(text) {
  const [digits, power] = text.split("e");
  const plain = digits.replace("-", "−");
  if (power === undefined) return plain;
  const raised = [...power.replace("+", "")].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  return `${plain}·10${raised.join("")}`;
}

// Short enough for a cell of the map.
function brief(value) {
  if (value === null) return "";
  const size = Math.abs(value);
  if (size > 0 && (size < 0.0005 || size >= 9999.5)) return value.toExponential(0).replace("+", "");
  if (size > 0 && size < 0.005) return tidy(value.toFixed(3));
  return tidy(size >= 100 ? value.toFixed(0) : size >= 9.95 ? value.toFixed(1) : value.toFixed(2));
}

const withUnit = (value, column) =>
  value === null ? "not measured" : format(value) + (column.unit ? ` ${column.unit}` : "");

function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = 100 * share;
  return `${value >= 9.95 ? value.toFixed(0) : Number(value.toPrecision(2))} %`;
}

function ordinal(place) {
  const teens = place % 100 >= 11 && place % 100 <= 13;
  return place + (teens ? "th" : {1: "st", 2: "nd", 3: "rd"}[place % 10] ?? "th");
}

// ---- ranks: 1 is the largest; equal values share their places

const rankTables = new Map();

function ranksOf(column) {
  if (!rankTables.has(column)) {
    const falling = valuesOf(column).sort((one, other) => other - one);
    const [first, last] = [new Map(), new Map()];
    falling.forEach((value, place) => {
      if (!first.has(value)) first.set(value, place + 1);
      last.set(value, place + 1);
    });
    rankTables.set(column, {first, last, count: falling.length});
  }
  return rankTables.get(column);
}

function rankOf(row, column) {
  const {first, last, count} = ranksOf(column);
  const value = valueOf(row, column);
  return value === null ? null : {place: first.get(value), until: last.get(value), count};
}

const rankText = (row, column) => {
  const rank = rankOf(row, column);
  if (rank === null || rank.count === 1) return "";
  const {place, until, count} = rank;
  if (until === place) return `${ordinal(place)} of ${count}`;
  if (until - place === count - 1) return "the same for all heads";
  return `${ordinal(place)} to ${ordinal(until)} of ${count}, tied`;
};

// ---- links of an example, decoded when they are first shown

const decoded = new Map();

function numbers16(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Uint16Array.from({length: bytes.length >> 1}, (_, i) => view.getUint16(2 * i, true));
}

// {width, queries, keys, list: [{from, to, weight}], received: [share], gained: [share] | null} of
// one head, or null.
function linksOf(place, row) {
  const stored = audit.examples[place].links[layerKey(row)];
  if (stored === undefined) return null;
  const name = `${place}/${layerKey(row)}`;
  if (!decoded.has(name)) {
    decoded.set(name, ["to", "weight", "received", "gained"].map((part) =>
      (stored[part] === undefined ? null : numbers16(stored[part]))));
  }
  const [to, weight, received, gained] = decoded.get(name);
  const {width, queries, keys} = stored;
  const head = placeInLayer(row);
  const list = [];
  for (let from = 0; from < queries; from++) {
    for (let rank = 0; rank < width; rank++) {
      const at = (head * queries + from) * width + rank;
      if (weight[at] > 0) list.push({from, to: to[at], weight: weight[at] / 65535});
    }
  }
  const ofHead = (numbers, read) => Array.from(numbers.subarray(head * keys, (head + 1) * keys), read);
  return {width, queries, keys, list, received: ofHead(received, (x) => x / 65535),
    gained: gained === null ? null : ofHead(gained, gainOf)};
}

// ---- elements

function set(node, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  return node;
}

function el(tag, properties = {}, ...children) {
  const node = set(document.createElement(tag), properties);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, properties = {}, ...children) {
  const node = set(document.createElementNS("http://www.w3.org/2000/svg", tag), properties);
  node.append(...children.flat());
  return node;
}

function choice(label, options, value, change) {
  const select = el("select", {on: {change: () => change(select.value)}});
  const grouped = new Map();
  for (const [name, title, group] of options) {
    const option = el("option", {value: name, text: title});
    if (group === undefined) { select.append(option); continue; }
    if (!grouped.has(group)) {
      grouped.set(group, el("optgroup", {label: group}));
      select.append(grouped.get(group));
    }
    grouped.get(group).append(option);
  }
  select.value = value;
  return el("label", {}, el("span", {text: label}), select);
}

function tick(label, checked, change) {
  const box = el("input", {type: "checkbox", checked, on: {change: () => change(box.checked)}});
  return el("label", {class: "tick"}, box, el("span", {text: label}));
}

// One stop of the tab key for a grid of controls; arrows move inside. `step(place, key)` gives the
// next place or null.
function roving(container, items, step) {
  if (!items.length) return;
  items.forEach((item) => { item.tabIndex = -1; });
  items[0].tabIndex = 0;
  const places = new Map(items.map((item, place) => [item, place]));
  container.addEventListener("focusin", (event) => {
    if (!places.has(event.target)) return;
    items.forEach((item) => { if (item.tabIndex === 0) item.tabIndex = -1; });
    event.target.tabIndex = 0;
  });
  container.addEventListener("keydown", (event) => {
    const place = places.get(event.target);
    if (place === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    const next = step(place, event.key);
    if (next === null || !items[next]) return;
    event.preventDefault();
    items[next].focus();
  });
}

// For items in reading order, `wide` in a row.
const gridStep = (wide, count) => (place, key) => {
  const by = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide}[key];
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  return by === undefined || place + by < 0 || place + by >= count ? null : place + by;
};

// ---- the one tooltip

const tip = document.getElementById("tip");

function showTip(target, lines, below) {
  tip.replaceChildren(...lines.filter(Boolean).map((line, i) =>
    el(i === 0 ? "strong" : "span", {text: line})));
  tip.hidden = false;
  tip.classList.toggle("below", below);
  const at = target.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left + at.width / 2 - tip.offsetWidth / 2),
    document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 && !below ? above : at.bottom + (below ? 3 : 8)}px`;
}

const hideTip = () => { tip.hidden = true; };
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.addEventListener("scroll", hideTip, {passive: true, capture: true});

function tipped(container, lines, {below = false} = {}) {
  const show = (event) => {
    const shown = event.target instanceof Element ? lines(event.target) : null;
    if (shown) showTip(event.target, shown, below);
    else hideTip();
  };
  container.addEventListener("mouseover", show);
  container.addEventListener("focusin", show);
  container.addEventListener("mouseleave", hideTip);
  container.addEventListener("focusout", hideTip);
}
