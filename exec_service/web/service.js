// Sends requests to the service. The API key, if it needs one, is in this tab's session storage.

import { find, on, onSubmit } from "./dom.js";

const KEY = "exec-key";

/** The service refused a request; `problem` is its problem+json. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `HTTP ${status}`);
    this.status = status;
    this.problem = problem;
  }
}

export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.body), cache: "no-store", redirect: "error" });
  if (response.ok) return response.json();
  const problem = await response.json().catch(() => ({}));
  if (response.status === 401) askForKey();
  throw new Refused(response.status, problem);
}

/** Fetches `path` every `everyMs` while `view` is shown. Ignores an answer that a later request or `outdate` overtook. */
export class Poller {
  #timer = null;
  #asked = 0;

  constructor(view, path, everyMs, show, fail) {
    Object.assign(this, { view, path, everyMs, show, fail });
    document.addEventListener("visibilitychange", () => this.update());
  }

  /** Start or stop, as the view is shown or hidden. */
  update() {
    clearInterval(this.#timer);
    if (document.hidden || this.view.hidden) return;
    this.#timer = setInterval(() => this.refresh(), this.everyMs);
    this.refresh();
  }

  outdate() {
    this.#asked += 1;
  }

  async refresh() {
    const number = ++this.#asked;
    try {
      const answer = await ask(this.path);
      if (number === this.#asked) await this.show(answer);
    } catch (error) {
      if (number === this.#asked) this.fail(error);
    }
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

function headers(body) {
  const key = sessionStorage.getItem(KEY);
  return {
    ...(body === undefined ? {} : { "content-type": "application/json" }),
    ...(key ? { authorization: `Bearer ${key}` } : {}),
  };
}

/** Open the dialog, unless it is open or the user has just closed it. */
export function askForKey({ again = false } = {}) {
  find("key-button").hidden = false;
  const dialog = find("key-dialog");
  if (dialog.open || (dismissed && !again)) return;
  dialog.showModal();
}

let dismissed = false;

export function prepareKeyDialog(changed) {
  const dialog = find("key-dialog");
  const field = find("key");
  const close = (value) => {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
    field.value = "";
    dismissed = false;
    dialog.close();
    changed();
  };
  onSubmit("key-form", () => close(field.value.trim()));
  on("key-forget", "click", () => close(""));
  dialog.addEventListener("cancel", () => (dismissed = true));
  on("key-button", "click", () => askForKey({ again: true }));
  find("key-button").hidden = !hasKey();
}
