// Where a step down the gradient of the loss would look more, and where less.

const SHADES = [["received", "weight received"], ["pull", "where the gradient pulls"]];
const DEEPEST = 70;  // per cent of colour; the name of a token stays readable on it

// Shares of the head's largest, from -1 to 1. Half of the range is nothing, and lies between two
// of the whole numbers.
const gainOf = (whole) => (Math.abs(2 * whole - 65535) <= 1 ? 0 : (2 * whole - 65535) / 65535);

// Whether the pull is shown: the reader chose it, and the document has it for this layer.
const pulls = (links) => links.gained !== null && sentence.shade === "pull";

function shadeChoice(links, draw) {
  if (links.gained === null) return null;
  const picked = choice("shade", SHADES, sentence.shade, (name) => { sentence.shade = name; draw(); });
  picked.querySelector("select").classList.add("shade");
  return picked;
}

function gainText(gain) {
  const size = Math.abs(gain);
  if (size < 0.0005) return "0";
  return (gain > 0 ? "+" : "−") + size.toFixed(size < 0.0995 ? 3 : 2);
}

// One line: what it covers is being read.
function gainTip(name, gain) {
  const change = gainText(gain) === "0" ? "no change" : gain > 0 ? "more" : "less";
  return [`“${plain(name)}” ${gainText(gain)}, ${change}`];
}

const gainChip = (name, gain) =>
  el("span", {class: "chip"}, el("b", {text: plain(name)}), ` ${gainText(gain)}`);

// By the square root, as weights are; `top` has the deepest colour.
function paintPull(buttons, gains, top) {
  buttons.forEach((button, place) => {
    const share = gains === null ? 0 : gains[place] / top;
    button.classList.toggle("more", share > 0);
    button.classList.toggle("less", share < 0);
    button.style.setProperty("--pull", `${(DEEPEST * Math.sqrt(Math.abs(share))).toFixed(1)}%`);
  });
}

function pullLegend() {
  return el("div", {class: "pull-legend"},
    el("p", {}, "A step down the gradient of the loss would look ",
      el("span", {class: "scale"},
        el("b", {text: "less"}), " ", el("i", {class: "ramp"}), " ", el("b", {text: "more"})),
      " at these."),
    el("p", {class: "note", text: "The loss of a language model: the surprise of the next token. Of any other " +
      "model: minus the length of the embedding. The pull of all queries together, as a share of the " +
      "largest of this head; the shade by its square root."}));
}

// The places that would gain the most and those that would lose the most, in words.
function strongestPulls(gains, nameOf, most) {
  const places = [...gains.keys()].sort((one, other) => gains[other] - gains[one]);
  const chips = (places) => places.map((place) => gainChip(nameOf(place), gains[place]));
  const gain = places.slice(0, most).filter((place) => gains[place] > 0);
  const lose = places.slice(-most).reverse().filter((place) => gains[place] < 0);
  if (!gain.length && !lose.length) return ["The loss does not pull here."];
  return ["Would gain the most: ", ...chips(gain), "Would lose the most: ", ...chips(lose)];
}
