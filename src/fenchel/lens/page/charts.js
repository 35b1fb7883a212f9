// Scales of colour and small charts.

// viridis, and RdBu reversed for columns with both signs: even to the eye, safe for colour-blind.
const SEQUENTIAL = ["#440154", "#48186a", "#472d7b", "#424086", "#3b528b", "#33638d", "#2c728e",
  "#26828e", "#21918c", "#1fa088", "#28ae80", "#3fbc73", "#5ec962", "#84d44b", "#addc30",
  "#d8e219", "#fde725"];
const DIVERGING = ["#053061", "#2065ab", "#4393c3", "#90c4dd", "#d1e5f0", "#f7f6f6", "#fddbc7",
  "#f3a481", "#d6604d", "#b1182b", "#67001f"];

function mixed(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  const part = (stop, i) => parseInt(stop.slice(1 + 2 * i, 3 + 2 * i), 16);
  return [0, 1, 2].map((i) =>
    Math.round(part(stops[low], i) * (1 - at + low) + part(stops[low + 1], i) * (at - low)));
}

const css = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;
const isLight = ([red, green, blue]) => 0.299 * red + 0.587 * green + 0.114 * blue > 130;

// {low, high, flat, log, stops, share(value) in [0, 1], back(share)}; null without a number. flat: all
// values are equal, so that a bar would say nothing.
function scaleOf(column) {
  const values = valuesOf(column);
  if (!values.length) return null;
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low < 0 && high > 0) {
    high = Math.max(high, -low);
    low = -high;
    return {...straight(low, high), stops: DIVERGING, flat: false};
  }
  const positive = values.filter((value) => value > 0);
  if (column.scale === "log" && positive.length) return {...logarithmic(positive, high), flat: low === high};
  return {...straight(low, high), stops: SEQUENTIAL, flat: low === high};
}

function straight(low, high) {
  const share = (value) => (high > low ? (value - low) / (high - low) : 0.5);
  return {low, high, log: false, share, back: (part) => low + part * (high - low)};
}

function logarithmic(positive, high) {
  const low = positive.reduce((least, value) => Math.min(least, value), Infinity);
  const inner = straight(Math.log(low), Math.log(high));
  const share = (value) => (value > 0 ? inner.share(Math.log(value)) : 0);
  const back = (part) => Math.exp(inner.back(part));
  return {low, high, log: true, stops: SEQUENTIAL, share, back};
}

const colourOf = (scale, value) => mixed(scale.stops, scale.share(value));

function legend(scale, column) {
  if (scale === null) return el("p", {class: "note", text: "Not measured for any head."});
  const bar = el("div", {class: "ramp", style: {background:
    `linear-gradient(to right, ${scale.stops.join(", ")})`}});
  const marks = scale.high > scale.low ? [0, 0.25, 0.5, 0.75, 1] : [0.5];
  const ends = marks.map((share) => el("span", {text: format(scale.back(share))}));
  const kind = scale.log ? "logarithmic" : "";
  const unit = [column.unit, kind].filter(Boolean).join(", ");
  const missing = rows.some((row) => valueOf(row, column) === null);
  return el("div", {class: "legend", role: "img",
    "aria-label": `Colours from ${format(scale.low)} to ${format(scale.high)} ${unit}`},
    el("div", {}, bar, el("div", {class: "ends"}, ends)),
    el("span", {class: "unit", text: unit}),
    missing ? el("span", {class: "unit"}, el("i", {class: "swatch null"}), " not measured") : null);
}

// ---- charts of a head

const CHART = {width: 300, height: 118, left: 36, right: 8, top: 8, bottom: 26};

function chart(label, title) {
  const {width, height} = CHART;
  const drawn = svg("svg", {viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img",
    "aria-label": label});
  return {drawn, figure: el("figure", {}, el("figcaption", {text: title}), drawn)};
}

const across = (share) => CHART.left + share * (CHART.width - CHART.left - CHART.right);
const upward = (share) => CHART.top + (1 - share) * (CHART.height - CHART.top - CHART.bottom);

function axisText(drawn, x, y, text, anchor) {
  drawn.append(svg("text", {x, y, "text-anchor": anchor, text}));
}

function base(drawn, below, ends) {
  const floor = upward(0);
  drawn.append(svg("line", {x1: across(0), x2: across(1), y1: floor, y2: floor, class: "axis"}));
  ends.forEach((text, i) => {
    const share = ends.length === 1 ? 0.5 : i / (ends.length - 1);
    axisText(drawn, across(share), floor + 10, text, ["start", "middle", "end"][
      ends.length === 1 ? 1 : Math.round(2 * share)]);
  });
  axisText(drawn, across(0.5), CHART.height - 3, below, "middle");
}

