/** The address of a view: #/name?key=value, so that every state worth sharing is a link. */
import { useEffect, useState } from "./dom.js";
import { address } from "./api.js";

const listeners = new Set();

function parse() {
  const [path, words = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const query = {};
  for (const [name, value] of new URLSearchParams(words)) {
    if (name === "run" || name === "model") (query[name] ??= []).push(value);
    else query[name] = value;
  }
  return { path: path || "runs", query: { ...query, run: query.run ?? [], model: query.model ?? [] } };
}

function tell() {
  for (const listener of listeners) listener(parse());
}
window.addEventListener("hashchange", tell);

export function link(path, query = {}) {
  return address(`#/${path}`, query);
}

export function go(path, query) {
  location.hash = link(path, query);
}

/** Change a part of the query without a new entry in the browser's history; null removes a key. */
export function setQuery(change) {
  const { path, query } = parse();
  history.replaceState(null, "", link(path, { ...query, ...change }));
  tell();
}

export function useRoute() {
  const [route, setRoute] = useState(parse);
  useEffect(() => {
    listeners.add(setRoute);
    return () => listeners.delete(setRoute);
  }, []);
  return route;
}
