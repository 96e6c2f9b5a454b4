/**
 * What a person chose, kept in this browser, and what a person wrote, kept until the tab is closed; where storage is
 * disabled, for as long as the page is open.
 */
import { useState } from "./dom.js";

const inMemory = new Map();

export function readSetting(name, fallback, storage = "localStorage") {
  try {
    const text = globalThis[storage].getItem(`board.${name}`);
    if (text !== null) return JSON.parse(text);
  } catch {
    // Disabled, or written by something else.
  }
  return inMemory.has(name) ? inMemory.get(name) : fallback;
}

export function writeSetting(name, value, storage = "localStorage") {
  inMemory.set(name, value);
  try {
    globalThis[storage].setItem(`board.${name}`, JSON.stringify(value));
  } catch {
    // Disabled or full: it holds until the page is closed.
  }
}

/** A setting as state: [value, set]. */
export function useSetting(name, fallback, storage) {
  const [value, setValue] = useState(() => readSetting(name, fallback, storage));
  const set = (next) => {
    writeSetting(name, next, storage);
    setValue(next);
  };
  return [value, set];
}

/** A draft as state, which survives other views and a reload: [value, set]. */
export function useDraft(name, fallback) {
  return useSetting(name, fallback, "sessionStorage");
}