function histogram(counts, title, below) {
  const total = counts.reduce((sum, count) => sum + count, 0) || 1;
  const top = Math.max(...counts) / total || 1;
  const {drawn, figure} = chart(`Histogram: ${below}`, title);
  counts.forEach((count, i) => {
    const [left, right] = [across(i / counts.length), across((i + 1) / counts.length)];
    const y = upward(count / total / top);
    const bar = svg("rect", {x: left + 0.5, width: right - left - 1, y, height: upward(0) - y,
      class: "bar"});
    bar.append(svg("title", {text: `${format(i / counts.length)} to ` +
      `${format((i + 1) / counts.length)}: ${percent(count / total)} of queries`}));
    drawn.append(bar);
  });
  axisText(drawn, CHART.left - 4, upward(1) + 7, percent(top), "end");
  axisText(drawn, CHART.left - 4, upward(0), "0", "end");
  base(drawn, below, ["0", "0.5", "1"]);
  return figure;
}

function pathOf(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// Falling eigenvalues, on a logarithmic scale over at most eight powers of ten.
function spectrumChart(values) {
  const positive = values.filter((value) => value > 0);
  if (!positive.length) return null;
  const top = positive[0];
  const least = Math.max(positive[positive.length - 1], top * 1e-8);
  const wide = Math.log(top / least) || 1;
  const {drawn, figure} = chart("Fisher spectrum, falling", "Fisher spectrum in query space");
  const points = positive.map((value, i) => [
    across(positive.length > 1 ? i / (positive.length - 1) : 0.5),
    upward(Math.max(0, Math.log(value / least) / wide))]);
  drawn.append(svg("path", {d: pathOf(points), class: "curve"}));
  points.forEach(([cx, cy], i) => drawn.append(svg("circle", {cx, cy, r: 1.8, class: "dot"},
    svg("title", {text: `${i + 1}: ${format(positive[i])}`}))));
  axisText(drawn, CHART.left - 4, upward(1) + 7, brief(top), "end");
  axisText(drawn, CHART.left - 4, upward(0), brief(least), "end");
  base(drawn, "eigenvalue, from the largest", ["1", String(positive.length)]);
  return figure;
}

// A curve over key − query. least: where the axis begins, if not at the smallest value.
function offsetChart(offsets, values, title, least = Infinity) {
  const measured = offsets.map((offset, i) => [offset, values[i]]).filter(([, y]) => y !== null);
  if (measured.length < 2) return null;
  const ys = measured.map(([, y]) => y);
  const [low, high] = [Math.min(...ys, least), Math.max(...ys)];
  const [first, last] = [offsets[0], offsets[offsets.length - 1]];
  const x = (offset) => across((offset - first) / (last - first));
  const y = (value) => upward(high > low ? (value - low) / (high - low) : 0.5);
  const {drawn, figure} = chart(`${title}: a curve over key − query`, title);
  if (first < 0 && last > 0) {
    drawn.append(svg("line", {x1: x(0), x2: x(0), y1: upward(0), y2: upward(1), class: "grid"}));
  }
  drawn.append(svg("path", {d: pathOf(measured.map(([o, v]) => [x(o), y(v)])), class: "curve"}));
  measured.forEach(([o, v]) => drawn.append(svg("circle", {cx: x(o), cy: y(v), r: 1.8, class: "dot"},
    svg("title", {text: `key − query = ${o}: ${format(v)}`}))));
  axisText(drawn, CHART.left - 4, upward(1) + 7, format(high), "end");
  axisText(drawn, CHART.left - 4, upward(0), format(low), "end");
  const middle = first === -last ? ["0"] : [];
  base(drawn, "key − query", [String(first).replace("-", "−"), ...middle, `${last > 0 ? "+" : ""}${last}`]);
  return figure;
}

// All heads as ticks on a line, this one thick: one path whatever their number.
function strip(row, column, scale) {
  const marks = new Set(valuesOf(column).map((value) => (100 * scale.share(value)).toFixed(1)));
  const here = 100 * scale.share(valueOf(row, column));
  return svg("svg", {viewBox: "-2 0 104 12", class: "strip", "aria-hidden": "true",
    preserveAspectRatio: "none"},
    svg("path", {d: [...marks].map((x) => `M${x} 3V9`).join(""), class: "others"}),
    svg("path", {d: `M${here.toFixed(1)} 0V12`, class: "this"}));
}
