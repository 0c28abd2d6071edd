// Who was forked from whom, which of them live: as this tab has seen it. The service forgets what has ended; the tree does not.

import { bytes, make } from "./dom.js";

const STATES = { idle: "idle", running: "running", ended: "ended", gone: "gone" };

/** What the tab knows of one session. `cells` are those that were run from here, or inherited from the one it was forked from. */
class Known {
  constructor(info, name, own) {
    Object.assign(this, { id: info.id, parent: info.parent ?? "", info, name, own });
    this.cells = [];
    this.draft = "";
    this.pending = false;
    this.gone = false;
  }

  get state() {
    if (this.gone) return "gone";
    return this.pending ? "running" : this.info.state;
  }

  get alive() {
    return this.state === "idle" || this.state === "running";
  }
}

export class Forest {
  #sessions = new Map();
  #roots = 0;

  get(id) {
    return this.#sessions.get(id);
  }

  get all() {
    return [...this.#sessions.values()];
  }

  childrenOf(id) {
    return this.all.filter((session) => session.parent === id);
  }

  /** What the service says of a session; `own` if it was made from this tab. */
  note(info, own = false) {
    const known = this.#sessions.get(info.id) ?? this.#add(info, own);
    known.info = info;
    known.gone = false;
    known.own ||= own;
    return known;
  }

  #add(info, own) {
    const parent = info.parent ? (this.get(info.parent) ?? this.#addGone(info.parent)) : null;
    const session = new Known(info, parent ? `${parent.name}.${parent.forks}` : String(++this.#roots), own);
    session.forks = 1;
    if (parent) parent.forks += 1;
    this.#sessions.set(info.id, session);
    return session;
  }

  /** It had forks, and had ended before anybody looked. */
  #addGone(id) {
    const session = this.#add({ id, state: "ended", cells: 0 }, false);
    session.gone = true;
    return session;
  }

  /** All that the service has: others are gone. Of these only those stay that were made here or have forks that live. */
  noteAll(infos) {
    const there = new Set(infos.map((info) => info.id));
    for (const session of this.all) session.gone = !there.has(session.id) && !session.pending;
    for (const info of infos) this.note(info);
    for (const session of this.all.reverse()) {
      if (session.gone && !session.own && this.childrenOf(session.id).length === 0) this.#sessions.delete(session.id);
    }
  }
}

/** The forest as nested lists of buttons. */
export function drawForest(forest, chosen, choose) {
  const roots = forest.all.filter((session) => !forest.get(session.parent));
  return branch(forest, roots, chosen, choose);
}

function branch(forest, sessions, chosen, choose) {
  const rows = sessions.map((session) => {
    const children = forest.childrenOf(session.id);
    return make("li", node(session, session.id === chosen, choose), children.length ? branch(forest, children, chosen, choose) : null);
  });
  return make("ul", ...rows);
}

function node(session, isChosen, choose) {
  const { cells, memory_bytes: memory = 0, checkpoint } = session.info;
  const facts = [
    STATES[session.state],
    `${cells} cell${cells === 1 ? "" : "s"}`,
    session.parent || !memory || session.gone ? "" : bytes(memory),
    checkpoint && !session.gone ? "checkpoint" : "",
  ].filter(Boolean);
  const button = make(`button.node.is-${session.state}`, make("i.dot"), make("b", session.name), make("span", facts.join(" · ")));
  button.type = "button";
  button.dataset.id = session.id;
  button.dataset.state = session.state;
  if (isChosen) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => choose(session.id));
  return button;
}

/** Arrow keys go from row to row, as drawn. */
export function walkByArrows(box) {
  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const rows = [...box.querySelectorAll("button.node")];
    const here = rows.indexOf(document.activeElement);
    if (!step || here < 0) return;
    event.preventDefault();
    rows[Math.min(rows.length - 1, Math.max(0, here + step))].focus();
  });
}
