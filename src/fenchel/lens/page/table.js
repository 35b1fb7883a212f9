// The table of all heads, a hundred rows at a time.

const SOME = 100;
const WHERE = [
  {name: "kind", title: "kind", explain: "Which attention of the model."},
  {name: "layer", title: "layer", explain: "Counted from 0."},
  {name: "head", title: "head", explain: "Counted from 0."},
];
const tableState = {group: groups[0], kind: "", layer: "", sort: null, falling: false,
  order: [...rows], shown: 0};

const whereColumns = () => (kinds.length > 1 ? WHERE : WHERE.slice(1));
const groupColumns = () =>
  columns.filter((column) => tableState.group === "all" || column.group === tableState.group);

// Stable, on top of the order that is there; what was not measured comes last either way.
function sortBy(name) {
  const measure = columnNamed.has(name);
  tableState.falling = tableState.sort === name ? !tableState.falling : measure;
  tableState.sort = name;
  const sign = tableState.falling ? -1 : 1;
  tableState.order.sort((one, other) => {
    const [a, b] = [one[name] ?? null, other[name] ?? null];
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (a < b ? -1 : a > b ? 1 : 0);
  });
}

const chosenRows = () => tableState.order.filter((row) =>
  (tableState.kind === "" || row.kind === tableState.kind) &&
  (tableState.layer === "" || row.layer === Number(tableState.layer)));

function headerCell(column, redraw) {
  const sorted = tableState.sort === column.name;
  const direction = !sorted ? "none" : tableState.falling ? "descending" : "ascending";
  const button = el("button", {type: "button", "data-sort": column.name,
    on: {click: () => { sortBy(column.name); redraw(column.name); }}},
    el("span", {class: "title", text: column.title}));
  if (column.unit) button.append(el("small", {text: column.unit}));
  return el("th", {scope: "col", "aria-sort": direction, class: column.group ? null : "where"}, button);
}

function valueCell(row, column, scale) {
  const value = valueOf(row, column);
  if (value === null) return el("td", {class: "missing", text: "–", title: "not measured"});
  const cell = el("td", {text: format(value)});
  if (scale.flat) return cell;
  const share = (100 * scale.share(value)).toFixed(1);
  cell.style.background = `linear-gradient(to right, var(--bar) ${share}%, transparent ${share}%)`;
  return cell;
}

function bodyRow(row, shown, scales) {
  const where = whereColumns().map((column) => {
    if (column.name !== "head") return el("td", {class: "where", text: String(row[column.name])});
    return el("th", {scope: "row", class: "where"}, el("a", {href: `#${keyOf(row)}`,
      text: String(row.head), "aria-label": headTitle(row)}));
  });
  return el("tr", {"data-key": keyOf(row)}, where,
    shown.map((column, i) => valueCell(row, column, scales[i])));
}

function buildTable() {
  const area = document.getElementById("table-area");
  const table = el("table", {});
  const count = el("span", {class: "note", "aria-live": "polite"});
  const box = el("div", {class: "scroll tall", tabindex: "0", role: "region",
    "aria-label": "Table of heads"}, table);
  let more = () => {};
  const draw = (focus) => {
    const shown = groupColumns();
    const scales = shown.map(scaleOf);
    const chosen = chosenRows();
    count.textContent = `${chosen.length} of ${rows.length} heads`;
    const body = el("tbody");
    table.replaceChildren(el("thead", {}, el("tr", {},
      [...whereColumns(), ...shown].map((column) => headerCell(column, draw)))), body);
    tableState.shown = 0;
    more = () => {
      const next = chosen.slice(tableState.shown, tableState.shown + SOME);
      body.append(...next.map((row) => bodyRow(row, shown, scales)));
      tableState.shown += next.length;
    };
    more();
    let left = 0;  // kind, layer and head stay in sight
    [...table.rows[0].cells].slice(0, whereColumns().length).forEach((cell, i) => {
      table.style.setProperty(`--left-${i}`, `${left}px`);
      left += cell.getBoundingClientRect().width;
    });
    box.scrollTop = 0;
    if (focus) [...table.querySelectorAll("button")].find((b) => b.dataset.sort === focus)?.focus();
  };
  box.addEventListener("scroll", () => {
    if (box.scrollTop + box.clientHeight > box.scrollHeight - 400) more();
  });
  window.addEventListener("beforeprint", () => { while (tableState.shown < chosenRows().length) more(); });
  tipped(table, (target) => headerTip(target.closest("th button")));
  area.replaceChildren(tabs(() => draw()), el("div", {class: "controls"}, filters(() => draw()), count), box);
  draw();
}

function headerTip(button) {
  if (button === null) return null;
  const column = columnNamed.get(button.dataset.sort) ??
    WHERE.find((other) => other.name === button.dataset.sort);
  return [column.title, column.explain + measuredOn(column)];
}

function tabs(draw) {
  const names = groups.length > 1 ? [...groups, "all"] : groups;
  const buttons = names.map((name) => el("button", {type: "button", "data-group": name,
    text: name === "all" ? "all columns" : GROUP_TITLES[name] ?? name,
    "aria-pressed": String(name === tableState.group)}));
  const bar = el("div", {class: "tabs", role: "group", "aria-label": "Columns"}, buttons);
  bar.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button === null) return;
    tableState.group = button.dataset.group;
    buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    draw();
  });
  return bar;
}

function filters(draw) {
  const numbers = [...new Set(rows.map((row) => row.layer))].sort((a, b) => a - b);
  const layer = choice("layer", [["", "all"], ...numbers.map((n) => [n, String(n)])], "",
    (value) => { tableState.layer = value; draw(); });
  if (kinds.length === 1) return [layer];
  const kind = choice("kind", [["", "all"], ...kinds.map((k) => [k, KIND_TITLES[k] ?? k])], "",
    (value) => { tableState.kind = value; draw(); });
  return [kind, layer];
}

// The table is the largest part of the page: it waits until somebody comes near.
function lazily(section, build) {
  let done = false;
  const once = () => { if (!done) { done = true; observer.disconnect(); build(); } };
  const observer = new IntersectionObserver(
    (entries) => { if (entries.some((entry) => entry.isIntersecting)) once(); }, {rootMargin: "600px"});
  observer.observe(section);
  window.addEventListener("beforeprint", once);
  return once;
}
