/**
 * A completion token by token, coloured by a column of numbers.
 *
 * Colour is never the only carrier: signed columns also have a line below the token, solid above the middle and dotted
 * below it, and every value is in a tip at the pointer and in the strip that follows the arrow keys.
 */
import { html, useEffect, useMemo, useRef, useState } from "../core/dom.js";
import { formatNumber, formatSigned } from "../core/format.js";
import { useKeys } from "../core/keys.js";
import { colorScale, intensity } from "../core/numbers.js";

const STRONGEST = 0.5;
const MARKED = 0.12;
/** Long texts are laid out in parts, so that those out of view cost nothing. */
const PART = 512;
const FIRST_COLUMNS = ["advantages", "logprobs", "ratio", "values", "kl", "entropy", "sampler_diff"];
const TITLES = {
  advantages: "Advantage", logprobs: "Log-prob (sampled)", old_logprobs: "Log-prob (before updates)", ref_logprobs: "Log-prob (reference)",
  teacher_logprobs: "Log-prob (teacher)",
  kl: "KL", values: "Value", returns: "Return", rewards: "Reward", ratio: "Ratio", entropy: "Entropy",
  sampler_diff: "Trainer less sampler", mask: "Sampled or not", weight_versions: "Weight version",
};

export const columnTitle = (name) => TITLES[name] ?? name.replaceAll("_", " ");

/** The recorded columns, and those that follow from them. */
export function allColumns({ columns, response }) {
  const found = { ...columns };
  if (!found.sampler_diff && found.logprobs && found.old_logprobs) {
    found.sampler_diff = found.old_logprobs.map((value, place) => (value === null || found.logprobs[place] === null ? null : value - found.logprobs[place]));
  }
  found.mask = response.map(Number);
  const order = (name) => (FIRST_COLUMNS.includes(name) ? FIRST_COLUMNS.indexOf(name) : name === "mask" ? 99 : 50);
  return Object.fromEntries(Object.entries(found).sort(([a], [b]) => order(a) - order(b)));
}

/** Names of tokens that show nothing; a part of a character has no text. */
const spoken = (text) => (text.trim() ? null : text ? "space" : "part of a character");

const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");

function tokenStyle(value, scale) {
  const part = intensity(value, scale);
  if (!part) return undefined;
  return { backgroundColor: `rgb(var(--${part < 0 ? "token-low" : "token-high"}) / ${(STRONGEST * Math.abs(part)).toFixed(3)})` };
}

function tokenClass(value, scale, sampled) {
  const part = scale.signed ? intensity(value, scale) : 0;
  const side = part > MARKED ? " above" : part < -MARKED ? " below" : "";
  return `token${sampled ? "" : " given"}${side}`;
}

function Legend({ name, scale }) {
  if (name === "mask") return html`<p class="legend">Underlaid tokens were sampled; the others are the prompt or observations.</p>`;
  if (!scale.limit) return html`<p class="legend">All values are ${formatNumber(scale.middle)}.</p>`;
  const ends = scale.signed ? [scale.middle - scale.limit, scale.middle, scale.middle + scale.limit] : [0, scale.low < 0 ? -scale.limit : scale.limit];
  return html`<p class="legend"><span>${ends.map((end) => html`<span key=${end}>${formatNumber(end)}</span>`)}</span>
    <span class=${scale.signed ? "ramp signed" : "ramp"} aria-hidden="true"></span>
    <span class="muted">${scale.signed ? "solid line: above, dotted: below " + formatNumber(scale.middle) : "stronger: further from 0"}; recorded ${formatNumber(scale.low)} to ${formatNumber(scale.high)}</span></p>`;
}

function Strip({ tokens, columns, column, place }) {
  if (place === null) return html`<div class="strip" role="status"><p class="muted">Point at a token, or focus the text and use the arrow keys, to read its values.</p></div>`;
  const values = Object.entries(columns).filter(([name]) => name !== "mask");
  return html`<div class="strip" role="status">
    <p class="strip-token"><code>${visible(tokens.texts?.[place] ?? "")}</code>
      <span class="muted">position ${place}, id ${tokens.ids[place]}, ${tokens.response[place] ? "sampled" : "not sampled"}</span></p>
    <dl>${values.map(([name, series]) => html`<div key=${name} class=${name === column ? "current" : ""}><dt>${columnTitle(name)}</dt><dd>${formatSigned(series[place])}</dd></div>`)}</dl>
  </div>`;
}

