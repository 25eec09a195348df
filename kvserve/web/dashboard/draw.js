// What the page is drawn with: elements without markup in strings, lists that keep what the reader has opened, numbers as a
// person reads them, and the chart. It knows nothing of the server.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; text is only ever text. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function shape(name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

/** Put text into an element; what is there already is left alone, so that a reader's selection survives. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make `parent` hold one child per item, in this order. Children are known by `key` and live on, with what is open in them. */
export function keep(parent, items, key, create, update) {
  const known = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = known.get(name);
    if (child) known.delete(name);
    else {
      child = create(item);
      child.dataset.key = name;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

/** Pairs of a name and a text in a description list. */
export function pairs(list, entries) {
  keep(list, entries, ([name]) => name,
    ([name]) => make("div", {}, make("dt", {}, name), make("dd")),
    (child, [, text]) => say(child.lastElementChild, text));
}

export const plural = (number, word, words = `${word}s`) => `${count(number)} ${number === 1 ? word : words}`;
export const count = (number) => Math.round(number).toLocaleString("en");
export const percent = (part, whole) => (whole ? `${(Math.floor((1000 * part) / whole) / 10).toFixed(1)} %` : "-");
export const seconds = (number) => (number < 10 ? `${number.toFixed(2)} s` : `${number.toFixed(1)} s`);

export function short(number) {
  if (number < 10_000) return count(number);
  return number < 1e6 ? `${(number / 1e3).toFixed(1)} k` : `${(number / 1e6).toFixed(2)} M`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

export function ago(number) {
  if (number < 2) return "just now";
  if (number < 120) return `${Math.round(number)} s ago`;
  return number < 7200 ? `${Math.round(number / 60)} min ago` : `${Math.round(number / 3600)} h ago`;
}

/** Bars of reused (solid, below) and computed (hatched, above) tokens per minute, and the share that was reused as a line. */
export function chart(minutes, sentence, width) {
  const [height, left, bottom] = [150, 44, 18];
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": sentence });
  svg.append(shape("title", {}, sentence), hatching());
  const most = Math.max(2, ...minutes.map((minute) => minute.prompt));
  const step = (width - left) / minutes.length;
  const y = (share) => (height - bottom) * (1 - share) + 4 * share;
  for (const share of [0, 0.5, 1]) {
    svg.append(shape("line", { class: "axis", x1: left, x2: width, y1: y(share), y2: y(share) }));
    svg.append(shape("text", { x: 0, y: y(share) + (share ? 8 : 0) }, short(most * share)));
  }
  const points = [];
  minutes.forEach((minute, index) => {
    if (!minute.prompt) return;
    const x = left + index * step + 1;
    const [reused, all] = [minute.cached / most, minute.prompt / most];
    const bar = { x, width: Math.max(1, step - 2) };
    svg.append(shape("rect", { ...bar, class: "computed", y: y(all), height: y(reused) - y(all) }));
    svg.append(shape("rect", { ...bar, fill: "url(#hatch)", y: y(all), height: y(reused) - y(all) }));
    svg.append(shape("rect", { ...bar, class: "reused", y: y(reused), height: y(0) - y(reused) }));
    points.push([x + step / 2 - 1, y(minute.cached / minute.prompt)]);
  });
  svg.append(shape("polyline", { class: "share", points: points.map((point) => point.join()).join(" ") }));
  for (const [cx, cy] of points) svg.append(shape("circle", { class: "point", cx, cy, r: 3 }));
  svg.append(shape("text", { x: left, y: height - 3 }, `${minutes.length} min ago`));
  svg.append(shape("text", { x: width - 24, y: height - 3 }, "now"));
  return svg;
}

function hatching() {
  const pattern = shape("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(shape("line", { class: "hatch", x1: 0, x2: 0, y1: 0, y2: 6 }));
  const definitions = shape("defs");
  definitions.append(pattern);
  return definitions;
}
