// The playground's form: a program with its language, input, files and limits. It becomes a call, and is filled from one.

import { button, bytes, copyText, find, make, on } from "./dom.js";
import { makeEditor } from "./editor.js";
import { EXAMPLES, exampleWith } from "./examples.js";
import { asCurl, asPython, callOfLink, linkTo } from "./snippets.js";
import { keep, kept } from "./store.js";

const DRAFT = "playground-draft";
const LIMITS = [
  ["wall_s", "Wall time, s", 0.1],
  ["cpu_s", "CPU time, s", 0.1],
  ["memory_mb", "Memory, MiB", 1],
  ["output_kb", "Output, KiB", 1],
  ["processes", "Processes", 1],
  ["file_mb", "Files, MiB", 1],
];

export let defaults = {};
let editor = null;
let files = {}; // path -> base64
let limitsToBe = {}; // until the service has said what limits there are
let largestRequest = Infinity;
let filling = false;

export function prepareForm() {
  editor = makeEditor(find("editor"), { id: "code", label: "Program", hint: find("tab-hint"), changed: edited });
  on("language", "change", followLanguage);
  on("example", "change", () => find("example").value && fillForm({ language: language(), ...EXAMPLES[language()][find("example").value] }));
  on("upload", "change", upload);
  find("call").addEventListener("input", save);
  for (const [id, write, what] of [["copy-curl", asCurl, "The curl command"], ["copy-python", asPython, "The Python program"], ["copy-link", linkTo, "The link"]])
    on(id, "click", () => copy(write, what));
  const draft = kept(DRAFT, null);
  fillForm(typeof draft?.code === "string" ? draft : EXAMPLES.python.Hello);
}

/** Fill the form from the fragment of a link. */
export function openLink(fragment) {
  try {
    fillForm(callOfLink(fragment));
    note("This program came with the link. Read it before you run it.");
  } catch {
    note("The link carries no program that can be read.");
  }
}

/** Take over `/v1/info`: languages, and the default and maximum of every limit. */
export function offer({ languages, limits, requests }) {
  const before = currentCall();
  const chosen = language();
  find("language").replaceChildren(...languages.map((name) => make("option", name)));
  find("language").value = languages.includes(chosen) ? chosen : languages[0];
  defaults = limits.default;
  largestRequest = requests.max_body_bytes;
  find("limit-fields").replaceChildren(...LIMITS.map((limit) => limitField(...limit, limits)));
  setLimits(before.limits);
  showLanguage();
}

function limitField(name, title, step, limits) {
  const field = make("input");
  Object.assign(field, { type: "number", name, id: `limit-${name}`, min: step, max: limits.maximum[name], step: "any", required: true });
  return make("label", title, field);
}

const language = () => find("language").value || "python";

/** The call that the form describes. What is as the service would have it is left out. */
export function currentCall() {
  const fetched = find("fetch-files").value.split(",").map((path) => path.trim()).filter(Boolean);
  const limits = currentLimits();
  return {
    code: editor.text,
    ...(language() !== "python" && { language: language() }),
    ...(find("stdin").value && { stdin: find("stdin").value }),
    ...(Object.keys(files).length && { files }),
    ...(fetched.length && { fetch_files: fetched }),
    ...(Object.keys(limits).length && { limits }),
    ...(limits.wall_s && { deadline_s: Math.min(7200, limits.wall_s + 60) }),
    ...(find("echo-value").checked && { echo_value: true }),
  };
}

function currentLimits() {
  if (!find("limit-wall_s")) return limitsToBe;
  const given = LIMITS.map(([name]) => [name, Number(find(`limit-${name}`).value)]);
  return Object.fromEntries(given.filter(([name, value]) => Number.isFinite(value) && value > 0 && value !== defaults[name]));
}

function setLimits(limits = {}) {
  limitsToBe = limits;
  for (const [name] of LIMITS) {
    const field = find(`limit-${name}`);
    if (field) field.value = limits[name] ?? defaults[name];
  }
}

/** Put a call into the form, in the place of what is there. */
export function fillForm({ code, language: wanted = "python", stdin = "", limits = {}, fetch_files = [], echo_value = false, files: given = {} }) {
  filling = true;
  if (![...find("language").options].some(({ value }) => value === wanted)) find("language").append(make("option", String(wanted)));
  find("language").value = wanted;
  find("stdin").value = stdin;
  find("fetch-files").value = [fetch_files].flat().join(", ");
  find("echo-value").checked = Boolean(echo_value);
  files = given;
  showUploads();
  setLimits(Object(limits));
  editor.text = code;
  filling = false;
  showLanguage();
  save();
}

/** The example in the other language, unless the user wrote a program of their own. */
function followLanguage() {
  const before = Object.keys(EXAMPLES).map((name) => exampleWith(editor.text, name)).find(Boolean);
  const examples = EXAMPLES[language()] ?? {};
  if (before || !editor.text.trim()) fillForm({ code: "", language: language(), ...(examples[before] ?? Object.values(examples)[0]) });
  else showLanguage();
}

function showLanguage() {
  editor.setLanguage(language());
  find("echo-value").parentElement.hidden = language() !== "python";
  const own = Object.assign(make("option", "your own"), { value: "", disabled: true });
  find("example").replaceChildren(own, ...Object.keys(EXAMPLES[language()] ?? {}).map((name) => make("option", name)));
  find("example").value = exampleWith(editor.text, language());
}

function edited() {
  if (filling) return;
  find("example").value = exampleWith(editor.text, language());
  save();
}

const save = () => keep(DRAFT, { ...currentCall(), files: undefined });

async function upload() {
  const chosen = [...find("upload").files];
  find("upload").value = "";
  const size = chosen.reduce((sum, file) => sum + file.size, Object.values(files).join("").length * 0.75);
  if (size * (4 / 3) > largestRequest) return note(`Not added: a request may have ${bytes(largestRequest)}, and files take a third more than their size.`);
  for (const file of chosen) files = { ...files, [file.name]: await base64(file) };
  showUploads();
}

function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function showUploads() {
  find("uploads").replaceChildren(...Object.entries(files).map(([path, content]) => {
    const remove = button("button.quiet", () => {
      files = Object.fromEntries(Object.entries(files).filter(([other]) => other !== path));
      showUploads();
    }, "Remove");
    remove.ariaLabel = `Remove ${path}`;
    return make("li", make("code", path), make("span.hint", bytes(Math.floor(content.replace(/=+$/, "").length * 0.75))), remove);
  }));
}

async function copy(write, what) {
  const call = currentCall();
  await copyText(write(call));
  note(`${what} is in the clipboard${write === linkTo && call.files ? ", without the files" : ""}.`);
}

function note(text) {
  find("call-note").textContent = text;
}
