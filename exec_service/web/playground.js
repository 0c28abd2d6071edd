// The playground: write a program, run it, read the result. Earlier results stay, also across reloads.

import { button, find, make, on, onSubmit, submitOnCtrlEnter } from "./dom.js";
import { currentCall, defaults, fillForm, prepareForm } from "./call_form.js";
import { banner, refusal } from "./report.js";
import { named, report } from "./result_view.js";
import { ask } from "./service.js";
import { keep, kept } from "./store.js";

const HISTORY = 12;
const RESULTS = "playground-results";
const NARROW = matchMedia("(max-width: 1000px)"); // the result is below the program then

let aborter = null;
let results = []; // newest last: { number, call, result } or { number, call, failure }

export function preparePlayground() {
  prepareForm();
  onSubmit("call", run);
  on("stop", "click", () => aborter?.abort());
  submitOnCtrlEnter(find("playground"), find("call"));
  find("limits").open = !NARROW.matches;
  results = [kept(RESULTS, [])].flat();
}

/** Show the newest of the kept results, once the service's limits are known. */
export function showKept() {
  if (!results.length || !find("result-body").hidden) return;
  try {
    show(results.at(-1));
  } catch {
    forget(); // another version of this page kept them
  }
}

async function run() {
  if (aborter) return;
  aborter = new AbortController();
  const call = currentCall();
  working(true);
  try {
    const result = await ask("/v1/run", { method: "POST", body: JSON.stringify({ ...call, priority: "eval" }), signal: aborter.signal });
    remember({ call, result });
  } catch (error) {
    const { status, problem, message } = error;
    remember({ call, failure: error.name === "AbortError" ? { stopped: true } : { status, problem, message } });
  } finally {
    aborter = null;
    working(false);
  }
  if (NARROW.matches) find("result").scrollIntoView();
}

function working(yes) {
  find("run").disabled = yes;
  find("stop").hidden = !yes;
  if (!yes) return;
  find("nothing-yet").hidden = true;
  find("result-body").hidden = false;
  find("result-body").replaceChildren(make("div.working", make("i"), "running …"));
}

function remember(entry) {
  results = [...results, { ...entry, number: (results.at(-1)?.number ?? 0) + 1 }].slice(-HISTORY);
  show(results.at(-1));
  const light = results.map(({ call, ...rest }) => ({ ...rest, call: { ...call, files: undefined } }));
  while (!keep(RESULTS, light) && light.length) light.shift();
}

function show(entry) {
  find("nothing-yet").hidden = true;
  find("result-body").hidden = false;
  find("result-body").replaceChildren(...(entry.failure ? [named("verdict", failureBanner(entry.failure))] : report(entry, defaults)));
  find("history").hidden = false;
  const again = button("button.quiet", () => fillForm(entry.call), "Edit this program again");
  const clear = button("button.quiet", forget, "Forget all results");
  find("history").replaceChildren(...results.map((other) => historyButton(other, other === entry)), again, clear);
}

function historyButton(entry, shown) {
  return Object.assign(button("button", () => show(entry), `${entry.number} · ${label(entry)}`), { ariaPressed: String(shown) });
}

function label({ result, failure }) {
  if (result) return result.status.replaceAll("_", " ");
  if (failure.stopped) return "stopped";
  return failure.status ? "not run" : "no answer";
}

function forget() {
  results = [];
  keep(RESULTS, results);
  find("nothing-yet").hidden = false;
  find("result-body").hidden = true;
  find("history").hidden = true;
}

function failureBanner(failure) {
  return failure.stopped ? banner("client", "Stopped", "You stopped it; the service killed the program.") : refusal(failure);
}
