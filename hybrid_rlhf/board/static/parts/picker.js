/** Which runs a view shows. */
import { html } from "../core/dom.js";
import { setQuery } from "../core/route.js";
import { CURVE_COLORS } from "../core/theme.js";

/** Chips of the chosen runs, and a list to add others; `colorOf` is the colour of a run's curves, where there are some. */
export function RunsPicker({ runs, chosen, colorOf, most = 12 }) {
  const ids = chosen.map((run) => run.id);
  const rest = runs.filter((run) => !ids.includes(run.id));
  const show = (run) => setQuery({ run });
  return html`<div class="picker" role="group" aria-label="Runs shown">
    ${chosen.map((run) => html`<span class="chip" key=${run.id}>
      ${colorOf && html`<span class=${`swatch curve-${colorOf(run) % CURVE_COLORS}`} aria-hidden="true"></span>`}
      <span class="chip-name" title=${run.folder}>${run.name}</span>
      ${chosen.length > 1 && html`<button class="chip-remove" aria-label=${`Hide ${run.name}`} onClick=${() => show(ids.filter((id) => id !== run.id))}>✕</button>`}
    </span>`)}
    ${rest.length > 0 && chosen.length < most && html`<select class="input compact" aria-label="Add a run" value="" onChange=${(event) => {
      show([...ids, event.target.value]);
      event.target.value = "";
    }}>
      <option value="">Add a run…</option>
      ${rest.map((run) => html`<option key=${run.id} value=${run.id}>${run.name}</option>`)}
    </select>`}
  </div>`;
}

/** One run. */
export function RunPicker({ runs, run, clear = {} }) {
  return html`<label class="field-inline"><span>Run</span>
    <select class="input compact" value=${run?.id} onChange=${(event) => setQuery({ ...clear, run: [event.target.value] })}>
      ${runs.map((other) => html`<option key=${other.id} value=${other.id} selected=${other.id === run?.id}>${other.name}</option>`)}
    </select>
  </label>`;
}

/** One saved model. */
export function ModelSelect({ models, value, label, optional, onChange }) {
  return html`<label class="field-inline"><span>${label}</span><select class="input compact" value=${value ?? ""} onChange=${(event) => onChange(event.target.value)}>
    ${optional && html`<option value="">none</option>`}
    ${models.map((model) => html`<option key=${model.path} value=${model.path} selected=${model.path === value}>${model.name}</option>`)}</select></label>`;
}
