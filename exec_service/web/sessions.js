// The view of sessions: cells, and the tree of forks.

import { bytes, duration, find, make, on, onSubmit, submitOnCtrlEnter } from "./dom.js";
import { makeEditor } from "./editor.js";
import { drawForest, Forest, walkByArrows } from "./fork_tree.js";
import { MARK, output, picture, refusal, verdict } from "./report.js";
import { ask, Poller } from "./service.js";

const EVERY_MS = 4000; // delay until changes by others are seen
const FIRST_CELL = "x = 20\nx + 1\n";

const forest = new Forest();
let chosen = "";
let limits = {};
let editor = null;

export const poller = new Poller(find("sessions"), "/v1/sessions", EVERY_MS, showAll, (error) => {
  if (error.status !== 401) showRefusal(error, "The sessions cannot be listed");
});

export function prepareSessions() {
  editor = makeEditor(find("cell-editor"), { id: "cell-code", label: "Next cell", hint: find("cell-hint") });
  editor.setLanguage("python");
  submitOnCtrlEnter(find("sessions"), find("cell"));
  walkByArrows(find("fork-tree"));
  onSubmit("new-session", create);
  onSubmit("cell", run);
  onSubmit("fork-form", fork);
  for (const [id, act] of [["roll-back", rollBack], ["interrupt", interrupt], ["end-session", end]]) on(id, "click", act);
  show();
}

/** Fill the form from `/v1/info`: profiles, and the limits of a cell. */
export function offerSessions(info) {
  const select = find("profile");
  const before = select.value;
  select.replaceChildren(...info.profiles.map((name) => make("option", name)));
  select.value = info.profiles.includes(before) ? before : info.profiles[0];
  limits = { ...info.limits.default, memory_mb: 1024 };
}

const post = (path, body = {}) => ask(`/v1/sessions${path}`, { method: "POST", body: JSON.stringify(body) });

function showAll({ sessions }) {
  forest.noteAll(sessions);
  if (!forest.get(chosen)) choose(firstAlive());
  else show();
}

/** Run `act` and show a refusal. Pending lists are outdated afterwards. */
async function attempt(failed, act) {
  poller.outdate();
  find("session-says").replaceChildren();
  try {
    await act();
  } catch (error) {
    showRefusal(error, failed);
  }
  await poller.refresh();
}

async function create() {
  find("start-session").disabled = true;
  await attempt("Not started", async () => {
    const info = await post("", { profile: find("profile").value, auto_checkpoint: find("auto-checkpoint").checked });
    forest.note(info, true).draft = FIRST_CELL;
    choose(info.id);
    editor.focus();
  });
  find("start-session").disabled = false;
}

async function run() {
  const session = forest.get(chosen);
  const code = editor.text;
  if (!session?.alive || session.pending || !code.trim()) return;
  const cell = { code, number: session.info.cells + 1 };
  session.cells.push(cell);
  session.pending = true;
  session.draft = "";
  editor.text = "";
  show({ cells: true });
  await attempt("Not run", async () => {
    try {
      cell.result = await post(`/${session.id}/run`, { code });
    } catch (error) {
      cell.error = error;
    } finally {
      session.pending = false;
      cell.element = null;
      if (chosen === session.id) show({ cells: true });
    }
  });
}

const fork = () =>
  onChosen("Not forked", async (session) => {
    const inherited = session.cells.map(({ code, number, result, error, undone }) => ({ code, number, result, error, undone, inherited: true }));
    const { sessions } = await post(`/${session.id}/fork`, { n: Number(find("fork-count").value) });
    for (const info of sessions) forest.note(info, true).cells = inherited.map((cell) => ({ ...cell }));
    show();
  });

const rollBack = () =>
  onChosen("Not rolled back", async (session) => {
    const info = await post(`/${session.id}/rollback`);
    forest.note(info);
    const last = session.cells.findLast((cell) => cell.result && !cell.undone);
    if (last) Object.assign(last, { undone: true, filesLeft: info.files_restored === false, element: null });
    show({ cells: true });
  });

const interrupt = () => onChosen("Not interrupted", (session) => post(`/${session.id}/interrupt`));

const end = () =>
  onChosen("Not deleted", async (session) => {
    await ask(`/v1/sessions/${session.id}`, { method: "DELETE" });
    session.gone = true;
    choose(forest.get(session.parent)?.alive ? session.parent : firstAlive());
  });

