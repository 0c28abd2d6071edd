// A small SVG chart of a few lines over the steps of a run, with the values of one step in its caption.

import { figure, make, shape } from "./dom.js";

const HEIGHT = 170;
const [LEFT, BOTTOM, TOP, RIGHT] = [44, 20, 8, 6];
const DOTS = 24; // up to so many points of a line are also dots

export class Chart {
  /** `point(step)` and `choose(step)` are called when the reader points at a step, or chooses it. */
  constructor({ title, log, lines }, { point, choose }) {
    Object.assign(this, { title, log, point, choose, lines: [], range: [0, 1], step: null, width: 300 });
    this.svg = shape("svg", { class: "chart", role: "slider", tabindex: 0, "aria-label": title });
    this.values = lines.map(() => make("b"));
    const legend = lines.map(({ label }, number) => make("span", make(`i.key.l${number}`), label, " ", this.values[number]));
    this.at = make("span.hint");
    this.figure = make("figure.panel", make("figcaption", make("h2", title), this.at), this.svg, make("div.legend", ...legend));
    this.svg.addEventListener("pointermove", (event) => this.point(this.stepAt(event)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("click", (event) => this.choose(this.stepAt(event)));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(([entry]) => this.resize(entry.contentRect.width)).observe(this.svg);
  }

  resize(width) {
    if (width < 50 || Math.abs(width - this.width) < 1) return;
    this.width = width;
    this.paint();
  }

  draw(lines, range) {
    Object.assign(this, { lines, range, steps: [...new Set(lines.flatMap((line) => line.points.map(([step]) => step)))].sort((a, b) => a - b) });
    this.paint();
  }

  read(step) {
    this.step = step;
    this.paint();
  }

  x(step) {
    const [first, last] = this.range;
    return LEFT + ((this.width - LEFT - RIGHT) * (step - first)) / Math.max(1, last - first);
  }

  stepAt(event) {
    const box = this.svg.getBoundingClientRect();
    const [first, last] = this.range;
    const share = (event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT - RIGHT);
    return Math.round(first + (last - first) * Math.min(1, Math.max(0, share)));
  }

  press(event) {
    const { steps } = this;
    if (!steps.length) return;
    const place = this.step === null ? steps.length - 1 : nearest(steps, this.step);
    if (event.key === "Enter") this.choose(steps[place]);
    const to = { ArrowLeft: place - 1, ArrowRight: place + 1, PageDown: place - 10, PageUp: place + 10, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.point(steps[Math.min(steps.length - 1, Math.max(0, to))]);
  }

  paint() {
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const every = this.lines.flatMap((line) => line.points.map(([, value]) => value)).filter((value) => !this.log || value > 0);
    const scale = this.log ? logarithmic(every) : linear(every);
    const parts = every.length ? [...this.rules(scale), ...this.cross(), ...this.lines.flatMap((line, number) => this.line(line, number, scale))] : [this.none()];
    this.svg.replaceChildren(...parts);
    this.tell();
  }

  none() {
    return shape("text", { x: this.width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "not measured yet");
  }

  rules({ ticks, y, format }) {
    const [first, last] = this.range;
    const rules = ticks.map((tick) => shape("line", { class: "rule", x1: LEFT, x2: this.width - RIGHT, y1: y(tick), y2: y(tick) }));
    const texts = ticks.map((tick) => shape("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
    const feet = [[first, "start"], [last, "end"]].map(([step, anchor]) =>
      shape("text", { x: this.x(step), y: HEIGHT - 4, "text-anchor": anchor }, anchor === "start" ? `step ${step}` : String(step)));
    return [...rules, ...texts, ...feet];
  }

  line({ points }, number, { y }) {
    const places = points.filter(([, value]) => !this.log || value > 0).map(([step, value]) => [this.x(step), y(value)]);
    const dots = places.length <= DOTS ? places.map(([cx, cy]) => shape("circle", { class: `dot l${number}`, cx, cy, r: 2.2 })) : [];
    return [shape("polyline", { class: `stroke l${number}`, points: places.join(" ") }), ...dots];
  }

  cross() {
    if (this.step === null) return [];
    const x = this.x(this.step);
    return [shape("line", { class: "cross", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM })];
  }

  /** The values at the step that is read, else the last ones. */
  tell() {
    const step = this.step ?? this.range[1];
    const words = this.lines.map(({ label, points }, number) => {
      const before = points.filter(([one]) => one <= step).at(-1);
      this.values[number].textContent = figure(before?.[1]);
      return `${label} ${figure(before?.[1])}`;
    });
    this.at.textContent = this.step === null ? "" : `step ${step}`;
    Object.assign(this.svg, { ariaValueMin: this.range[0], ariaValueMax: this.range[1], ariaValueNow: step, ariaValueText: `step ${step}: ${words.join(", ")}` });
  }
}

function nearest(steps, wanted) {
  return steps.reduce((best, step, place) => (Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? place : best), 0);
}

const spread = (share) => TOP + (HEIGHT - BOTTOM - TOP) * (1 - share);

function linear(values) {
  const [low, high] = [Math.min(0, ...values), Math.max(1e-9, ...values)];
  const unit = 10 ** Math.floor(Math.log10(high - low));
  const step = [0.2, 0.25, 0.5, 1, 2, 2.5, 5].map((times) => times * unit).find((size) => (high - low) / size <= 4.001);
  const [from, to] = [Math.floor(low / step) * step, Math.ceil(high / step - 1e-9) * step];
  const ticks = Array.from({ length: Math.round((to - from) / step) + 1 }, (_, number) => from + number * step);
  const digits = [0, 1, 2, 3].find((count) => Math.abs(step * 10 ** count - Math.round(step * 10 ** count)) < 1e-6) ?? 4;
  return { ticks, y: (value) => spread((value - from) / (to - from)), format: (tick) => (high >= 1e4 ? figure(tick) : tick.toFixed(digits)) };
}

function logarithmic(values) {
  const [low, high] = [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)) + 1e-9)];
  const every = Math.ceil((high - low) / 4);
  const ticks = Array.from({ length: Math.floor((high - low) / every) + 1 }, (_, number) => 10 ** (low + number * every));
  return { ticks, y: (value) => spread((Math.log10(value) - low) / (high - low)), format: (tick) => tick.toExponential(0) };
}
