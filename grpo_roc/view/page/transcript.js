// One rollout: why it was kept or dropped, the rollouts of its group, and its tokens with tool calls and entropies.

import { figure, link, make, pairs, signed, times } from "./dom.js";
import { tag } from "./labels.js";
import { Tokens } from "./tokens.js";
import { why } from "./why.js";

const COLOURS = { entropies: "Entropy", surprises: "−log p", none: "None" };
const MOST_TOKENS = 6000; // shown at once
const CALLS = { ok: "good", error: "bad", infra: "odd", "": "plain" };

let colour = "entropies";

/** `to(rollout)` is the address of another rollout, `before` and `after` those of its neighbours in the list. */
export function showRollout(box, { step, group, siblings, rollout }, to, { before, after }) {
  const title = Object.assign(make("h2", group.problem || `Problem ${group.group}`), { id: "h-rollout" });
  const steps = make("nav.bar", jump("← Previous", before), jump("Next →", after));
  steps.ariaLabel = "Neighbours in the list";
  const tokens = new Tokens(rollout.parts, MOST_TOKENS);
  if (!tokens.has(colour)) colour = "surprises";
  tokens.colour(colour);
  box.replaceChildren(
    make("header.bar", title, make("span.hint", `step ${step.step} · group ${group.group} · sample ${rollout.sample}`), make("span.spring"), steps),
    make("p.why", tag(rollout.verdict === "kept" ? "Kept" : "Dropped", rollout.verdict === "kept" ? "good" : "plain"), " ", why(step, group, siblings, rollout)),
    facts(group, rollout),
    make("h3", `The ${siblings.length} rollouts of this problem`),
    strip(siblings, rollout, to),
    make("div.bar.reading", make("h3", "Tokens"), make("span.spring"), chooser(tokens)),
    tokens.reader(),
    prompt(group),
    ...rollout.parts.map((part, number) => turn(part, rollout, tokens.boxes[number], number)),
  );
  box.scrollTop = 0;
}

function jump(text, href) {
  return href ? link("a.quiet", href, text) : make("span.quiet.off", text);
}

function facts(group, one) {
  return pairs([
    ["Reward", one.reward === null ? "unknown" : figure(one.reward), one.truncated ? "truncated" : ""],
    ["Right answer", group.truth],
    ["Advantage", signed(one.advantage)],
    ["p_err", figure(one.p_err), one.outcomes.length ? `${one.outcomes.filter((outcome) => outcome === "error").length} of ${times(one.outcomes.length, "call")}` : "no call"],
    ["p_format", figure(one.p_format), times(one.answers, "answer")],
    ["Tokens", figure(one.tokens), times(one.turns, "turn")],
    ["Tools took", `${figure(one.tool_wait_s)} s`],
    ["Weights of", `step ${one.weights}`],
  ]);
}

/** A chip per rollout of the group, those that were kept first, then by penalty. */
function strip(siblings, current, to) {
  const rank = (one) => [one.verdict !== "kept", !(one.reward > 0), one.p_err + one.p_format];
  const sorted = [...siblings].sort((a, b) => compare(rank(a), rank(b)));
  const chips = sorted.map((one) => {
    const words = one.reward > 0 ? `✓ ${(one.p_err + one.p_format).toFixed(2)}` : one.reward === null ? "?" : "✗";
    const kind = one.reward === null ? "odd" : one.reward > 0 ? "good" : "bad";
    const chip = link(`a.chip.is-${kind}${one.verdict === "kept" ? ".kept" : ""}`, to(one), words);
    chip.ariaLabel = `sample ${one.sample}: ${one.reward > 0 ? "correct" : one.reward === null ? "unknown" : "wrong"}, penalty ${(one.p_err + one.p_format).toFixed(2)}, ${one.verdict === "kept" ? "kept" : "dropped"}`;
    if (one.sample === current.sample) chip.setAttribute("aria-current", "true");
    return make("li", chip);
  });
  return make("div", make("ul.strip", ...chips), make("p.hint", "✓ correct, with its penalty p_err + p_format; ✗ wrong. A filled chip was kept."));
}

function compare(a, b) {
  const place = a.findIndex((value, number) => value !== b[number]);
  return place < 0 ? 0 : a[place] < b[place] ? -1 : 1;
}

function chooser(tokens) {
  const options = Object.entries(COLOURS).map(([name, title]) => {
    const input = Object.assign(make("input"), { type: "radio", name: "colour", value: name, checked: name === colour, disabled: !tokens.has(name) });
    input.addEventListener("change", () => tokens.colour((colour = name)));
    return make("label", input, title);
  });
  const legend = make("span.scale", ...[1, 2, 3, 4, 5, 6].map((level) => make(`i.e${level}`)));
  legend.ariaHidden = "true";
  return make("fieldset.chooser", make("legend.said-only", "Colour of the tokens"), ...options, make("span.hint", "0"), legend, make("span.hint", "3 nats"));
}

function prompt(group) {
  const text = make("pre.observed", group.prompt);
  return make("details.turn", make("summary", `Prompt · ${times(group.prompt_tokens, "token")} · not learned`), text);
}

function turn(part, rollout, text, number) {
  const count = times(part.tokens.length, "token");
  if (part.role === "tool") return make("section.turn.tool", make("h4", "Tool response ", make("small", `${count} · masked: not learned`)), text);
  const learned = rollout.verdict === "kept" ? "learned" : "not learned: the rollout was dropped";
  const calls = part.calls.map((call, place) => callCard(call, part.calls.length > 1 ? ` ${place + 1}` : ""));
  return make("section.turn.model", make("h4", `Model, turn ${number / 2 + 1} `, make("small", `${count} · ${learned}`)), text, ...calls);
}

function callCard(call, number) {
  const said = call.outcome === "" ? "not run" : call.outcome === "ok" ? "ok" : `${call.outcome === "infra" ? "the service failed" : "error"}: ${call.status}`;
  const body = call.failure ? make("p", call.failure) : make("pre", call.code);
  return make("div.call", make("div.bar", make("b", `Tool call${number}`), tag(said, CALLS[call.outcome])), body, call.stdin ? make("pre", `stdin: ${call.stdin}`) : null);
}
