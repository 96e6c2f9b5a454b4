/** Metrics of the chosen runs as small multiples, live; runs that differ only in their seed become a band. */
import { get } from "../core/api.js";
import { html, useEffect, useMemo, useRef, useState } from "../core/dom.js";
import { formatSeconds, plural } from "../core/format.js";
import { useMetrics } from "../core/metrics.js";
import { band, configWithoutSeed } from "../core/numbers.js";
import { setQuery } from "../core/route.js";
import { useChosen, useRuns } from "../core/runs.js";
import { Choice, Empty, ErrorLine, Loading, QueryInput, Toggle, ViewHead } from "../parts/basic.js";
import { Chart, useSeen } from "../parts/chart.js";
import { RunsPicker } from "../parts/picker.js";

const FIRST_SECTIONS = ["objective", "rewards", "sft", "reward", "preference", "loss", "train", "eval", "policy", "critic", "val", "completions", "rollout"];
const LAST_SECTIONS = ["perf", "time", "memory"];

const sectionOf = (name) => (name.includes("/") ? name.split("/")[0] : "general");

function rank(section) {
  if (FIRST_SECTIONS.includes(section)) return FIRST_SECTIONS.indexOf(section);
  return LAST_SECTIONS.includes(section) ? 200 + LAST_SECTIONS.indexOf(section) : 100;
}

/** [[section, names], ...] with what matters most first. */
function sections(names) {
  const found = new Map();
  for (const name of names) {
    const section = sectionOf(name);
    if (!found.has(section)) found.set(section, []);
    found.get(section).push(name);
  }
  return [...found].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b));
}

/** Metric names and the config of each run; loaded once, and again for more names when a run has its first lines. */
function useDetails(runs) {
  const [details, setDetails] = useState({});
  const [error, setError] = useState(null);
  const key = runs.map((run) => `${run.id} ${run.step > 0}`).join(",");
  useEffect(() => {
    let current = true;
    setError(null);
    Promise.all(runs.map((run) => get(`/api/runs/${run.id}`))).then(
      (found) => current && setDetails(Object.fromEntries(found.map((detail) => [detail.id, detail]))),
      (failure) => current && setError(failure.message),
    );
    return () => { current = false; };
  }, [key]);
  return { details, error };
}

/** Runs that are one curve: those with the same config but for the seed, or each by itself. */
function families(runs, details, bands) {
  const found = new Map();
  runs.forEach((run) => {
    const config = details[run.id]?.config;
    const key = bands && config ? configWithoutSeed(config) : run.id;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(run);
  });
  return [...found.values()];
}

function MetricChart({ name, store, groups, colors, weight, log, x }) {
  const place = useRef(null);
  const seen = useSeen(place);
  useEffect(() => { if (seen) store.ask(name); }, [seen, store]);
  const sources = groups.flat().map((run) => store.curves.get(run.id));
  const curves = useMemo(() => groups.flatMap((runs) => {
    const lines = runs.flatMap((run) => {
      const curve = store.curves.get(run.id);
      const y = curve?.values.get(name);
      return y?.some((value) => value !== null) ? [{ x: x === "time" ? curve.time_seconds : curve.step, y }] : [];
    });
    if (!lines.length) return [];
    const color = colors.get(runs[0].id);
    const label = runs.length > 1 ? `${runs[0].name}, ${runs.length} seeds` : runs[0].name;
    return [{ label, color, ...(lines.length > 1 ? band(lines) : lines[0]) }];
  }), [name, x, groups, ...sources]);
  const formatX = x === "time" ? formatSeconds : undefined;
  return html`<div ref=${place} class="card chart-card">
    ${curves.length ? html`<${Chart} title=${name} curves=${curves} weight=${weight} log=${log} formatX=${formatX} xName=${x} />`
      : html`<figure class="chart"><figcaption><h3>${name}</h3></figcaption><div class="chart-waiting"></div></figure>`}
  </div>`;
}

export function Curves({ query }) {
  const { runs, error, loading } = useRuns();
  const chosen = useChosen(runs, (run) => run.step > 0);
  useEffect(() => {
    // Without it the page would follow whichever run is the latest.
    if (!query.run.length && chosen.length) setQuery({ run: chosen.map((run) => run.id) });
  }, [query.run.length, chosen.length]);
  const { details, error: detailError } = useDetails(chosen);
  const store = useMetrics(chosen.map((run) => run.id));
  const bands = query.bands !== "0";
  const weight = Number(query.smooth ?? 0) || 0;
  const x = query.x === "time" ? "time" : "step";
  const groups = useMemo(() => families(chosen, details, bands), [chosen.map((run) => run.id).join(), details, bands]);
  const colors = new Map(groups.flatMap((members, place) => members.map((run) => [run.id, place])));
  const names = [...new Set(chosen.flatMap((run) => details[run.id]?.metric_names ?? []))];
  const words = (query.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const shown = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  if (loading) return html`<${ViewHead} title="Curves" /><${Loading} what="runs" />`;
  return html`
    <${ViewHead} title="Curves"><${RunsPicker} runs=${runs} chosen=${chosen} colorOf=${(run) => colors.get(run.id)} /></${ViewHead}>
    <${ErrorLine} text=${error ?? detailError ?? store.error} />
    <div class="toolbar" role="search" aria-label="Metrics">
      <${QueryInput} name="q" value=${query.q} label="Search metrics" placeholder="Search metrics" search />
      <label class="range"><span>Smoothing</span><input type="range" min="0" max="0.98" step="0.02" value=${weight}
        onInput=${(event) => setQuery({ smooth: Number(event.target.value) || null })} /><output>${weight.toFixed(2)}</output></label>
      <${Choice} label="Horizontal axis" value=${x} options=${[["step", "Step"], ["time", "Time"]]} onChange=${(value) => setQuery({ x: value === "step" ? null : value })} />
      <${Toggle} label="Log scale" value=${query.log === "1"} onChange=${(on) => setQuery({ log: on ? 1 : null })} />
      ${chosen.length > 1 && html`<${Toggle} label="Band over seeds" value=${bands} onChange=${(on) => setQuery({ bands: on ? null : 0 })} />`}
      <span class="muted toolbar-end">${plural(shown.length, "metric")}</span>
    </div>
    ${chosen.length > 0 && !Object.keys(details).length && !detailError && html`<${Loading} what="metrics" />`}
    ${!chosen.length && html`<${Empty} title="No run has metrics yet">Curves appear with the first step of a run.</${Empty}>`}
    ${chosen.length > 0 && names.length > 0 && !shown.length && html`<${Empty} title="No metric matches">Nothing has “${query.q}” in its name.</${Empty}>`}
    ${sections(shown).map(([section, members]) => html`<section class="chart-section" key=${section}>
      <h2>${section}</h2>
      <div class="chart-grid">${members.map((name) => html`<${MetricChart} key=${`${name} ${x}`} ...${{ name, store, groups, colors, weight, log: query.log === "1", x }} />`)}</div>
    </section>`)}`;
}
