"""The page of the board in a real browser. `axe.min.js` is axe-core 4.14.1 (npm, MPL-2.0), used by tests alone."""
