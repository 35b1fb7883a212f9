// The overview, and the way between it and the heads.

function buildEverywhere() {
  if (!audit.everywhere.length) return;
  const named = [["alpha", "α", (x) => format(x)], ["kept", "links kept", percent],
    ["moved", "output moves by", percent], ["cosine", "cosine with the output before", (x) => format(x)],
    ["kl", "KL of the predictions, nats", (x) => format(x)]];
  const shown = named.filter(([name]) => audit.everywhere.some((run) => (run[name] ?? null) !== null));
  const head = el("tr", {}, shown.map(([, title]) => el("th", {scope: "col", text: title})));
  const body = audit.everywhere.map((run) => el("tr", {},
    shown.map(([name, , say]) => el("td", {text: say(run[name])}))));
  document.getElementById("everywhere-area").replaceChildren(
    el("p", {text: "Every softmax of the model replaced by entmax of one α, without training. " +
      "α 1 is softmax; a larger α sets more weights to exactly zero."}),
    el("div", {class: "scroll"}, el("table", {class: "plain"}, el("thead", {}, head), el("tbody", {}, body))));
  document.getElementById("everywhere").hidden = false;
}

function recipeColumns() {
  const heads = new Map(audit.recipe.heads.map((head) => [keyOf(head), head]));
  const column = (name, title, explain) => ({name, title, explain, unit: "", scale: "linear",
    value: (row) => heads.get(keyOf(row))?.[name] ?? null});
  return [column("alpha", "α", "The α that the recipe gives this head; 1 is softmax."),
    column("kept", "share of links kept", "The share of this head's links that stay above zero.")];
}

// moved: {"probe" | "unseen": {texts, root_mean_square, largest}}.
function movedBy(moved) {
  return Object.entries(moved).map(([which, move]) => `${percent(move.root_mean_square)} ` +
    `(at most ${percent(move.largest)}) on ${move.texts} ${which === "probe" ? "of the probe" : which}`)
    .join(" and by ");
}

function buildRecipe() {
  const {recipe} = audit;
  if (recipe === null) return;
  const options = recipeColumns();
  const area = el("div");
  const draw = (name) => {
    const column = options.find((option) => option.name === name);
    area.replaceChildren(el("p", {class: "explain", text: column.explain}), legend(scaleOf(column), column),
      ...kinds.map((kind) => mapPanel(kind, column)));
  };
  draw("alpha");
  const moved = movedBy(recipe.moved);
  const apply = 'fenchel.hf.convert(model, "recipe.json")';
  document.getElementById("recipe-area").replaceChildren(
    el("p", {text: `An α for every head, so that the output moves by at most ${percent(recipe.tolerance)} ` +
      `of its length: together they keep ${percent(recipe.kept)} of the links, and the output moves by ` +
      `${moved}.`}),
    el("p", {}, "To apply it: ", el("code", {text: apply})),
    el("div", {class: "controls"}, choice("colour by", options.map((o) => [o.name, o.title]), "alpha", draw)),
    area);
  document.getElementById("recipe").hidden = false;
}

function buildHow() {
  const lists = groups.map((group) => [el("h4", {text: GROUP_TITLES[group] ?? group}),
    el("dl", {class: "columns"}, columns.filter((column) => column.group === group).map((column) => [
      el("dt", {}, el("a", {href: `#map/${encodeURIComponent(column.name)}`, text: column.title}),
        column.unit ? ` (${column.unit})` : ""),
      el("dd", {text: column.explain + measuredOn(column)})]).flat())]).flat();
  const shown = ofImages ? "the patches that a patch looks at are coloured, the warmer the more weight."
    : "curves lead from a token to the tokens it looks at, the thicker the more weight.";
  const [many, one] = ofImages ? ["patches", "patch"] : ["tokens", "token"];
  document.getElementById("how-area").replaceChildren(
    el("p", {text: `A head weighs the ${many} that it may look at, for every ${one} that asks. Each cell of a map ` +
      "is one head; its colour is a mean over all queries of all inputs. Choose a cell to see what that head " +
      `does: on its page, ${shown}`}),
    el("details", {}, el("summary", {text: `What the ${columns.length} columns mean`}), lists));
}

function buildSections() {
  const nav = document.querySelector("nav.sections");
  const sections = [...document.querySelectorAll("#overview > section:not([hidden])")].slice(1);
  nav.replaceChildren(...sections.map((section) =>
    el("a", {href: `#${section.id}`, text: section.querySelector("h2").textContent})));
}

// ---- addresses: "", "map/column", "section", "kind/layer/head"

const overview = document.getElementById("overview");
const headArea = document.getElementById("head");
let overviewScroll = 0;

function openHead(row) {
  if (!overview.hidden) overviewScroll = window.scrollY;
  hideTip();
  overview.hidden = true;
  headArea.hidden = false;
  headArea.replaceChildren(...headPage(row));
  window.scrollTo(0, 0);
  document.getElementById("head-title").focus({preventScroll: true});
}

function openOverview(address) {
  const returning = overview.hidden;
  hideTip();
  document.title = `${audit.model.name}: audit of attention`;
  overview.hidden = false;
  headArea.hidden = true;
  headArea.replaceChildren();
  if (address.startsWith("map/")) {
    const name = address.slice(4);
    if (columnNamed.has(name)) { mapState.column = name; drawMaps(); }
    document.getElementById("maps").scrollIntoView();
  } else if (address !== "" && overview.querySelector(`#${CSS.escape(address)}`)) {
    if (address === "table") tableOnce();
    document.getElementById(address).scrollIntoView();
  } else if (returning) {
    window.scrollTo(0, overviewScroll);
  }
}

function addressed() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";  // a % that stands for nothing
  }
}

function route() {
  const row = byKey.get(addressed());
  if (row) openHead(row);
  else openOverview(addressed());
}

history.scrollRestoration = "manual";
buildMaps();
buildEverywhere();
buildRecipe();
buildHow();
buildSections();
const tableOnce = lazily(document.getElementById("table"), buildTable);
window.addEventListener("hashchange", route);
route();
