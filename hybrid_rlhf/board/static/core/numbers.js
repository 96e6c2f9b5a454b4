/** Arithmetic of curves and token colours; no DOM. */

/** Exponential moving average of values [n] without the pull of its start, gaps kept; weight 0 is no smoothing. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

/** The curve {x, y} at a place by linear interpolation; null outside it. */
function at({ x, y }, place, start) {
  let next = start;
  while (next < x.length && x[next] < place) next += 1;
  if (next >= x.length || (next === 0 && x[0] > place)) return [null, next];
  if (x[next] === place) return [y[next], next];
  const part = (place - x[next - 1]) / (x[next] - x[next - 1]);
  return [y[next - 1] + part * (y[next] - y[next - 1]), next];
}

/** Mean, lowest and highest of several curves at each x of any of them: {x, y, low, high}. */
export function band(curves) {
  const known = curves.map(({ x, y }) => {
    const kept = x.map((_, place) => place).filter((place) => y[place] !== null && y[place] !== undefined);
    return { x: kept.map((place) => x[place]), y: kept.map((place) => y[place]) };
  });
  const places = [...new Set(known.flatMap(({ x }) => x))].sort((a, b) => a - b);
  const cursors = known.map(() => 0);
  const result = { x: places, y: [], low: [], high: [] };
  for (const place of places) {
    const values = [];
    known.forEach((curve, index) => {
      const [value, next] = at(curve, place, cursors[index]);
      cursors[index] = next;
      if (value !== null) values.push(value);
    });
    result.y.push(values.reduce((sum, value) => sum + value, 0) / values.length);
    result.low.push(Math.min(...values));
    result.high.push(Math.max(...values));
  }
  return result;
}

/** A config without what differs between runs that only differ in their seed. */
export function configWithoutSeed(config) {
  const skipped = new Set(["seed", "output_dir", "resume", "name"]);
  const sorted = (value) => {
    if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
    return Object.fromEntries(Object.keys(value).filter((key) => !skipped.has(key)).sort().map((key) => [key, sorted(value[key])]));
  };
  return JSON.stringify(sorted(config ?? {}));
}

/** Columns of tokens whose sign or side means something, with the value in the middle. */
const MIDDLE = { advantages: 0, values: 0, kl: 0, returns: 0, rewards: 0, sampler_diff: 0, ratio: 1 };

/**
 * How a column is coloured: {signed, middle, limit, low, high}. The limit is the 98th percentile of the distances to the
 * middle, so that one outlier does not fade all others.
 */
export function colorScale(name, values) {
  const finite = values.filter((value) => typeof value === "number");
  const middle = MIDDLE[name];
  const signed = middle !== undefined;
  const low = finite.length ? Math.min(...finite) : 0;
  const high = finite.length ? Math.max(...finite) : 0;
  // Log-probs and entropies grow away from 0, where the model was certain.
  const distances = finite.map((value) => Math.abs(value - (middle ?? 0))).sort((a, b) => a - b);
  const limit = distances.length ? distances[Math.ceil(0.98 * distances.length) - 1] || distances.at(-1) : 0;
  return { signed, middle: middle ?? 0, limit, low, high };
}

/** Where a value lies in its scale, -1 to 1 for a signed column, 0 to 1 for others. */
export function intensity(value, { signed, middle, limit }) {
  if (typeof value !== "number" || !limit) return 0;
  const part = Math.max(-1, Math.min(1, (value - middle) / limit));
  return signed ? part : Math.abs(part);
}

/** Sums of neighbours so that at most `most` groups are left: [[first, end), ...] over n items. */
export function buckets(n, most) {
  const size = Math.max(1, Math.ceil(n / most));
  return Array.from({ length: Math.ceil(n / size) }, (_, place) => [place * size, Math.min(n, (place + 1) * size)]);
}

export function mean(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
