/* The theme chosen last time, set before the first paint. A classic script: modules run too late for that. */
try {
  const theme = localStorage.getItem("quire.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be closed to the page; then the system's theme holds.
}
