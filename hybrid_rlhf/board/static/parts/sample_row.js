/** A sample in a list, and its numbers. */
import { html } from "../core/dom.js";
import { formatNumber, plural } from "../core/format.js";
import { link } from "../core/route.js";

/** The address of a sample. */
export const samplePath = (run, row) => `/api/runs/${run}/samples/${row.step}/${row.index}`;

export const sampleLink = (run, row, more = {}) => link("sample", { run, step: row.step, index: row.index, ...more });

/** [[name, value], ...] of the reward components, unless the only one repeats the score. */
export function shownComponents(row) {
  const components = Object.entries(row.components ?? {});
  return components.length === 1 && components[0][1] === row.score ? [] : components;
}

export function SampleNumbers({ row }) {
  const components = shownComponents(row);
  return html`<span class="numbers">
    <span><span class="muted">score</span> <b>${formatNumber(row.score)}</b></span>
    <span><span class="muted">KL</span> ${formatNumber(row.kl)}</span>
    <span><span class="muted">length</span> ${formatNumber(row.length)}</span>
    ${components.slice(0, 3).map(([name, value]) => html`<span key=${name} class="component"><span class="muted">${name}</span> ${formatNumber(value)}</span>`)}
    ${row.stopped === false && html`<span class="tag" title="The completion reached the length limit">truncated</span>`}
  </span>`;
}

export function SampleRow({ run, row }) {
  return html`<a class="sample-row" data-entry href=${sampleLink(run, row)}>
    <span class="sample-place">step ${formatNumber(row.step)}<span class="muted"> · ${row.index}</span></span>
    <span class="sample-texts"><span class="sample-prompt" dir="auto">${row.prompt_preview || "–"}</span>
      <span class="sample-completion" dir="auto">${row.completion_preview || html`<span class="muted">(empty)</span>`}</span></span>
    <${SampleNumbers} row=${row} />
  </a>`;
}

export function SampleCard({ run, row, title, best }) {
  return html`<a class=${`sample-card ${best ? "best" : ""}`} data-entry href=${sampleLink(run, row)}>
    <span class="sample-place">${title ?? `sample ${row.index}`}${best && html` <span class="tag good">best</span>`}</span>
    <span class="sample-completion" dir="auto">${row.completion_preview || html`<span class="muted">(empty)</span>`}</span>
    <${SampleNumbers} row=${row} />
  </a>`;
}

export function count(total) {
  return plural(total, "sample");
}
