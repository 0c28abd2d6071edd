// Pictures that a program made, drawn on a canvas: so the page's policy need not let any image from anywhere in.

import { make } from "./dom.js";

const MOST_PIXELS = 32e6; // a small file can claim to be a huge picture
const SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];

/** An element that becomes the picture, or says why it does not. */
export function picture(base64) {
  const box = make("div.picture");
  draw(base64, box).catch(() => box.replaceChildren(make("p.hint", "A picture that cannot be read.")));
  return box;
}

async function draw(base64, box) {
  const data = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const { width, height } = sizeOf(data);
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

/** As the first chunk of a PNG says it. */
function sizeOf(data) {
  if (data.length < 24 || SIGNATURE.some((byte, index) => data[index] !== byte)) throw new TypeError("no PNG");
  const head = new DataView(data.buffer, 16, 8);
  return { width: head.getUint32(0), height: head.getUint32(4) };
}
