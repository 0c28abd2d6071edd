// The list of rollouts: filters, one page of rows, and the rollout that is open. The address holds all of it.

import { ask, newest } from "./api.js";
import { find, link, make, signed, table, times } from "./dom.js";
import { reward, tag } from "./labels.js";
import * as place from "./place.js";
import { showRollout } from "./transcript.js";

const OUTCOMES = { ok: ["✓", "good"], error: ["✗", "bad"], infra: ["?", "odd"] };
const VERDICTS = { kept: ["kept", "good"], not_drawn: ["not drawn", "plain"], equal: ["rejected", "plain"], unknown: ["left out", "odd"] };
const SHOWN_CALLS = 8;

let listed = null; // the last answer of the server
let opened = "";

export function offer(run) {
  const steps = run.steps.map(([step]) => String(step)).reverse();
  const chosen = place.read().step;
  const known = [...find("step").options].map((option) => option.value);
  if (known.join() !== ["", ...steps].join()) find("step").replaceChildren(...["", ...steps].map(option));
  find("step").value = chosen;
}

const option = (step) => Object.assign(make("option", step || "all"), { value: step });

/** Show what the address says. */
export async function refresh() {
  const wanted = place.read();
  for (const field of find("filters").elements) {
    if (field.name && field !== document.activeElement) field.value = wanted[field.name];
  }
  await Promise.all([list(wanted), open(wanted.open)]);
}

const list = newest(({ step, reward, verdict, calls, problem, page }) => ask("/api/rollouts", { step, reward, verdict, calls, problem, page }), showList);

/** While a rollout is open, new ones do not move the list under the reader. */
function showList(found, wanted) {
  const same = listed && filters(wanted) === listed.filters;
  if (same && wanted.open && listed.found.rows.length && found.all !== listed.found.all) {
    find("newer").hidden = found.found === listed.found.found;
    return mark(wanted.open);
  }
  put(found, wanted);
}

function put(found, wanted) {
  listed = { found, filters: filters(wanted) };
  find("newer").hidden = true;
  find("found").textContent = found.found === found.all ? times(found.all, "rollout") : `${found.found} of ${times(found.all, "rollout")}`;
  const focused = find("list").contains(document.activeElement) ? document.activeElement.hash : null;
  find("list").replaceChildren(found.rows.length ? rows(found.rows, wanted) : make("p.empty", found.all ? "No rollout is like this." : "No rollout is recorded yet."));
  find("list").setAttribute("aria-busy", "false");
  [...find("list").querySelectorAll("a")].find((one) => one.hash === focused)?.focus({ preventScroll: true });
  const pages = Math.ceil(found.found / found.per_page);
  find("pager").hidden = pages < 2;
  find("page").textContent = `page ${found.page + 1} of ${pages}`;
  find("page-back").disabled = found.page === 0;
  find("page-on").disabled = found.page + 1 >= pages;
  mark(wanted.open);
}

const filters = ({ step, reward, verdict, calls, problem, page }) => JSON.stringify([step, reward, verdict, calls, problem, page]);

function rows(found, wanted) {
  const made = table([
    ["Step", (one) => String(one.step), "number"],
    ["Sample", (one) => make("small", `${one.group} · ${one.sample}`), "extra"],
    ["Problem", (one) => problem(one, wanted), "text"],
    ["Reward", (one) => reward(one)],
    ["Calls", (one) => calls(one.outcomes)],
    ["Tokens", (one) => String(one.tokens), "number.extra"],
    ["Selection", (one) => tag(...VERDICTS[one.verdict])],
    ["Advantage", (one) => signed(one.advantage), "number.extra"],
  ], found);
  [...made.tBodies[0].rows].forEach((row, number) => {
    row.dataset.open = place.name(found[number]);
    row.addEventListener("click", () => row.querySelector("a").click());
  });
  return made;
}

function problem(one, wanted) {
  const shown = link("a", place.address({ ...wanted, open: place.name(one) }), one.problem || `problem ${one.group}`);
  shown.addEventListener("click", (event) => event.stopPropagation());
  return shown;
}

/** A sign per call; a screen reader gets the counts. */
function calls(outcomes) {
  if (!outcomes.length) return make("span.hint", "none");
  const signs = outcomes.slice(0, SHOWN_CALLS).map((outcome) => make(`span.sign.is-${OUTCOMES[outcome][1]}`, OUTCOMES[outcome][0]));
  const more = outcomes.length > SHOWN_CALLS ? make("small", ` +${outcomes.length - SHOWN_CALLS}`) : null;
  const wrong = outcomes.filter((outcome) => outcome !== "ok").length;
  return make("span.signs", Object.assign(make("span", ...signs, more), { ariaHidden: "true" }), make("span.said-only", `${times(outcomes.length, "call")}, ${wrong} failed`));
}

function mark(name) {
  for (const row of find("list").querySelectorAll("tbody tr")) {
    if (row.dataset.open === name) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

const load = newest((name) => {
  const at = place.named(name);
  return at ? ask("/api/rollout", at).catch((error) => ({ error })) : { error: new Error("The address names no rollout.") };
}, showOpened);

async function open(name) {
  if (name === opened) return;
  opened = name;
  mark(name);
  if (name) await load(name);
  else closeRollout();
}

function showOpened(found, name) {
  if (found.error) {
    find("rollout").replaceChildren(heading("Rollout"), make("p.empty", found.error.message));
    return;
  }
  showRollout(find("rollout"), found, (one) => place.address({ ...place.read(), open: place.name(one) }), neighbours(name));
  if (matchMedia("(max-width: 1000px)").matches) find("rollout").scrollIntoView();
}

function closeRollout() {
  find("rollout").replaceChildren(heading("Rollout"), make("p.empty", "Choose a rollout: its tokens, tool calls and entropies are shown here, and why it was kept or dropped."));
}

const heading = (text) => Object.assign(make("h2.said-only", text), { id: "h-rollout" });

/** The addresses of the rollouts before and after it in the list, on this page. */
function neighbours(name) {
  const names = listed ? listed.found.rows.map(place.name) : [];
  const at = names.indexOf(name);
  const to = (other) => (at >= 0 && other !== undefined ? place.address({ ...place.read(), open: other }) : null);
  return { before: to(at > 0 ? names[at - 1] : undefined), after: to(names[at + 1]) };
}

/** Go to a place in the address; `changes` to what is there now. */
const go = (changes) => (location.hash = place.address({ ...place.read(), view: "rollouts", ...changes }));

const chosen = () => Object.fromEntries(new FormData(find("filters")));
find("filters").addEventListener("submit", (event) => event.preventDefault());
find("filters").addEventListener("change", () => go({ ...chosen(), page: "" }));
find("filters").addEventListener("reset", () => go({ step: "", reward: "", verdict: "", calls: "", problem: "", page: "" }));
let typing = null;
find("filters").elements.problem.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => go({ ...chosen(), page: "" }), 250);
});
find("page-back").addEventListener("click", () => go({ page: listed.found.page - 1 || "" }));
find("page-on").addEventListener("click", () => go({ page: listed.found.page + 1 }));
find("newer").addEventListener("click", () => {
  listed = null;
  refresh();
});
find("list").addEventListener("keydown", (event) => {
  const links = [...find("list").querySelectorAll("tbody a")];
  const to = links.indexOf(document.activeElement) + ({ ArrowDown: 1, ArrowUp: -1 }[event.key] ?? NaN);
  if (!links[to] || (event.key === "ArrowUp" && !links.includes(document.activeElement))) return;
  event.preventDefault();
  links[to].focus();
});
