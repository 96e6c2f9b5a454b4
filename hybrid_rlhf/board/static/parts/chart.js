/** One chart of curves on a canvas (uPlot), with its values as text: at the cursor, otherwise the last ones. */
import { html, useEffect, useMemo, useRef, useState } from "../core/dom.js";
import { formatNumber, formatTick } from "../core/format.js";
import { smoothed } from "../core/numbers.js";
import { CURVE_COLORS, themeColor, useTheme } from "../core/theme.js";

const { uPlot } = globalThis;
const FADED = 0.28;
const BAND = 0.16;

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
const STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((first) => first * 10 ** power)).flat();

/** The range of an axis; around a single value as much on both sides. */
function range(_, low, high) {
  if (low !== high || low === null) return uPlot.rangeNum(low, high, 0.1, true);
  const room = Math.abs(low) / 10 || 1;
  return [low - room, high + room];
}

const isSingle = (curve) => curve.y.filter((value) => value !== null && value !== undefined).length === 1;
const withAlpha = (color, alpha) => color.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
const positive = (values) => values.map((value) => (value > 0 ? value : null));

/**
 * The columns of a chart. Each curve has a line; a smoothed one its raw line behind it; one of several runs the lines of
 * its band.
 */
function columns(curves, { weight, log }) {
  const tables = [];
  const lines = [];
  const add = (curve, values, kind) => {
    tables.push([curve.x, log ? positive(values) : values]);
    lines.push({ curve, kind });
  };
  for (const curve of curves) {
    if (curve.low) {
      add(curve, smoothed(curve.high, weight), "high");
      add(curve, smoothed(curve.low, weight), "low");
    } else if (weight) {
      add(curve, curve.y, "raw");
    }
    add(curve, smoothed(curve.y, weight), "line");
  }
  return { lines, data: tables.length ? uPlot.join(tables) : [[]] };
}

function options({ lines, log, width, height, formatX, xName, onCursor }) {
  const muted = themeColor("muted");
  const grid = themeColor("line");
  const axis = { stroke: muted, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const series = lines.map(({ curve, kind }) => {
    const color = themeColor(`curve-${curve.color % CURVE_COLORS}`);
    const faded = kind !== "line";
    return {
      label: curve.label,
      stroke: kind === "raw" ? withAlpha(color, FADED) : faded ? "transparent" : color,
      width: faded ? 1 : 1.75,
      points: kind !== "line" ? { show: false } : isSingle(curve) ? { show: true, size: 7, fill: color } : {},
      spanGaps: true,
    };
  });
  const bands = lines.flatMap(({ curve, kind }, place) =>
    kind === "high" ? [{ series: [place + 1, place + 2], fill: withAlpha(themeColor(`curve-${curve.color % CURVE_COLORS}`), BAND) }] : []);
  return {
    width,
    height,
    series: [{}, ...series],
    bands,
    padding: [8, 12, 0, 0],
    legend: { show: false },
    cursor: { y: false, sync: { key: "curves" }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range } },
    axes: [
      { ...axis, size: 26, gap: 4, incrs: xName === "time" ? SECONDS : STEPS, values: (_, places) => places.map(formatX) },
      { ...axis, size: 56, gap: 4, values: (_, places, __, ___, step) => places.map((place) => (place === null ? "" : log ? formatNumber(place) : formatTick(place, step))) },
    ],
    hooks: { setCursor: [(plot) => onCursor(plot.cursor.idx ?? null)] },
  };
}

function lastValue(values) {
  for (let place = values.length - 1; place >= 0; place -= 1) {
    if (values[place] !== null && values[place] !== undefined) return values[place];
  }
  return null;
}

/**
 * Args: title; curves [{label, color, x, y, low?, high?}], x ascending; weight of smoothing; log of the y axis; formatX;
 * xName ("step" or "time").
 */
export function Chart({ title, curves, weight = 0, log = false, formatX = formatNumber, xName = "step", height = 168 }) {
  const host = useRef(null);
  const plot = useRef(null);
  const [place, setPlace] = useState(null);
  const { dark } = useTheme();
  const { lines, data } = useMemo(() => columns(curves, { weight, log }), [curves, weight, log]);
  const shape = lines.map(({ curve, kind }) => `${curve.label} ${curve.color} ${kind} ${isSingle(curve)}`).join("\n");
  useEffect(() => {
    const width = host.current.clientWidth;
    plot.current = new uPlot(options({ lines, log, width, height, formatX, xName, onCursor: setPlace }), data, host.current);
    const observer = new ResizeObserver(() => plot.current.setSize({ width: host.current.clientWidth, height }));
    observer.observe(host.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [shape, log, dark, xName]);
  useEffect(() => plot.current.setData(data), [data]);
  const move = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !data[0].length) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(data[0].length - 1, (place ?? (by > 0 ? -1 : data[0].length)) + by));
    plot.current.setCursor({ left: plot.current.valToPos(data[0][next], "x"), top: 0 });
  };
  const shown = lines.flatMap(({ curve, kind }, index) => {
    if (kind !== "line") return [];
    return [{ curve, value: place === null ? lastValue(data[index + 1]) : data[index + 1][place] }];
  });
  const summary = shown.map(({ curve, value }) => `${curve.label} ${formatNumber(value)}`).join(", ");
  return html`<figure class="chart">
    <figcaption><h3>${title}</h3>
      <span class="chart-place">${place === null ? "last" : `${xName} ${formatX(data[0][place])}`}</span></figcaption>
    <div class="chart-values">${shown.map(({ curve, value }) => html`<span key=${curve.label} title=${curve.label}>
      <span class=${`swatch curve-${curve.color % CURVE_COLORS}`} aria-hidden="true"></span>
      ${shown.length > 1 && html`<span class="chart-label">${curve.label}</span>`}<b>${formatNumber(value)}</b>
    </span>`)}</div>
    <div ref=${host} class="chart-canvas" role="img" tabindex="0" onKeyDown=${move} onBlur=${() => plot.current.setCursor({ left: -10, top: -10 })}
      aria-label=${`${title} by ${xName}, ${place === null ? "last values" : `at ${formatX(data[0][place])}`}: ${summary}`}></div>
  </figure>`;
}

/** Whether an element has come into view; it stays true, so that what was drawn is kept. */
export function useSeen(element) {
  const [seen, setSeen] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) setSeen(true);
    }, { rootMargin: "300px" });
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  return seen;
}
