// The playground: write a program, run it, read the result.

import { button, bytes, duration, find, make, on, onSubmit, swatch } from "./dom.js";
import { fill, prepareEditor } from "./editor.js";
import { banner, output, refusal, verdict } from "./report.js";
import { ask } from "./service.js";

const HISTORY = 12;
const LIMITS = [
  ["wall_s", "Wall time, s", 0.1],
  ["cpu_s", "CPU time, s", 0.1],
  ["memory_mb", "Memory, MB", 1],
  ["output_kb", "Output, KB", 1],
  ["processes", "Processes", 1],
  ["file_mb", "Files, MB", 1],
];
const EXAMPLES = {
  "Hello": { code: 'for number in range(1, 6):\n    print(number, "squared is", number * number)\n' },
  "Standard input": { code: "numbers = map(int, input().split())\nprint(sum(numbers))\n", stdin: "3 14 15 92 65" },
  "Exact mathematics": { code: "import sympy as sp\n\nx = sp.symbols('x')\nsp.integrate(sp.exp(-x**2), (x, -sp.oo, sp.oo))\n", echo: true },
  "Fails": { code: 'answer = {"pi": 3.14}\nprint(answer["e"])\n' },
  "Never ends": { code: "import time\n\nprint('thinking …', flush=True)\nwhile True:\n    time.sleep(0.1)\n", limits: { wall_s: 1 } },
  "Wants too much memory": { code: "hoard = []\nwhile True:\n    hoard.append(bytearray(10_000_000))\n", limits: { memory_mb: 128 } },
  "Looks for a network": { code: "import socket\nsocket.create_connection(('1.1.1.1', 53), 2)\n" },
};

let defaults = {};
let aborter = null;
const results = []; // newest last

export function preparePlayground() {
  find("example").append(...Object.keys(EXAMPLES).map((name) => make("option", name)));
  on("example", "change", () => load(EXAMPLES[find("example").value]));
  onSubmit("call", run);
  on("stop", "click", () => aborter?.abort());
  prepareEditor(find("code"), find("gutter"), find("playground"), find("call"));
  load(EXAMPLES.Hello);
}

/** Fill the form from `/v1/info`: languages, and the default and maximum of every limit. */
export function offer(info) {
  const chosen = find("language").value || "python";
  find("language").replaceChildren(...info.languages.map((name) => make("option", name)));
  find("language").value = info.languages.includes(chosen) ? chosen : info.languages[0];
  defaults = info.limits.default;
  find("limit-fields").replaceChildren(...LIMITS.map((limit) => limitField(...limit, info.limits)));
  setLimits(EXAMPLES[find("example").value]?.limits);
}

function limitField(name, title, step, limits) {
  const field = make("input");
  Object.assign(field, { type: "number", name, id: `limit-${name}`, min: step, max: limits.maximum[name], step: "any", required: true });
  field.value = limits.default[name];
  return make("label", title, field);
}

function load({ code, stdin = "", limits = {}, echo = false }) {
  fill(find("code"), find("gutter"), code);
  find("stdin").value = stdin;
  find("echo-value").checked = echo;
  setLimits(limits);
}

function setLimits(limits = {}) {
  for (const [name] of LIMITS) {
    const field = find(`limit-${name}`);
    if (field) field.value = limits[name] ?? defaults[name];
  }
}

function callOfForm() {
  const limits = Object.fromEntries(
    LIMITS.map(([name]) => [name, Number(find(`limit-${name}`)?.value)]).filter(([, value]) => Number.isFinite(value) && value > 0),
  );
  if (limits.cpu_s === defaults.cpu_s) delete limits.cpu_s; // the service derives its default from the wall time
  return {
    code: find("code").value,
    language: find("language").value || "python",
    stdin: find("stdin").value,
    limits,
    deadline_s: Math.min(7200, (limits.wall_s ?? 10) + 60),
    echo_value: find("echo-value").checked,
    priority: "eval",
  };
}

async function run() {
  if (aborter) return;
  aborter = new AbortController();
  const call = callOfForm();
  working(true);
  try {
    const result = await ask("/v1/run", { method: "POST", body: JSON.stringify(call), signal: aborter.signal });
    remember({ call, result });
  } catch (error) {
    remember({ call, error });
  } finally {
    aborter = null;
    working(false);
  }
}

