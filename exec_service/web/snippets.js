// A call as text that does the same elsewhere: a curl command, a Python program, a link to this page.

import { hasKey } from "./service.js";

const LINK = "#program=";

export function asCurl(call) {
  const key = hasKey() ? ' -H "authorization: Bearer $EXEC_API_KEY"' : "";
  // JSON.stringify makes one line, and nothing in a quoted here-document is replaced.
  return `curl -s ${location.origin}/v1/run -H 'content-type: application/json'${key} -d @- <<'END'\n${JSON.stringify(call)}\nEND\n`;
}

export function asPython({ code, ...fields }) {
  const given = Object.entries(fields).map(([name, value]) => `, ${name}=${name === "limits" ? limitsOf(value) : literal(value)}`);
  const names = fields.limits ? "Client, Limits" : "Client";
  return `from exec_client import ${names}\n\ncode = ${block(code)}\n\nwith Client(${literal(location.origin)}) as client:\n` +
    `    result = client.run(code${given.join("")})\n    print(result.tool_text())\n`;
}

const limitsOf = (limits) => `Limits(${Object.entries(limits).map(([name, value]) => `${name}=${value}`).join(", ")})`;

/** A Python literal. A string of JSON is one as it is. */
function literal(value) {
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${literal(name)}: ${literal(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/** Over several lines where nothing has to be escaped. */
const block = (code) => (/[\\\r]|"""|"$|[\ud800-\udfff]/.test(code) ? literal(code) : `"""\\\n${code}"""`);

/** A link that opens this page with a program, without its files. It runs nothing. */
export function linkTo(call) {
  const bytes = new TextEncoder().encode(JSON.stringify({ ...call, files: undefined }));
  const text = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return location.origin + location.pathname + LINK + text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export const isLink = (fragment) => fragment.startsWith(LINK);

/** The call in the fragment of a link. Throws if there is none. */
export function callOfLink(fragment) {
  const text = atob(fragment.slice(LINK.length).replaceAll("-", "+").replaceAll("_", "/"));
  const call = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(text, (character) => character.charCodeAt(0))));
  if (typeof call?.code !== "string") throw new TypeError("no program");
  return { ...call, files: undefined };
}
