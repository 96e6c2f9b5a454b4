/** Samples of a run: filters, a list of any length, or the groups of a step side by side. */
import { useData, useEvents } from "../core/api.js";
import { html, useMemo, useState } from "../core/dom.js";
import { formatNumber, plural } from "../core/format.js";
import { link, setQuery } from "../core/route.js";
import { useChosen, useIndexing, useRuns } from "../core/runs.js";
import { Choice, Empty, ErrorLine, Loading, QueryInput, ViewHead } from "../parts/basic.js";
import { Distributions } from "../parts/histogram.js";
import { Pictures } from "../parts/messages.js";
import { RunPicker } from "../parts/picker.js";
import { SampleCard, SampleRow, count, samplePath } from "../parts/sample_row.js";
import { VirtualList, useNarrow } from "../parts/virtual_list.js";

const RANGES = [["score", "Score"], ["length", "Length"], ["kl", "KL"]];
const SORTS = [["step", "Step"], ["score", "Score"], ["length", "Length"], ["kl", "KL"]];
const FILTERS = ["step", "text", "component", "component_min", "component_max", ...RANGES.flatMap(([key]) => [`${key}_min`, `${key}_max`])];
const ROW_HEIGHT = 76;
const NARROW_ROW_HEIGHT = 144;
const GROUP_ROWS = 100;
/** Steps of a list to choose from; of more, the number is typed. */
const MOST_OPTIONS = 500;

/** The part of the address that the server understands. */
function sampleQuery(query) {
  const kept = {};
  for (const key of FILTERS) if (query[key]) kept[key] = query[key];
  if (!kept.component) {
    delete kept.component_min;
    delete kept.component_max;
  }
  return { ...kept, prompt: query.prompt, sort: query.sort ?? "step", order: query.order ?? "desc" };
}

function Range({ name, title, query }) {
  return html`<fieldset class="range-fields"><legend>${title}</legend>
    <${QueryInput} name=${`${name}_min`} value=${query[`${name}_min`]} label=${`${title} at least`} placeholder="min" type="number" step="any" />
    <span aria-hidden="true">–</span>
    <${QueryInput} name=${`${name}_max`} value=${query[`${name}_max`]} label=${`${title} at most`} placeholder="max" type="number" step="any" />
  </fieldset>`;
}

function Filters({ query, steps, components, groups }) {
  const step = query.step ?? (groups ? String(steps.at(-1) ?? "") : "");
  const active = FILTERS.filter((key) => query[key] && key !== "text" && key !== "step").length;
  const clear = () => setQuery(Object.fromEntries([...FILTERS, "prompt"].map((key) => [key, null])));
  return html`<div class="toolbar filters" role="search" aria-label="Samples">
    <${QueryInput} name="text" value=${query.text} label="Search prompts and completions" placeholder="Search prompts and completions" search />
    <label class="field-inline"><span>Step</span>${steps.length > MOST_OPTIONS
      ? html`<${QueryInput} name="step" value=${query.step} label="Step" placeholder=${groups ? step : "all"} type="number" />`
      : html`<select class="input compact" value=${step} onChange=${(event) => setQuery({ step: event.target.value || null })}>
        ${!groups && html`<option value="">all</option>`}
        ${[...steps].reverse().map((other) => html`<option key=${other} value=${other} selected=${String(other) === step}>${other}</option>`)}
      </select>`}</label>
    ${!groups && html`<label class="field-inline"><span>Sort by</span><select class="input compact" value=${query.sort ?? "step"} onChange=${(event) => setQuery({ sort: event.target.value })}>
      ${SORTS.map(([key, title]) => html`<option key=${key} value=${key} selected=${key === (query.sort ?? "step")}>${title}</option>`)}
    </select></label>
    <${Choice} label="Order" value=${query.order ?? "desc"} options=${[["desc", "High first"], ["asc", "Low first"]]} onChange=${(order) => setQuery({ order })} />`}
    <${Choice} label="Layout" value=${groups ? "groups" : "list"} options=${[["list", "List"], ["groups", "Groups"]]} onChange=${(value) => setQuery({ view: value === "list" ? null : value })} />
    <details class="more-filters" open=${active > 0}><summary>Ranges${active ? ` (${active})` : ""}</summary>
      <div class="ranges">${RANGES.map(([name, title]) => html`<${Range} key=${name} name=${name} title=${title} query=${query} />`)}
        ${components.length > 0 && html`<label class="field-inline"><span>Component</span><select class="input compact" value=${query.component ?? ""} onChange=${(event) => setQuery({ component: event.target.value || null })}>
          <option value="">none</option>${components.map((name) => html`<option key=${name} value=${name} selected=${name === query.component}>${name}</option>`)}
        </select></label>`}
        ${query.component && html`<${Range} name="component" title=${query.component} query=${query} />`}
      </div>
    </details>
    ${(active > 0 || query.text || query.step || query.prompt) && html`<button class="button quiet" onClick=${clear}>Clear</button>`}
  </div>`;
}

