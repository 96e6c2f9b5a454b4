/** One prompt: how it was answered in all steps and runs. */
import { useData } from "../core/api.js";
import { html, useMemo } from "../core/dom.js";
import { formatNumber, plural } from "../core/format.js";
import { band } from "../core/numbers.js";
import { link } from "../core/route.js";
import { useRuns } from "../core/runs.js";
import { Empty, ErrorLine, Loading, ViewHead } from "../parts/basic.js";
import { Chart } from "../parts/chart.js";
import { Conversation } from "../parts/messages.js";
import { SampleCard, samplePath } from "../parts/sample_row.js";

/** Rows by run and step: [[run, [[step, rows], ...]], ...]. */
function byRunAndStep(rows) {
  const found = new Map();
  for (const row of [...rows].sort((a, b) => a.step - b.step || a.index - b.index)) {
    if (!found.has(row.run)) found.set(row.run, new Map());
    const steps = found.get(row.run);
    if (!steps.has(row.step)) steps.set(row.step, []);
    steps.get(row.step).push(row);
  }
  return [...found].map(([run, steps]) => [run, [...steps]]);
}

/** Mean score by step with the band of the samples. */
function scoreCurves(found, nameOf) {
  return found.flatMap(([run, steps], color) => {
    const scored = steps.map(([step, rows]) => [step, rows.map((row) => row.score).filter((score) => score !== null)]).filter(([, scores]) => scores.length);
    if (!scored.length) return [];
    const most = Math.max(...scored.map(([, scores]) => scores.length));
    const x = scored.map(([step]) => step);
    const lines = Array.from({ length: most }, (_, place) => ({ x, y: scored.map(([, scores]) => scores[place] ?? scores[0]) }));
    return [{ label: nameOf(run), color, ...(most > 1 ? band(lines) : lines[0]) }];
  });
}

export function Prompt({ query }) {
  const { runs } = useRuns();
  const { data, error, loading } = useData(query.key ? `/api/prompts/${query.key}` : null);
  const names = new Map(runs.map((run) => [run.id, run.name]));
  const nameOf = (run) => names.get(run) ?? run;
  const found = useMemo(() => byRunAndStep(data?.rows ?? []), [data]);
  const curves = useMemo(() => scoreCurves(found, nameOf), [found, runs.length]);
  const back = html`<a class="button" href=${link("rollouts", { run: query.run })}>Rollouts</a>`;
  if (loading && !data) return html`<${ViewHead} title="Prompt">${back}</${ViewHead}><${Loading} what="the prompt" />`;
  if (!data?.rows?.length) {
    return html`<${ViewHead} title="Prompt">${back}</${ViewHead}><${ErrorLine} text=${error} />${!error && html`<${Empty} title="There is no such prompt">No run below the board's folders has samples of it.</${Empty}>`}`;
  }
  return html`
    <${ViewHead} title="Prompt" note=${`${plural(data.rows.length, "sample")} in ${plural(found.length, "run")}`}>${back}</${ViewHead}>
    <section class="card"><${Conversation} messages=${data.prompt} images=${data.rows[0].images} of=${samplePath(data.rows[0].run, data.rows[0])} /></section>
    ${curves.some((curve) => curve.x.length > 1) && html`<section class="card chart-card"><${Chart} title="score" curves=${curves} /></section>`}
    ${found.map(([run, steps]) => html`<section key=${run}><h2 class="section-title">${nameOf(run)}</h2>
      ${steps.map(([step, rows]) => html`<div class="group" key=${step}><header><h3>Step ${formatNumber(step)}</h3></header>
        <div class="group-cards">${rows.map((row) => html`<${SampleCard} key=${row.index} run=${run} row=${row} />`)}</div></div>`)}
    </section>`)}`;
}
