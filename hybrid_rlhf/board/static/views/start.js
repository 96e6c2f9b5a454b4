/** A form of a training command's settings, with the command that they are and what it will need, while they are entered. */
import { get, post, useData } from "../core/api.js";
import { html, useEffect, useMemo, useRef, useState } from "../core/dom.js";
import { asContent, asText, changedValues, isOn } from "../core/form.js";
import { formatNumber, formatSeconds, plural } from "../core/format.js";
import { go, setQuery } from "../core/route.js";
import { useDraft } from "../core/settings.js";
import { Choice, ErrorLine, Loading, Toggle, ViewHead } from "../parts/basic.js";

const COMMANDS = [["rl", "RL"], ["sft", "SFT"], ["reward", "Reward model"], ["preference", "Preference"]];
const NAMES = new Map(COMMANDS);
const CHECK_MS = 200;
const ESTIMATE_MS = 600;

/** An answer to values, asked after a pause; `path` null: nothing is asked. */
function useAsked(path, body, pause) {
  const [state, setState] = useState({ answer: null, error: null, loading: false });
  const key = path && JSON.stringify([path, body]);
  useEffect(() => {
    if (!key) {
      setState({ answer: null, error: null, loading: false });
      return undefined;
    }
    const abort = new AbortController();
    setState((old) => ({ ...old, loading: true }));
    const timer = setTimeout(() => post(path, body, abort.signal).then(
      (answer) => setState({ answer, error: null, loading: false }),
      (error) => !abort.signal.aborted && setState({ answer: null, error: error.message, loading: false }),
    ), pause);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [key]);
  return state;
}

function Input({ field, content, wrong, onChange }) {
  const id = `field-${field.key}`;
  const shared = { id, "aria-describedby": `help-${field.key}`, "aria-invalid": wrong ? "true" : null };
  const change = (event) => onChange(event.target.value);
  if (field.type === "bool" || field.type === "section") {
    return html`<input type="checkbox" ...${shared} checked=${content ?? field.default} onChange=${(event) => onChange(event.target.checked)} />`;
  }
  const text = content ?? asText(field.default);
  if (field.type === "choice") {
    return html`<select class="input" ...${shared} value=${text} onChange=${change}>${field.default === null && html`<option value="">–</option>`}
      ${field.choices.map((choice) => html`<option key=${String(choice)} value=${String(choice)} selected=${String(choice) === text}>${String(choice)}</option>`)}</select>`;
  }
  if (field.type === "list" || field.type === "yaml") {
    const placeholder = field.type === "list" ? "one per line: a name, or {key: value}" : "YAML";
    return html`<textarea class="input code" ...${shared} rows=${Math.min(8, Math.max(field.type === "list" ? 2 : 1, text.split("\n").length))} value=${text} spellcheck=${false} placeholder=${placeholder} onInput=${change}></textarea>`;
  }
  const number = field.type === "int" || field.type === "float";
  return html`<input class="input" ...${shared} value=${text} inputmode=${number ? "decimal" : null} spellcheck=${false} placeholder=${field.default === null ? "none" : null} onInput=${change} />`;
}

function FormField({ field, content, changed, problem, onChange }) {
  return html`<div class=${`form-field ${changed ? "changed" : ""}`}>
    <label for=${`field-${field.key}`}><code>${field.key}</code>${changed && html`<span class="tag">changed</span>`}</label>
    <${Input} field=${field} content=${content} wrong=${problem} onChange=${onChange} />
    ${problem && html`<p class="field-problem" role="alert">${problem}</p>`}
    <p class="hint" id=${`help-${field.key}`}>${field.help}</p>
  </div>`;
}

/** What the form can begin with: its defaults, a recipe or an earlier run. */
function PresetSelect({ presets, loading, value, onChoose }) {
  const option = (preset) => html`<option key=${preset.id} value=${preset.id} selected=${preset.id === value} disabled=${Boolean(preset.problem)} title=${preset.problem}>${preset.name} · ${NAMES.get(preset.command) ?? "cannot be read"}</option>`;
  const groups = [["recipe", "Recipes"], ["run", "Earlier runs"]].map(([kind, label]) => [label, presets.filter((preset) => preset.kind === kind)]);
  return html`<label class="field-inline preset"><span>Begin with</span><select class="input" value=${value ?? ""} disabled=${loading} onChange=${(event) => onChoose(event.target.value)}>
    <option value="">${loading ? "loading recipes and runs…" : "the defaults"}</option>
    ${groups.filter(([, members]) => members.length).map(([label, members]) => html`<optgroup key=${label} label=${label}>${members.map(option)}</optgroup>`)}</select></label>`;
}

function Estimate({ ready, answer, error, loading }) {
  return html`<section class="card estimate" aria-live="polite" aria-busy=${loading}><h2>Estimate</h2>
    ${!ready && html`<p class="muted">Memory and speed appear when the settings are complete.</p>`}
    ${loading && html`<p class="job"><span class="spinner" aria-hidden="true"></span><span>Estimating…</span></p>`}
    <${ErrorLine} text=${!loading && (error ?? answer?.problem)} />
    ${!loading && answer?.memory?.length > 0 && html`<table class="table compact"><thead><tr><th scope="col">Phase</th><th scope="col" class="number">GiB</th><th scope="col">Fits</th></tr></thead>
      <tbody>${answer.memory.map((row) => html`<tr key=${row.phase}><th scope="row">${row.phase.replaceAll("_", " ")}</th><td class="number">${formatNumber(row.gib)}</td>
        <td>${row.fits === null || row.fits === undefined ? "–" : html`<span class=${`tag ${row.fits ? "good" : "bad"}`}>${row.fits ? "yes" : "no"}</span>`}</td></tr>`)}</tbody></table>`}
    ${!loading && answer?.step_seconds && html`<p>About ${formatSeconds(answer.step_seconds)} per step.</p>`}
  </section>`;
}

/** The command of the settings, to be copied. */
function Command({ lines }) {
  const text = lines.join(" \\\n    ");
  const shown = useRef(null);
  const [copied, setCopied] = useState(null);
  const copy = async () => {
    getSelection().selectAllChildren(shown.current); // without a secure origin there is no clipboard
    await navigator.clipboard?.writeText(text);
    setCopied(navigator.clipboard ? text : null);
  };
  return html`<section class="card command"><header class="card-head"><h2>Command</h2>
      <button type="button" class="button" onClick=${copy}>${copied === text ? "Copied" : "Copy"}</button></header>
    <pre ref=${shown} tabindex="0" role="region" aria-label="The command that these settings are"><code>${text}</code></pre></section>`;
}

/** Fields by the first word of their keys, those of one group folded while nothing in it is needed. */
function Group({ name, members, open, changed, children }) {
  return html`<details class="card form-group" open=${open}><summary><h2>${name}</h2>
    <span class="muted">${plural(members, "setting")}${changed ? `, ${changed} changed` : ""}</span></summary>${children}</details>`;
}

function Starting({ checked, missing, problem, changed, settings, onStart }) {
  const [state, setState] = useState({ busy: false, error: null });
  useEffect(() => setState({ busy: false, error: null }), [settings]);
  const start = async () => {
    setState({ busy: true, error: null });
    try {
      await onStart();
    } catch (failure) {
      setState({ busy: false, error: failure.message });
    }
  };
  return html`<section class="card"><h2>Start</h2>
    ${missing.length > 0 && html`<p class="hint">Still needed: ${missing.map((key, place) => html`${place ? ", " : ""}<label key=${key} for=${`field-${key}`} class="needed"><code>${key}</code></label>`)}</p>`}
    ${checked && !missing.length && html`<p class="hint">${changed ? `${plural(changed, "setting")} changed.` : "All settings are at their defaults."}</p>`}
    <${ErrorLine} text=${problem} />
    <button class="button primary" disabled=${state.busy || !checked || missing.length > 0 || Boolean(problem)} onClick=${start}>${state.busy ? "Starting…" : "Start the run"}</button>
    <${ErrorLine} text=${state.error} /></section>`;
}

export function Start({ query }) {
  const command = NAMES.has(query.command) ? query.command : "rl";
  const { data, error, loading } = useData("/api/form", { command, algorithm: command === "rl" || command === "preference" ? query.algorithm : null });
  const presets = useData("/api/presets");
  const [draft, setDraft] = useDraft("start", []);
  const contents = useMemo(() => new Map([...draft, ...(query.algorithm ? [["algorithm.name", query.algorithm]] : [])]), [draft, query.algorithm]);
  const setContents = (next) => setDraft([...next]);
  const [preset, setPreset] = useState({ note: null, error: null });
  const [search, setSearch] = useState("");
  const [advanced, setAdvanced] = useState(false);
  const fields = data?.fields ?? [];
  const byKey = useMemo(() => new Map(fields.map((field) => [field.key, field])), [fields]);
  const changed = useMemo(() => new Map(changedValues(fields, contents)), [fields, contents]);
  // The folder is always sent: the default of a later moment would be another one.
  const values = useMemo(() => ({ output_dir: byKey.get("output_dir")?.default, ...Object.fromEntries(changed) }), [byKey, changed]);
  const check = useAsked(fields.length ? "/api/form/check" : null, { command, values }, CHECK_MS);
  const ready = Boolean(check.answer && !check.answer.problem && !check.answer.missing.includes("model.path"));
  const estimate = useAsked(ready ? "/api/form/estimate" : null, { command, values }, ESTIMATE_MS);
  const problem = check.error ?? check.answer?.problem;
  const wrong = byKey.has(check.answer?.key) ? check.answer.key : null;

  useEffect(() => {
    if (!query.preset) return undefined;
    let current = true;
    get(`/api/presets/${encodeURIComponent(query.preset)}`).then(
      (found) => {
        if (!current) return;
        setContents(new Map(Object.entries(found.values).map(([key, value]) => [key, asContent(value)])));
        setPreset({ note: found.note, error: null });
        setQuery({ command: found.command, algorithm: found.values["algorithm.name"] ?? null });
      },
      (failure) => current && setPreset({ note: null, error: failure.message }),
    );
    return () => { current = false; };
  }, [query.preset]);

  const restart = (next, kept = []) => {
    setContents(new Map(kept));
    setPreset({ note: null, error: null });
    setQuery({ algorithm: null, preset: null, ...next });
  };
  const others = () => [...contents].filter(([key]) => !key.startsWith("algorithm."));
  const change = (field) => (content) => {
    setContents(new Map([...contents, [field.key, content]]));
    if (field.key === "algorithm.name") setQuery({ algorithm: content });
  };
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const unused = fields.filter((field) => field.type === "section" && !isOn(field, contents)).map((field) => `${field.key}.`);
  const isShown = (field) => {
    if (words.length) return words.every((word) => `${field.key} ${field.help}`.toLowerCase().includes(word));
    if (changed.has(field.key) || field.key === wrong) return true;
    return (advanced || !field.advanced) && !unused.some((prefix) => field.key.startsWith(prefix));
  };
  const shown = fields.filter(isShown);
  const isFirst = (field) => field.required || field.key === "algorithm.name";
  const first = shown.filter(isFirst);
  const groups = Map.groupBy(shown.filter((field) => !isFirst(field)), (field) => (field.key.includes(".") || field.type === "section" ? field.key.split(".")[0] : "general"));
  const row = (field) => html`<${FormField} key=${`${command} ${field.key}`} field=${field} content=${contents.get(field.key)} changed=${changed.has(field.key)}
    problem=${field.key === wrong ? check.answer.problem : null} onChange=${change(field)} />`;
  return html`
    <${ViewHead} title="New run"><${Choice} label="Command" value=${command} options=${COMMANDS} onChange=${(next) => restart({ command: next }, others())} /></${ViewHead}>
    <${ErrorLine} text=${error ?? presets.error ?? preset.error} />
    ${loading && !fields.length && html`<${Loading} what="the form" />`}
    ${fields.length > 0 && html`<div class="columns start-columns"><div>
      <div class="toolbar"><${PresetSelect} presets=${presets.data ?? []} loading=${presets.loading} value=${query.preset} onChoose=${(id) => (id ? setQuery({ preset: id }) : restart({}))} />
        <input class="input" type="search" data-search placeholder="Search settings" aria-label="Search settings" value=${search} onInput=${(event) => setSearch(event.target.value)} />
        <${Toggle} label="All settings" value=${advanced} onChange=${setAdvanced} /></div>
      ${preset.note && html`<pre class="card preset-note">${preset.note}</pre>`}
      ${first.length > 0 && html`<section class="card form-first" aria-label="Required settings">${first.map(row)}</section>`}
      ${[...groups].map(([group, members]) => html`<${Group} key=${`${command} ${group}`} name=${group} members=${members.length} changed=${members.filter((field) => changed.has(field.key)).length}
        open=${words.length > 0 || advanced || members.some((field) => changed.has(field.key) || field.key === wrong)}>${members.map(row)}</${Group}>`)}
      ${!shown.length && html`<p class="muted">No setting matches.</p>`}
    </div><aside class="start-side" aria-label="Command, estimate and start">
      <${Starting} checked=${Boolean(check.answer)} missing=${check.answer?.missing ?? []} problem=${wrong ? `See ${wrong}.` : problem} changed=${changed.size} settings=${JSON.stringify([command, values])}
        onStart=${async () => {
          const { run } = await post("/api/runs", { command, values });
          setContents(new Map());
          go("run", { run });
        }} />
      <${Estimate} ready=${ready} ...${estimate} />
      ${check.answer?.command && html`<${Command} lines=${check.answer.command} />`}</aside></div>`}`;
}
