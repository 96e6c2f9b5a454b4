/** Which of two answers is better, asked blind; the judgements become training data of a reward model. */
import { get, post, useData } from "../core/api.js";
import { html, useEffect, useState } from "../core/dom.js";
import { formatNumber, plural } from "../core/format.js";
import { useKeys } from "../core/keys.js";
import { link } from "../core/route.js";
import { useChosen, useRuns } from "../core/runs.js";
import { useSetting } from "../core/settings.js";
import { Dialog, Empty, ErrorLine, Field, Loading, ViewHead } from "../parts/basic.js";
import { Conversation } from "../parts/messages.js";
import { RunsPicker } from "../parts/picker.js";

const MOST_RUNS = 2;
const CHOICES = { 1: "left", 2: "right", 0: "equal" };

/** The pair that is shown, and the one after the present. */
function usePair(runs) {
  const [state, setState] = useState({ pair: null, error: null, loading: true });
  const key = runs.map((run) => run.id).join(",");
  const next = async () => {
    setState((old) => ({ ...old, loading: true, error: null }));
    try {
      setState({ pair: await get("/api/preferences/next", { run: runs.map((run) => run.id) }), error: null, loading: false });
    } catch (error) {
      setState({ pair: null, error: error.message, loading: false });
    }
  };
  useEffect(() => {
    if (runs.length) next();
  }, [key]);
  return { ...state, next, fail: (error) => setState((old) => ({ ...old, error: error.message, loading: false })) };
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

export function Preferences() {
  const { runs, error: listError, loading: listLoading } = useRuns();
  const chosen = useChosen(runs, (run) => run.has_samples).slice(0, MOST_RUNS);
  const { pair, error, loading, next, fail } = usePair(chosen);
  const summary = useData("/api/preferences/summary");
  const [who, setWho] = useSetting("who", "me");
  const [training, setTraining] = useState(false);
  const [sending, setSending] = useState(false);
  const shown = pair?.pair ? pair : null;
  const choose = async (choice) => {
    if (!shown || loading || sending) return;
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
  useKeys({ ...Object.fromEntries(Object.entries(CHOICES).map(([key, choice]) => [key, () => choose(choice)])), s: () => shown && next() });
  const busy = loading || sending;
  const answer = (side, key) => html`<section class="card answer" aria-label=${`Answer ${key}`}>
    <div class="message-text" dir="auto">${shown[side] || html`<span class="muted">(empty)</span>`}</div>
    <button class="button primary" disabled=${busy} onClick=${() => choose(side)}><kbd>${key}</kbd> This one is better</button></section>`;
  return html`
    <${ViewHead} title="Preferences"><${RunsPicker} runs=${runs.filter((run) => run.has_samples)} chosen=${chosen} most=${MOST_RUNS} />
      <label class="field-inline"><span>Your name</span><input class="input compact" value=${who} onInput=${(event) => setWho(event.target.value)} autocomplete="nickname" /></label>
      <button class="button" disabled=${!summary.data?.count} onClick=${() => setTraining(true)}>Train a reward model</button></${ViewHead}>
    ${summary.data && html`<${Summary} summary=${summary.data} />`}
    <${ErrorLine} text=${listError ?? error ?? summary.error} retry=${error ? next : null} />
    ${(listLoading || (loading && !pair && chosen.length > 0)) && html`<${Loading} what="a pair" />`}
    ${!listLoading && !error && (!chosen.length || (pair && !shown)) && html`<${Empty} title="No pair to judge">A pair needs two different answers to one prompt. Choose a run that records samples (<code>logging.samples_every</code>), or two.</${Empty}>`}
    ${shown && html`<section class="card"><${Conversation} messages=${shown.prompt} /></section>
      <div class="answers">${answer("left", "1")}${answer("right", "2")}</div>
      <div class="judge"><button class="button" disabled=${busy} onClick=${() => choose("equal")}><kbd>0</kbd> Equal</button>
        <button class="button quiet" disabled=${busy} onClick=${next}><kbd>s</kbd> Skip</button></div>`}
    ${training && html`<${Train} base=${chosen[0]?.model} onClose=${() => setTraining(false)} />`}`;
}
