// The page: the view that is shown, the theme, and what is new in the run, asked for every two seconds.

import { ask } from "./api.js";
import * as curves from "./curves.js";
import { find, span } from "./dom.js";
import * as place from "./place.js";
import * as rollouts from "./rollouts.js";

const EVERY_MS = 2000;
const THEMES = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };
const VIEWS = { curves, rollouts };

let version = null;

async function look() {
  if (document.hidden) return;
  try {
    const run = await ask("/api/run");
    showState(run);
    if (run.version !== version) {
      version = run.version;
      for (const view of Object.values(VIEWS)) view.offer(run);
      await VIEWS[place.read().view].refresh();
    }
    trouble(run.troubles.join("; "));
  } catch (error) {
    trouble(error.status ? error.message : "No answer from `python -m grpo_roc view`; trying again.");
  }
}

function showState({ name, folder, rows, latest, planned, running, written }) {
  const step = rows ? `step ${latest.step + 1}${planned ? ` of ${planned}` : ""}` : "no step yet";
  const age = written ? Date.now() / 1000 - written : null;
  const when = age === null ? "" : running && rows !== planned ? " · running" : ` · last written ${span(age)} ago`;
  find("name").textContent = name;
  find("state").textContent = `${folder} · ${step}${when}`;
  document.title = `${rows ? `${latest.step + 1} · ` : ""}${name}`;
}

function trouble(text) {
  if (find("banner").textContent !== text) find("banner").textContent = text;
  find("banner").hidden = !text;
}

async function showView() {
  const { view } = place.read();
  for (const name of Object.keys(VIEWS)) {
    find(name).hidden = name !== view;
    if (name === view) find(`to-${name}`).setAttribute("aria-current", "page");
    else find(`to-${name}`).removeAttribute("aria-current");
  }
  try {
    if (version !== null) await VIEWS[view].refresh();
  } catch (error) {
    trouble(error.message);
  }
}

function prepareTheme() {
  const names = Object.keys(THEMES);
  const current = () => document.documentElement.dataset.theme ?? "";
  const show = () => (find("theme-button").textContent = THEMES[current()]);
  find("theme-button").addEventListener("click", () => {
    const next = names[(names.indexOf(current()) + 1) % names.length];
    if (next) localStorage.setItem("theme", (document.documentElement.dataset.theme = next));
    else {
      localStorage.removeItem("theme");
      delete document.documentElement.dataset.theme;
    }
    show();
  });
  show();
}

prepareTheme();
find("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address holds the view
  find("main").focus();
});
window.addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", look);
showView();
look();
setInterval(look, EVERY_MS);
