/** A long list of rows of one height, of which only those in view exist; their data is loaded page by page. */
import { get } from "../core/api.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../core/dom.js";
import { useIndexing } from "../core/runs.js";

const PAGE = 50;
const OVERSCAN = 4;
/** Rows that fit into the tallest element that browsers lay out. */
const MOST_ROWS = 100_000;

/**
 * Pages of {total, rows} of a path; `query` is a part of the identity: with another, the pages are dropped. `revision`
 * loads the visible pages again and shows the old rows meanwhile; so does an index that is still being built.
 */
function usePages(path, query, revision) {
  const key = JSON.stringify([path, query]);
  const [answer, setAnswer] = useState({ key, pages: new Map(), first: null, error: null });
  const [round, setRound] = useState(0);
  const asked = useRef({ key: null, pages: new Set(), abort: new AbortController() });
  const load = (page) => {
    const { pages, abort } = asked.current;
    if (pages.has(page)) return;
    pages.add(page);
    get(path, { ...query, offset: page * PAGE, limit: PAGE }, abort.signal).then(
      (found) => setAnswer((old) => {
        const known = old.key === key ? old.pages : new Map();
        return { key, pages: new Map(known).set(page, found.rows), first: found, error: null };
      }),
      (error) => !abort.signal.aborted && setAnswer((old) => ({ ...old, key, error: error.message })),
    );
  };
  useEffect(() => {
    asked.current.abort.abort();
    asked.current = { key, pages: new Set(), abort: new AbortController() };
    load(0);
    return () => asked.current.abort.abort();
  }, [key, revision, round]);
  useIndexing(answer.first, () => setRound((count) => count + 1));
  const current = answer.key === key ? answer : { pages: new Map(), first: null, error: null };
  return { ...current, load, round, row: (place) => current.pages.get(Math.floor(place / PAGE))?.[place % PAGE] };
}

/** Args: path and query of the rows; renderRow(row, place); rowHeight in pixels; onAnswer({total, ...}); label. */
export function VirtualList({ path, query, revision = 0, renderRow, rowHeight, label, children }) {
  const pages = usePages(path, query, revision);
  const [view, setView] = useState({ top: 0, height: 600 });
  const box = useRef(null);
  useLayoutEffect(() => {
    const measure = () => setView({ top: box.current.scrollTop, height: box.current.clientHeight });
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => { box.current.scrollTop = 0; }, [path, JSON.stringify(query)]);
  const total = pages.first?.total ?? 0;
  const shown = Math.min(total, MOST_ROWS);
  const first = Math.max(0, Math.floor(view.top / rowHeight) - OVERSCAN);
  const last = Math.min(shown, Math.ceil((view.top + view.height) / rowHeight) + OVERSCAN);
  useEffect(() => {
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) pages.load(page);
  }, [first, last, pages.first, revision, pages.round]);
  const rows = [];
  for (let place = first; place < last; place += 1) {
    const row = pages.row(place);
    rows.push(html`<div key=${place} role="listitem" class="virtual-row" aria-setsize=${total} aria-posinset=${place + 1} style=${{ top: `${place * rowHeight}px`, height: `${rowHeight}px` }}>
      ${row ? renderRow(row, place) : html`<div class="row-waiting" aria-hidden="true"></div>`}
    </div>`);
  }
  return html`
    ${children({ answer: pages.first, error: pages.error, shown })}
    <div class="virtual" ref=${box} hidden=${!total} tabindex="-1" onScroll=${() => setView({ top: box.current.scrollTop, height: box.current.clientHeight })}>
      <div role="list" aria-label=${label} style=${{ height: `${shown * rowHeight}px` }}>${rows}</div>
    </div>`;
}

/** Whether the screen is as narrow as a phone. */
export function useNarrow() {
  const query = matchMedia("(max-width: 640px)");
  const [narrow, setNarrow] = useState(query.matches);
  useEffect(() => {
    const listener = (event) => setNarrow(event.matches);
    query.addEventListener("change", listener);
    return () => query.removeEventListener("change", listener);
  }, []);
  return narrow;
}
