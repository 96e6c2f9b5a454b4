/** Requests to the server of this page: JSON, errors as one line, the stream of events. */
import { useCallback, useEffect, useRef, useState } from "./dom.js";

export class RequestError extends Error {}

/** A path with a query; lists are repeated, empty values left out. */
export function address(path, query = {}) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== null && item !== undefined && item !== "") words.append(name, item);
    }
  }
  const text = words.toString();
  return text ? `${path}?${text}` : path;
}

async function checked(response) {
  if (response.ok) return response;
  let reason = `The server answered ${response.status}.`;
  try {
    reason = (await response.json()).error ?? reason;
  } catch {
    // No JSON: the status says what there is to say.
  }
  throw new RequestError(reason);
}

async function send(path, options) {
  try {
    return await checked(await fetch(path, options));
  } catch (error) {
    if (error instanceof TypeError) throw new RequestError("The board does not answer. Is `hybrid-rlhf board` still running?");
    throw error;
  }
}

export async function get(path, query, signal) {
  return (await send(address(path, query), { signal })).json();
}

/** The X-Board header cannot be sent by a form of another site. */
export async function post(path, body, signal) {
  return (await postForStream(path, body, signal)).json();
}

export function postForStream(path, body, signal) {
  const headers = { "Content-Type": "application/json", "X-Board": "1" };
  return send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** The JSON of each `data:` line of a streamed answer. */
export async function* streamed(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (waiting + value).split("\n");
    waiting = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield JSON.parse(line.slice(5));
    }
  }
}

/**
 * Data of the server as state: {data, error, loading, reload}. Old data stays while new data is loaded, so that a list
 * does not flicker. No path: nothing is loaded.
 */
export function useData(path, query = {}) {
  const target = path && address(path, query);
  const [state, setState] = useState({ data: null, error: null, done: null });
  const [round, setRound] = useState(0);
  const shown = useRef(null);
  useEffect(() => {
    if (!target) {
      shown.current = null;
      setState({ data: null, error: null, done: null });
      return undefined;
    }
    const abort = new AbortController();
    if (shown.current !== path) setState({ data: null, error: null, done: null });
    get(target, {}, abort.signal).then(
      (data) => {
        shown.current = path;
        setState({ data, error: null, done: target });
      },
      (error) => {
        if (!abort.signal.aborted) setState((old) => ({ data: old.data, error: error.message, done: target }));
      },
    );
    return () => abort.abort();
  }, [target, round]);
  const reload = useCallback(() => setRound((count) => count + 1), []);
  // What was shown of another path is not this one's, not even for the frame before the effect.
  const data = shown.current === path ? state.data : null;
  const error = state.done === target ? state.error : null;
  return { data, error, loading: Boolean(target) && state.done !== target, reload };
}

const KINDS = ["runs", "metrics", "samples", "job"];
const subscribers = new Map(KINDS.map((kind) => [kind, new Set()]));
const statusListeners = new Set();
let source = null;
let connected = false;

function connect() {
  source = new EventSource("/api/events");
  for (const kind of KINDS) {
    source.addEventListener(kind, (event) => {
      const content = event.data ? JSON.parse(event.data) : {};
      for (const subscriber of subscribers.get(kind)) subscriber(content);
    });
  }
  const tell = (state) => () => {
    connected = state;
    for (const listener of statusListeners) listener(state);
  };
  source.addEventListener("open", tell(true));
  source.addEventListener("error", tell(false));
}

/** Calls `subscriber` with each event of a kind while the component is shown. */
export function useEvents(kind, subscriber) {
  const latest = useRef(subscriber);
  latest.current = subscriber;
  useEffect(() => {
    if (!source) connect();
    const call = (content) => latest.current(content);
    subscribers.get(kind).add(call);
    return () => subscribers.get(kind).delete(call);
  }, [kind]);
}

/** Whether events arrive. */
export function useConnected() {
  const [state, setState] = useState(connected);
  useEffect(() => {
    if (!source) connect();
    statusListeners.add(setState);
    return () => statusListeners.delete(setState);
  }, []);
  return state;
}
