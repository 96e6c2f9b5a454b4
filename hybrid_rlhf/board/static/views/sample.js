/** One sample: its messages or its tokens, its score, and what can be done with it. */
import { useData } from "../core/api.js";
import { html } from "../core/dom.js";
import { formatNumber, plural } from "../core/format.js";
import { useKeys } from "../core/keys.js";
import { go, link, setQuery } from "../core/route.js";
import { useIndexing, useRuns } from "../core/runs.js";
import { Choice, Empty, ErrorLine, Fact, Loading, ViewHead } from "../parts/basic.js";
import { Conversation, Message } from "../parts/messages.js";
import { Branch, Replay, Rescore } from "../parts/sample_actions.js";
import { samplePath, shownComponents } from "../parts/sample_row.js";
import { Tokens } from "../parts/tokens.js";

/** The bars have the scale of the whole run, so that those of two samples can be compared. */
function Components({ sample }) {
  const rows = shownComponents(sample);
  if (!rows.length) return null;
  const limit = sample.component_limit || 1;
  return html`<table class="table compact components"><caption>Reward components</caption><tbody>${rows.map(([name, value]) => html`<tr key=${name}>
    <th scope="row">${name}</th><td class="number">${formatNumber(value)}</td>
    <td class="bar-cell" aria-hidden="true"><span class=${`bar ${value < 0 ? "low" : "high"}`} style=${{ width: `${Math.min(50, (50 * Math.abs(value ?? 0)) / limit)}%` }}></span></td>
  </tr>`)}</tbody></table>`;
}

/** The other columns of the prompt's row, which the reward saw. */
function Columns({ columns }) {
  const rows = Object.entries(columns ?? {});
  if (!rows.length) return null;
  return html`<section class="card"><h2>Row</h2><dl class="row-columns">${rows.map(([name, value]) => html`<div key=${name}><dt><code>${name}</code></dt>
    <dd>${typeof value === "string" ? value : JSON.stringify(value)}</dd></div>`)}</dl></section>`;
}

function versions(pairs) {
  if (pairs?.length === 1) return String(Array.isArray(pairs[0]) ? pairs[0][0] : pairs[0]);
  return (pairs ?? []).map((pair) => (Array.isArray(pair) ? `${pair[0]} (${plural(pair[1], "token")})` : String(pair))).join(", ") || "–";
}

function Facts({ sample }) {
  return html`<section class="card"><h2>Score</h2>
    <dl class="facts small">
      <${Fact} name="Score">${formatNumber(sample.score)}</${Fact}>
      <${Fact} name="KL" title="Sum over the completion, in nats">${formatNumber(sample.kl)}</${Fact}>
      <${Fact} name="Length" title="Sampled tokens">${formatNumber(sample.length)}</${Fact}>
      <${Fact} name="Advantage" title="Mean over the tokens">${formatNumber(sample.advantage)}</${Fact}>
      <${Fact} name="Ended by itself">${sample.stopped === null || sample.stopped === undefined ? "–" : sample.stopped ? "yes" : "no, truncated"}</${Fact}>
      <${Fact} name="Weight version">${versions(sample.weight_versions)}</${Fact}>
    </dl>
    <${Components} sample=${sample} />
  </section>`;
}

export function Sample({ query }) {
  const { runs } = useRuns();
  const run = query.run[0];
  const step = Number(query.step);
  const index = Number(query.index);
  const named = run && Number.isInteger(step) && Number.isInteger(index);
  const siblings = useData(named ? `/api/runs/${run}/samples` : null, { step, limit: 1 });
  const indexing = useIndexing(siblings.data, siblings.reload);
  // A sample that has not been indexed yet is asked for later.
  const ready = siblings.data && (!indexing || siblings.data.total > index);
  const { data: sample, error: sampleError, loading: sampleLoading } = useData(ready ? `/api/runs/${run}/samples/${step}/${index}` : null);
  const error = siblings.error ?? sampleError;
  const loading = sampleLoading || (named && !ready && !error);
  const name = runs.find((found) => found.id === run)?.name ?? "run";
  const total = siblings.data?.total ?? 0;
  const tokens = sample?.tokens;
  const place = query.place !== undefined && tokens && Number(query.place) < tokens.ids.length ? Number(query.place) : null;
  const view = tokens && query.view === "tokens" ? "tokens" : "messages";
  const show = (next) => next >= 0 && next < total && go("sample", { ...query, index: next, place: null });
  const look = (next) => setQuery({ view: next === "messages" ? null : next });
  useKeys({ m: () => look("messages"), v: () => tokens && look("tokens"), "[": () => show(index - 1), "]": () => show(index + 1) });
  const head = html`<${ViewHead} title=${`Step ${query.step ?? "–"}, sample ${query.index ?? "–"}`} note=${html`<a href=${link("rollouts", { run, step: query.step })}>${name}</a>`}>
    <button class="button" disabled=${index <= 0} onClick=${() => show(index - 1)} aria-label="Previous sample of the step">←</button>
    <button class="button" disabled=${index + 1 >= total} onClick=${() => show(index + 1)} aria-label="Next sample of the step">→</button>
    ${sample && html`<a class="button" href=${link("prompt", { run, key: sample.prompt_key })}>All answers to this prompt</a>`}
  </${ViewHead}>`;
  if (loading && !sample) return html`${head}<${Loading} what="the sample" />`;
  if (!sample) return html`${head}<${ErrorLine} text=${error} />${!error && html`<${Empty} title="There is no such sample">See the <a href=${link("rollouts", { run })}>rollouts</a>.</${Empty}>`}`;
  const key = `${run} ${step} ${index}`;
  return html`${head}<${ErrorLine} text=${error} />
    <div class="columns sample-columns">
      <div class="sample-main">
        <div class="toolbar"><${Choice} label="Show" value=${view} options=${[["messages", "Messages"], ["tokens", "Tokens"]]} onChange=${look} />
          ${!tokens && html`<span class="muted">No tokens are recorded of this step (<code>logging.tokens</code>).</span>`}</div>
        ${view === "tokens" ? html`<section class="card"><${Tokens} tokens=${tokens} column=${query.column ?? "advantages"} onColumn=${(column) => setQuery({ column })}
            place=${place} onPlace=${(next) => setQuery({ place: next })}>
            <${Branch} key=${key} run=${run} sample=${sample} place=${place} /></${Tokens}></section>`
          : html`<section class="card"><${Conversation} messages=${sample.prompt} images=${sample.images} of=${samplePath(run, sample)}><${Message} role="assistant" text=${sample.completion} /></${Conversation}></section>`}
      </div>
      <aside class="sample-side" aria-label="Score and actions">
        <${Facts} sample=${sample} />
        <${Columns} columns=${sample.columns} />
        <${Rescore} key=${`rescore ${key}`} run=${run} sample=${sample} />
        <${Replay} key=${`replay ${key}`} run=${run} sample=${sample} />
      </aside>
    </div>`;
}
