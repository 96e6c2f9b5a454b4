/** Small parts of all views: headings, states, errors, empty views, fields. */
import { html, useEffect, useRef, useState } from "../core/dom.js";
import { setQuery } from "../core/route.js";

/** The heading of a view; it takes the focus when the view opens, so that a screen reader says where it is. */
export function ViewHead({ title, children, note }) {
  return html`<header class="view-head">
    <div><h1 tabindex="-1" id="view-title">${title}</h1>${note && html`<p class="note">${note}</p>`}</div>
    <div class="view-actions">${children}</div>
  </header>`;
}

const STATES = {
  running: "is training now",
  finished: "made all its steps",
  stopped: "was stopped; a training run can be resumed",
  killed: "its process ended at once; a training run can be resumed",
  broken: "ended with an error, or has files that cannot be read",
  foreign: "is no run of this library",
};

export function State({ state }) {
  return html`<span class=${`state state-${state}`} title=${STATES[state]}>${state}</span>`;
}

export function ErrorLine({ text, retry }) {
  if (!text) return null;
  return html`<div class="error-line" role="alert">
    <p>${text}</p>${retry && html`<button class="button" onClick=${retry}>Try again</button>`}
  </div>`;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><h2>${title}</h2><p>${children}</p></div>`;
}

/** Shown after a moment, so that a fast answer does not flicker. */
export function Loading({ what }) {
  return html`<p class="loading" role="status">Loading ${what}…</p>`;
}

export function Field({ label, children, hint }) {
  return html`<label class="field"><span class="field-label">${label}</span>${children}${hint && html`<span class="hint">${hint}</span>`}</label>`;
}

/** A text field bound to a key of the address, written after a pause in typing. */
export function QueryInput({ name, value, label, placeholder, type = "text", search = false, step }) {
  const [text, setText] = useState(value ?? "");
  const timer = useRef(null);
  const field = useRef(null);
  useEffect(() => {
    if (document.activeElement !== field.current) setText(value ?? "");
  }, [value]);
  const change = (event) => {
    const next = event.target.value;
    setText(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setQuery({ [name]: next || null }), 250);
  };
  return html`<input ref=${field} class="input" type=${search ? "search" : type} data-search=${search || null} aria-label=${label}
    placeholder=${placeholder} value=${text} step=${step} onInput=${change} autocomplete="off" spellcheck=${false} />`;
}

export function focusSearch() {
  document.querySelector("[data-search]")?.focus();
}

/** One of a few values, as a row of buttons. */
export function Choice({ label, value, options, onChange }) {
  return html`<div class="choice" role="group" aria-label=${label}>
    ${options.map(([key, text]) => html`<button type="button" key=${key} aria-pressed=${value === key} onClick=${() => onChange(key)}>${text}</button>`)}
  </div>`;
}

export function Toggle({ label, value, onChange }) {
  return html`<label class="toggle"><input type="checkbox" checked=${value} onChange=${(event) => onChange(event.target.checked)} />${label}</label>`;
}

/** A number with its name. */
export function Fact({ name, children, title }) {
  return html`<div class="fact" title=${title}><dt>${name}</dt><dd>${children}</dd></div>`;
}

/** A modal dialog; Esc and the button close it. */
export function Dialog({ title, onClose, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${dialog} aria-labelledby="dialog-title" onClose=${onClose} onClick=${(event) => event.target === dialog.current && onClose()}>
    <div class="dialog-body">
      <header><h2 id="dialog-title">${title}</h2><button class="button quiet" aria-label="Close" onClick=${onClose}>✕</button></header>
      ${children}
    </div>
  </dialog>`;
}
