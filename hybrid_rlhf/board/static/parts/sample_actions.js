/** Scoring an edited completion, sampling the same one again, and going on from one of its tokens. */
import { post } from "../core/api.js";
import { html, useState } from "../core/dom.js";
import { formatNumber, formatSigned } from "../core/format.js";
import { ErrorLine, Field } from "./basic.js";
import { JobProgress } from "./job.js";

/** Sends a request and keeps its answer, its error, and whether it is under way. */
function useRequest() {
  const [state, setState] = useState({ busy: false, answer: null, error: null });
  const send = async (path, body) => {
    setState({ busy: true, answer: null, error: null });
    try {
      setState({ busy: false, answer: await post(path, body), error: null });
    } catch (error) {
      setState({ busy: false, answer: null, error: error.message });
    }
  };
  return { ...state, send };
}

function difference(before, after) {
  return typeof before === "number" && typeof after === "number" ? formatSigned(after - before) : "–";
}

export function Rescore({ run, sample }) {
  const [text, setText] = useState(sample.completion);
  const { busy, answer, error, send } = useRequest();
  const score = () => send(`/api/runs/${run}/rescore`, { step: sample.step, index: sample.index, completion: text });
  const rows = answer && [["score", sample.score, answer.score], ...Object.entries(answer.components ?? {}).map(([name, value]) => [name, sample.components?.[name], value])];
  return html`<section class="card"><details><summary><h2>Edit and score again</h2></summary>
    <${Field} label="Completion"><textarea class="input" rows="6" dir="auto" value=${text} onInput=${(event) => setText(event.target.value)}></textarea></${Field}>
    <div class="form-actions"><button class="button primary" disabled=${busy} onClick=${score}>${busy ? "Scoring…" : "Score"}</button>
      <button class="button quiet" disabled=${busy || text === sample.completion} onClick=${() => setText(sample.completion)}>Undo edits</button></div>
    <${ErrorLine} text=${error} />
    ${rows && html`<table class="table compact" aria-live="polite"><thead><tr><th scope="col">Component</th><th scope="col" class="number">Recorded</th><th scope="col" class="number">Edited</th><th scope="col" class="number">Difference</th></tr></thead>
      <tbody>${rows.map(([name, before, after]) => html`<tr key=${name}><th scope="row">${name}</th><td class="number">${formatNumber(before)}</td><td class="number">${formatNumber(after)}</td><td class="number">${difference(before, after)}</td></tr>`)}</tbody></table>`}
  </details></section>`;
}

function ReplayResult({ result, sample }) {
  if (result.identical) return html`<p><span class="tag good">identical</span> The same ${result.compared === "text" ? "text" : "tokens"} came out again, bit for bit.</p>`;
  return html`<p><span class="tag bad">different</span> ${result.first_difference === null || result.first_difference === undefined ? "The text differs." : `The first difference is at token ${formatNumber(result.first_difference)}.`}</p>
    <h3>Recorded</h3><div class="message-text quote" dir="auto">${sample.completion}</div>
    <h3>Sampled again</h3><div class="message-text quote" dir="auto">${result.text}</div>`;
}

export function Replay({ run, sample }) {
  const { busy, answer, error, send } = useRequest();
  return html`<section class="card"><details><summary><h2>Replay</h2></summary>
    <p class="hint">Resumes the run from the checkpoint before this step in a folder of its own, samples again and compares.</p>
    <button class="button primary" disabled=${busy} onClick=${() => send(`/api/runs/${run}/replay`, { step: sample.step, index: sample.index })}>Replay this sample</button>
    <${ErrorLine} text=${error} />
    <${JobProgress} job=${answer?.job} what="Replaying">${(result) => html`<${ReplayResult} result=${result} sample=${sample} />`}</${JobProgress}>
  </details></section>`;
}

/** `place` is the position of the first token that is sampled anew. */
export function Branch({ run, sample, place }) {
  const [text, setText] = useState("");
  const [samples, setSamples] = useState(4);
  const { busy, answer, error, send } = useRequest();
  const usable = place !== null && sample.tokens.response[place];
  const branch = () => send(`/api/runs/${run}/branch`, { step: sample.step, index: sample.index, token: place, text: text || null, samples });
  return html`<div class="branch">
    <h3>Branch</h3>
    <p class="hint">${usable ? `Keeps the text before token ${place} and samples what follows with the weights of this step.` : "Choose a sampled token: what follows it is sampled again from there."}</p>
    <div class="form-row"><${Field} label="Text to put there (optional)"><input class="input" dir="auto" value=${text} onInput=${(event) => setText(event.target.value)} /></${Field}>
      <${Field} label="Samples"><input class="input narrow" type="number" min="1" max="64" value=${samples} onInput=${(event) => setSamples(Number(event.target.value))} /></${Field}>
      <button class="button primary" disabled=${busy || !usable || !(samples >= 1)} onClick=${branch}>Branch here</button></div>
    <${ErrorLine} text=${error} />
    <${JobProgress} job=${answer?.job} what="Branching">${(result) => html`<ol class="branches">${(result.completions ?? []).map((found, index) => html`<li key=${index}>
      <div class="message-text" dir="auto">${found.text}</div><span class="muted">score ${formatNumber(found.score)}</span></li>`)}</ol>`}</${JobProgress}>
  </div>`;
}
