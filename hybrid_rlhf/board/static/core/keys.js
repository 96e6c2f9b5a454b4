/**
 * Shortcuts of one key. They can be switched off in the dialog of `?`, because speech input and unsteady hands type
 * them by accident (WCAG 2.1.4).
 */
import { useEffect, useRef } from "./dom.js";
import { readSetting } from "./settings.js";

/** What the dialog lists: [keys, meaning]. */
export const SHORTCUTS = [
  ["Everywhere", [
    ["?", "this list"],
    ["g, then r c o s p h n", "go to runs, curves, rollouts, signals, preferences, chat, a new run"],
    ["/", "search in this view"],
    ["t", "theme: of the system, light, dark"],
    ["Esc", "close a dialog, leave a field"],
  ]],
  ["Lists", [["j, k", "next, previous entry"], ["Enter", "open it"]]],
  ["Sample", [
    ["m, v", "messages, tokens"],
    ["[, ]", "previous, next sample of the step"],
    ["←, →, Home, End", "move through the tokens"],
    ["c", "next column of values"],
  ]],
  ["Charts", [["←, →", "move through the steps of the focused chart"]]],
  ["Preferences", [["1, 2", "the left, the right answer is better"], ["0", "equal"], ["s", "skip"], ["u", "undo"]]],
];

const typing = (target) => target.closest?.("input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select, [contenteditable]");

/** Calls bindings[key] on a plain key press outside of fields and dialogs. */
export function useKeys(bindings) {
  const latest = useRef(bindings);
  latest.current = bindings;
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      if (typing(event.target) || document.querySelector("dialog[open]")) return;
      const binding = latest.current[event.key];
      if (!binding || (event.key !== "?" && !readSetting("keys", true))) return;
      event.preventDefault();
      binding(event);
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

/** Moves the focus among the elements that match, for j and k. */
export function moveFocus(selector, by) {
  const items = [...document.querySelectorAll(selector)];
  const place = items.indexOf(document.activeElement?.closest?.(selector));
  items[Math.min(items.length - 1, Math.max(0, place + by))]?.focus();
}
