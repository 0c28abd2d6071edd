// What is shown of an answer in more than one view: a verdict, a refusal, a block of text.

import { make } from "./dom.js";
import { Refused } from "./service.js";
import { MARK } from "./verdict.js";

export function banner(blame, what, whose) {
  return make(`div.verdict.is-${blame}`, make("span.mark", MARK[blame]), make("div", make("div.what", what), make("div.blame", whose)));
}

/** Why something was not done, as a banner. */
export function refusal(error, not = "Not run") {
  if (!(error instanceof Refused)) return banner("infra", "No answer from the service", "Is it still running? Nothing is known of the program.");
  const { code = "", field = "" } = error.problem;
  const kind = error.status < 500 && error.status !== 429 ? "client" : "infra";
  const where = [field && `field ${field}`, code, `HTTP ${error.status}`].filter(Boolean).join(" · ");
  return banner(kind, `${not}: ${error.message}`, where);
}

export function output(title, text, id = "", kind = "") {
  const pre = make("pre", text);
  pre.tabIndex = 0;
  pre.ariaLabel = title;
  if (id) pre.id = id;
  const copy = make("button.quiet", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  });
  return make(kind ? `section.out.${kind}` : "section.out", make("header", make("h3", title), copy), pre);
}
