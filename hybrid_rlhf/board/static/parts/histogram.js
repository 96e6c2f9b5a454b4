/** How the scores and lengths of a step are distributed; the ranges are those of the whole run. */
import { useData } from "../core/api.js";
import { html, useEffect, useRef } from "../core/dom.js";
import { formatNumber, plural } from "../core/format.js";

function Histogram({ title, found }) {
  const highest = Math.max(...found.counts) || 1;
  const total = found.counts.reduce((sum, count) => sum + count, 0);
  const range = (place) => `${formatNumber(found.edges[place])} to ${formatNumber(found.edges[place + 1])}`;
  return html`<figure class="histogram">
    <figcaption>${title}</figcaption>
    <svg viewBox=${`0 0 ${found.counts.length} 100`} preserveAspectRatio="none" role="img" aria-label=${`${title}: ${plural(total, "sample")} from ${formatNumber(found.edges[0])} to ${formatNumber(found.edges.at(-1))}`}>
      ${found.counts.map((count, place) => html`<rect key=${place} x=${place + 0.05} width="0.9" y=${100 - (100 * count) / highest} height=${(100 * count) / highest}><title>${range(place)}: ${plural(count, "sample")}</title></rect>`)}
    </svg>
    <p class="timeline-axis"><span>${formatNumber(found.edges[0])}</span><span>highest ${formatNumber(highest)}</span><span>${formatNumber(found.edges.at(-1))}</span></p>
  </figure>`;
}

/** `total`: of the samples that are indexed; with more of them, the newest step may be another. */
export function Distributions({ run, step, total }) {
  const { data, reload } = useData(`/api/runs/${run.id}/distributions`, { step });
  const seen = useRef(total);
  useEffect(() => {
    if (seen.current !== total) reload();
    seen.current = total;
  }, [total]);
  if (!data || (!data.score && !data.length)) return null;
  return html`<details class="card distributions" open><summary>Scores and lengths of step ${formatNumber(data.step)}</summary>
    <div class="histograms">${data.score && html`<${Histogram} title="Score" found=${data.score} />`}${data.length && html`<${Histogram} title="Length in tokens" found=${data.length} />`}</div>
  </details>`;
}
