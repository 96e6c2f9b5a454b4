/** One run: its state, where its time and memory go, its settings; stop and resume. */
import { post, useData, useEvents } from "../core/api.js";
import { html, useEffect, useRef, useState } from "../core/dom.js";
import { formatAgo, formatNumber, shortPath } from "../core/format.js";
import { go, link } from "../core/route.js";
import { useChosen, useRuns } from "../core/runs.js";
import { useDraft } from "../core/settings.js";
import { Dialog, Empty, ErrorLine, Fact, Field, Loading, State, ViewHead } from "../parts/basic.js";
import { RunPicker } from "../parts/picker.js";
import { Memory, Timeline } from "../parts/timeline.js";

const PRINTED_MS = 2000;

const isObject = (value) => value !== null && typeof value === "object";

/** A config as flat rows, the way the command line writes keys; the leaves of an item of a list have its place. */
export function flatConfig(config, prefix = "") {
  return Object.entries(config ?? {}).flatMap(([key, value]) => {
    const name = `${prefix}${key}`;
    if (Array.isArray(value) && value.some(isObject)) return value.flatMap((item, place) => (isObject(item) ? flatConfig(item, `${name}[${place}].`) : [[`${name}[${place}]`, String(item)]]));
    return isObject(value) && !Array.isArray(value) ? flatConfig(value, `${name}.`) : [[name, Array.isArray(value) ? JSON.stringify(value) : String(value)]];
  });
}

function Actions({ run, onDone }) {
  const [asked, setAsked] = useState(null);
  const [stopping, setStopping] = useDraft("stopping", null); // the view may be left before the step has ended
  const start = `${run.id} ${run.started_seconds}`;
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const act = async (action) => {
    setBusy(true);
    setError(null);
    try {
      await post(`/api/runs/${run.id}/${action}`, {});
      setStopping(action === "stop" ? start : null);
      onDone();
    } catch (failure) {
      setError(failure.message);
    }
    setBusy(false);
    setAsked(null);
  };
  return html`
    ${run.state === "running" && (stopping === start ? html`<span class="note-inline" role="status">Stopping after this step…</span>`
      : html`<button class="button" disabled=${busy} onClick=${() => setAsked("stop")}>Stop</button>`)}
    ${["stopped", "killed", "broken"].includes(run.state) && run.command && html`<button class="button primary" disabled=${busy} onClick=${() => act("resume")}>Resume</button>`}
    ${asked && html`<${Dialog} title=${`Stop ${run.name}?`} onClose=${() => setAsked(null)}>
      <p>The run writes a checkpoint after the present step and ends. It can be resumed.</p>
      <footer><button class="button" onClick=${() => setAsked(null)}>Keep training</button>
        <button class="button danger" disabled=${busy} onClick=${() => act("stop")}>Stop the run</button></footer>
    </${Dialog}>`}
    <${ErrorLine} text=${error} />`;
}

/** The title and the notes of a run, and its deletion. */
function Marks({ run, notes, onDone }) {
  const [open, setOpen] = useState(null);
  const [title, setTitle] = useState("");
  const [text, setText] = useState("");
  const [typed, setTyped] = useState("");
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const show = (what) => {
    setTitle(run.title ?? "");
    setText(notes);
    setTyped("");
    setError(null);
    setOpen(what);
  };
  const send = async (event, action, content) => {
    event.preventDefault();
    setBusy(true);
    try {
      await post(`/api/runs/${run.id}/${action}`, content);
      setOpen(null);
      if (action === "delete") go("runs");
      else onDone();
    } catch (failure) {
      setError(failure.message);
    }
    setBusy(false);
  };
  return html`<section class="card"><header class="card-head"><h2>Notes</h2>
      <span><button class="button" onClick=${() => show("marks")}>Edit title and notes</button>
      ${run.state !== "running" && html` <button class="button" onClick=${() => show("delete")}>Delete…</button>`}</span></header>
    ${notes ? html`<p class="notes-text">${notes}</p>` : html`<p class="muted">No notes.</p>`}
    ${open === "marks" && html`<${Dialog} title="Title and notes" onClose=${() => setOpen(null)}>
      <form onSubmit=${(event) => send(event, "marks", { title, notes: text })}>
        <${Field} label="Title" hint="Shown in place of the folder's name, which stays."><input class="input" maxlength="200" value=${title} onInput=${(event) => setTitle(event.target.value)} /></${Field}>
        <${Field} label="Notes"><textarea class="input" rows="8" maxlength="20000" value=${text} onInput=${(event) => setText(event.target.value)}></textarea></${Field}>
        <${ErrorLine} text=${error} />
        <footer><button type="button" class="button" onClick=${() => setOpen(null)}>Cancel</button><button class="button primary" disabled=${busy}>Save</button></footer>
      </form></${Dialog}>`}
    ${open === "delete" && html`<${Dialog} title=${`Delete ${run.name}?`} onClose=${() => setOpen(null)}>
      <form onSubmit=${(event) => send(event, "delete", { name: typed })}>
        <p>The folder <code>${run.folder}</code> is deleted, with its models, checkpoints and samples. This cannot be undone.</p>
        <${Field} label=${`Type ${run.name} to confirm`}><input class="input" value=${typed} onInput=${(event) => setTyped(event.target.value)} autocomplete="off" spellcheck=${false} /></${Field}>
        <${ErrorLine} text=${error} />
        <footer><button type="button" class="button" onClick=${() => setOpen(null)}>Keep</button><button class="button danger" disabled=${busy || typed !== run.name}>${busy ? "Deleting…" : "Delete the run"}</button></footer>
      </form></${Dialog}>`}
  </section>`;
}

