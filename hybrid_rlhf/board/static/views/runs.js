/** All runs below the board's folders, with their last values; the marked ones are compared. */
import { useData } from "../core/api.js";
import { html, useState } from "../core/dom.js";
import { formatAgo, formatNumber, formatSeconds, plural, shortPath } from "../core/format.js";
import { link } from "../core/route.js";
import { useRuns } from "../core/runs.js";
import { Empty, ErrorLine, Loading, State, ViewHead } from "../parts/basic.js";

function Progress({ run }) {
  const { step, total_steps: total } = run;
  const left = run.state === "running" && total > step && run.step_seconds ? (total - step) * run.step_seconds : null;
  if (step === null || step === undefined) return html`<span class="muted">–</span>`;
  return html`<span class="progress-text">${formatNumber(step)}${total ? html`<span class="muted"> / ${formatNumber(total)}</span>` : ""}</span>
    ${total > 0 && html`<span class="progress" aria-hidden="true"><span style=${{ width: `${Math.min(100, (100 * step) / total)}%` }}></span></span>`}
    ${left && html`<span class="muted">about ${formatSeconds(left)} left</span>`}`;
}

/** Title of a column: what it is sorted by. */
const COLUMNS = {
  Run: (run) => (run.title ?? run.name).toLowerCase(),
  State: (run) => run.state,
  Step: (run) => run.step,
  Algorithm: (run) => run.algorithm ?? run.command ?? "",
  Model: (run) => run.model ?? "",
  Seed: (run) => Number(run.seed ?? -1),
  "Last values": (run) => Object.values(run.last ?? {})[0] ?? -Infinity,
  Changed: (run) => run.updated_seconds ?? 0,
};
const compared = (a, b) => (a < b ? -1 : Number(a > b));
const valueName = (name) => (name.startsWith("eval/") ? name.replace("/", " ") : name.split("/").at(-1)).replaceAll("_", " ");

function Row({ run, marked, onMark }) {
  const values = Object.entries(run.last ?? {}).slice(0, 3);
  return html`<tr class=${marked ? "marked" : ""}>
    <td class="cell-mark"><input type="checkbox" checked=${marked} onChange=${onMark} aria-label=${`Compare ${run.name}`} /></td>
    <th scope="row" class="cell-name"><a href=${link("run", { run: run.id })} data-entry>${run.title ?? run.name}</a>
      ${run.title && html`<span class="run-path muted">${run.name}</span>`}
      ${run.problem && html`<span class="problem">${run.problem}</span>`}</th>
    <td data-label="State"><${State} state=${run.state} /></td>
    <td data-label="Step"><${Progress} run=${run} /></td>
    <td data-label="Algorithm">${run.algorithm ?? run.command ?? "–"}</td>
    <td data-label="Model" class="cell-model" title=${run.model}>${shortPath(run.model)}</td>
    <td data-label="Seed" class="number">${run.seed ?? "–"}</td>
    <td data-label="Last values" class="cell-values">${values.length
      ? values.map(([name, value]) => html`<span key=${name} title=${name}><span class="muted">${valueName(name)}</span> ${formatNumber(value)}</span>`)
      : html`<span class="muted">–</span>`}</td>
    <td data-label="Changed">${formatAgo(run.updated_seconds)}</td>
    <td class="cell-links">${run.has_samples && html`<a href=${link("rollouts", { run: run.id })} aria-label=${`Rollouts of ${run.name}`}>Rollouts</a>`}
      <a href=${link("curves", { run: run.id })} aria-label=${`Curves of ${run.name}`}>Curves</a></td>
  </tr>`;
}

/** Links to folders, which are not followed. */
function Linked() {
  const { data } = useData("/api/folders");
  if (!data?.linked.length) return null;
  return html`<details class="note-line"><summary>${plural(data.linked.length, "linked folder")} not shown</summary>
    <p>Links are not followed. To show their runs, give the folders themselves to <code>hybrid-rlhf board</code>:</p>
    <ul>${data.linked.map((path) => html`<li key=${path}><code>${path}</code></li>`)}</ul></details>`;
}

export function Runs() {
  const { runs, error, loading, reload } = useRuns();
  const [marked, setMarked] = useState([]);
  const [text, setText] = useState("");
  const [[column, direction], setOrder] = useState(["Changed", -1]);
  const words = text.toLowerCase().split(/\s+/);
  const textOf = (run) => `${run.title ?? ""} ${run.name} ${run.model} ${run.algorithm} ${run.state}`.toLowerCase();
  const shown = runs.filter((run) => words.every((word) => textOf(run).includes(word))).sort((a, b) => direction * compared(COLUMNS[column](a), COLUMNS[column](b)));
  const order = (name) => setOrder([name, name === column ? -direction : name === "Changed" ? -1 : 1]);
  const mark = (id) => setMarked(marked.includes(id) ? marked.filter((other) => other !== id) : [...marked, id]);
  const training = runs.filter((run) => run.state === "running").length;
  return html`
    <${ViewHead} title="Runs" note=${runs.length ? `${plural(runs.length, "run")}${training ? `, ${training} training now` : ""}` : null}>
      <input class="input" type="search" data-search placeholder="Search: name, model, state" aria-label="Search runs" value=${text} onInput=${(event) => setText(event.target.value)} />
      <a class=${`button primary ${marked.length ? "" : "disabled"}`} aria-disabled=${!marked.length} href=${marked.length ? link("curves", { run: marked }) : null}>
        Compare${marked.length ? ` ${marked.length}` : ""}</a>
      ${marked.length === 2 && html`<a class="button" href=${link("diff", { run: marked })}>Settings diff</a>`}
    </${ViewHead}>
    <${ErrorLine} text=${error} retry=${reload} />
    <${Linked} />
    ${loading && html`<${Loading} what="runs" />`}
    ${!loading && !error && !runs.length && html`<${Empty} title="No runs yet">Start one with <code>hybrid-rlhf train</code> or under <a href=${link("start")}>New run</a>. It appears here with its first step; the <code>log.txt</code> of one that ended before says why.</${Empty}>`}
    ${runs.length > 0 && !shown.length && html`<${Empty} title="No run matches">Nothing has “${text}” in its name, model, algorithm or state.</${Empty}>`}
    ${shown.length > 0 && html`<div class="card table-card"><table class="table runs-table">
      <thead><tr><th scope="col"><span class="visually-hidden">Compare</span></th>
        ${Object.keys(COLUMNS).map((name) => html`<th scope="col" key=${name} aria-sort=${name !== column ? null : direction > 0 ? "ascending" : "descending"}>
          <button class="sort" onClick=${() => order(name)}>${name}</button></th>`)}
        <th scope="col"><span class="visually-hidden">Links</span></th></tr></thead>
      <tbody>${shown.map((run) => html`<${Row} key=${run.id} run=${run} marked=${marked.includes(run.id)} onMark=${() => mark(run.id)} />`)}</tbody>
    </table></div>`}`;
}
