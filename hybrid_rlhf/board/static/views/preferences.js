/** Which of two answers is better, asked blind; the judgements become training data of a reward model. */
import { get, post, useData } from "../core/api.js";
import { html, useEffect, useRef, useState } from "../core/dom.js";
import { formatNumber, plural } from "../core/format.js";
import { useKeys } from "../core/keys.js";
import { link, setQuery } from "../core/route.js";
import { useChosen, useRuns } from "../core/runs.js";
import { useDraft, useSetting } from "../core/settings.js";
import { Choice, Dialog, Empty, ErrorLine, Field, Loading, ViewHead } from "../parts/basic.js";
import { Conversation } from "../parts/messages.js";
import { ModelSelect, RunsPicker } from "../parts/picker.js";
import { SAMPLING } from "./chat.js";

const MOST_RUNS = 2;
const CHOICES = { 1: "left", 2: "right", 0: "equal" };

/** The pair that is shown: `ask` gets one, and is called again when `key` changes; null: there is nothing to ask. */
function usePair(key, ask) {
  const [state, setState] = useState({ pair: null, error: null, loading: Boolean(key) });
  const current = useRef(key);
  current.current = key;
  const show = async (get) => {
    setState((old) => ({ ...old, loading: true, error: null }));
    try {
      const pair = await get();
      if (current.current === key) setState({ pair, error: null, loading: false });
    } catch (error) {
      if (current.current === key) setState({ pair: null, error: error.message, loading: false });
    }
  };
  const next = () => show(ask);
  useEffect(() => {
    setState({ pair: null, error: null, loading: Boolean(key) });
    if (key) next();
  }, [key]);
  return { ...state, show, next, fail: (error) => setState((old) => ({ ...old, error: error.message, loading: false })) };
}

/** Which models answer the prompts of which data. */
function Asked({ models, query, prompts, onPrompts }) {
  const chosen = query.model;
  const choose = (place) => (path) => setQuery({ model: place ? [chosen[0] ?? models[0]?.path, path] : [path, chosen[1]].filter(Boolean) });
  return html`<div class="toolbar"><${ModelSelect} models=${models} value=${chosen[0] ?? models[0]?.path} label="Model" onChange=${choose(0)} />
    <${ModelSelect} models=${models} value=${chosen[1]} label="and" optional onChange=${choose(1)} />
    <label class="field-inline prompts-of"><span>answer prompts of</span><input class="input" value=${prompts} placeholder="rows.jsonl" onChange=${(event) => onPrompts(event.target.value)} /></label></div>`;
}

/** Starts from the model of the judged run, as its reward model did. */
function Train({ base, onClose }) {
  const models = useData("/api/models");
  const [model, setModel] = useState(base ?? "");
  const [folder, setFolder] = useState("reward_from_preferences");
  const [state, setState] = useState({ busy: false, error: null, run: null });
  const train = async (event) => {
    event.preventDefault();
    setState({ busy: true, error: null, run: null });
    try {
      const { run } = await post("/api/preferences/train", { model, output_dir: folder, options: {} });
      setState({ busy: false, error: null, run });
    } catch (error) {
      setState({ busy: false, error: error.message, run: null });
    }
  };
  return html`<${Dialog} title="Train a reward model" onClose=${onClose}><form onSubmit=${train}>
    <p>The judgements that name a better answer become preference pairs. A batch has 32 of them, or half of them where there are fewer than 64.</p>
    <${Field} label="Start from" hint="A model below the board's folders, or another path or name.">
      <input class="input" list="models" required value=${model} onInput=${(event) => setModel(event.target.value)} />
      <datalist id="models">${(models.data ?? []).map((found) => html`<option key=${found.path} value=${found.path}>${found.name}</option>`)}</datalist></${Field}>
    <${Field} label="Output folder"><input class="input" required value=${folder} onInput=${(event) => setFolder(event.target.value)} /></${Field}>
    <${ErrorLine} text=${state.error ?? models.error} />
    ${state.run && html`<p role="status">Started. <a href=${link("run", { run: state.run })}>Watch the run</a>.</p>`}
    <footer><button type="submit" class="button primary" disabled=${state.busy || Boolean(state.run)}>${state.busy ? "Starting…" : "Start"}</button></footer>
  </form></${Dialog}>`;
}

function Summary({ summary }) {
  const by = Object.entries(summary.by ?? {});
  return html`<p class="note" aria-live="polite">${plural(summary.count, "judgement")}${by.length > 1 ? ` (${by.map(([who, count]) => `${who} ${count}`).join(", ")})` : ""}
    ${summary.agreement === null || summary.agreement === undefined ? "" : html`, <span title="Share of judgements that prefer the answer with the higher recorded score">${formatNumber(Math.round(1000 * summary.agreement) / 10)} % agree with the scores</span>`}</p>`;
}

