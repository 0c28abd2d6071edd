// What became of a call, and whose fault it was, in a sentence.

import { duration } from "./dom.js";

export const MARK = { none: "✓", model: "✕", infra: "!", client: "○" };
export const WHOSE = {
  none: "Nobody is to blame.",
  model: "The program is to blame: it counts as its failure.",
  infra: "The service is to blame, not the program: leave the sample out, or send it again.",
  client: "The caller’s own doing.",
};

export function verdict(result, limits) {
  return { what: what(result, limits), whose: WHOSE[result.blame] ?? "" };
}

function what(result, limits) {
  const infra = result.blame === "infra";
  switch (result.status) {
    case "ok":
      return `Finished in ${duration(result.usage.wall_s * 1000)}`;
    case "error":
      return `Failed with exit code ${result.exit_code}`;
    case "signal":
      return `Killed by signal ${result.signal}${infra ? ", which the machine sent" : ""}`;
    case "timeout":
      return infra
        ? `Timed out after ${seconds(result.usage.wall_s)}: the machine did not give it the time it was promised`
        : `Timed out: still running after ${seconds(result.usage.wall_s)}, its limit of wall time is ${seconds(limits.wall_s)}`;
    case "cpu_limit":
      return `Stopped: it used ${seconds(result.usage.cpu_s)} of CPU time, its limit is ${seconds(limits.cpu_s)}`;
    case "memory_limit":
      return `Stopped: it needed more than its limit of ${limits.memory_mb} MB of memory`;
    case "output_limit":
      return `Stopped: it printed more than its limit of ${limits.output_kb} KB`;
    case "compile_error":
      return "Does not compile";
    case "expired":
      return "Expired: its deadline passed before it could start";
    case "cancelled":
      return "Cancelled";
    case "rejected":
      return "Rejected";
    case "worker_lost":
      return "Lost: the worker that ran it is gone";
    case "session_lost":
      return "Lost: the worker that had the session is gone";
    default:
      return `The service failed (${result.status})`;
  }
}

const seconds = (value) => `${Number(value.toFixed(value < 10 ? 2 : 1))} s`;
