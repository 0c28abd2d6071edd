// The curves of a run. One step is read in all charts at once; Enter or a click shows its rollouts.

import { ask, newest } from "./api.js";
import { Chart } from "./chart.js";
import { figure, find, make } from "./dom.js";
import * as place from "./place.js";

const TILES = [
  ["Reward", "reward/mean", "mean of all rollouts"],
  ["Held-out", "eval/reward", "at the last validation"],
  ["Tool errors", "err_in_pos", "share of calls in correct rollouts"],
  ["Tokens", "len/mean", "per rollout"],
  ["Groups", "groups/mixed", "with different rewards"],
  ["Step", "time/step", "seconds"],
];

let charts = [];
let recorded = new Set();

/** What is known of the run, whichever view is shown. */
export function offer(run) {
  recorded = new Set(run.steps.map(([step]) => step));
  find("tiles").replaceChildren(...TILES.map(([title, metric, note]) => tile(title, run.latest[metric], note)));
  find("curves-note").textContent = run.rows
    ? "Arrow keys and the pointer read a step in all charts; Enter or a click shows its rollouts."
    : "The run has not ended a step yet.";
}

function tile(title, value, note) {
  return make("div.tile", make("div.label", title), make("div.value", figure(value)), make("div.note", note));
}

export const refresh = newest(() => ask("/api/curves"), show);

function show(panels) {
  if (!charts.length) {
    charts = panels.map((panel) => new Chart(panel, { point, choose }));
    find("charts").replaceChildren(...charts.map((chart) => chart.figure));
  }
  const steps = panels.flatMap((panel) => panel.lines.flatMap((line) => line.points.map(([step]) => step)));
  const range = steps.length ? [steps.reduce((a, b) => Math.min(a, b)), steps.reduce((a, b) => Math.max(a, b))] : [0, 1];
  charts.forEach((chart, number) => chart.draw(panels[number].lines, range));
}

/** All charts read the same step; null: the last one. */
function point(step) {
  for (const chart of charts) chart.read(step);
}

function choose(step) {
  const before = [...recorded].filter((one) => one <= step);
  if (before.length) location.hash = place.address({ view: "rollouts", step: Math.max(...before) });
}