export function Preferences({ query }) {
  const { runs, error: listError, loading: listLoading } = useRuns();
  const asks = query.ask === "1";
  const known = useData(asks ? "/api/models" : null);
  const models = (known.data ?? []).filter((model) => model.kind !== "reward");
  const recorded = useChosen(runs, (run) => run.has_samples).slice(0, MOST_RUNS);
  const chosen = asks ? [] : recorded;
  const asked = [query.model[0] ?? models[0]?.path, query.model[1]];
  const [written, setPrompts] = useDraft("prompts", "");
  const prompts = written || asked.map((path) => models.find((model) => model.path === path)?.prompts).find(Boolean) || "";
  const [sampling] = useSetting("sampling", SAMPLING);
  const complete = asks && asked[0] && asked[1] && prompts;
  const ask = () => (asks ? post("/api/preferences/ask", { models: asked, prompts, sampling: { ...sampling, seed: null } }) : get("/api/preferences/next", { run: chosen.map((run) => run.id) }));
  const key = asks ? (complete ? JSON.stringify([asked, prompts]) : null) : chosen.map((run) => run.id).join(",") || null;
  const { pair, error, loading, show, next, fail } = usePair(key, ask);
  const summary = useData("/api/preferences/summary");
  const [given, setWho] = useSetting("who", null);
  const who = given ?? summary.data?.user ?? "";
  const [training, setTraining] = useState(false);
  const [sending, setSending] = useState(false);
  const shown = pair?.pair ? pair : null;
  const busy = loading || sending;
  const choose = async (choice) => {
    if (!shown || busy) return;
    if (!who.trim()) {
      fail(new Error("Enter your name first, so that the judgements of several people can be told apart."));
      return;
    }
    setSending(true);
    try {
      await post("/api/preferences", { pair: shown.pair, choice, who: who.trim() });
      summary.reload();
      await next();
    } catch (failure) {
      fail(failure);
    }
    setSending(false);
  };
  const undo = () => !busy && summary.data?.can_undo && show(() => post("/api/preferences/undo", {})).then(summary.reload);
  useKeys({ u: undo, ...Object.fromEntries(Object.entries(CHOICES).map(([key, choice]) => [key, () => choose(choice)])), s: () => shown && next() });
  const answer = (side, key) => html`<section class="card answer" aria-label=${`Answer ${key}`}>
    <div class="message-text" dir="auto">${shown[side] || html`<span class="muted">(empty)</span>`}</div>
    <button class="button primary" disabled=${busy} onClick=${() => choose(side)}><kbd>${key}</kbd> This one is better</button></section>`;
  return html`
    <${ViewHead} title="Preferences"><${Choice} label="What is compared" value=${asks} options=${[[false, "Recorded answers"], [true, "Two models"]]} onChange=${(on) => setQuery({ ask: on ? 1 : null })} />
      ${!asks && html`<${RunsPicker} runs=${runs.filter((run) => run.has_samples)} chosen=${chosen} most=${MOST_RUNS} />`}
      <label class="field-inline"><span>Your name</span><input class="input compact" value=${who} onInput=${(event) => setWho(event.target.value)} autocomplete="nickname" /></label>
      <button class="button" disabled=${!summary.data?.count} onClick=${() => setTraining(true)}>Train a reward model</button></${ViewHead}>
    ${asks && known.data && html`<${Asked} models=${models} query=${query} prompts=${prompts} onPrompts=${setPrompts} />`}
    ${summary.data && html`<${Summary} summary=${summary.data} />`}
    <${ErrorLine} text=${listError ?? known.error ?? error ?? summary.error} retry=${error ? next : null} />
    ${asks && !complete && known.data && html`<${Empty} title="Choose two models and data">Both answer the same prompts, drawn at random from the rows of a file; the sampling is that of the chat.</${Empty}>`}
    ${(listLoading || (loading && !pair)) && (asks ? html`<p class="job" role="status"><span class="spinner" aria-hidden="true"></span><span>Both models answer…</span></p>` : html`<${Loading} what="a pair" />`)}
    ${!listLoading && !loading && !error && (asks ? complete && !shown : !shown) && html`<${Empty} title="No pair to judge">A pair needs two different answers to one prompt. ${asks ? "These models gave equal answers, or all rows have been judged."
      : html`${recorded.length > 1 ? "The chosen runs recorded no prompt in common, or all pairs have been judged." : html`Choose a run that records samples (<code>logging.samples_every</code>), or two.`} Under <a href=${link("preferences", { ask: 1 })}>Two models</a>, saved models answer the same prompts.`}</${Empty}>`}
    ${shown && html`<section class="card"><${Conversation} messages=${shown.prompt} images=${shown.images} of=${`/api/preferences/${shown.pair}`} /></section>
      <div class="answers">${answer("left", "1")}${answer("right", "2")}</div>
      <div class="judge"><button class="button" disabled=${busy} onClick=${() => choose("equal")}><kbd>0</kbd> Equal</button>
        <button class="button quiet" disabled=${busy} onClick=${next}><kbd>s</kbd> Skip</button>
        <button class="button quiet" disabled=${busy || !summary.data?.can_undo} onClick=${undo}><kbd>u</kbd> Undo</button></div>`}
    ${training && html`<${Train} base=${asks ? asked[0] : chosen[0]?.model} onClose=${() => setTraining(false)} />`}`;
}
