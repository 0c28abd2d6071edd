// The API reference at /docs: sends the form of a route and shows the answer, and how curl would send it, as text.

const KEY = "exec-key"; // the playground's own, in this tab's session storage
const SHOWN_CHARS = 200_000;
const key = document.getElementById("key");

/** The request that a form describes: its verb, its address and what `fetch` takes. */
function requestOf(form) {
  const query = new URLSearchParams();
  const headers = {};
  let path = form.dataset.path;
  for (const { name, value } of form.querySelectorAll("input")) {
    const [where, field] = name.split(" ");
    if (where === "path") path = path.replace(`{${field}}`, encodeURIComponent(value));
    else if (where === "header" && value) headers[field] = value;
    else if (where === "query" && value) query.append(field, value);
  }
  const body = form.elements.body?.value;
  if (body !== undefined) headers["content-type"] = form.elements.body.dataset.kind;
  const url = location.origin + path + (query.size ? `?${query}` : "");
  return { url, method: form.dataset.verb, headers, body };
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function curlOf({ url, method, headers, body }) {
  const parts = ["curl", "-s", "-X", method, quoted(url)];
  for (const [name, value] of Object.entries(headers)) parts.push("-H", quoted(`${name}: ${value}`));
  if (key.value) parts.push("-H", '"Authorization: Bearer $KEY"');
  if (body !== undefined) parts.push("--data-binary", quoted(body));
  return parts.join(" ");
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // lines of JSON, or no JSON
  }
}

async function send(form) {
  const shown = form.querySelector(".answer");
  const request = requestOf(form);
  const button = form.querySelector("button");
  button.disabled = true;
  shown.textContent = "…";
  try {
    const headers = key.value ? { ...request.headers, authorization: `Bearer ${key.value}` } : request.headers;
    const began = performance.now();
    const response = await fetch(request.url, { ...request, headers, cache: "no-store", redirect: "error" });
    const text = pretty(await response.text());
    const cut = text.length > SHOWN_CHARS ? `\n… ${text.length - SHOWN_CHARS} more characters` : "";
    const took = Math.round(performance.now() - began);
    const id = response.headers.get("x-request-id");
    shown.textContent = `HTTP ${response.status} · ${took} ms · request ${id}\n\n${text.slice(0, SHOWN_CHARS)}${cut}`;
  } catch (error) {
    shown.textContent = `No answer: ${error.message}`;
  } finally {
    button.disabled = false;
  }
}

const showCurl = (form) => (form.querySelector(".curl").textContent = curlOf(requestOf(form)));
const forms = [...document.querySelectorAll("form")];
key.value = sessionStorage.getItem(KEY) ?? "";
key.addEventListener("input", () => {
  if (key.value) sessionStorage.setItem(KEY, key.value);
  else sessionStorage.removeItem(KEY);
  forms.forEach(showCurl);
});
for (const form of forms) {
  showCurl(form);
  form.addEventListener("input", () => showCurl(form));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
}
