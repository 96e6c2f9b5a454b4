/** A form of a training command's settings, with what they will need, checked while they are entered. */
import { post, useData } from "../core/api.js";
import { html, useEffect, useMemo, useState } from "../core/dom.js";
import { formatNumber, formatSeconds, plural } from "../core/format.js";
import { go, setQuery } from "../core/route.js";
import { Choice, ErrorLine, Field, Loading, Toggle, ViewHead } from "../parts/basic.js";

const COMMANDS = [["rl", "RL"], ["sft", "SFT"], ["reward", "Reward model"], ["preference", "Preference"]];
const ESTIMATE_MS = 600;

const asText = (value) => (value === null || value === undefined ? "" : Array.isArray(value) ? value.join("\n") : String(value));

/** What a field's text means to the server; undefined: left at its default. */
function parsed(field, text) {
  if (field.type === "bool" || text === undefined) return text;
  if (text === asText(field.default)) return undefined;
  if (text.trim() === "") return field.type === "list" ? [] : null;
  if (field.type === "list") return text.split("\n").map((line) => line.trim()).filter(Boolean);
  if ((field.type === "int" || field.type === "float") && Number.isFinite(Number(text))) return Number(text);
  return text;
}

/** The values that differ from the defaults. */
function changedValues(fields, texts) {
  const known = new Map(fields.map((field) => [field.key, field]));
  const found = Object.entries(texts).flatMap(([key, text]) => {
    const value = known.has(key) ? parsed(known.get(key), text) : undefined;
    return value === undefined || value === known.get(key).default ? [] : [[key, value]];
  });
  return Object.fromEntries(found);
}

function Input({ field, text, onText }) {
  const shared = { class: "input", value: text ?? asText(field.default), "aria-describedby": `help-${field.key}` };
  const change = (event) => onText(event.target.value);
  if (field.type === "bool") {
    return html`<input type="checkbox" id=${`field-${field.key}`} checked=${text ?? field.default} aria-describedby=${`help-${field.key}`} onChange=${(event) => onText(event.target.checked)} />`;
  }
  if (field.type === "choice") {
    return html`<select ...${shared} id=${`field-${field.key}`} onChange=${change}>${field.default === null && html`<option value="">–</option>`}
      ${field.choices.map((choice) => html`<option key=${String(choice)} value=${String(choice)} selected=${String(choice) === shared.value}>${String(choice)}</option>`)}</select>`;
  }
  if (field.type === "list") return html`<textarea ...${shared} id=${`field-${field.key}`} rows="2" placeholder="one per line" onInput=${change}></textarea>`;
  const number = field.type === "int" || field.type === "float";
  return html`<input ...${shared} id=${`field-${field.key}`} inputmode=${number ? "decimal" : null} spellcheck=${false} placeholder=${field.default === null ? "none" : null} onInput=${change} />`;
}

function FormField({ field, text, onText, changed }) {
  return html`<div class=${`form-field ${changed ? "changed" : ""}`}>
    <label for=${`field-${field.key}`}><code>${field.key}</code>${changed && html`<span class="tag">changed</span>`}</label>
    <${Input} field=${field} text=${text} onText=${onText} />
    <p class="hint" id=${`help-${field.key}`}>${field.help}</p>
  </div>`;
}

