// Creates elements from text. No script of this page turns a string into markup.

const SVG = "http://www.w3.org/2000/svg";

/** `make("p.note", "text", child)`: an element with classes and children; strings become text. */
export function make(spec, ...children) {
  const [tag, ...classes] = spec.split(".");
  const element = document.createElement(tag || "div");
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

export function button(spec, onClick, ...children) {
  const element = make(spec, ...children);
  element.type = "button";
  element.addEventListener("click", onClick);
  return element;
}

export const find = (id) => document.getElementById(id);

export const on = (id, event, act) => find(id).addEventListener(event, act);

/** Handle a form here instead of sending it. */
export function onSubmit(id, act) {
  on(id, "submit", (event) => {
    event.preventDefault();
    act();
  });
}

/** Ctrl+Enter submits `form` while `view` is shown. */
export function submitOnCtrlEnter(view, form) {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || view.hidden) return;
    event.preventDefault();
    form.requestSubmit();
  });
}

/** Also where the browser has no clipboard for scripts: on a page that came over plain HTTP from another machine. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = Object.assign(make("textarea"), { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A table: columns are [title, cell-maker, class]. */
export function table(columns, rows) {
  const head = make("tr", ...columns.map(([title, , kind]) => make(kind ? `th.${kind}` : "th", title)));
  for (const title of head.children) title.scope = "col";
  const body = rows.map((row) => make("tr", ...columns.map(([, cell, kind]) => make(kind ? `td.${kind}` : "td", cell(row)))));
  return make("table", make("thead", head), make("tbody", ...body));
}

/** A bar that is full at 1. It stands beside its number, so screen readers pass it over. */
export function meter(share) {
  const fill = make("i");
  fill.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
  return Object.assign(make("div.meter", fill), { ariaHidden: "true" });
}

export const swatch = (kind) => make(`span.swatch.c-${kind}`);

// -- numbers as text --

export function duration(ms) {
  if (ms >= 100_000) return `${(ms / 1000).toFixed(0)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms >= 10_000 ? 1 : 2)} s`;
  if (ms >= 100) return `${ms.toFixed(0)} ms`;
  return `${ms.toFixed(ms >= 10 ? 1 : 2)} ms`;
}

export function bytes(count) {
  if (count < 1 << 10) return `${count} B`;
  if (count < 1 << 20) return `${(count / (1 << 10)).toFixed(0)} KiB`;
  if (count < 1 << 30) return mebibytes(count);
  return `${(count / (1 << 30)).toFixed(2)} GiB`;
}

export const mebibytes = (count) => `${Number((count / (1 << 20)).toFixed(1))} MiB`;

export function count(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)} M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(1)} k`;
  return Number.isInteger(number) ? String(number) : number.toFixed(number < 10 ? 1 : 0);
}

export function percent(share) {
  const value = share * 100;
  if (value === 0 || value === 100) return `${value} %`;
  return value < 0.1 ? "< 0.1 %" : `${value.toFixed(value < 10 ? 1 : 0)} %`;
}

export function ago(seconds) {
  if (seconds < 60) return `${seconds.toFixed(0)} s ago`;
  if (seconds < 3600) return `${(seconds / 60).toFixed(0)} min ago`;
  return `${(seconds / 3600).toFixed(1)} h ago`;
}
