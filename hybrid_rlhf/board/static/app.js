/**
 * The page of `hybrid-rlhf board`: a frame with the navigation, and the view that the address names.
 *
 * `core/` is what has no look (requests, addresses, keys, numbers), `parts/` what several views show, `views/` one file
 * per view. There is no build step: the browser loads these modules as they are.
 */
import { useConnected } from "./core/api.js";
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./core/dom.js";
import { SHORTCUTS, moveFocus, useKeys } from "./core/keys.js";
import { go, link, useRoute } from "./core/route.js";
import { useSetting } from "./core/settings.js";
import { nextTheme, useTheme } from "./core/theme.js";
import { Dialog, Empty, ErrorLine, Toggle, focusSearch } from "./parts/basic.js";
import { Chat } from "./views/chat.js";
import { Curves } from "./views/curves.js";
import { Diff } from "./views/diff.js";
import { Preferences } from "./views/preferences.js";
import { Prompt } from "./views/prompt.js";
import { Rollouts } from "./views/rollouts.js";
import { Run } from "./views/run.js";
import { Runs } from "./views/runs.js";
import { Sample } from "./views/sample.js";
import { Signals } from "./views/signals.js";
import { Start } from "./views/start.js";

/** name: [view, title, key after g]; views without a key are reached from others. */
const VIEWS = {
  runs: [Runs, "Runs", "r"],
  curves: [Curves, "Curves", "c"],
  rollouts: [Rollouts, "Rollouts", "o"],
  signals: [Signals, "Signals", "s"],
  preferences: [Preferences, "Preferences", "p"],
  chat: [Chat, "Chat", "h"],
  start: [Start, "New run", "n"],
  run: [Run, "Run"],
  diff: [Diff, "Settings"],
  sample: [Sample, "Sample"],
  prompt: [Prompt, "Prompt"],
};
const PARENTS = { run: "runs", diff: "runs", sample: "rollouts", prompt: "rollouts" };
const JUMP_MS = 1200;
const LOST_MS = 3000;
const THEME_NAMES = { system: "System", light: "Light", dark: "Dark" };

function Navigation({ path, runs, open, onLeave }) {
  return html`<nav id="navigation" class=${open ? "open" : ""} aria-label="Views" onClick=${onLeave}>
    <ul>${Object.entries(VIEWS).filter(([, view]) => view[2]).map(([name, [, title]]) => html`<li key=${name}>
      <a href=${link(name, { run: runs })} aria-current=${(PARENTS[path] ?? path) === name ? "page" : null}>${title}</a>
    </li>`)}</ul>
  </nav>`;
}

function Help({ onClose }) {
  const [enabled, setEnabled] = useSetting("keys", true);
  return html`<${Dialog} title="Keyboard" onClose=${onClose}>
    <div class="shortcuts">${SHORTCUTS.map(([group, keys]) => html`<section key=${group}>
      <h3>${group}</h3>
      <dl>${keys.map(([key, meaning]) => html`<div key=${key}><dt>${key.split(/(?<=\S),? /).map((part) => html`<kbd>${part}</kbd> `)}</dt><dd>${meaning}</dd></div>`)}</dl>
    </section>`)}</div>
    <${Toggle} label="Shortcuts of one key" value=${enabled} onChange=${setEnabled} />
  </${Dialog}>`;
}

/** Whether the server's stream of events arrives; a line over the page once it has been lost for a moment. */
function Connection({ onLost }) {
  const connected = useConnected();
  const found = useRef(false);
  useEffect(() => {
    found.current ||= connected;
    onLost(false);
    if (connected || !found.current) return undefined;
    const timer = setTimeout(() => onLost(true), LOST_MS);
    return () => clearTimeout(timer);
  }, [connected]);
  return html`<span class=${`connection ${connected ? "on" : ""}`} role="status">
    <span class="dot" aria-hidden="true"></span><span class="connection-text">${connected ? "Live" : "Connecting"}</span></span>`;
}

function Frame() {
  const { path, query } = useRoute();
  const { choice } = useTheme();
  const [help, setHelp] = useState(false);
  const [menu, setMenu] = useState(false);
  const [lost, setLost] = useState(false);
  const jump = useRef(0);
  const main = useRef(null);
  const known = VIEWS[path];
  const title = known?.[1] ?? "Not found";
  const first = useRef(true);
  useLayoutEffect(() => {
    document.title = `${title} · Board`;
    setMenu(false);
    if (!first.current) main.current.querySelector("h1")?.focus({ preventScroll: true });
    first.current = false;
    scrollTo(0, 0);
  }, [path]);
  const bindings = {
    "?": () => setHelp(true),
    "/": focusSearch,
    t: nextTheme,
    g: () => { jump.current = Date.now(); },
    j: () => moveFocus("[data-entry]", 1),
    k: () => moveFocus("[data-entry]", -1),
  };
  for (const [name, [, , key]] of Object.entries(VIEWS)) {
    if (!key) continue;
    const other = bindings[key];
    bindings[key] = (event) => {
      if (Date.now() - jump.current < JUMP_MS) go(name, { run: query.run });
      else other?.(event);
      jump.current = 0;
    };
  }
  useKeys(bindings);
  useEffect(() => {
    const leave = (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && document.activeElement?.blur();
    addEventListener("keydown", leave);
    return () => removeEventListener("keydown", leave);
  }, []);
  const View = known?.[0];
  return html`
    <a class="skip" href="#view-title" onClick=${(event) => { event.preventDefault(); main.current.querySelector("h1")?.focus(); }}>Skip to content</a>
    <header class="top">
      <a class="brand" href=${link("runs")}><img src="/static/icon.svg" alt="" width="22" height="22" />Board</a>
      <${Connection} onLost=${setLost} />
      <div class="top-actions">
        <button class="button quiet" onClick=${nextTheme} aria-label=${`Theme: ${THEME_NAMES[choice]}. Change`}>${THEME_NAMES[choice]}</button>
        <button class="button quiet" onClick=${() => setHelp(true)} aria-label="Keyboard shortcuts">?</button>
        <button class="button menu-button" aria-expanded=${menu} aria-controls="navigation" onClick=${() => setMenu(!menu)}>Menu</button>
      </div>
    </header>
    <div class="body">
      <${Navigation} path=${path} runs=${query.run} open=${menu} onLeave=${(event) => event.target.closest("a") && setMenu(false)} />
      <main ref=${main}>${lost && html`<${ErrorLine} text="The board does not answer: what is shown may be old. Is hybrid-rlhf board still running?" />`}${View ? html`<${View} query=${query} />` : html`<h1 tabindex="-1">Not found</h1>
        <${Empty} title="There is no such view">Choose one in the navigation.</${Empty}>`}</main>
    </div>
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

const root = document.getElementById("app");
render(html`<${Frame} />`, root);