function Settings({ config }) {
  const [text, setText] = useState("");
  const rows = flatConfig(config).filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(text.toLowerCase()));
  return html`<section class="card">
    <header class="card-head"><h2>Settings</h2>
      <input class="input compact" type="search" data-search placeholder="Search settings" aria-label="Search settings" value=${text} onInput=${(event) => setText(event.target.value)} /></header>
    ${rows.length ? html`<div class="settings" tabindex="0" role="region" aria-label="Settings of the run"><table class="table compact"><thead class="visually-hidden"><tr><th scope="col">Key</th><th scope="col">Value</th></tr></thead>
      <tbody>${rows.map(([key, value]) => html`<tr key=${key}><th scope="row"><code>${key}</code></th><td><code>${value}</code></td></tr>`)}</tbody></table></div>`
      : html`<p class="muted">${text ? "No setting matches." : "The run has no readable config."}</p>`}
  </section>`;
}

/** Files of the run that a browser can show. */
function Files({ run, names }) {
  const shown = ["log.txt", "board.log", "config.yaml", "metrics.jsonl"].filter((name) => names.includes(name));
  if (!shown.length) return null;
  return html`<p class="note-line">Files: ${shown.map((name, place) => html`${place ? ", " : ""}<a key=${name} href=${`/api/runs/${run.id}/files/${name}`} target="_blank" rel="noopener">${name}</a>`)}</p>`;
}

/** The end of what a run has printed, which says what it does before its first step, and why it ended. */
function Printed({ text, file }) {
  const box = useRef(null);
  useEffect(() => { box.current.scrollTop = box.current.scrollHeight; }, [text]);
  return html`<section class="card"><header class="card-head"><h2>Output</h2><span class="hint">The end of <code>${file}</code> in the run's folder.</span></header>
    <pre class="printed" ref=${box} tabindex="0" role="region" aria-label="Output of the run">${text || "Nothing has been printed yet."}</pre></section>`;
}

export function Run({ query }) {
  const { runs, error, loading, reload } = useRuns();
  const [run] = useChosen(runs);
  const detail = useData(run && `/api/runs/${run.id}`);
  const timeline = useData(run && `/api/runs/${run.id}/timeline`);
  useEvents("runs", detail.reload); // the memory plan is computed after the first answer
  useEvents("metrics", (event) => event.run === run?.id && timeline.reload());
  const follows = run?.state === "running" && typeof detail.data?.printed === "string";
  useEffect(() => {
    if (!follows) return undefined;
    const timer = setInterval(detail.reload, PRINTED_MS);
    return () => clearInterval(timer);
  }, [follows, run?.id]);
  if (loading) return html`<${ViewHead} title="Run" /><${Loading} what="the run" />`;
  if (!run || (query.run.length && run.id !== query.run[0])) {
    return html`<${ViewHead} title="Run" /><${ErrorLine} text=${error} /><${Empty} title="There is no such run">It may have been moved or removed. See <a href=${link("runs")}>all runs</a>.</${Empty}>`;
  }
  return html`
    <${ViewHead} title=${run.title ?? run.name} note=${run.folder}>
      <${RunPicker} runs=${runs} run=${run} />
      <a class="button" href=${link("curves", { run: run.id })}>Curves</a>
      ${run.has_samples && html`<a class="button" href=${link("rollouts", { run: run.id })}>Rollouts</a>`}
      ${(detail.data?.files ?? []).includes("report.html") && html`<a class="button" href=${`/api/runs/${run.id}/files/report.html`} target="_blank" rel="noopener">Report</a>`}
      ${run.command && html`<a class="button" href=${link("start", { preset: run.id })}>Clone settings</a>`}
      <${Actions} run=${run} onDone=${reload} />
    </${ViewHead}>
    <${ErrorLine} text=${detail.error ?? run.problem} />
    <${Files} run=${run} names=${detail.data?.files ?? []} />
    <dl class="facts card">
      <${Fact} name="State"><${State} state=${run.state} /></${Fact}>
      <${Fact} name="Step">${formatNumber(run.step)}${run.total_steps ? ` of ${formatNumber(run.total_steps)}` : ""}</${Fact}>
      <${Fact} name="Algorithm">${run.algorithm ?? run.command ?? "–"}</${Fact}>
      <${Fact} name="Model" title=${run.model}>${shortPath(run.model)}</${Fact}>
      <${Fact} name="Seed">${run.seed ?? "–"}</${Fact}>
      <${Fact} name="Changed">${formatAgo(run.updated_seconds)}</${Fact}>
    </dl>
    <div class="columns">
      <section class="card"><header class="card-head"><h2>Time of each step</h2></header>
        <${ErrorLine} text=${timeline.error} />${timeline.data ? html`<${Timeline} timeline=${timeline.data} />` : html`<${Loading} what="the timeline" />`}</section>
      <section class="card"><header class="card-head"><h2>Memory</h2></header>
        ${timeline.data && detail.data ? html`<${Memory} plan=${detail.data.memory_plan} measured=${timeline.data.memory} />` : html`<${Loading} what="the memory" />`}</section>
    </div>
    ${typeof detail.data?.printed === "string" && html`<${Printed} text=${detail.data.printed} file=${detail.data.printed_file} />`}
    ${detail.data ? html`<${Marks} run=${run} notes=${detail.data.notes} onDone=${() => { detail.reload(); reload(); }} />
      <${Settings} config=${detail.data.config} />` : !detail.error && html`<${Loading} what="the settings" />`}`;
}
