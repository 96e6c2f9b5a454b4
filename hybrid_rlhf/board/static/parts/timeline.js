/** Where the time of each step went: a bar per step, stacked by phase, and the shares of the phases as a table. */
import { html, useState } from "../core/dom.js";
import { formatNumber, formatSeconds } from "../core/format.js";
import { buckets, mean } from "../core/numbers.js";

const MOST_BARS = 160;

const phaseTitle = (name) => name.replaceAll("_", " ");

/** Phases by their share of the time, the largest first, with one mean per bar. */
function stacked({ steps, phases }) {
  const parts = buckets(steps.length, MOST_BARS);
  const rows = Object.entries(phases).map(([name, seconds]) => ({
    name,
    total: seconds.reduce((sum, value) => sum + (value ?? 0), 0),
    bars: parts.map(([first, end]) => Math.max(0, mean(seconds.slice(first, end)) ?? 0)),
  }));
  rows.sort((a, b) => b.total - a.total);
  const labels = parts.map(([first, end]) => (end - first > 1 ? `steps ${steps[first]} to ${steps[end - 1]}` : `step ${steps[first]}`));
  return { rows, labels };
}

export function Timeline({ timeline }) {
  const [place, setPlace] = useState(null);
  const { rows, labels } = stacked(timeline);
  if (!labels.length || !rows.length) return html`<p class="muted">No step has been timed yet.</p>`;
  const heights = labels.map((_, bar) => rows.reduce((sum, row) => sum + row.bars[bar], 0));
  const highest = Math.max(...heights) || 1;
  const whole = rows.reduce((sum, row) => sum + row.total, 0) || 1;
  const move = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    setPlace(Math.max(0, Math.min(labels.length - 1, (place ?? (by > 0 ? -1 : labels.length)) + by)));
  };
  const hover = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    setPlace(Math.min(labels.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * labels.length))));
  };
  const rects = labels.flatMap((label, bar) => {
    let bottom = 100;
    return rows.map((row, index) => {
      const height = (100 * row.bars[bar]) / highest;
      bottom -= height;
      return html`<rect key=${`${label} ${row.name}`} class=${`phase-${index % 8}`} x=${bar} y=${bottom} width="0.86" height=${height} />`;
    });
  });
  return html`<div class="timeline">
    <svg viewBox=${`0 0 ${labels.length} 100`} preserveAspectRatio="none" role="img" tabindex="0" onKeyDown=${move} onMouseMove=${hover}
      onMouseLeave=${() => setPlace(null)} onBlur=${() => setPlace(null)}
      aria-label=${`Seconds of each phase, ${labels[0]} to ${labels.at(-1)}; the longest step took ${formatSeconds(highest)}`}>
      ${rects}${place !== null && html`<rect class="timeline-cursor" x=${place} y="0" width="0.86" height="100" />`}
    </svg>
    <p class="timeline-axis"><span>${labels[0]}</span><span>highest ${formatSeconds(highest)}</span><span>${labels.at(-1)}</span></p>
    <table class="table compact">
      <thead><tr><th scope="col">Phase</th><th scope="col" class="number">Share</th><th scope="col" class="number">${place === null ? "Mean" : labels[place]}</th></tr></thead>
      <tbody>${rows.map((row, index) => html`<tr key=${row.name}><th scope="row"><span class=${`swatch phase-${index % 8}`} aria-hidden="true"></span>${phaseTitle(row.name)}</th>
        <td class="number">${formatNumber(Math.round((1000 * row.total) / whole) / 10)} %</td>
        <td class="number">${formatSeconds(place === null ? row.total / timeline.steps.length : row.bars[place])}</td></tr>`)}</tbody>
    </table>
  </div>`;
}

/** What was measured next to what was planned, GiB per phase. */
export function Memory({ plan, measured }) {
  const peaks = Object.fromEntries(Object.entries(measured ?? {}).map(([name, values]) => [name, Math.max(...values.filter((value) => value !== null))]));
  const names = [...new Set([...Object.keys(plan ?? {}), ...Object.keys(peaks)])];
  const highest = Math.max(...Object.values(plan ?? {}), ...Object.values(peaks)) || 1;
  if (!names.length) return html`<p class="muted">The run has no memory plan and measured no memory.</p>`;
  const bar = (value, kind) => html`<span class="memory-track" aria-hidden="true">${Number.isFinite(value) && html`<span class=${kind} style=${{ width: `${(100 * value) / highest}%` }}></span>`}</span>`;
  const gib = (value) => (Number.isFinite(value) ? `${formatNumber(value)} GiB` : "–");
  return html`<p class="hint">The plan is an upper bound: it has the longest rows that the settings allow.</p>
  <table class="table compact memory">
    <thead><tr><th scope="col">Phase</th><th scope="col">Planned</th><th scope="col">Measured peak</th></tr></thead>
    <tbody>${names.map((name) => html`<tr key=${name}><th scope="row">${phaseTitle(name)}</th>
      <td>${bar(plan?.[name], "planned")}<span class="memory-value">${gib(plan?.[name])}</span></td>
      <td>${bar(peaks[name], "measured")}<span class="memory-value">${gib(peaks[name])}</span></td></tr>`)}</tbody>
  </table>`;
}
