// Runs before the first paint, so that a chosen theme does not flash. The rest of the theme is in theme.js.
try {
  const chosen = JSON.parse(localStorage.getItem("board.theme"));
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be disabled: the theme of the system is shown.
}
