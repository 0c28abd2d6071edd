// The tree of sessions and forks as this tab has seen it. The service forgets ended sessions; the tree keeps them.

import { button, bytes, make } from "./dom.js";

/** One session. `cells` are those that this tab ran, or that it inherited from the session it was forked from. */
class Session {
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

  /** Take over what the service says of a session; `own` if this tab created it. */
  note(info, own = false) {
    const known = this.#sessions.get(info.id) ?? this.#add(info, own);
    known.info = info;
    known.gone = false;
    known.own ||= own;
    return known;
  }

  #add(info, own) {
    const parent = info.parent ? (this.get(info.parent) ?? this.#addGone(info.parent)) : null;
    const session = new Session(info, parent ? `${parent.name}.${parent.forks}` : String(++this.#roots), own);
    session.forks = 1;
    if (parent) parent.forks += 1;
    this.#sessions.set(info.id, session);
    return session;
  }

  /** A session that ended before this tab saw it, but whose forks live. */
  #addGone(id) {
    const session = this.#add({ id, state: "ended", cells: 0 }, false);
    session.gone = true;
    return session;
  }

  /** Take over the complete list. Sessions not in it are gone; of these, keep our own and those with live forks. */
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
    session.state,
    `${cells} cell${cells === 1 ? "" : "s"}`,
    session.parent || !memory || session.gone ? "" : bytes(memory),
    checkpoint && !session.gone ? "checkpoint" : "",
  ].filter(Boolean);
  const parts = [make("i.dot"), make("b", session.name), make("span", facts.join(" · "))];
  const row = button(`button.node.is-${session.state}`, () => choose(session.id), ...parts);
  Object.assign(row.dataset, { id: session.id, state: session.state });
  if (isChosen) row.setAttribute("aria-current", "true");
  return row;
}

/** Arrow keys move the focus from row to row. */
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
