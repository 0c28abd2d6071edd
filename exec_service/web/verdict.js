// Describes in a sentence how a call ended and who is to blame.

import { duration } from "./dom.js";

const seconds = (value) => `${Number(value.toFixed(value < 10 ? 2 : 1))} s`;

export const MARK = { none: "✓", model: "✕", infra: "!", client: "○" };
const WHOSE = {
  none: "Nobody is to blame.",
  model: "The program is to blame: count it as its failure.",
  infra: "The service is to blame, not the program: leave the sample out, or send it again.",
  client: "The caller is to blame.",
};
const ENDINGS = {
  ok: ({ usage }) => `Finished in ${duration(usage.wall_s * 1000)}`,
  error: ({ exit_code }) => `Failed with exit code ${exit_code}`,
  signal: ({ signal, blame }) => `Killed by signal ${signal}${blame === "infra" ? ", which the machine sent" : ""}`,
  timeout: ({ usage, blame }, limits) =>
    blame === "infra"
      ? `Timed out after ${seconds(usage.wall_s)}: the deadline passed before its wall time was used up`
      : `Timed out: still running after ${seconds(usage.wall_s)}, its limit of wall time is ${seconds(limits.wall_s)}`,
  cpu_limit: ({ usage }, limits) => `Stopped: it used ${seconds(usage.cpu_s)} of CPU time, its limit is ${seconds(limits.cpu_s)}`,
  memory_limit: (_, limits) => `Stopped: it needed more than its limit of ${limits.memory_mb} MB of memory`,
  output_limit: (_, limits) => `Stopped: it printed more than its limit of ${limits.output_kb} KB`,
  compile_error: () => "Does not compile",
  expired: () => "Expired: its deadline passed before it could start",
  cancelled: () => "Cancelled",
  rejected: () => "Rejected",
  worker_lost: () => "Lost: its worker is gone",
  session_lost: () => "Lost: the worker of the session is gone",
};

export function verdict(result, limits) {
  const what = ENDINGS[result.status]?.(result, limits) ?? `The service failed (${result.status})`;
  return { what, whose: WHOSE[result.blame] ?? "" };
}
