// What became of a rollout, in a coloured word.

import { make } from "./dom.js";

export function reward(one) {
  if (one.reward === null) return tag("unknown", "odd");
  return one.reward > 0 ? tag("correct", "good") : tag(one.truncated ? "truncated" : "wrong", "bad");
}

export const tag = (text, kind) => make(`span.tag.is-${kind}`, text);
