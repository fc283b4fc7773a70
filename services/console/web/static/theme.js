// Sets light or dark before anything is drawn. Storage may be forbidden: then the system decides.
(() => {
  let theme = null;
  try { theme = localStorage.getItem("tidemill-theme"); } catch { /* as the system has it */ }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