function working(yes) {
  find("run").disabled = yes;
  find("stop").hidden = !yes;
  find("nothing-yet").hidden = true;
  if (!yes) return;
  find("result-body").hidden = false;
  find("result-body").replaceChildren(make("div.working", make("i"), "running …"));
}

function remember(entry) {
  results.push({ ...entry, number: (results.at(-1)?.number ?? 0) + 1 });
  if (results.length > HISTORY) results.shift();
  show(results.at(-1));
}

function show(entry) {
  find("result-body").hidden = false;
  find("result-body").replaceChildren(...(entry.error ? [named("verdict", failure(entry.error))] : report(entry)));
  find("history").hidden = results.length < 2;
  find("history").replaceChildren(...results.map((other) => historyButton(other, other === entry)));
}

function historyButton(entry, shown) {
  const status = entry.error ? "not run" : entry.result.status;
  return Object.assign(button("button", () => show(entry), `${entry.number} · ${status}`), { ariaPressed: String(shown) });
}

const named = (id, box) => Object.assign(box, { id });

function failure(error) {
  return error.name === "AbortError" ? banner("client", "Stopped", "You stopped it; the service killed the program.") : refusal(error);
}

function report({ call, result }) {
  const limits = { ...defaults, ...call.limits };
  limits.cpu_s = call.limits.cpu_s ?? 2 * limits.wall_s + 1;
  const { what, whose } = verdict(result, limits);
  const parts = [named("verdict", banner(result.blame, what, whose))];
  if (result.error) parts.push(output("Message of the service", result.error));
  if (result.stdout) parts.push(output("Output", result.stdout, "stdout"));
  if (result.value !== null && result.value !== "None") parts.push(output("Value", result.value, "value"));
  if (result.stderr) parts.push(output("Errors", result.stderr, "stderr", "err"));
  if (!result.stdout && !result.stderr && result.value === null) parts.push(make("p.none-yet", "It printed nothing."));
  if (result.truncated) parts.push(make("p.hint", "The output was too long: its middle is cut out, and the cut is marked."));
  parts.push(timings(result.timings), usage(result, limits), origin(result));
  return parts;
}

function timings(times) {
  const stages = [["queue", "waiting", times.queue_ms], ["start", "starting", times.start_ms], ["run", "running", times.run_ms]];
  const whole = Math.max(times.total_ms, 0.001);
  const bars = stages.filter(([, , ms]) => ms > 0).map(([kind, , ms]) => {
    const bar = make(`i.c-${kind}`);
    bar.style.width = `${(100 * ms) / whole}%`;
    return bar;
  });
  const legend = stages.map(([kind, label, ms]) => make("span", swatch(kind), `${label} `, make("b", duration(ms))));
  const total = make("span", "total ", make("b", duration(times.total_ms)));
  return named("timings", make("section.facts", make("h3", "Time by stage"), make("div.stack", ...bars), make("div.legend", ...legend, total)));
}

function usage({ usage: used, exit_code, signal }, limits) {
  const rows = [
    ["Wall time", `${used.wall_s.toFixed(3)} s`, `of ${limits.wall_s} s`],
    ["CPU time", `${used.cpu_s.toFixed(3)} s`, `of ${limits.cpu_s} s`],
    ["Memory peak", bytes(used.memory_peak_bytes), `of ${limits.memory_mb} MB`],
    ["Processes", String(used.processes_peak), `of ${limits.processes}`],
    signal === null ? ["Exit code", exit_code === null ? "–" : String(exit_code), ""] : ["Signal", String(signal), ""],
  ];
  const pairs = rows.map(([name, value, most]) => make("div", make("dt", name), make("dd", value, " ", make("span.hint", most))));
  return named("usage", make("section.facts", make("h3", "Usage"), make("dl.pairs", ...pairs)));
}

function origin(result) {
  const { tier, layers, profile } = result.sandbox;
  const box = [`tier ${tier}`, profile && `interpreter ${profile}`, result.worker && `worker ${result.worker}`].filter(Boolean).join(" · ");
  return make("details", make("summary", `Sandbox: ${box}`),
    make("p.hint", layers.length ? `Layers: ${layers.join(", ")}.` : "No layers."), make("p.hint", "Request ", make("code", result.request_id)));
}