/** The server's estimate of the values, asked after a pause. */
function useEstimate(command, values) {
  const [state, setState] = useState({ estimate: null, error: null, loading: false });
  const key = JSON.stringify([command, values]);
  useEffect(() => {
    const abort = new AbortController();
    setState((old) => ({ ...old, loading: true }));
    const timer = setTimeout(() => post("/api/form/estimate", { command, values }, abort.signal).then(
      (estimate) => setState({ estimate, error: null, loading: false }),
      (error) => !abort.signal.aborted && setState({ estimate: null, error: error.message, loading: false }),
    ), ESTIMATE_MS);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [key]);
  return state;
}

function Estimate({ estimate, error, loading }) {
  return html`<section class="card estimate" aria-live="polite" aria-busy=${loading}><h2>Estimate</h2>
    <${ErrorLine} text=${error} />
    ${estimate?.problem && html`<div class="error-line"><p>${estimate.problem}</p></div>`}
    ${estimate?.memory?.length > 0 && html`<table class="table compact"><thead><tr><th scope="col">Phase</th><th scope="col" class="number">GiB</th><th scope="col">Fits</th></tr></thead>
      <tbody>${estimate.memory.map((row) => html`<tr key=${row.phase}><th scope="row">${row.phase.replaceAll("_", " ")}</th><td class="number">${formatNumber(row.gib)}</td>
        <td>${row.fits === null || row.fits === undefined ? "–" : html`<span class=${`tag ${row.fits ? "good" : "bad"}`}>${row.fits ? "yes" : "no"}</span>`}</td></tr>`)}</tbody></table>`}
    ${estimate?.step_seconds && html`<p>About ${formatSeconds(estimate.step_seconds)} per step.</p>`}
    ${!estimate && !error && html`<p class="muted">Estimating…</p>`}
    ${estimate && !estimate.problem && !estimate.memory?.length && html`<p class="muted">The settings are valid.</p>`}
  </section>`;
}

export function Start({ query }) {
  const command = COMMANDS.some(([key]) => key === query.command) ? query.command : "rl";
  const { data, error, loading } = useData("/api/form", { command, algorithm: command === "rl" ? query.algorithm : null });
  const [texts, setTexts] = useState({});
  const [search, setSearch] = useState("");
  const [advanced, setAdvanced] = useState(false);
  const [state, setState] = useState({ busy: false, error: null });
  const fields = data?.fields ?? [];
  const values = useMemo(() => changedValues(fields, texts), [fields, texts]);
  const estimate = useEstimate(command, values);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = fields.filter((field) => (words.length ? words.every((word) => `${field.key} ${field.help}`.toLowerCase().includes(word)) : advanced || !field.advanced || field.key in values));
  const groups = Map.groupBy(shown, (field) => (field.key.includes(".") ? field.key.split(".")[0] : "general"));
  const start = async () => {
    setState({ busy: true, error: null });
    try {
      const { run } = await post("/api/runs", { command, values });
      go("run", { run });
    } catch (failure) {
      setState({ busy: false, error: failure.message });
    }
  };
  const change = (field) => (text) => {
    setTexts({ ...texts, [field.key]: text });
    if (field.key === "algorithm.name") setQuery({ algorithm: text });
  };
  return html`
    <${ViewHead} title="New run"><${Choice} label="Command" value=${command} options=${COMMANDS} onChange=${(next) => { setTexts({}); setQuery({ command: next, algorithm: null }); }} /></${ViewHead}>
    <${ErrorLine} text=${error} />
    ${loading && !fields.length && html`<${Loading} what="the form" />`}
    ${fields.length > 0 && html`<div class="columns start-columns"><div>
      <div class="toolbar"><input class="input" type="search" data-search placeholder="Search settings" aria-label="Search settings" value=${search} onInput=${(event) => setSearch(event.target.value)} />
        <${Toggle} label="All settings" value=${advanced} onChange=${setAdvanced} /><span class="muted toolbar-end">${plural(shown.length, "setting")} of ${fields.length}</span></div>
      ${[...groups].map(([group, members]) => html`<section class="card" key=${group}><h2>${group}</h2>
        ${members.map((field) => html`<${FormField} key=${`${command} ${field.key}`} field=${field} text=${texts[field.key]} onText=${change(field)} changed=${field.key in values} />`)}</section>`)}
    </div><aside class="start-side" aria-label="Estimate and start"><${Estimate} ...${estimate} />
      <section class="card"><h2>Start</h2><p class="hint">${Object.keys(values).length ? `${plural(Object.keys(values).length, "setting")} changed.` : "All settings are at their defaults."}</p>
        <button class="button primary" disabled=${state.busy || Boolean(estimate.estimate?.problem)} onClick=${start}>${state.busy ? "Starting…" : "Start the run"}</button>
        <${ErrorLine} text=${state.error} /></section></aside></div>`}`;
}
