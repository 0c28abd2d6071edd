// Small SVG charts of the last two minutes: stacked areas and lines, with the values under the pointer.

import { count, make, shape, swatch } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 170;
const LEFT = 44;
const BOTTOM = 20;
const TOP = 6;

/**
 * options: title; areas and lines: [[kind, label]]; read(point) -> text; format(value) -> text; log: a logarithmic scale.
 * draw(points): one per second, oldest first, each an object with a number per kind.
 */
export class Chart {
  constructor(figure, options) {
    this.options = { areas: [], lines: [], format: count, log: false, ...options };
    this.points = [];
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "slider", tabindex: 0, preserveAspectRatio: "none" });
    this.readOut = make("span.read-out");
    const legend = [...this.options.areas, ...this.options.lines].map(([kind, label]) => make("span", swatch(kind), label));
    figure.replaceChildren(make("figcaption", make("h2", options.title), this.readOut), this.svg, make("div.legend", ...legend));
    this.at = null; // the second that is read: under the pointer, or chosen by the arrow keys
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("keydown", (event) => this.step(event));
    this.svg.addEventListener("blur", () => this.leave());
    new ResizeObserver(([entry]) => this.resize(entry.contentRect.width)).observe(this.svg);
    this.width = WIDTH;
  }

  resize(width) {
    if (width < 50 || Math.abs(width - this.width) < 1) return;
    this.width = width;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.draw(this.points);
  }

  draw(points) {
    this.points = points;
    if (!points.length) return;
    const scale = this.scale(points);
    this.svg.replaceChildren(...this.rules(scale), ...this.stacks(points, scale), ...this.strokes(points, scale), ...this.cross());
    this.showValues();
  }

  x(index) {
    return LEFT + ((this.width - LEFT) * index) / Math.max(1, this.points.length - 1);
  }

  scale(points) {
    const { areas, lines, log } = this.options;
    const sums = points.map((point) => areas.reduce((sum, [kind]) => sum + point[kind], 0));
    const tops = points.map((point) => Math.max(0, ...lines.map(([kind]) => point[kind])));
    const most = Math.max(...sums, ...tops);
    const height = HEIGHT - BOTTOM - TOP;
    if (!log) {
      const top = nice(Math.max(most, 1));
      return { ticks: [0, top / 2, top], y: (value) => TOP + height * (1 - value / top) };
    }
    const high = 10 ** Math.ceil(Math.log10(Math.max(most, 10)));
    const low = Math.min(1, high / 100);
    const span = Math.log10(high / low);
    const ticks = [];
    for (let tick = low; tick <= high * 1.001; tick *= 10) ticks.push(tick);
    return { ticks, y: (value) => TOP + height * (1 - Math.max(0, Math.log10(Math.max(value, low) / low)) / span) };
  }

  rules({ ticks, y }) {
    const lines = ticks.map((tick) => shape("line", { class: "rule", x1: LEFT, x2: this.width, y1: y(tick), y2: y(tick) }));
    const texts = ticks.map((tick) => shape("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, this.options.format(tick)));
    const last = this.points.length;
    const times = [[0, `${last} s ago`, "start"], [last - 1, "now", "end"]];
    const feet = times.map(([index, text, anchor]) => shape("text", { x: this.x(index), y: HEIGHT - 4, "text-anchor": anchor }, text));
    return [...lines, ...texts, ...feet];
  }

  stacks(points, { y }) {
    const below = points.map(() => 0);
    return this.options.areas.map(([kind]) => {
      const lower = points.map((_, index) => `${this.x(index)},${y(below[index])}`);
      points.forEach((point, index) => (below[index] += point[kind]));
      const upper = points.map((_, index) => `${this.x(index)},${y(below[index])}`);
      return shape("polygon", { class: `area f-${kind}`, points: [...upper, ...lower.reverse()].join(" ") });
    });
  }

  strokes(points, { y }) {
    return this.options.lines.flatMap(([kind]) => segments(points, kind, this.options.log).map((segment) => {
      const places = segment.map((index) => [this.x(index), y(points[index][kind])]);
      if (places.length > 1) return shape("polyline", { class: `stroke s-${kind}`, points: places.join(" ") });
      const [[cx, cy]] = places; // a second between two without calls: no line goes through it
      return shape("circle", { class: `dot-of s-${kind}`, cx, cy, r: 3 });
    }));
  }

  cross() {
    if (this.at === null) return [];
    const x = this.x(this.at);
    return [shape("line", { class: "cross", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM })];
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT);
    this.at = Math.max(0, Math.min(this.points.length - 1, Math.round(share * (this.points.length - 1))));
    this.draw(this.points);
  }

  /** Arrow keys read one second after the other. */
  step(event) {
    const last = this.points.length - 1;
    const to = { ArrowLeft: (this.at ?? last) - 1, ArrowRight: (this.at ?? last) + 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.at = Math.max(0, Math.min(last, to));
    this.draw(this.points);
  }

  leave() {
    this.at = null;
    this.draw(this.points);
  }

  showValues() {
    const at = this.at ?? this.points.length - 1;
    const text = this.options.read(this.points[at]);
    const words = this.at === null ? text : `${this.points.length - at} s ago: ${text}`;
    this.readOut.textContent = words;
    const said = { ariaLabel: this.options.title, ariaValueMin: -this.points.length, ariaValueMax: -1, ariaValueNow: at - this.points.length, ariaValueText: words };
    if (this.at !== null || document.activeElement !== this.svg) Object.assign(this.svg, said);
  }
}

/** The parts of a line that have values: on a logarithmic scale there are none where nothing was measured. */
function segments(points, kind, log) {
  const found = [[]];
  points.forEach((point, index) => {
    if (!log || point[kind] > 0) found.at(-1).push(index);
    else if (found.at(-1).length) found.push([]);
  });
  return found.filter((segment) => segment.length);
}

function nice(most) {
  const step = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 4, 5, 10].map((times) => times * step).find((top) => top >= most);
}
