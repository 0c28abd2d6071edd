// The page: the view that is shown, the theme, and the state of the service in the header.

import { find, make } from "./dom.js";
import * as live from "./live.js";
import { offer, openLink } from "./call_form.js";
import { preparePlayground, showKept } from "./playground.js";
import { Poller, prepareKeyDialog } from "./service.js";
import * as sessions from "./sessions.js";
import { isLink } from "./snippets.js";

const STATE_EVERY_MS = 3000;
const VIEWS = ["playground", "sessions", "live"];
const TITLES = { playground: "", sessions: "Sessions · ", live: "Live · " };
const THEMES = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };

function showView() {
  if (isLink(location.hash)) {
    openLink(location.hash);
    history.replaceState(null, "", "#playground"); // so that a reload keeps what the user changes
  }
  const wanted = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "playground";
  for (const view of VIEWS) {
    find(view).hidden = view !== wanted;
    const link = find(`to-${view}`);
    if (view === wanted) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${TITLES[wanted]}exec-service`;
  live.poller.update();
  sessions.poller.update();
}

const state = new Poller(document.body, "/v1/info", STATE_EVERY_MS, showState, (error) => {
  const why = error.status ? error.message : "no answer, trying again";
  showInHeader(error.status === 401 ? [why] : [make("b", "Service unavailable"), `: ${why}`], "bad");
});
let offered = "";

function showState(info) {
  const { version, workers, slots, tier, languages, profiles, limits, requests } = info;
  const offers = JSON.stringify([languages, profiles, limits, requests]);
  if (offers !== offered && languages.length) {
    offered = offers;
    offer(info);
    sessions.offerSessions(info);
    showKept();
  }
  const about = `${workers} worker${workers === 1 ? "" : "s"}`;
  if (workers) showInHeader(["version ", make("b", version), " · ", make("b", about), " · ", make("b", `${slots} slots`), " · tier ", make("b", tier)], "good");
  else showInHeader([make("b", "No worker"), ": programs wait until one is there"], "bad");
}

/** Only what has changed, so that a screen reader says it once. */
function showInHeader(parts, kind) {
  const text = parts.map((part) => part.textContent ?? part).join("");
  if (find("state").textContent === text) return;
  find("state").className = `state ${kind}`;
  find("state").replaceChildren(...parts);
}

function prepareTheme() {
  const names = Object.keys(THEMES);
  const button = find("theme-button");
  const show = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = THEMES[theme];
  };
  show(document.documentElement.dataset.theme ?? "");
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
    if (next) localStorage.setItem("theme", next);
    else localStorage.removeItem("theme");
    show(next);
  });
}

prepareTheme();
prepareKeyDialog(() => {
  state.refresh();
  showView();
});
preparePlayground();
sessions.prepareSessions();
window.addEventListener("hashchange", showView);
showView();
state.update();
