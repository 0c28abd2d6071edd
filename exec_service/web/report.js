// Parts of a result that several views show: a verdict, a refusal, a block of text, a picture.

import { button, make } from "./dom.js";
import { Refused } from "./service.js";
import { MARK } from "./verdict.js";

const MOST_PIXELS = 32e6; // a small file can claim to be a huge picture
const PNG_SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];

export function banner(blame, what, whose) {
  return make(`div.verdict.is-${blame}`, make("span.mark", MARK[blame]), make("div", make("div.what", what), make("div.blame", whose)));
}

/** Why the service did not do something, as a banner. */
export function refusal(error, title = "Not run") {
  if (!(error instanceof Refused)) return banner("infra", "No answer from the service", "Check that it is running. The program may or may not have run.");
  const { code = "", field = "" } = error.problem;
  const kind = error.status < 500 && error.status !== 429 ? "client" : "infra";
  const where = [field && `field ${field}`, code, `HTTP ${error.status}`].filter(Boolean).join(" · ");
  return banner(kind, `${title}: ${error.message}`, where);
}

export function output(title, text, id = "", kind = "") {
  const pre = make("pre", text);
  Object.assign(pre, { tabIndex: 0, ariaLabel: title });
  if (id) pre.id = id;
  const copy = button("button.quiet", async () => {
    await navigator.clipboard.writeText(text);
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
