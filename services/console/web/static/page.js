// On every page: the theme's switch, the help, keys. Keys are ignored while the user types.

const THEMES = ["system", "light", "dark"];
const root = document.documentElement;
const button = document.getElementById("theme");
const dialog = document.getElementById("keys");

function theme() { return root.dataset.theme || "system"; }

function show() { button.textContent = `Theme: ${theme()}`; }

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "system") delete root.dataset.theme; else root.dataset.theme = next;
  try { localStorage.setItem("tidemill-theme", next); } catch { /* only for this page, then */ }
  show();
}

// Rows of the main table, or completions: whatever j and k go through.
function stops() {
  const rows = [...document.querySelectorAll("table[data-rows] tbody tr th a")];
  return rows.length ? rows : [...document.querySelectorAll("article.sample")];
}

function move(by) {
  const all = stops();
  if (!all.length) return;
  const at = all.findIndex((stop) => stop === document.activeElement || stop.contains(document.activeElement));
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + by))];
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest", behavior: "instant" });
}

function follow(selector) {
  const link = document.querySelector(selector);
  if (link) link.click();
  return Boolean(link);
}

const ACTIONS = {
  "?": () => (dialog.open ? dialog.close() : dialog.showModal()),
  t: nextTheme,
  j: () => move(1),
  k: () => move(-1),
  n: () => follow("a[rel=next]"),
  p: () => follow("a[rel=prev]"),
  u: () => follow("a[rel=up]") || follow("a.run-name"),
  "/": () => document.getElementById("search")?.focus(),
};
for (const key of "ogsdmcl") ACTIONS[key] = () => follow(`a[data-key=${key}]`);

function isTyping(target) {
  return target.isContentEditable || (target.matches("input, select, textarea") && !["radio", "checkbox", "range"].includes(target.type));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  if (dialog.open && event.key !== "?") return;
  const action = ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

for (const log of document.querySelectorAll(".log")) log.scrollTop = log.scrollHeight; // the newest lines
button.addEventListener("click", nextTheme);
document.getElementById("help").addEventListener("click", () => dialog.showModal());
show();
