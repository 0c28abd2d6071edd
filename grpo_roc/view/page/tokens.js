// The tokens of a rollout: as coloured text, and as a strip of bars over which one token after the other is read.

import { figure, make, shape, times } from "./dom.js";

const LEVELS = [0.05, 0.2, 0.5, 1, 1.75, 2.5]; // nats
const [WIDTH, HEIGHT, CEILING] = [600, 44, 3];

export class Tokens {
  constructor(parts, most) {
    this.tokens = parts.flatMap((part) => part.tokens.map((text, number) => ({
      text,
      role: part.role,
      entropies: part.entropies[number] ?? null,
      surprises: part.role === "model" ? Math.abs(part.logprobs[number]) : null,
    })));
    this.spans = [];
    this.boxes = parts.map((part) => this.text(part, most));
    this.kind = "none";
    this.at = null;
  }

  has(kind) {
    return kind === "none" || this.tokens.some((token) => token[kind] !== null);
  }

  /** The text of a part. Beyond `most` tokens the rest comes when asked for. */
  text(part, most) {
    const box = make(part.role === "tool" ? "pre.observed" : "pre.generated");
    const first = this.spans.length;
    this.spans.push(...part.tokens.map((text) => Object.assign(make("span"), { textContent: text })));
    const spans = this.spans.slice(first);
    box.append(...spans.slice(0, most));
    if (spans.length > most) {
      const more = Object.assign(make("button", `Show ${times(spans.length - most, "more token")}`), { type: "button" });
      more.addEventListener("click", () => more.replaceWith(...spans.slice(most)));
      box.append(more);
    }
    box.addEventListener("pointerover", (event) => {
      const place = spans.indexOf(event.target);
      if (place >= 0) this.read(first + place);
    });
    return box;
  }

  colour(kind) {
    this.kind = kind;
    this.tokens.forEach((token, number) => {
      const level = kind === "none" || token[kind] === null ? 0 : LEVELS.filter((limit) => token[kind] >= limit).length;
      this.spans[number].className = level ? `e${level}` : "";
    });
    this.spans[this.at]?.classList.add("at");
    if (this.strip) this.bars();
  }

  /** A slider over all tokens, and what is known of the one that is read. */
  reader() {
    this.strip = shape("svg", { class: "tape", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.slider = Object.assign(make("input"), { type: "range", min: 1, max: Math.max(1, this.tokens.length), value: 1, ariaLabel: "Token" });
    this.slider.addEventListener("input", () => {
      this.read(Number(this.slider.value) - 1);
      this.spans[this.at].scrollIntoView({ block: "nearest" });
    });
    this.told = make("p.told.hint", "Point at a token, or move the slider.");
    this.bars();
    return make("div.reader", this.strip, this.slider, this.told);
  }

  read(number) {
    this.spans[this.at]?.classList.remove("at");
    this.at = number;
    this.spans[number].classList.add("at");
    const { text, role, entropies, surprises } = this.tokens[number];
    const known = role === "tool" ? "observed" : `entropy ${entropies === null ? "not measured" : `${figure(entropies)} nats`}, p ${figure(Math.exp(-surprises))}`;
    const words = `token ${number + 1} of ${this.tokens.length}: ${known}`;
    this.told.replaceChildren(make("code", JSON.stringify(text)), ` ${words}`);
    this.slider.value = number + 1;
    this.slider.setAttribute("aria-valuetext", `${text} ${words}`);
    this.cross.setAttribute("d", `M${((number + 0.5) / this.tokens.length) * WIDTH},0V${HEIGHT}`);
  }

  /** One path: a bar per token, or the highest of neighbours where there is no room for all. Observed parts are a band. */
  bars() {
    const width = WIDTH / Math.max(1, this.tokens.length);
    const kind = this.kind === "none" ? "entropies" : this.kind;
    const heights = Array(Math.min(WIDTH, this.tokens.length)).fill(0);
    let observed = "";
    this.tokens.forEach((token, number) => {
      const x = Math.floor((number / this.tokens.length) * heights.length);
      heights[x] = Math.max(heights[x], Math.min(1, (token[kind] ?? 0) / CEILING) * HEIGHT);
      if (token.role === "tool") observed += `M${number * width},0h${width}v${HEIGHT}h${-width}z`;
    });
    const bar = WIDTH / Math.max(1, heights.length);
    const path = heights.map((height, x) => `M${x * bar},${HEIGHT}v${-height}h${bar * 0.9}v${height}z`).join("");
    this.cross = shape("path", { class: "cross", d: "" });
    this.strip.replaceChildren(shape("path", { class: "band", d: observed }), shape("path", { class: "bar-of", d: path }), this.cross);
  }
}
