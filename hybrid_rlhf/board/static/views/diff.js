/** The settings that differ between two runs. */
import { useData } from "../core/api.js";
import { html, useState } from "../core/dom.js";
import { plural } from "../core/format.js";
import { link } from "../core/route.js";
import { useRuns } from "../core/runs.js";
import { Empty, ErrorLine, Loading, Toggle, ViewHead } from "../parts/basic.js";
import { flatConfig } from "./run.js";

const ABSENT = "–";
/** Keys that differ between any two runs and say nothing about them. */
const OF_THE_FOLDER = new Set(["output_dir", "resume"]);

/** [[key, left, right], ...] of two configs. */
export function differences(left, right, all = false) {
  const [first, second] = [left, right].map((config) => new Map(flatConfig(config)));
  const keys = [...new Set([...first.keys(), ...second.keys()])].filter((key) => !OF_THE_FOLDER.has(key));
  return keys.map((key) => [key, first.get(key) ?? ABSENT, second.get(key) ?? ABSENT]).filter(([, a, b]) => all || a !== b);
}

export function Diff({ query }) {
  const { runs, error, loading } = useRuns();
  const [all, setAll] = useState(false);
  const [left, right] = query.run;
  const details = [useData(left && `/api/runs/${left}`), useData(right && `/api/runs/${right}`)];
  const names = query.run.map((id) => runs.find((run) => run.id === id)).map((run) => run?.title ?? run?.name ?? "run");
  const head = html`<${ViewHead} title="Settings of two runs" note=${names.slice(0, 2).join(" and ")}><a class="button" href=${link("curves", { run: query.run })}>Curves</a></${ViewHead}>`;
  if (query.run.length !== 2) return html`${head}<${Empty} title="Two runs are compared">Mark two under <a href=${link("runs")}>Runs</a>.</${Empty}>`;
  const failure = error ?? details[0].error ?? details[1].error;
  if (failure) return html`${head}<${ErrorLine} text=${failure} />`;
  if (loading || !details[0].data || !details[1].data) return html`${head}<${Loading} what="settings" />`;
  const rows = differences(details[0].data.config, details[1].data.config, all);
  return html`${head}
    <div class="toolbar"><${Toggle} label="Equal settings too" value=${all} onChange=${setAll} /><span class="muted toolbar-end">${plural(rows.length, "setting")}</span></div>
    ${rows.length ? html`<div class="card table-card"><table class="table compact diff-table">
      <thead><tr><th scope="col">Key</th>${names.slice(0, 2).map((name, place) => html`<th scope="col" key=${place}>${name}</th>`)}</tr></thead>
      <tbody>${rows.map(([key, a, b]) => html`<tr key=${key} class=${a === b ? "" : "differs"}><th scope="row"><code>${key}</code></th><td data-label=${names[0]}><code>${a}</code></td><td data-label=${names[1]}><code>${b}</code></td></tr>`)}</tbody>
    </table></div>` : html`<${Empty} title="No setting differs">The runs have the same settings, except for their folders.</${Empty}>`}`;
}
