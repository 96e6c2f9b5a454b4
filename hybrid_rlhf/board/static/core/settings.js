/** What a person chose, kept in this browser; where storage is disabled, for as long as the page is open. */
import { useState } from "./dom.js";

const inMemory = new Map();

export function readSetting(name, fallback) {
  try {
    const text = localStorage.getItem(`board.${name}`);
    if (text !== null) return JSON.parse(text);
  } catch {
    // Disabled, or written by something else.
  }
  return inMemory.has(name) ? inMemory.get(name) : fallback;
}

export function writeSetting(name, value) {
  inMemory.set(name, value);
  try {
    localStorage.setItem(`board.${name}`, JSON.stringify(value));
  } catch {
    // Disabled or full: it holds until the page is closed.
  }
}

/** A setting as state: [value, set]. */
export function useSetting(name, fallback) {
  const [value, setValue] = useState(() => readSetting(name, fallback));
  const set = (next) => {
    writeSetting(name, next);
    setValue(next);
  };
  return [value, set];
}
