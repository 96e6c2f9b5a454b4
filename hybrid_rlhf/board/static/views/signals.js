/** What looks wrong in the chosen runs, with the evidence. */
import { get, useEvents } from "../core/api.js";
import { html, useEffect, useState } from "../core/dom.js";
import { formatNumber } from "../core/format.js";
import { link } from "../core/route.js";
import { useChosen, useRuns } from "../core/runs.js";
import { Empty, ErrorLine, Loading, ViewHead } from "../parts/basic.js";
import { RunsPicker } from "../parts/picker.js";
import { sampleLink } from "../parts/sample_row.js";

function useSignals(runs) {
  const [state, setState] = useState({ key: null, signals: null, error: null });
  const [round, setRound] = useState(0);
  const key = runs.map((run) => run.id).join(",");
  useEvents("samples", ({ run }) => key.includes(run) && setRound((count) => count + 1));
  useEffect(() => {
    let current = true;
    Promise.all(runs.map(async (run) => (await get(`/api/runs/${run.id}/signals`)).map((signal) => ({ ...signal, run })))).then(
      (found) => current && setState({ key, signals: found.flat(), error: null }),
      (error) => current && setState({ key, signals: null, error: error.message }),
    );
    return () => { current = false; };
  }, [key, round]);
  return state.key === key ? state : { signals: null, error: null }; // those of other runs are not shown
}

function Evidence({ run, item }) {
  if (item.index !== undefined && item.step !== undefined) return html`<li><a href=${sampleLink(run.id, item)}>Step ${formatNumber(item.step)}, sample ${item.index}</a></li>`;
  return html`<li><span class="muted">${item.label}</span> <b>${formatNumber(item.value)}</b></li>`;
}

function Signal({ signal, several }) {
  return html`<article class=${`card signal signal-${signal.severity}`}>
    <header><span class=${`tag ${signal.severity === "alert" ? "bad" : "warn"}`}>${signal.severity}</span><h2>${signal.name.replaceAll("_", " ")}</h2>
      <span class="muted">${several ? `${signal.run.name}, ` : ""}${signal.first_step < signal.step ? `steps ${formatNumber(signal.first_step)} to ${formatNumber(signal.step)}` : `step ${formatNumber(signal.step)}`}</span></header>
    <p>${signal.what}</p>
    <ul class="evidence">${signal.evidence.map((item, place) => html`<${Evidence} key=${place} run=${signal.run} item=${item} />`)}
      <li><a href=${link("curves", { run: signal.run.id })}>Curves</a></li>
      ${signal.run.has_samples && html`<li><a href=${link("rollouts", { run: signal.run.id, step: signal.step })}>Rollouts of the step</a></li>`}</ul>
    <p class="hint">Rule: ${signal.source}</p>
  </article>`;
}

export function Signals() {
  const { runs, error: listError, loading } = useRuns();
  const chosen = useChosen(runs, (run) => run.step > 0);
  const { signals, error } = useSignals(chosen);
  const order = { alert: 0, warning: 1 };
  const sorted = [...(loading ? [] : signals ?? [])].sort((a, b) => order[a.severity] - order[b.severity] || b.step - a.step);
  return html`
    <${ViewHead} title="Signals" note="Patterns that often precede a failed run. Each is a reason to look, not a verdict."><${RunsPicker} runs=${runs} chosen=${chosen} /></${ViewHead}>
    <${ErrorLine} text=${listError ?? error} />
    ${(loading || !signals) && !error && html`<${Loading} what="signals" />`}
    ${!loading && signals && !sorted.length && html`<${Empty} title="Nothing stands out">No rule is met in the metrics and samples so far.</${Empty}>`}
    <div class="signals" aria-live="polite">${sorted.map((signal, place) => html`<${Signal} key=${place} signal=${signal} several=${chosen.length > 1} />`)}</div>`;
}