/** The samples of one step by group: what the algorithm compared. */
function Groups({ run, query, steps }) {
  const step = query.step ?? String(steps.at(-1) ?? "");
  const [limit, setLimit] = useState(GROUP_ROWS);
  const filter = { ...sampleQuery(query), step, sort: "step", order: "asc", limit };
  const { data, error } = useData(step ? `/api/runs/${run.id}/samples` : null, filter);
  const groups = useMemo(() => {
    const found = new Map();
    for (const row of data?.rows ?? []) {
      const key = row.group ?? row.prompt_key;
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(row);
    }
    return [...found];
  }, [data]);
  if (error) return html`<${ErrorLine} text=${error} />`;
  if (!data) return html`<${Loading} what="groups" />`;
  if (!data.total) return html`<${Empty} title="No sample matches">Widen the ranges or clear the filters.</${Empty}>`;
  const compared = groups.filter(([, rows]) => rows.length > 1);
  const single = groups.filter(([, rows]) => rows.length === 1).map(([, rows]) => rows[0]);
  const loaded = data.rows.length < data.total ? " loaded" : "";
  return html`<p class="result-count" role="status">${count(data.total)} of step ${formatNumber(Number(step))}${compared.length ? ` in ${plural(compared.length, "group")}${loaded}` : ""}${single.length ? `, ${plural(single.length, "prompt")} with one sample${loaded}` : ""}</p>
    ${compared.map(([key, rows]) => {
      const scores = rows.map((row) => row.score).filter((score) => score !== null);
      const best = Math.max(...scores);
      return html`<section class="group" key=${key}>
        <header><h2 dir="auto">${rows[0].prompt_preview || "–"}</h2>
          <span class="muted">${plural(rows.length, "sample")}, scores ${scores.length ? `${formatNumber(Math.min(...scores))} to ${formatNumber(best)}` : "–"}</span>
          <a href=${link("prompt", { run: run.id, key: rows[0].prompt_key })}>All steps</a></header>
        <${Pictures} images=${rows[0].images} of=${samplePath(run.id, rows[0])} />
        <div class="group-cards">${rows.map((row) => html`<${SampleCard} key=${row.index} run=${run.id} row=${row} best=${scores.length > 1 && best > Math.min(...scores) && row.score === best} />`)}</div>
      </section>`;
    })}
    ${single.length > 0 && html`<div class="card sample-list">${single.map((row) => html`<${SampleRow} key=${row.index} run=${run.id} row=${row} />`)}</div>`}
    ${data.rows.length < data.total && limit < 500 && html`<button class="button" onClick=${() => setLimit(Math.min(500, limit + GROUP_ROWS))}>Load more</button>`}`;
}

export function Rollouts({ query }) {
  const { runs, error, loading } = useRuns();
  const [run] = useChosen(runs, (found) => found.has_samples);
  const [revision, setRevision] = useState(0);
  const narrow = useNarrow();
  const facets = useData(run?.has_samples ? `/api/runs/${run.id}/samples` : null, { limit: 1 });
  useEvents("samples", (event) => {
    if (event.run !== run?.id) return;
    setRevision((value) => value + 1);
    facets.reload();
  });
  const filter = useMemo(() => sampleQuery(query), [JSON.stringify(query)]);
  const indexing = useIndexing(facets.data, facets.reload);
  // The server refuses a component that it has not read of yet; without one, the list does not wait for the facets.
  const known = !filter.component || (facets.data && (!indexing || facets.data.components.includes(filter.component)));
  if (loading) return html`<${ViewHead} title="Rollouts" /><${Loading} what="runs" />`;
  const groups = query.view === "groups";
  return html`
    <${ViewHead} title="Rollouts">${run && html`<${RunPicker} runs=${runs.filter((found) => found.has_samples || found.id === run.id)} run=${run} clear=${{ step: null, component: null, prompt: null }} />`}</${ViewHead}>
    <${ErrorLine} text=${error} />
    ${!run?.has_samples ? html`<${Empty} title="No samples here">${run?.samples_problem ?? html`A run records samples every <code>logging.samples_every</code> steps, which is 0 in this one, or it has made no step yet.`}</${Empty}>` : html`
      <${Filters} query=${query} steps=${facets.data?.steps ?? []} components=${facets.data?.components ?? []} groups=${groups} />
      ${facets.data && html`<${Distributions} run=${run} step=${query.step} total=${facets.data.total} />`}
      ${groups && facets.data ? html`<${Groups} run=${run} query=${query} steps=${facets.data.steps} />` : groups || !known ? html`<${ErrorLine} text=${facets.error} />${!facets.error && html`<${Loading} what="samples" />`}` : html`
        <${VirtualList} path=${`/api/runs/${run.id}/samples`} query=${filter} revision=${revision} rowHeight=${narrow ? NARROW_ROW_HEIGHT : ROW_HEIGHT} label="Samples"
          renderRow=${(row) => html`<${SampleRow} run=${run.id} row=${row} />`}>
          ${({ answer, error: listError, shown }) => html`<${ErrorLine} text=${listError} />
            ${((!answer && !listError) || (answer?.total === 0 && answer.indexed < 1)) && html`<${Loading} what="samples" />`}
            ${answer?.total === 0 && answer.indexed >= 1 && html`<${Empty} title="No sample matches">Widen the ranges or clear the filters.</${Empty}>`}
            ${answer && answer.total > 0 && html`<p class="result-count" role="status">${count(answer.total)}${shown < answer.total ? `, the first ${formatNumber(shown)} are listed: filter for the others` : ""}${answer.indexed < 1 ? `, ${Math.floor(100 * answer.indexed)} % read so far` : ""}</p>`}`}
        </${VirtualList}>`}`}`;
}
