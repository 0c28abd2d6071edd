// A text area for programs: line numbers, Tab indents, Enter keeps the indentation. It is served as /web/editor.js where the
// editor with syntax colours (editor/codemirror.js) was not built, and exports the same function.

import { make } from "./dom.js";

/** An editor in `box`. `hint` is the element that describes its keys. Calls `changed` after each change of the text. */
export function makeEditor(box, { id, label, hint, changed = () => {} }) {
  const gutter = Object.assign(make("pre.gutter"), { ariaHidden: "true" });
  const code = Object.assign(make("textarea"), { id, ariaLabel: label, spellcheck: false, autocapitalize: "off", autocomplete: "off", wrap: "off" });
  code.setAttribute("aria-describedby", hint.id);
  box.replaceChildren(gutter, code);
  const number = () => (gutter.textContent = Array.from(code.value.split("\n"), (_, index) => index + 1).join("\n"));
  code.addEventListener("input", () => {
    number();
    changed();
  });
  code.addEventListener("scroll", () => (gutter.scrollTop = code.scrollTop));
  handleKeys(code);
  number();
  return {
    get text() {
      return code.value;
    },
    set text(text) {
      code.value = text;
      code.setSelectionRange(0, 0);
      number();
      changed();
    },
    focus: () => code.focus(),
    setLanguage: () => {},
  };
}

function handleKeys(code) {
  let leaving = false; // after Esc the next Tab moves the focus
  code.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leaving = true;
    else if (event.key === "Tab" && !event.shiftKey && !event.ctrlKey && !event.altKey && !leaving) {
      event.preventDefault();
      type("    ");
    } else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey && !event.isComposing) {
      event.preventDefault();
      type(`\n${indentation(code)}`);
    } else if (event.key !== "Shift") leaving = false;
  });
  code.addEventListener("blur", () => (leaving = false));
}

/** Insert text as if typed, so that undo works. */
const type = (text) => document.execCommand("insertText", false, text);

function indentation(code) {
  const line = code.value.slice(0, code.selectionStart).split("\n").at(-1);
  return line.match(/^\s*/)[0] + (line.trimEnd().endsWith(":") ? "    " : "");
}
