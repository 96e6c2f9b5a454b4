/** The list of runs, kept up to date, and which of them a view shows. */
import { useData, useEvents } from "./api.js";
import { useEffect, useMemo, useRef } from "./dom.js";
import { useRoute } from "./route.js";

const RELOAD_MS = 1000;
const INDEXING_MS = 500;

/** {runs, error, loading, reload}, the latest first. */
export function useRuns() {
  const { data, error, loading, reload } = useData("/api/runs");
  const timer = useRef(null);
  const soon = () => {
    timer.current ??= setTimeout(() => {
      timer.current = null;
      reload();
    }, RELOAD_MS);
  };
  useEvents("runs", soon);
  useEvents("metrics", soon);
  useEffect(() => () => clearTimeout(timer.current), []);
  const runs = useMemo(() => [...(data ?? [])].sort((a, b) => (b.updated_seconds ?? 0) - (a.updated_seconds ?? 0)), [data]);
  return { runs, error, loading: loading && !data, reload };
}

/** The runs named in the address; without any, the latest that is suitable. */
export function useChosen(runs, suitable = () => true) {
  const { query } = useRoute();
  const named = query.run.map((id) => runs.find((run) => run.id === id)).filter(Boolean);
  if (named.length) return named;
  const latest = runs.find((run) => suitable(run) && run.state !== "foreign") ?? runs.find(suitable);
  return latest ? [latest] : [];
}

/** Whether the index behind a page of samples is still being built; asks again, by `reload`, until it is not. */
export function useIndexing(page, reload) {
  const indexing = page?.indexed < 1;
  useEffect(() => {
    if (!indexing) return undefined;
    const timer = setTimeout(reload, INDEXING_MS);
    return () => clearTimeout(timer);
  }, [page]);
  return indexing;
}
