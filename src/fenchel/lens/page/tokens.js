// A sentence as wrapped text, with the links of a head drawn over it.

const sentence = {example: 0, shown: 40, special: true, incoming: false, shade: "received"};
const MOST_LINKS = 400;

// What tokenizers write for a space before a word.
const SPACES = /^[\u0120\u2581 ]+/;
const plain = (token) => {
  const text = token.replace(SPACES, "").replace(/[\u010a\n]/g, "⏎").replace(/\t/g, "⇥");
  return text === "" ? "␣" : text;
};

// Whether each token begins a word: by a mark of a space, or by the lack of a mark of going on.
function wordStarts(tokens) {
  const marked = tokens.some((token) => SPACES.test(token));
  return tokens.map((token) => (marked ? SPACES.test(token) : !token.startsWith("##")));
}

function tokensOf(example, side, count) {
  const words = example.tokens?.[side] ?? [];
  return Array.from({length: count}, (_, i) => words[i] ?? `token ${i}`);
}

function tokenBlock(tokens, special, side) {
  const starts = wordStarts(tokens);
  const buttons = tokens.map((token, place) => el("button", {type: "button", text: plain(token),
    class: `token${starts[place] ? " word" : ""}${special.has(place) ? " special" : ""}`,
    "data-side": side, "data-place": place, "aria-label": `token ${place}: ${plain(token)}`}));
  const node = el("div", {class: "tokens", dir: "auto"}, buttons);
  roving(node, buttons, gridStep(1, buttons.length));
  return {node, buttons, tokens};
}

// ---- curves

function boxOf(button) {
  return {x: button.offsetLeft, y: button.offsetTop, w: button.offsetWidth, h: button.offsetHeight};
}

// Over a line an arc, between lines an S; both stay within the room between the two tokens.
function curveOf(a, b, same, room) {
  if (same) {
    const [left, right] = [a.x + 0.25 * a.w, a.x + 0.75 * a.w];
    return `M${left} ${a.y}C${left} ${a.y - 15} ${right} ${a.y - 15} ${right} ${a.y}`;
  }
  const [x1, x2] = [a.x + a.w / 2, b.x + b.w / 2];
  if (Math.abs(a.y - b.y) < a.h / 2) {
    const rise = Math.min(1.2 * room, 9 + Math.abs(x2 - x1) * 0.13);  // its top is at 3/4 of that
    return `M${x1} ${a.y}C${x1} ${a.y - rise} ${x2} ${b.y - rise} ${x2} ${b.y}`;
  }
  const down = b.y > a.y;
  const [y1, y2] = down ? [a.y + a.h, b.y] : [a.y, b.y + b.h];
  const middle = (y1 + y2) / 2;
  return `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}`;
}

function linkPath(link, boxes, top, thick) {
  const share = link.weight / top;
  const d = curveOf(boxes.from(link.from), boxes.to(link.to), boxes.same(link), boxes.room);
  return svg("path", {d, class: "link", "marker-end": "url(#tip-of-link)",
    "data-from": link.from, "data-to": link.to, "data-weight": link.weight.toFixed(5),
    "stroke-width": (0.8 + thick * link.weight).toFixed(2), opacity: (0.3 + 0.6 * share).toFixed(2)});
}

const arrow = () => svg("defs", {}, svg("marker", {id: "tip-of-link", viewBox: "0 0 6 6", refX: 4.6, refY: 3,
  markerWidth: 6.5, markerHeight: 6.5, markerUnits: "userSpaceOnUse", orient: "auto"},
  svg("path", {d: "M0 0.4L6 3L0 5.6z", class: "arrow"})));

// ---- one head on one sentence

