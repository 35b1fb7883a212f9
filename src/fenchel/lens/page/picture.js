// An image with its patches: where a patch or the class token looks.

const MEAN = -1;  // instead of a query: the mean over all of them
const HEAT = ["#5b1a6b", "#b3305e", "#ec6726", "#fbb41a", "#fcffa4"];

function pictureView(row, place) {
  const example = audit.examples[place];
  const links = linksOf(place, row);
  if (links === null) return el("p", {class: "note", text: "No links of this layer were kept."});
  const {rows: high, columns: wide, first, data} = example.image;
  const view = {links, wide, first, patches: high * wide, example, side: SIDES[row.kind][1],
    query: first > 0 ? 0 : MEAN};
  view.said = el("p", {class: "said", "aria-live": "polite"});
  view.note = el("p", {class: "note"});
  view.legend = pullLegend();
  view.cells = Array.from({length: view.patches}, (_, i) => el("button", {type: "button",
    class: "patch", "data-place": first + i, "aria-label": patchName(view, first + i)}));
  const grid = el("div", {class: "patches"}, view.cells);
  grid.style.gridTemplateColumns = `repeat(${wide}, minmax(0, 1fr))`;
  grid.style.gridTemplateRows = `repeat(${high}, minmax(0, 1fr))`;
  roving(grid, view.cells, gridStep(wide, view.patches));
  const image = el("img", {alt: example.text || "the image", draggable: "false"});
  if (data.startsWith("data:image/")) image.src = data;
  view.others = otherQueries(view);
  const choose = (event) => {
    const button = event.target instanceof Element ? event.target.closest("button[data-place]") : null;
    if (button !== null && !pulls(links)) { view.query = Number(button.dataset.place); drawPicture(view); }
  };
  view.bar = el("div", {class: "tabs", role: "group", "aria-label": "Query"}, view.others);
  grid.addEventListener("click", choose);
  view.bar.addEventListener("click", choose);
  tipped(grid, (target) => patchTip(view, target.closest("button.patch")), {below: true});
  view.box = el("div", {class: "picture-view"}, el("div", {class: "picture"}, image, grid),
    el("div", {}, view.bar, view.legend, view.said, view.note));
  drawPicture(view);
  const shades = shadeChoice(links, () => drawPicture(view));
  return el("div", {}, shades && el("div", {class: "controls"}, shades), view.box);
}

function patchName(view, place) {
  const patch = place - view.first;
  if (patch < 0 || patch >= view.patches) {
    return view.example.tokens?.[view.side]?.[place] ?? (place === 0 ? "class token" : `token ${place}`);
  }
  return `row ${Math.floor(patch / view.wide)}, column ${patch % view.wide}`;
}

// Tokens that are no patch, and the mean.
function otherQueries(view) {
  const places = Array.from({length: view.links.queries}, (_, i) => i)
    .filter((place) => place < view.first || place >= view.first + view.patches);
  const button = (place, text) => el("button", {type: "button", "data-place": place, text});
  return [...places.map((place) => button(place, patchName(view, place))), button(MEAN, "mean of all queries")];
}

function drawPicture(view) {
  const {links, query} = view;
  const masses = new Float64Array(links.keys);
  if (query === MEAN) links.received.forEach((mass, place) => { masses[place] = mass; });
  for (const link of links.list) if (link.from === query) masses[link.to] = link.weight;
  const patches = masses.subarray(view.first, view.first + view.patches);
  const top = Math.max(...patches, 1e-9);
  const pulled = pulls(links);
  view.cells.forEach((cell, i) => {
    cell.style.backgroundColor = pulled ? "" : heat(patches[i] / top);
    cell.classList.toggle("chosen", !pulled && view.first + i === query);
  });
  view.others.forEach((button) =>
    button.setAttribute("aria-pressed", String(Number(button.dataset.place) === query)));
  view.box.classList.toggle("pull", pulled);
  view.bar.hidden = pulled;  // the pull is that of all queries
  view.legend.hidden = !pulled;
  paintPull(view.cells, pulled ? patchGains(view) : null, largestGain(view));
  if (pulled) tellPull(view);
  else tellPicture(view, masses);
}

const heat = (share) => (share > 0
  ? `rgba(${mixed(HEAT, share).join(", ")}, ${(0.25 + 0.5 * share).toFixed(2)})` : "transparent");

const patchGains = (view) => view.links.gained.slice(view.first, view.first + view.patches);

// Of the patches alone: a class token would else leave them all pale.
const largestGain = (view) =>
  (view.links.gained === null ? 1 : Math.max(...patchGains(view).map(Math.abs), 1e-9));

function patchTip(view, patch) {
  if (patch === null || !pulls(view.links)) return null;
  const place = Number(patch.dataset.place);
  return gainTip(patchName(view, place), view.links.gained[place]);
}

function tellPull(view) {
  const {gained} = view.links;
  const nameOf = (place) => patchName(view, place);
  view.said.replaceChildren(...strongestPulls(gained, nameOf, 4));
  const largest = gained.reduce((best, gain, place) => (Math.abs(gain) > Math.abs(gained[best]) ? place : best), 0);
  view.note.textContent = patchGains(view).includes(gained[largest]) ? ""
    : `The deepest colour is ${format(largestGain(view))} of this head's largest, which “${nameOf(largest)}” has.`;
}

function tellPicture(view, masses) {
  const {links, query} = view;
  const best = [...masses.keys()].filter((place) => masses[place] > 0)
    .sort((one, other) => masses[other] - masses[one]).slice(0, links.width);
  const name = el("b", {text: query === MEAN ? "All queries" : patchName(view, query)});
  view.said.replaceChildren(name, query === MEAN ? " look at: " : " looks at: ",
    ...best.map((place) => chip(patchName(view, place), masses[place])));
  const total = best.reduce((sum, place) => sum + masses[place], 0);
  view.note.textContent = query === MEAN
    ? "Heat: the weight that a patch receives on average. Choose a patch to see where it looks."
    : `These hold ${percent(total)} of its weight; the ${links.width} strongest were kept. ` +
      "Choose a patch to see where it looks.";
}
