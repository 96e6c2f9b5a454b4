/**
 * Curves of some runs, loaded when a chart asks for them and followed while the runs go on.
 *
 * Names that are asked for in one moment are one request. New lines are fetched with `after`, not taken from the event,
 * which has no time; once a curve has twice the points that fit on a screen, it is loaded again, thinned out.
 */
import { get, useEvents } from "./api.js";
import { useEffect, useMemo, useState } from "./dom.js";

const POINTS = 1000;
const GATHER_MS = 30;
const FOLLOW_MS = 700;

class MetricStore {
  constructor(runs) {
    this.runs = runs;
    this.names = new Set();
    this.asked = new Set();
    this.curves = new Map(runs.map((run) => [run, { step: [], time_seconds: [], values: new Map() }]));
    this.listeners = new Set();
    this.abort = new AbortController();
    this.error = null;
  }

  ask(name) {
    if (this.names.has(name) || this.asked.has(name)) return;
    this.asked.add(name);
    this.timer ??= setTimeout(() => this.loadAsked(), GATHER_MS);
  }

  loadAsked() {
    this.timer = null;
    for (const name of this.asked) this.names.add(name);
    this.asked.clear();
    // The names share one list of steps, so all are loaded together when one is added.
    return this.load();
  }

  async load(after = null) {
    try {
      const query = { run: this.runs, name: [...this.names], points: POINTS, after };
      const found = await get("/api/metrics", query, this.abort.signal);
      for (const [run, { values, ...curve }] of Object.entries(found)) {
        this.take(run, { ...curve, values: new Map(Object.entries(values)) }, after); // a metric may be named `constructor`
      }
      this.error = null;
    } catch (error) {
      if (this.abort.signal.aborted) return;
      this.error = error.message;
    }
    for (const listener of this.listeners) listener();
  }

  take(run, curve, after) {
    const old = this.curves.get(run);
    if (after === null || !old) {
      this.curves.set(run, curve);
      return;
    }
    const last = old.step.at(-1) ?? -Infinity;
    const fresh = curve.step.findIndex((step) => step > last);
    if (fresh < 0) return;
    const values = new Map();
    for (const name of this.names) {
      const before = old.values.get(name) ?? old.step.map(() => null);
      values.set(name, before.concat(curve.values.get(name)?.slice(fresh) ?? curve.step.slice(fresh).map(() => null)));
    }
    const joined = (key) => old[key].concat(curve[key].slice(fresh));
    this.curves.set(run, { step: joined("step"), time_seconds: joined("time_seconds"), values });
  }

  follow(run) {
    if (!this.curves.has(run) || !this.names.size) return;
    this.next ??= setTimeout(() => {
      this.next = null;
      const lengths = [...this.curves.values()].map((curve) => curve.step.length);
      const lasts = [...this.curves.values()].map((curve) => curve.step.at(-1) ?? -1);
      this.load(Math.max(...lengths) > 2 * POINTS ? null : Math.min(...lasts));
    }, FOLLOW_MS);
  }

  close() {
    this.abort.abort();
    clearTimeout(this.timer);
    clearTimeout(this.next);
  }
}

/** A store of the curves of these runs; redraws when curves change. */
export function useMetrics(runs) {
  const key = runs.join(" ");
  const store = useMemo(() => new MetricStore(runs), [key]);
  const [, redraw] = useState(0);
  useEffect(() => {
    const listener = () => redraw((count) => count + 1);
    store.listeners.add(listener);
    return () => {
      store.listeners.delete(listener);
      store.close();
    };
  }, [store]);
  useEvents("metrics", ({ run }) => store.follow(run));
  return store;
}
