// The page: the view that is shown, the theme, and the state of the service in the header.

import { find, make } from "./dom.js";
import * as live from "./live.js";
import { offer, preparePlayground } from "./playground.js";
import { ask, prepareKeyDialog } from "./service.js";
import * as sessions from "./sessions.js";

const VIEWS = ["playground", "sessions", "live"];
const TITLES = { playground: "", sessions: "Sessions · ", live: "Live · " };
const THEMES = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };

function showView() {
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

async function showState() {
  try {
    const info = await ask("/v1/info");
    offer(info);
    sessions.offerSessions(info);
    const workers = `${info.workers} worker${info.workers === 1 ? "" : "s"}`;
    find("state").replaceChildren("version ", make("b", info.version), " · ", make("b", workers), " · ", make("b", `${info.slots} slots`), " · tier ", make("b", info.tier));
  } catch (error) {
    find("state").textContent = error.status ? error.message : "no answer from the service";
    if (!error.status) setTimeout(showState, 2000);
  }
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
  showState();
  showView();
});
preparePlayground();
sessions.prepareSessions();
window.addEventListener("hashchange", showView);
showView();
showState();
