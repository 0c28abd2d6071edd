// The live view: the last two minutes of the service, fetched once a second while the view is shown.

import { Chart } from "./chart.js";
import { ago, button, count, duration, find, make, meter, percent, swatch, table } from "./dom.js";
import { ask, Poller } from "./service.js";

const EVERY_MS = 1000;
const KEPT = 120;
const STAGES = [["queue", "waiting"], ["start", "starting"], ["run", "running"], ["total", "total"]];
const RATES = [
  ["Calls", (one) => count(one.calls), "number"],
  ["Programs failed", (one) => percent(one.tool_error_rate), "number"],
  ["Service failed", (one) => percent(one.infra_fault_rate), "number"],
];

const REASONS = {
  timeout: "still running at its limit of wall time",
  cpu_limit: "used up its CPU time",
  memory_limit: "needed more memory than its limit",
  output_limit: "printed more than its limit",
  compile_error: "does not compile",
  expired: "its deadline passed before it could start",
  cancelled: "the caller cancelled it",
};

const depths = []; // queue and slots, once a second while the view was open
let charts = null;
let chosenRun = null;
let latest = null;

export const poller = new Poller(find("live"), "/v1/stats", EVERY_MS, show, (error) =>
  showTrouble(error.status ? `No statistics: ${error.message}` : "No answer from the service; trying again every second."));
find("failure-filter").addEventListener("change", () => latest && showFailures(latest.failures));

function showTrouble(text) {
  find("banner").textContent = text;
  find("banner").hidden = !text;
}

async function show(stats) {
  latest = stats;
  const { now } = stats;
  depths.push({ waiting: now.waiting, queue: now.waiting, busy: now.busy, slots: now.slots });
  if (depths.length > KEPT) depths.shift();
  charts ??= makeCharts();
  find("tiles").replaceChildren(...tiles(stats));
  charts.calls.draw(stats.seconds);
  charts.latency.draw(stats.seconds.map(({ p50_ms, p99_ms }) => ({ p50: p50_ms, p99: p99_ms })));
  charts.queue.draw(depths.length > 1 ? depths : [depths[0], depths[0]]);
  showWorkers(stats.workers);
  showTenants(stats.tenants);
  showStages(stats.latency_ms);
  showFailures(stats.failures);
  showRuns(stats.runs);
  find("live-note").textContent =
    `Rates, latencies and shares cover the last ${stats.window_s.toFixed(0)} s of this gateway, which has been up for ${ago(stats.uptime_s).replace(" ago", "")}. All metrics for Prometheus: /metrics.`;
  if (chosenRun) await showSteps(chosenRun);
  showTrouble("");
}

function makeCharts() {
  const blames = [["none", "ok"], ["model", "program failed"], ["infra", "service failed"], ["client", "cancelled"]];
  const calls = (point) => point.none + point.model + point.infra + point.client;
  return {
    calls: new Chart(find("chart-calls"), {
      title: "Calls per second",
      areas: blames,
      read: (point) => `${count(calls(point))} calls, ${count(point.model)} failed, ${count(point.infra)} by the service`,
    }),
    latency: new Chart(find("chart-latency"), {
      title: "Latency",
      lines: [["p50", "p50: half of the calls are faster"], ["p99", "p99: 99 % are faster"]],
      log: true,
      format: (ms) => (ms >= 1000 ? `${ms / 1000} s` : `${ms} ms`),
      read: (point) => (point.p99 ? `p50 ${duration(point.p50)}, p99 ${duration(point.p99)}` : "no calls"),
    }),
    queue: new Chart(find("chart-queue"), {
      title: "Queue and slots",
      areas: [["queue", "waiting calls"]],
      lines: [["busy", "busy slots"], ["slots", "all slots"]],
      read: (point) => `${count(point.waiting)} waiting, ${point.busy} of ${point.slots} slots busy`,
    }),
  };
}

function tiles({ now, calls_per_s, latency_ms, seconds, workers, tiers }) {
  const sum = (blame) => seconds.slice(-60).reduce((total, second) => total + second[blame], 0);
  const all = sum("none") + sum("model") + sum("infra") + sum("client");
  const names = Object.entries(tiers).map(([tier, workers]) => `${workers} × tier ${tier}`).join(", ");
  const rate = all ? sum("infra") / all : 0;
  return [
    tile("calls", "Calls per second", count(calls_per_s), "", `${count(all)} in 60 s`),
    tile("latency", "Latency", latency_ms.total.p50 ? duration(latency_ms.total.p50) : "–", "p50", `p99 ${latency_ms.total.p99 ? duration(latency_ms.total.p99) : "–"}`),
    tile("queue", "Waiting", count(now.waiting), "calls", now.waiting ? `the oldest for ${duration(now.oldest_wait_s * 1000)}` : `${count(now.in_flight)} in flight`),
    tile("slots", "Busy slots", String(now.busy), `of ${now.slots}`, `${workers.length} worker${workers.length === 1 ? "" : "s"}`, now.slots === 0),
    tile("tool-errors", "Programs failed", percent(all ? sum("model") / all : 0), "", "blame: the program"),
    tile("infra", "Service failed", percent(rate), "", "blame: the service", rate > 0.01),
    tile("tier", "Isolation", names || "no worker", "", "S strongest, E none", !names),
  ];
}

