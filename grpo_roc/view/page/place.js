// Where the reader is, in the address: #rollouts?step=3&reward=wrong&open=3.1.4. Links and the back button work.

const FIELDS = ["step", "reward", "verdict", "calls", "problem", "page", "open"];

export function read() {
  const [view, query] = location.hash.slice(1).split("?");
  const given = new URLSearchParams(query ?? "");
  const place = Object.fromEntries(FIELDS.map((name) => [name, given.get(name) ?? ""]));
  return { ...place, view: view === "rollouts" ? "rollouts" : "curves" };
}

export function address({ view, ...place }) {
  const given = Object.fromEntries(FIELDS.map((name) => [name, String(place[name] ?? "")]).filter(([, value]) => value));
  const query = new URLSearchParams(given).toString();
  return `#${view}${query ? `?${query}` : ""}`;
}

export const name = ({ step, group, sample }) => `${step}.${group}.${sample}`;

/** {step, group, sample} of such a name; null for anything else. */
export function named(text) {
  if (!/^\d+\.\d+\.\d+$/.test(text)) return null;
  const [step, group, sample] = text.split(".").map(Number);
  return { step, group, sample };
}
