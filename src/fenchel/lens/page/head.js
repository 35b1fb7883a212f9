// The page of one head.

function headPage(row) {
  const place = rows.indexOf(row);
  const around = layers.get(layerKey(row));
  document.title = `${headTitle(row)} · ${audit.model.name}`;
  return [
    headBar(row, place),
    el("div", {class: "head-top"},
      el("div", {}, el("h2", {text: capital(headTitle(row)), tabindex: "-1", id: "head-title"}),
        headLabel(row), standsOut(row)),
      miniMap(row)),
    examplesPart(row),
    chartsPart(row, around),
    certificatePart(row),
    numbersPart(row),
  ].filter(Boolean);
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const part = (id, title, ...children) =>
  el("section", {id, "aria-label": title}, el("h3", {text: title}), children);

function headBar(row, place) {
  const step = (other, text, rel) => (other === undefined
    ? el("span", {class: "off", text})
    : el("a", {href: `#${keyOf(other)}`, rel, text, title: headTitle(other)}));
  return el("nav", {class: "head-bar", "aria-label": "Heads"},
    el("a", {href: "#", class: "back", text: "← all heads"}),
    step(rows[place - 1], "‹ previous", "prev"), step(rows[place + 1], "next ›", "next"));
}

// What a head is called when one of its numbers is clear; the first that holds.
const LABELS = [
  ["mass_previous", (x) => x > 0.5, (x, one) =>
    `Previous-${one} head: ${percent(x)} of its weight is on the ${one} before.`],
  ["mass_next", (x) => x > 0.5, (x, one) =>
    `Next-${one} head: ${percent(x)} of its weight is on the ${one} after.`],
  ["mass_self", (x) => x > 0.5, (x, one) =>
    `Looks at itself: a ${one} gives itself ${percent(x)} of its weight.`],
  ["mass_first", (x) => x > 0.5, (x) =>
    `First-token head (a sink): ${percent(x)} of its weight is on the first token.`],
  ["mass_separator", (x) => x > 0.5, (x) =>
    `Separator head: ${percent(x)} of its weight is on separators.`],
  ["distance", (x) => x < 2, (x) =>
    `Local head: it looks ${withUnit(x, columnNamed.get("distance"))} away on average.`],
  ["entropy_share", (x) => x > 0.85, (x) =>
    `Broad head: its entropy is ${percent(x)} of the most possible.`],
];

function headLabel(row) {
  const isMeasured = (name) => columnNamed.has(name) && (row[name] ?? null) !== null;
  const label = LABELS.find(([name, holds]) => isMeasured(name) && holds(row[name]));
  if (label === undefined) return null;
  const [name, , say] = label;
  return el("p", {class: "label", text: say(row[name], ofImages ? "patch" : "token")});
}

// The columns in which this head is among the first or the last.
function standsOut(row) {
  const near = Math.max(1, Math.min(3, Math.floor(rows.length / 12)));
  const extremes = [];
  for (const column of columns) {
    const rank = rankOf(row, column);
    if (rank === null || rank.count < 4) continue;
    const ties = rank.until - rank.place + 1;
    const last = rank.count - rank.until + 1;
    if (ties > near) continue;
    const tied = ties > 1 ? ", tied" : "";
    if (rank.place <= near) extremes.push([column, rank.place, "largest", tied]);
    else if (last <= near) extremes.push([column, last, "smallest", tied]);
  }
  extremes.sort((one, other) => one[1] - other[1]);
  if (!extremes.length) return el("p", {class: "note", text: "No number of it is extreme among all heads."});
  const items = extremes.slice(0, 6).map(([column, at, which, tied]) => el("li", {},
    `${at === 1 ? "" : `${ordinal(at)} `}${which} `,
    el("a", {href: `#map/${encodeURIComponent(column.name)}`, text: column.title, title: column.explain}),
    ` of all heads${tied}: ${withUnit(valueOf(row, column), column)}`));
  return el("ul", {class: "stands-out"}, items);
}

// All heads of this kind, small, to move between them.
function miniMap(row) {
  const column = columnNamed.get(mapState.column);
  if (column === undefined || rows.length > 2000) return null;
  const map = drawMap(row.kind, column);
  map.classList.add("mini");
  map.style.gridAutoRows = "";
  map.style.gridTemplateColumns = `repeat(${map.style.gridTemplateColumns.match(/repeat\((\d+)/)[1]}, 1fr)`;
  const here = map.querySelector(`[data-key="${CSS.escape(keyOf(row))}"]`);
  here.classList.add("here");
  here.setAttribute("aria-current", "page");
  return el("div", {class: "mini-box"}, el("p", {class: "note", text: `${column.title}: layers down, heads across`}), map);
}

// ---- sentences and images

function examplesPart(row) {
  if (!audit.examples.length) return null;
  sentence.example = Math.min(sentence.example, audit.examples.length - 1);
  const area = el("div", {class: "example"});
  const draw = () => {
    const example = audit.examples[sentence.example];
    area.replaceChildren(example.image ? pictureView(row, sentence.example) : sentenceView(row, sentence.example));
  };
  const titles = audit.examples.map((example, place) => [place, exampleTitle(example, place)]);
  const pick = choice("example", titles, sentence.example, (value) => { sentence.example = Number(value); draw(); });
  const select = pick.querySelector("select");
  const step = (by) => () => {
    const count = audit.examples.length;
    sentence.example = (sentence.example + by + count) % count;
    select.value = sentence.example;
    draw();
  };
  const arrows = el("span", {class: "pair"},
    el("button", {type: "button", text: "‹", "aria-label": "previous example", on: {click: step(-1)}}),
    el("button", {type: "button", text: "›", "aria-label": "next example", on: {click: step(1)}}));
  draw();
  const bar = el("div", {class: "controls"}, pick, audit.examples.length > 1 ? arrows : null);
  return part("examples", "Where it looks", bar, area);
}

function exampleTitle(example, place) {
  const text = (example.text || `${example.image ? "image" : "text"} ${place}`).replace(/\s+/g, " ");
  const count = example.image ? "" : ` (${(Object.values(example.tokens ?? {})[0] ?? []).length} tokens)`;
  return (text.length > 72 ? `${text.slice(0, 70)}…` : text) + count;
}

// ---- charts

function chartsPart(row, around) {
  const place = placeInLayer(row);
  const name = layerKey(row);
  const order = ofImages ? " (reading order)" : "";
  const charts = [];
  const histograms = audit.histograms[name];
  if (histograms?.entropy_share) {
    charts.push(histogram(histograms.entropy_share[place], "How spread its queries are",
      "entropy / largest possible entropy"));
  }
  if (histograms?.top_weight) {
    charts.push(histogram(histograms.top_weight[place], "Largest weight of its queries", "largest weight"));
  }
  if (audit.spectra[name]?.[place]) charts.push(spectrumChart(audit.spectra[name][place]));
  const preference = audit.preference[name];
  if (preference?.log[place]) {
    charts.push(offsetChart(preference.offsets, preference.log[place], `Preference by place, log${order}`));
  }
  const masses = audit.offsets?.[name];
  if (masses?.mass[place]) {
    charts.push(offsetChart(masses.offsets, masses.mass[place], `Weight by place${order}`, 0));
  }
  if (audit.agreement[name] && around.length > 1) charts.push(agreementStrip(row, around, audit.agreement[name][place]));
  const shown = charts.filter(Boolean);
  return shown.length ? part("charts", "How it behaves", el("div", {class: "charts"}, shown)) : null;
}

function agreementStrip(row, around, cosines) {
  const bars = around.map((other, i) => {
    const cosine = cosines[i];
    const self = other === row;
    const bar = el(self ? "span" : "a", {class: `agree${self ? " self" : ""}`, href: self ? null : `#${keyOf(other)}`,
      title: `head ${other.head}: ${cosine === null ? "not measured" : cosine.toFixed(2)}`,
      "aria-label": `head ${other.head}: cosine ${format(cosine)}`});
    const fill = el("i");
    fill.style.height = `${(100 * Math.max(0, cosine ?? 0)).toFixed(1)}%`;
    const named = around.length <= 24 || i % 8 === 0;
    bar.append(el("span", {class: "column"}, fill), el("small", {text: named ? String(other.head) : "\u00a0"}));
    return bar;
  });
  return el("figure", {}, el("figcaption", {text: `Agreement with the heads of layer ${row.layer}`}),
    el("div", {class: `agreement${around.length > 24 ? " many" : ""}`}, bars),
    el("p", {class: "note", text: "Mean cosine of the weights, from 0 to 1; a bar leads to that head."}));
}

// ---- the certificate in words

function certificatePart(row) {
  const numberOf = (name) => row[name] ?? null;
  const [bound, largest, local, most, tightness] =
    ["bound", "largest_bound", "local", "largest_local", "tightness"].map(numberOf);
  if (bound === null && largest === null) return null;
  const unit = ofImages ? "image" : "text";
  const words = [];
  if (largest !== null) {
    words.push(`If its query moves by a length of 1, its output moves by at most ${format(largest)}: ` +
      `certified for every query of each ${unit}.`);
  }
  if (bound !== null) words.push(`On average over ${unit}s the certified bound is ${format(bound)}.`);
  if (local !== null) {
    words.push(`At the queries that really occur the constant is ${format(local)}` +
      (most === null ? "." : ` on average and ${format(most)} at most.`));
  }
  if (tightness !== null) {
    words.push(tightness < 1.005 ? "An attack reached the bound: it is tight."
      : `The bound is ${format(tightness)} times what an attack reached; 1 would be exact.`);
  }
  return part("certificate", "How stable it is", el("p", {text: words.join(" ")}));
}

// ---- numbers

const openGroups = new Set(groups.slice(0, 1));  // kept from head to head
window.addEventListener("beforeprint", () =>
  document.querySelectorAll("details.group").forEach((box) => { box.open = true; }));

function groupBox(group, lines) {
  const summary = el("summary", {text: GROUP_TITLES[group] ?? group, on: {click: () => {
    if (box.open) openGroups.delete(group);  // a click comes before its effect
    else openGroups.add(group);
  }}});
  const box = el("details", {class: "group", open: openGroups.has(group), "data-group": group},
    summary, el("dl", {}, lines));
  return box;
}

function numbersPart(row) {
  const parts = groups.map((group) => {
    const members = columns.filter((column) => column.group === group);
    return groupBox(group, members.map((column) => numberLine(row, column)));
  });
  return part("numbers", "All numbers",
    el("p", {class: "note", text: "Ranks among all heads: the 1st is the largest. " +
      "On each line, all heads, and this one in colour."}), el("div", {}, parts));
}

function numberLine(row, column) {
  const value = valueOf(row, column);
  const scale = scaleOf(column);
  const mark = value === null || scale.flat ? null : strip(row, column, scale);
  return el("div", {class: "number", "data-column": column.name},
    el("dt", {}, el("a", {href: `#map/${encodeURIComponent(column.name)}`, text: column.title})),
    el("dd", {class: value === null ? "missing" : ""}, el("b", {text: withUnit(value, column)}),
      el("span", {class: "rank", text: rankText(row, column)}), mark,
      el("span", {class: "explain", text: column.explain + measuredOn(column)})));
}
