// What the page is drawn with: elements without markup in strings, lists that keep what the reader has opened, and numbers
// as a person reads them. It knows nothing of the server.

export const at = (id) => document.getElementById(id);

/** An element with attributes and children; text is only ever text. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
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

/** A button that copies a text, where the browser allows that. */
export function copyButton(text, label = "Copy") {
  const button = make("button", { type: "button" }, label);
  button.addEventListener("click", () => {
    const copied = navigator.clipboard ? navigator.clipboard.writeText(text) : Promise.reject(new Error("not here"));
    copied.then(() => say(button, "Copied"), () => say(button, "Not allowed"));
  });
  return button;
}

export const plural = (number, word, words = `${word}s`) => `${count(number)} ${number === 1 ? word : words}`;
export const count = (number) => Math.round(number).toLocaleString("en");
export const percent = (part, whole) => (whole ? `${(Math.floor((1000 * part) / whole) / 10).toFixed(1)} %` : "-");
export const rate = (number) => `${number < 100 ? number.toFixed(1) : count(number)} tok/s`;

/** A time that something took. */
export function seconds(number) {
  if (number < 10) return `${number.toFixed(number && number < 0.095 ? 3 : 2)} s`;
  if (number < 60) return `${number.toFixed(1)} s`;
  if (number < 3600) return `${Math.floor(number / 60)} min ${Math.floor(number % 60)} s`;
  return `${count(Math.floor(number / 3600))} h ${Math.floor((number % 3600) / 60)} min`;
}

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
  if (number < 7200) return `${Math.round(number / 60)} min ago`;
  return number < 172_800 ? `${Math.round(number / 3600)} h ago` : `${Math.round(number / 86_400)} days ago`;
}

export const clock = (time) => new Date(time * 1000).toTimeString().slice(0, 8);

export const dayTime = (time) => `${new Date(time * 1000).toLocaleDateString("en", { weekday: "short" })} ${clock(time).slice(0, 5)}`;

const PROGRAMS = { "claude-cli": "Claude Code", codex_cli_rs: "Codex", codex_exec: "Codex", "codex-tui": "Codex" };

/** A client by what its User-Agent begins with. */
export function clientName(product) {
  if (!product) return "unknown client";
  const cut = product.lastIndexOf("/");
  const [name, version] = [product.slice(0, cut), product.slice(cut + 1)];
  return `${PROGRAMS[name] ?? name}${version ? ` ${version}` : ""}`;
}

/** A model by the end of its path. */
export const modelName = (name) => name.split("/").filter(Boolean).at(-1) ?? name;
