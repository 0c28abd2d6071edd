// How the playground shows a result: verdict, output, files, times, usage, sandbox.

import { button, bytes, duration, make, mebibytes, swatch } from "./dom.js";
import { banner, output, picture, verdict } from "./report.js";

export const named = (id, box) => Object.assign(box, { id });

export function report({ call, result }, defaults) {
  const limits = { ...defaults, ...call.limits };
  limits.cpu_s = call.limits?.cpu_s ?? 2 * limits.wall_s + 1; // as the service derives it
  const { what, whose } = verdict(result, limits);
  const parts = [named("verdict", banner(result.blame, what, whose))];
  if (result.error) parts.push(output("Message of the service", result.error));
  if (result.stdout) parts.push(output("Output", result.stdout, "stdout"));
  if (result.value !== null && result.value !== "None") parts.push(output("Value", result.value, "value"));
  if (result.stderr) parts.push(output("Errors", result.stderr, "stderr", "err"));
  if (!result.stdout && !result.stderr && result.value === null) parts.push(make("p.none-yet", "It printed nothing."));
  if (result.truncated) parts.push(make("p.hint", "The output was too long: its middle is cut out, and the cut is marked."));
  parts.push(fetched(result), timings(result.timings), usage(result.usage, limits), origin(result));
  return parts.filter(Boolean);
}

function fetched({ files, files_missing: missing = {} }) {
  const rows = Object.entries(files).map(([path, content]) => make("li",
    button("button", () => download(path, content), `Download ${path}`),
    make("span.hint", bytes(bytesOf(content).length)),
    path.toLowerCase().endsWith(".png") ? picture(content) : null));
  rows.push(...Object.entries(missing).map(([path, why]) => make("li", make("code", path), make("span.hint", `not fetched: ${why}`))));
  return rows.length ? named("fetched", make("section.facts", make("h3", "Files"), make("ul.files", ...rows))) : null;
}

const bytesOf = (content) => Uint8Array.from(atob(content), (character) => character.charCodeAt(0));

function download(path, content) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([bytesOf(content)]));
  link.download = path.split("/").at(-1);
  link.click();
  URL.revokeObjectURL(link.href);
}

function timings({ queue_ms, start_ms, run_ms, total_ms }) {
  const rest = Math.max(0, total_ms - queue_ms - start_ms - run_ms);
  const stages = [["queue", "waiting", queue_ms], ["start", "starting", start_ms], ["run", "running", run_ms], ["rest", "between these", rest]];
  const bars = stages.filter(([, , ms]) => ms > 0).map(([kind, , ms]) => {
    const bar = make(`i.c-${kind}`);
    bar.style.width = `${(100 * ms) / Math.max(total_ms, 0.001)}%`;
    return bar;
  });
  const legend = stages.map(([kind, label, ms]) => make("span", swatch(kind), `${label} `, make("b", duration(ms))));
  return named("timings", make("section.facts", make("h3", "Time by stage"), make("div.stack", ...bars), make("div.legend", ...legend)));
}

function usage(used, limits) {
  const rows = [
    ["CPU time", `${used.cpu_s.toFixed(3)} s`, `of ${limits.cpu_s} s`],
    ["Memory peak", mebibytes(used.memory_peak_bytes), `of ${limits.memory_mb} MiB`],
    ["Processes", String(used.processes_peak), `of ${limits.processes}`],
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
