// Creates elements from text. No script of this page turns a string into markup.

const SVG = "http://www.w3.org/2000/svg";

/** `make("p.note", "text", child)`: an element with classes and children; strings become text. */
export function make(spec, ...children) {
  const [tag, ...classes] = spec.split(".");
  const element = document.createElement(tag);
  element.className = classes.join(" ");
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function shape(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const find = (id) => document.getElementById(id);

export const link = (spec, href, ...children) => Object.assign(make(spec, ...children), { href });

/** A table: columns are [title, cell-maker, class]. */
export function table(columns, rows) {
  const head = make("tr", ...columns.map(([title, , kind]) => Object.assign(make(kind ? `th.${kind}` : "th", title), { scope: "col" })));
  const body = rows.map((row) => make("tr", ...columns.map(([, cell, kind]) => make(kind ? `td.${kind}` : "td", cell(row)))));
  return make("table", make("thead", head), make("tbody", ...body));
}

/** Pairs of a title and a value, as a description list. */
export function pairs(facts) {
  return make("dl.pairs", ...facts.map(([title, value, note]) => make("div", make("dt", title), make("dd", value, note ? make("small", note) : null))));
}

// -- numbers as text --

/** With as many digits as a reader needs. */
export function figure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (Number.isInteger(value)) return String(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  return size >= 0.01 ? value.toFixed(2) : size >= 0.001 ? value.toFixed(3) : value.toExponential(0);
}

export const signed = (value) => (value === null ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`);

export function span(seconds) {
  if (seconds < 90) return `${Math.max(0, seconds).toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172_800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86_400).toFixed(0)} days`;
}

export const times = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
