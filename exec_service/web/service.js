// Sends requests to the service. The API key, if it needs one, is in this tab's session storage.

import { find } from "./dom.js";

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
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    close(field.value.trim());
  });
  find("key-forget").addEventListener("click", () => close(""));
  dialog.addEventListener("cancel", () => (dismissed = true));
  find("key-button").addEventListener("click", () => askForKey({ again: true }));
  find("key-button").hidden = sessionStorage.getItem(KEY) === null;
}
