/** Light or dark: that of the system, or the one chosen. Colours are CSS variables; canvases ask for them here. */
import { useEffect, useState } from "./dom.js";
import { readSetting, writeSetting } from "./settings.js";

const CHOICES = ["system", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

function changed() {
  for (const listener of listeners) listener();
}
system.addEventListener("change", changed);

export function themeChoice() {
  const choice = readSetting("theme", "system");
  return CHOICES.includes(choice) ? choice : "system";
}

export function nextTheme() {
  const choice = CHOICES[(CHOICES.indexOf(themeChoice()) + 1) % CHOICES.length];
  writeSetting("theme", choice);
  if (choice === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  changed();
}

/** The choice and whether the page is dark now; redraws when either changes. */
export function useTheme() {
  const now = () => ({ choice: themeChoice(), dark: themeChoice() === "system" ? system.matches : themeChoice() === "dark" });
  const [theme, setTheme] = useState(now);
  useEffect(() => {
    const listener = () => setTheme(now());
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return theme;
}

const probe = document.createElement("span");
probe.hidden = true;

/** The present value of a colour variable, as rgb(...). */
export function themeColor(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export const CURVE_COLORS = 8;