function sentenceView(row, place) {
  const example = audit.examples[place];
  const links = linksOf(place, row);
  if (links === null) return el("p", {class: "note", text: "No links of this layer were kept."});
  const [asking, asked] = SIDES[row.kind];
  const view = {links, alone: asking === asked, active: null, pinned: null};
  view.special = new Set(example.special?.[asked] ?? []);
  const keys = tokenBlock(tokensOf(example, asked, links.keys), view.special, "key");
  view.keys = keys;
  view.shift = view.alone ? links.keys - links.queries : 0;  // a cache comes first
  view.queries = view.alone ? keys : tokenBlock(tokensOf(example, asking, links.queries),
    new Set(example.special?.[asking] ?? []), "query");
  view.curves = svg("svg", {class: "curves", "aria-hidden": "true"});
  view.said = el("p", {class: "said", "aria-live": "polite"});
  view.note = el("p", {class: "note"});
  view.legend = pullLegend();
  const short = links.keys + (view.alone ? 0 : links.queries) <= 80;
  view.box = el("div", {class: `sentence${view.alone ? "" : " two"}${short ? " short" : ""}`},
    blocks(view, asking, asked), view.curves);
  listen(view);
  new ResizeObserver(() => drawSentence(view)).observe(view.box);
  return el("div", {}, sentenceControls(view), view.legend, view.box, view.said, view.note);
}

function blocks(view, asking, asked) {
  if (view.alone) return [view.keys.node];
  return [el("h4", {text: `${asking}: asks`}), view.queries.node,
    el("h4", {text: `${asked}: is asked`}), view.keys.node];
}

function sentenceControls(view) {
  const most = Math.min(MOST_LINKS, view.links.list.length);
  const told = el("output", {text: String(Math.min(sentence.shown, most))});
  const slider = el("input", {type: "range", min: 0, max: most, step: 1, class: "links-shown",
    on: {input: () => {
      sentence.shown = Number(slider.value);
      told.textContent = slider.value;
      drawSentence(view);
    }}});
  slider.value = Math.min(sentence.shown, most);
  const change = (name) => (on) => { sentence[name] = on; drawSentence(view); };
  return el("div", {class: "controls"},
    el("label", {}, el("span", {text: "strongest links shown"}), slider, told),
    view.special.size ? tick("with links to special tokens", sentence.special, change("special")) : null,
    view.alone ? tick("who looks at a token", sentence.incoming, change("incoming")) : null,
    shadeChoice(view.links, () => drawSentence(view)));
}

function listen(view) {
  const tokenAt = (target) => {
    const button = target instanceof Element ? target.closest("button.token") : null;
    return button && {side: button.dataset.side, place: Number(button.dataset.place)};
  };
  const activate = (active) => { view.active = active; drawSentence(view); };
  view.box.addEventListener("mouseover", (event) => activate(tokenAt(event.target) ?? view.pinned));
  view.box.addEventListener("mouseleave", () => activate(view.pinned));
  view.box.addEventListener("focusin", (event) => activate(tokenAt(event.target)));
  view.box.addEventListener("focusout", () => activate(view.pinned));
  view.box.addEventListener("click", (event) => {
    const token = tokenAt(event.target);
    const again = token && view.pinned && token.side === view.pinned.side && token.place === view.pinned.place;
    view.pinned = again ? null : token;
    activate(view.pinned);
  });
  view.box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { view.pinned = null; activate(null); }
  });
  tipped(view.box, (target) => pullTip(view, tokenAt(target)), {below: true});
}

// Only a token that is asked can gain.
function pullTip(view, token) {
  if (token === null || token.side !== "key" || !pulls(view.links)) return null;
  return gainTip(view.keys.tokens[token.place], view.links.gained[token.place]);
}

// Whether the active token is asked rather than asking.
const isAsked = (view) => (view.alone ? sentence.incoming : view.active.side === "key");

function shownLinks(view) {
  const {list} = view.links;
  const falling = (links) => links.sort((one, other) => other.weight - one.weight);
  if (view.active === null) {
    const wanted = list.filter((link) => sentence.special || !view.special.has(link.to));
    return falling(wanted).slice(0, sentence.shown);
  }
  const {place} = view.active;
  return falling(list.filter((link) =>
    (isAsked(view) ? link.to === place : link.from + view.shift === place)));
}

function drawSentence(view) {
  const links = shownLinks(view);
  const boxes = {
    from: (place) => boxOf(view.queries.buttons[place + view.shift]),
    to: (place) => boxOf(view.keys.buttons[place]),
    same: (link) => view.alone && link.from + view.shift === link.to,
    room: parseFloat(getComputedStyle(view.keys.node).rowGap),
  };
  const {offsetWidth, offsetHeight} = view.box;
  set(view.curves, {viewBox: `0 0 ${offsetWidth} ${offsetHeight}`, width: offsetWidth, height: offsetHeight});
  const top = links.length ? links[0].weight : 1;
  const thick = view.active === null ? 3.2 : 5;
  const drawn = links.slice(0, MOST_LINKS).map((link) => linkPath(link, boxes, top, thick));
  view.curves.replaceChildren(arrow(), ...drawn);
  view.box.classList.toggle("choosing", view.active !== null);
  view.box.classList.toggle("incoming", view.active !== null && isAsked(view));
  view.box.classList.toggle("pull", pulls(view.links));
  view.legend.hidden = !pulls(view.links);
  shade(view, links);
  tell(view, links);
}

