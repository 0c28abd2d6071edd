// The editor of the page with syntax colours: CodeMirror, bundled by deploy/editor.sh and served as /web/editor.js. Where it was
// not built, plain_editor.js is served by that name and exports the same function.

import { defaultKeymap, history, historyKeymap, indentMore } from "@codemirror/commands";
import { pythonLanguage } from "@codemirror/lang-python";
import { bracketMatching, HighlightStyle, indentOnInput, indentUnit, StreamLanguage, syntaxHighlighting } from "@codemirror/language";
import { cpp } from "@codemirror/legacy-modes/mode/clike";
import { javascript } from "@codemirror/legacy-modes/mode/javascript";
import { shell } from "@codemirror/legacy-modes/mode/shell";
import { Compartment } from "@codemirror/state";
import { EditorView, highlightSpecialChars, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";

const INDENT = "    ";
const LANGUAGES = {
  python: pythonLanguage,
  cpp: StreamLanguage.define(cpp),
  javascript: StreamLanguage.define(javascript),
  bash: StreamLanguage.define(shell),
};
const colour = (name) => `var(--code-${name})`;
const COLOURS = HighlightStyle.define([
  { tag: [tags.keyword, tags.operatorKeyword, tags.modifier], color: colour("keyword") },
  { tag: [tags.string, tags.special(tags.string), tags.regexp, tags.character], color: colour("string") },
  { tag: [tags.number, tags.bool, tags.null, tags.atom], color: colour("number") },
  { tag: [tags.comment, tags.meta], color: colour("comment"), fontStyle: "italic" },
  { tag: [tags.function(tags.variableName), tags.definition(tags.variableName), tags.className, tags.typeName], color: colour("name") },
  { tag: tags.standard(tags.variableName), color: colour("name") },
]);
const THEME = EditorView.theme({
  "&": { height: "100%", color: "var(--ink)", fontSize: "13.5px" },
  "&.cm-focused": { outline: "none" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.55" },
  ".cm-content": { padding: "12px 0", caretColor: "var(--ink)" },
  ".cm-line": { padding: "0 12px 0 4px" },
  ".cm-gutters": { background: "var(--sunk)", color: "var(--muted)", border: "none" },
  ".cm-lineNumbers .cm-gutterElement": { padding: "0 10px 0 14px", minWidth: "46px" },
  "&.cm-focused .cm-matchingBracket": { background: "none", outline: "1px solid var(--muted)" },
  "&.cm-focused .cm-nonmatchingBracket": { background: "none", outline: "1px solid var(--infra)" },
});

/** An editor in `box`. `hint` is the element that describes its keys. Calls `changed` after each change of the text. */
export function makeEditor(box, { id, label, hint, changed = () => {} }) {
  const language = new Compartment();
  // In a shadow root CodeMirror adopts its style sheets; elsewhere it would add <style> elements, which the policy forbids.
  const root = box.attachShadow({ mode: "open" });
  const extensions = [
    lineNumbers(), highlightSpecialChars(), history(), indentOnInput(), bracketMatching(), indentUnit.of(INDENT),
    syntaxHighlighting(COLOURS), THEME, language.of([]),
    keymap.of([{ key: "Tab", run: indent }, { key: "Mod-Enter", run: () => true }, ...historyKeymap, ...defaultKeymap]),
    EditorView.domEventHandlers({ beforeinput: typeOver }),
    EditorView.contentAttributes.of({ id, "aria-label": label }),
    EditorView.updateListener.of((update) => update.docChanged && changed()),
  ];
  const view = new EditorView({ parent: root, root, extensions });
  view.contentDOM.ariaDescribedByElements = [hint];
  return {
    get text() {
      return view.state.doc.toString();
    },
    set text(text) {
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text }, selection: { anchor: 0 } });
    },
    focus: () => view.focus(),
    setLanguage: (name) => view.dispatch({ effects: language.reconfigure(LANGUAGES[name] ?? []) }),
  };
}

/** Typing over a selection. Left to itself the browser carries over the selection's colours by style attributes, against the policy. */
function typeOver(event, view) {
  if (event.inputType !== "insertText" || event.data === null || view.composing || view.state.selection.main.empty) return false;
  event.preventDefault();
  view.dispatch(view.state.replaceSelection(event.data), { userEvent: "input.type", scrollIntoView: true });
  return true;
}

function indent(view) {
  if (!view.state.selection.main.empty) return indentMore(view);
  view.dispatch(view.state.replaceSelection(INDENT), { userEvent: "input", scrollIntoView: true });
  return true;
}
