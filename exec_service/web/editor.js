// A text area for programs: line numbers, Tab indents, Enter keeps the indentation.

/** Ctrl+Enter submits `form` while `view` is shown. */
export function prepareEditor(code, gutter, view, form) {
  let leaving = false; // after Esc the next Tab moves the focus
  code.addEventListener("input", () => number(code, gutter));
  code.addEventListener("scroll", () => (gutter.scrollTop = code.scrollTop));
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
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || view.hidden) return;
    event.preventDefault();
    form.requestSubmit();
  });
  new ResizeObserver(() => (gutter.style.height = `${code.offsetHeight}px`)).observe(code);
}

/** Replace the whole text of an editor. */
export function fill(code, gutter, text) {
  code.value = text;
  number(code, gutter);
}

/** Insert text as if typed, so that undo works. */
const type = (text) => document.execCommand("insertText", false, text);

function indentation(code) {
  const line = code.value.slice(0, code.selectionStart).split("\n").at(-1);
  return line.match(/^\s*/)[0] + (line.trimEnd().endsWith(":") ? "    " : "");
}

function number(code, gutter) {
  const lines = code.value.split("\n").length;
  gutter.textContent = Array.from({ length: lines }, (_, index) => index + 1).join("\n");
}