// Each key by what it receives; with a token chosen, each token by its link with that one.
function shade(view, links) {
  const masses = view.keys.buttons.map(() => 0);
  const others = view.alone ? masses : view.queries.buttons.map(() => 0);
  if (view.active === null) {
    view.links.received.forEach((mass, place) => { masses[place] = mass; });
  } else if (isAsked(view)) {
    links.forEach((link) => { others[link.from + view.shift] = link.weight; });
  } else {
    links.forEach((link) => { masses[link.to] = link.weight; });
  }
  paint(view.keys.buttons, masses);
  if (!view.alone) paint(view.queries.buttons, others);
  paintPull(view.keys.buttons, pulls(view.links) ? view.links.gained : null, 1);
  for (const block of new Set([view.keys, view.queries])) {
    block.buttons.forEach((button, place) => button.classList.toggle("chosen", view.active !== null &&
      view.active.place === place && view.active.side === button.dataset.side));
  }
}

function paint(buttons, masses) {
  const top = Math.max(...masses, 4 / masses.length);  // even weight stays pale
  buttons.forEach((button, place) => {
    const share = Math.sqrt(masses[place] / top);
    button.style.setProperty("--mass", `${(62 * share).toFixed(0)}%`);
  });
}

const weightText = (weight) =>
  weight < 0.0005 ? "< 0.001" : weight.toFixed(weight < 0.0995 ? 3 : 2);
const chip = (token, weight) => el("span", {class: "chip"}, el("b", {text: plain(token)}),
  ` ${weightText(weight)}`);

const LEAST = 0.5 / 65535;  // a smaller weight is stored as 0

function keptLinks({width, keys}) {
  const which = width < keys ? `the ${width} strongest links` : "all links";
  return `Of each token ${which} are kept, if above ${format(LEAST)}.`;
}

function shownOf(view, links) {
  const count = view.links.list.length;
  return links.length === count ? `All ${count} links in the file are drawn.`
    : `The ${links.length} strongest of the ${count} links in the file are drawn.`;
}

function tell(view, links) {
  if (view.active === null) {
    view.said.replaceChildren(`${shownOf(view, links)} ${keptLinks(view.links)} Point at a token, ` +
      "or choose it with the keyboard, to see where it looks; a click holds it.");
    tellShade(view);
    return;
  }
  const asked = isAsked(view);
  const block = view.active.side === "key" ? view.keys : view.queries;
  const other = asked ? view.queries : view.keys;
  const name = el("b", {text: `“${plain(block.tokens[view.active.place])}”`});
  const chips = links.slice(0, 12).map((link) =>
    chip(other.tokens[asked ? link.from + view.shift : link.to], link.weight));
  const gain = view.active.side === "key" && pulls(view.links)
    ? ` (pull ${gainText(view.links.gained[view.active.place])})` : "";
  view.said.replaceChildren(name, gain, asked ? " is looked at by: " : " looks at: ", ...chips);
  if (!chips.length) view.said.append("nobody among the links that were kept");
  const total = links.reduce((sum, link) => sum + link.weight, 0);
  view.note.textContent = asked
    ? `Among the ${view.links.width} strongest links of each query.`
    : `These hold ${percent(total)} of its weight; the ${view.links.width} strongest were kept.`;
}

function tellShade(view) {
  const {received, gained} = view.links;
  if (pulls(view.links)) {
    view.note.replaceChildren(...strongestPulls(gained, (place) => view.keys.tokens[place], 3));
    return;
  }
  const most = received.indexOf(Math.max(...received));
  view.note.textContent = "Shade: the weight that a token receives on average over the queries " +
    `(by its square root; most: “${plain(view.keys.tokens[most])}”, ${format(received[most])}).`;
}