async function onChosen(failed, act) {
  const session = forest.get(chosen);
  if (session) await attempt(failed, () => act(session));
}

function firstAlive() {
  return forest.all.find((session) => session.alive)?.id ?? forest.all[0]?.id ?? "";
}

function choose(id) {
  const before = forest.get(chosen);
  if (before) before.draft = editor.text;
  chosen = id;
  editor.text = forest.get(id)?.draft ?? "";
  show({ cells: true });
}

function showRefusal(error, failed) {
  find("session-says").replaceChildren(refusal(error, failed));
}

function show({ cells = false } = {}) {
  const session = forest.get(chosen);
  showTree();
  find("no-session").hidden = session !== undefined;
  find("notebook").hidden = session === undefined;
  if (!session) return;
  showFacts(session);
  find("roll-back").disabled = !session.info.checkpoint || session.gone || session.state === "running";
  find("interrupt").disabled = session.state !== "running";
  find("fork").disabled = session.state !== "idle";
  find("end-session").disabled = session.gone;
  find("run-cell").disabled = session.state !== "idle";
  if (cells) showCells(session);
}

function showTree() {
  const focused = find("fork-tree").contains(document.activeElement) ? document.activeElement.dataset.id : null;
  find("fork-tree").replaceChildren(drawForest(forest, chosen, choose));
  if (focused) [...find("fork-tree").querySelectorAll("button")].find((button) => button.dataset.id === focused)?.focus();
}

function showFacts(session) {
  const { info, name } = session;
  const parent = forest.get(session.parent);
  find("session-name").textContent = `Session ${name}`;
  const facts = [
    parent && `forked from ${parent.name}`,
    session.gone ? "gone: deleted, or ended because nobody used it" : session.state,
    info.state === "ended" && info.error,
    info.profile && `profile ${info.profile}`,
    info.memory_bytes && `${bytes(info.memory_bytes)} with its forks`,
    info.ttl_s && `ends after ${duration(info.ttl_s * 1000)} without a request`,
  ];
  find("session-facts").textContent = facts.filter(Boolean).join(" · ");
}

function showCells(session) {
  for (const cell of session.cells) cell.element ??= cellElement(cell);
  find("cells").replaceChildren(...session.cells.map((cell) => cell.element));
  find("cell").scrollIntoView({ block: "nearest" });
}

function cellElement(cell) {
  const notes = [cell.inherited && "run before the fork", cell.undone && "rolled back", cell.filesLeft && "its files are kept"];
  const head = make("div.cell-head", make("b", `[${cell.number}]`), make("span.hint", notes.filter(Boolean).join(" · ")));
  const code = make("pre.cell-code", cell.code.trimEnd());
  Object.assign(code, { tabIndex: 0, role: "group", ariaLabel: `Cell ${cell.number}` });
  const kinds = [cell.inherited && "inherited", cell.undone && "undone"].filter(Boolean).map((kind) => `.${kind}`);
  return make(`li.cell${kinds.join("")}`, head, code, ...outcome(cell));
}

function outcome({ result, error }) {
  if (error) return [refusal(error)];
  if (!result) return [make("div.working", make("i"), "running …")];
  const parts = [];
  if (result.stdout) parts.push(output("Output", result.stdout));
  if (result.value !== null) parts.push(output("Value", result.value, "", "value"));
  parts.push(...result.display.map(({ data }) => shown(data)).filter(Boolean));
  if (result.stderr) parts.push(output("Errors", result.stderr, "", "err"));
  parts.push(ending(result));
  return parts;
}

/** One display of a cell: a picture, or else its source as text. Nothing is rendered as markup. */
function shown(data) {
  if (data["image/png"]) return picture(data["image/png"]);
  const [kind, text] = Object.entries(data).find(([type]) => type.startsWith("text/") || type === "image/svg+xml") ?? [];
  return kind ? output(`${kind}, as text`, text) : null;
}

function ending(result) {
  const kept = { true: "", false: "The variables are lost." }[String(result.state_kept)] ?? "";
  const { what, whose } = verdict(result, limits);
  const text = result.status === "ok" ? duration(result.usage.wall_s * 1000) : [what, result.error, result.blame === "infra" ? whose : "", kept].filter(Boolean).join(". ");
  return make(`p.ending.tag.is-${result.blame}`, `${MARK[result.blame]} ${text}`);
}