/** Args: tokens of the API; column and onColumn; place (selected position or null) and onPlace; children below the strip. */
export function Tokens({ tokens, column, onColumn, place, onPlace, children }) {
  const columns = useMemo(() => allColumns(tokens), [tokens]);
  const names = Object.keys(columns);
  const shown = names.includes(column) ? column : names[0];
  const scale = useMemo(() => colorScale(shown, columns[shown]), [columns, shown]);
  const [tip, setTip] = useState(null);
  const box = useRef(null);
  useKeys({ c: () => onColumn(names[(names.indexOf(shown) + 1) % names.length]) });
  // The spans are made once per column: moving the selection over thousands of tokens changes two of them by hand.
  const text = useMemo(() => {
    const spans = tokens.ids.map((id, index) => html`<span key=${index} id=${`token-${index}`} role="option" aria-selected="false" class=${tokenClass(columns[shown][index], scale, tokens.response[index])}
      aria-label=${spoken(visible(tokens.texts?.[index] ?? `#${id}`))} data-place=${index} style=${tokenStyle(columns[shown][index], scale)}>${visible(tokens.texts?.[index] ?? `#${id} `)}</span>`);
    if (spans.length <= 4 * PART) return spans;
    return Array.from({ length: Math.ceil(spans.length / PART) }, (_, part) => html`<div key=${`part-${part}`} role="group" aria-label=${`Tokens from ${part * PART}`} class="token-part">${spans.slice(part * PART, (part + 1) * PART)}</div>`);
  }, [tokens, columns, shown, scale]);
  useEffect(() => {
    box.current.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    if (place === null) return;
    const chosen = document.getElementById(`token-${place}`);
    chosen?.setAttribute("aria-selected", "true");
    chosen?.scrollIntoView({ block: "nearest" });
  }, [place, text]);
  const at = (event) => {
    const found = event.target.closest?.("[data-place]");
    return found ? Number(found.dataset.place) : null;
  };
  const press = (event) => {
    const last = tokens.ids.length - 1;
    const start = tokens.response.findIndex(Boolean);
    const next = { ArrowLeft: (place ?? start + 1) - 1, ArrowRight: (place ?? start - 1) + 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    onPlace(Math.max(0, Math.min(last, next)));
  };
  const point = (event) => {
    const found = at(event);
    if (found === null) return setTip(null);
    const frame = box.current.getBoundingClientRect();
    const left = Math.min(event.clientX - frame.left + 12, frame.width - 190);
    return setTip({ place: found, left: Math.max(0, left), top: event.clientY - frame.top + 18 });
  };
  return html`<div class="tokens">
    <div class="toolbar"><label class="field-inline"><span>Colour by</span><select class="input compact" value=${shown} onChange=${(event) => onColumn(event.target.value)}>
      ${names.map((name) => html`<option key=${name} value=${name} selected=${name === shown}>${columnTitle(name)}</option>`)}</select></label>
      <${Legend} name=${shown} scale=${scale} /></div>
    <div class="token-frame">
      <div class="token-text" ref=${box} role="listbox" aria-label="Tokens of the prompt and the completion" tabindex="0" dir="auto"
        aria-activedescendant=${place === null ? null : `token-${place}`} onKeyDown=${press} onMouseMove=${point} onMouseLeave=${() => setTip(null)}
        onClick=${(event) => at(event) !== null && onPlace(at(event))}>${text}</div>
      ${tip && html`<div class="tip" aria-hidden="true" style=${{ left: `${tip.left}px`, top: `${tip.top}px` }}><b>${formatSigned(columns[shown][tip.place])}</b> ${columnTitle(shown)}</div>`}
    </div>
    <${Strip} tokens=${tokens} columns=${columns} column=${shown} place=${place} />
    ${children}
  </div>`;
}
