// Parts of a result that several views show: a verdict, a refusal, a block of text, a picture.

import { button, copyText, duration, make } from "./dom.js";

const MOST_PIXELS = 32e6; // a small file can claim to be a huge picture
const PNG_SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];

export const MARK = { none: "✓", model: "✕", infra: "!", client: "○" };
const WHOSE = {
  none: "Exit code 0",
  model: "The program is to blame: count it as its failure.",
  infra: "The service is to blame, not the program: leave the sample out, or send it again.",
  client: "The call is to blame, not the program.",
};
const ENDINGS = {
  ok: ({ timings }) => `Finished in ${duration(timings.total_ms)}`,
  error: ({ exit_code }) => `Failed with exit code ${exit_code}`,
  signal: ({ signal, blame }) => `Killed by signal ${signal}${blame === "infra" ? ", which the machine sent" : ""}`,
  timeout: ({ usage, blame }, limits) =>
    blame === "infra"
      ? `Timed out after ${seconds(usage.wall_s)}: the deadline passed before its wall time was used up`
      : `Timed out: still running after ${seconds(usage.wall_s)}, its limit of wall time is ${seconds(limits.wall_s)}`,
  cpu_limit: ({ usage }, limits) => `Stopped: it used ${seconds(usage.cpu_s)} of CPU time, its limit is ${seconds(limits.cpu_s)}`,
  memory_limit: (_, limits) => `Stopped: it needed more than its limit of ${limits.memory_mb} MiB of memory`,
  output_limit: (_, limits) => `Stopped: it printed more than its limit of ${limits.output_kb} KiB`,
  compile_error: () => "Does not compile",
  expired: () => "Expired: its deadline passed before it could start",
  cancelled: () => "Cancelled",
  rejected: () => "Rejected",
  worker_lost: () => "Lost: its worker is gone",
  session_lost: () => "Lost: the worker of the session is gone",
};

/** How a call ended, in a sentence, and who is to blame. */
export function verdict(result, limits) {
  const what = ENDINGS[result.status]?.(result, limits) ?? `The service failed (${result.status})`;
  return { what, whose: WHOSE[result.blame] ?? "" };
}

const seconds = (value) => `${Number(value.toFixed(value < 10 ? 2 : 1))} s`;

export function banner(blame, what, whose) {
  return make(`div.verdict.is-${blame}`, make("span.mark", MARK[blame]), make("div", make("div.what", what), make("div.blame", whose)));
}

/** Why the service did not do something, as a banner. An error without an HTTP status is no answer at all. */
export function refusal(error, title = "Not run") {
  if (!error.status) return banner("infra", "No answer from the service", "Check that it is running. The program may or may not have run.");
  const { code = "", field = "" } = error.problem ?? {};
  const kind = error.status < 500 && error.status !== 429 ? "client" : "infra";
  const where = [field && `field ${field}`, code, `HTTP ${error.status}`].filter(Boolean).join(" · ");
  return banner(kind, `${title}: ${error.message}`, where);
}

export function output(title, text, id = "", kind = "") {
  const pre = make("pre", text);
  Object.assign(pre, { tabIndex: 0, role: "group", ariaLabel: title });
  if (id) pre.id = id;
  const copy = button("button.quiet", async () => {
    await copyText(text);
    copy.textContent = "Copied";
  }, "Copy");
  return make(kind ? `section.out.${kind}` : "section.out", make("header", make("h3", title), copy), pre);
}

/** A PNG of a program. It is drawn on a canvas, so that the page's policy need not allow images. */
export function picture(base64) {
  const box = make("div.picture");
  draw(base64, box).catch(() => box.replaceChildren(make("p.hint", "This picture cannot be read.")));
  return box;
}

async function draw(base64, box) {
  const data = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  if (data.length < 24 || PNG_SIGNATURE.some((byte, index) => data[index] !== byte)) throw new TypeError("no PNG");
  const head = new DataView(data.buffer, 16, 8);
  const [width, height] = [head.getUint32(0), head.getUint32(4)];
  if (width * height > MOST_PIXELS) {
    box.replaceChildren(make("p.hint", `A picture of ${width} × ${height} pixels: too large to be shown.`));
    return;
  }
  const drawn = await createImageBitmap(new Blob([data], { type: "image/png" }));
  const canvas = make("canvas");
  Object.assign(canvas, { width: drawn.width, height: drawn.height, role: "img", ariaLabel: `Picture, ${width} by ${height} pixels` });
  canvas.getContext("2d").drawImage(drawn, 0, 0);
  box.replaceChildren(canvas);
}
