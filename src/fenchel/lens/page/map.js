// Layer x head maps.

const mapState = {column: null, sorted: false};

function mapSize(heads, count) {
  const height = count <= 12 ? 2.3 : count <= 40 ? 1.55 : 0.8;
  const width = heads <= 16 ? 5.2 : heads <= 32 ? 2.2 : 1.3;
  return {height, width, texts: heads <= 16 && count <= 40};
}

// The heads of a layer in the order of presentation; undefined where a head was not audited.
function ordered(members, heads, column, sorted) {
  if (!sorted) {
    const there = new Map(members.map((row) => [row.head, row]));
    return heads.map((head) => there.get(head));
  }
  const falling = (row) => valueOf(row, column) ?? -Infinity;
  const byValue = [...members].sort((one, other) => falling(other) - falling(one) || 0);
  return heads.map((_, place) => byValue[place]);
}

function mapCell(row, column, scale, texts, sorted) {
  if (row === undefined) return el("span", {class: "cell absent", "aria-hidden": "true"});
  const value = valueOf(row, column);
  const cell = el("a", {class: "cell", href: `#${keyOf(row)}`, "data-key": keyOf(row),
    "aria-label": `${headTitle(row)}: ${withUnit(value, column)}`});
  if (value === null) {
    cell.classList.add("null");
  } else {
    const colour = colourOf(scale, value);
    cell.style.backgroundColor = css(colour);
    cell.classList.add(isLight(colour) ? "on-light" : "on-dark");
  }
  if (texts) cell.append(el("span", {text: brief(value)}));
  if (texts && sorted) cell.append(el("small", {text: String(row.head)}));
  return cell;
}

const median = (values) => {
  if (!values.length) return null;
  const rising = [...values].sort((one, other) => one - other);
  const middle = rising.length >> 1;
  return rising.length % 2 ? rising[middle] : (rising[middle - 1] + rising[middle]) / 2;
};

function headAxis(heads, sorted) {
  const every = heads.length <= 16 ? 1 : heads.length <= 40 ? 4 : 8;
  const names = heads.map((head, i) =>
    el("span", {class: "axis-head", text: !sorted && i % every === 0 ? String(head) : ""}));
  const label = sorted ? "layer" : "layer \\ head";
  return [el("span", {class: "axis-name", text: label}), ...names,
    el("span", {class: "axis-name", text: "median"})];
}

function drawMap(kind, column, {sorted = false} = {}) {
  const scale = scaleOf(column);
  const members = layersOf(kind);
  const heads = [...new Set(members.flat().map((row) => row.head))].sort((a, b) => a - b);
  const {height, width, texts} = mapSize(heads.length, members.length);
  const grid = el("div", {class: "map", role: "group",
    "aria-label": `${column.title}, ${KIND_TITLES[kind] ?? kind}: layers by heads`});
  grid.style.gridTemplateColumns =
    `max-content repeat(${heads.length}, minmax(0.35rem, ${width}rem)) max-content`;
  grid.style.gridAutoRows = `${height}rem`;
  grid.append(...headAxis(heads, sorted));
  const cells = [];
  for (const layer of members) {
    const line = ordered(layer, heads, column, sorted).map((row) =>
      mapCell(row, column, scale, texts, sorted));
    cells.push(...line);
    const middle = median(layer.map((row) => valueOf(row, column)).filter((x) => x !== null));
    grid.append(el("span", {class: "axis-layer", text: String(layer[0].layer)}), ...line,
      el("span", {class: "axis-median", text: middle === null ? "" : format(middle)}));
  }
  const links = cells.filter((cell) => cell.tagName === "A");
  const full = links.length === cells.length;
  roving(grid, links, gridStep(full ? heads.length : 1, links.length));
  tipped(grid, (target) => mapTip(target.closest("a.cell"), column));
  return grid;
}

function mapTip(cell, column) {
  if (cell === null) return null;
  const row = byKey.get(cell.dataset.key);
  const value = valueOf(row, column);
  const rank = value === null || column.value ? "" : rankText(row, column);
  const words = [withUnit(value, column), rank].filter(Boolean).join(" · ");
  return [headTitle(row), `${column.title}: ${words}`, column.explain];
}

function mapPanel(kind, column, options) {
  const title = kinds.length > 1 ? el("h3", {text: KIND_TITLES[kind] ?? kind}) : null;
  return el("div", {class: "map-panel"}, title,
    el("div", {class: "scroll"}, drawMap(kind, column, options)));
}

const OF_ONE_INPUT = new Set(["attacked", "tightness"]);  // an attack takes long: one of the probe stands for all

function measuredOn(column) {
  const {what, probe} = audit.inputs;
  if (OF_ONE_INPUT.has(column.name)) return "";
  return column.of === "probe" && probe ? ` Measured on the probe, ${probe} of the ${what}.` : "";
}

function drawMaps() {
  const column = columnNamed.get(mapState.column);
  if (column === undefined) return;
  document.getElementById("map-explain").textContent = column.explain + measuredOn(column);
  document.getElementById("map-legend").replaceChildren(legend(scaleOf(column), column));
  document.getElementById("map-area").replaceChildren(
    ...kinds.map((kind) => mapPanel(kind, column, {sorted: mapState.sorted})));
  const select = document.querySelector("#map-controls select");
  if (select) select.value = column.name;
}

function buildMaps() {
  mapState.column ??= columns.find((column) => valuesOf(column).length)?.name ?? columns[0]?.name;
  const options = columns.map((column) =>
    [column.name, column.title, GROUP_TITLES[column.group] ?? column.group]);
  const controls = document.getElementById("map-controls");
  const step = (by) => () => {
    const place = columns.findIndex((column) => column.name === mapState.column);
    mapState.column = columns[(place + by + columns.length) % columns.length].name;
    drawMaps();
  };
  controls.replaceChildren(
    choice("colour by", options, mapState.column, (name) => { mapState.column = name; drawMaps(); }),
    el("span", {class: "pair"},
      el("button", {type: "button", text: "‹", "aria-label": "previous column", on: {click: step(-1)}}),
      el("button", {type: "button", text: "›", "aria-label": "next column", on: {click: step(1)}})),
    tick("sort heads within each layer", mapState.sorted, (on) => { mapState.sorted = on; drawMaps(); }));
  drawMaps();
}