function tile(id, label, value, unit, note, bad = false) {
  const box = make(bad ? "div.tile.bad" : "div.tile", make("div.label", label), make("div.value", value, unit ? make("small", unit) : null), make("div.note", note));
  box.id = `tile-${id}`;
  return box;
}

/** Replaces the table in a box, and keeps the focus on its button. */
function put(id, rows, none, columns) {
  const box = find(id);
  const focused = box.contains(document.activeElement) ? document.activeElement.textContent : null;
  box.replaceChildren(rows.length ? table(columns, rows) : make("p.none-yet", none));
  [...box.querySelectorAll("button")].find((one) => one.textContent === focused)?.focus({ preventScroll: true });
}

function showWorkers(workers) {
  put("workers", workers, "No live worker: calls wait until their deadlines.", [
    ["Worker", (one) => one.id, "text"],
    ["Tier", (one) => one.tier],
    ["Busy slots", (one) => make("div.share", meter(one.slots ? one.busy / one.slots : 0), `${one.busy} of ${one.slots}`), "bar-and-number"],
  ]);
}

function showTenants(tenants) {
  put("tenants", tenants.slice(0, 12), "Nothing ran in the last minute.", [
    ["Tenant", (one) => one.tenant || "(none)", "text"],
    ["Share of slot time", (one) => make("div.share", meter(one.share), percent(one.share)), "bar-and-number"],
    ["Calls", (one) => count(one.calls), "number"],
  ]);
}

function showStages(latency) {
  put("stages", STAGES.filter(([stage]) => latency[stage]), "", [
    ["Stage", ([stage, label]) => make("span", swatch(stage), label)],
    ["p50", ([stage]) => duration(latency[stage].p50), "number"],
    ["p90", ([stage]) => duration(latency[stage].p90), "number"],
    ["p99", ([stage]) => duration(latency[stage].p99), "number"],
    ["max", ([stage]) => duration(latency[stage].most), "number"],
  ]);
}

function showFailures(failures) {
  const wanted = find("failure-filter").value;
  put("failures", failures.filter((one) => !wanted || one.blame === wanted).slice(0, 60), "No failures.", [
    ["When", (one) => ago(one.seconds_ago), "number"],
    ["Status", (one) => make(`span.tag.is-${one.blame}`, one.status)],
    ["Reason", (one) => one.error || reason(one), "text"],
    ["Run", (one) => (one.run ? `${one.run}${one.step === null ? "" : ` · ${one.step}`}` : "–"), "text.extra"],
    ["Took", (one) => duration(one.total_ms), "number"],
  ]);
}

function reason({ status, blame, exit_code, signal }) {
  if (status === "timeout" && blame === "infra") return "the machine was too busy: its deadline passed first";
  if (REASONS[status]) return REASONS[status];
  if (signal !== null) return `signal ${signal}`;
  return exit_code === null ? "–" : `exit code ${exit_code}`;
}

function showRuns(runs) {
  put("runs", runs, "No call has named a run yet (tags.run).", [
    ["Run", (one) => runButton(one), "text"],
    ...RATES,
    ["Last step", (one) => (one.last_step === null ? "–" : String(one.last_step)), "number"],
    ["Seen", (one) => ago(one.seconds_ago), "number.extra"],
  ]);
}

function runButton({ run, tenant }) {
  const choose = () => {
    chosenRun = { run, tenant };
    showSteps(chosenRun);
  };
  const chosen = chosenRun?.run === run && chosenRun.tenant === tenant;
  return Object.assign(button("button.link", choose, tenant ? `${run} (${tenant})` : run), { ariaPressed: String(chosen) });
}

async function showSteps({ run, tenant }) {
  const found = await ask(`/v1/stats?${new URLSearchParams({ run, tenant })}`);
  find("steps").hidden = false;
  const steps = found.steps.slice(-100).reverse();
  find("steps").replaceChildren(make("p.hint", `Steps of ${run}, newest first`), table([
    ["Step", (one) => (one.step === null ? "–" : String(one.step)), "number"],
    ...RATES,
    ["Queue wait, p99", (one) => duration(one.queue_ms.p99), "number.extra"],
    ["p50", (one) => duration(one.total_ms.p50), "number.extra"],
    ["p99", (one) => duration(one.total_ms.p99), "number"],
    ["max", (one) => duration(one.total_ms.most), "number.extra"],
  ], steps));
}
