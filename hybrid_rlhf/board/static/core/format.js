/** Numbers, times and texts as people read them. Missing values are a dash. */
export const MISSING = "–";

/** About four digits. */
export function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return minus(value.toExponential(2));
  if (Number.isInteger(value)) return minus(value.toLocaleString("en"));
  return minus(Number(value.toPrecision(size < 1 ? 3 : 4)).toString());
}

/** A multiple of a step of an axis, all in one notation: the digits that the step has, or an exponent if it has many. */
export function formatTick(value, step) {
  const digits = [0, 1, 2, 3, 4].find((count) => step * 10 ** count > 0.9 && Math.abs(step * 10 ** count - Math.round(step * 10 ** count)) < 1e-6);
  if (digits !== undefined && step < 1e6) return minus(value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace(/^-(?=[0.]*$)/, ""));
  return Math.abs(value) < step / 2 ? "0" : minus(value.toExponential(2));
}

export function formatSigned(value) {
  const text = formatNumber(value);
  return typeof value === "number" && value > 0 ? `+${text}` : text;
}

const minus = (text) => text.replace(/^-/, "−");

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return MISSING;
  if (seconds < 90) return `${formatNumber(Number(seconds.toPrecision(3)))} s`;
  const whole = Math.round(seconds);
  const minutes = Math.round(seconds / 60);
  if (whole < 600 && whole % 60) return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")} min`;
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** How long ago a moment was, in seconds since 1970. */
export function formatAgo(moment) {
  if (!moment) return MISSING;
  const seconds = Math.max(0, Date.now() / 1000 - moment);
  if (seconds < 45) return "now";
  if (seconds < 5400) return `${Math.max(1, Math.round(seconds / 60))} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

/** The text of a message, whose content may be a list of parts. */
export function messageText(message) {
  const { content } = message;
  const parts = Array.isArray(content) ? content.map((part) => part.text ?? JSON.stringify(part)) : [content ?? ""];
  if (message.tool_calls?.length) parts.push(JSON.stringify(message.tool_calls, null, 2));
  return parts.join("\n");
}

export function plural(count, noun) {
  return `${formatNumber(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** The end of a path, which tells models apart better than its begin. */
export function shortPath(path, parts = 2) {
  if (!path) return MISSING;
  const pieces = String(path).split("/").filter(Boolean);
  return pieces.length > parts ? `…/${pieces.slice(-parts).join("/")}` : String(path);
}
