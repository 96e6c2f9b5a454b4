/** A job of the server: its progress by events, and by asking where no event comes. */
import { get, useEvents } from "../core/api.js";
import { html, useEffect, useState } from "../core/dom.js";

const ASK_MS = 2000;

/** The state of a job, null before the first answer. */
export function useJob(job) {
  const [state, setState] = useState(null);
  const ask = async () => {
    try {
      setState(await get(`/api/jobs/${job}`));
    } catch (error) {
      setState({ state: "failed", error: error.message, progress: "", result: null });
    }
  };
  useEffect(() => {
    setState(null);
    if (!job) return undefined;
    ask();
    return undefined;
  }, [job]);
  const running = Boolean(job) && (!state || state.state === "running");
  useEffect(() => {
    if (!running) return undefined;
    const timer = setInterval(ask, ASK_MS);
    return () => clearInterval(timer);
  }, [job, running]);
  useEvents("job", (event) => {
    if (event.job !== job) return;
    if (event.state === "running") setState((old) => ({ ...old, ...event }));
    else ask();
  });
  return state;
}

export function JobProgress({ job, what, children }) {
  const state = useJob(job);
  if (!job) return null;
  if (!state || state.state === "running") {
    return html`<div class="job" role="status"><span class="spinner" aria-hidden="true"></span>
      <span>${what}${state?.progress ? `: ${state.progress}` : "…"}</span></div>`;
  }
  if (state.state === "failed") return html`<div class="error-line" role="alert"><p>${state.error ?? "The job failed."}</p></div>`;
  return html`<div class="job-result" role="status">${children(state.result ?? {})}</div>`;
}
