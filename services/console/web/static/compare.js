// Runs overlaid: whatever is chosen is in the address at once, and drawn without loading the page again.
import { Board } from "./charts.js";

const POLL_MS = 5000;
const PAUSE_MS = 150;
const form = document.getElementById("choice");
const board = new Board(document.getElementById("charts"));
const trouble = document.getElementById("trouble");
const search = document.getElementById("search");
let turn = 0;
let filling = 0;
let timer = 0;

function address() {
  const chosen = new URLSearchParams(new FormData(form));
  if (!Number(chosen.get("smooth"))) chosen.delete("smooth");
  if (chosen.get("x") === "step") chosen.delete("x");
  if (!chosen.get("text")) chosen.delete("text");
  const before = new URLSearchParams(location.search);
  for (const name of ["run", "metric"]) {
    // Values chosen before keep their place, and so their colour; an empty value means none, not the default ones.
    const now = chosen.getAll(name), old = before.getAll(name).filter((value) => now.includes(value));
    chosen.delete(name);
    for (const value of new Set([...old, ...now])) chosen.append(name, value);
    if (!now.length) chosen.append(name, "");
  }
  return chosen.toString();
}

async function draw(query) {
  const mine = ++turn;
  clearTimeout(timer);
  try {
    const answer = await fetch(`${board.holder.dataset.url}?${query}`);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const tree = await answer.json();
    if (mine !== turn) return; // something else was chosen meanwhile
    board.show(tree.charts);
    trouble.hidden = true;
    if (tree.live) timer = setTimeout(() => draw(query), POLL_MS);
  } catch {
    if (mine !== turn) return;
    trouble.textContent = "The server of this page does not answer. What is shown may be old.";
    trouble.hidden = false;
    timer = setTimeout(() => draw(query), POLL_MS);
  }
}

// Both tables, the names of metrics and the colours of the runs come as the server renders them.
async function fill(query) {
  const mine = ++filling;
  const answer = await fetch(`/compare?${query}`);
  if (!answer.ok || mine !== filling) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of ["h1", "#found", "#tables"]) document.querySelector(part).replaceWith(fresh.querySelector(part));
  // Only where the names have changed: else the focus on one of them would be lost.
  const names = document.getElementById("metrics"), found = fresh.getElementById("metrics");
  if (valuesIn(names) !== valuesIn(found)) names.replaceChildren(...found.children);
  for (const [i, title] of fresh.querySelectorAll("#choice summary").entries()) form.querySelectorAll("summary")[i].replaceChildren(...title.childNodes);
  filter();
}

function valuesIn(list) {
  return [...list.querySelectorAll("input")].map((input) => input.value).sort().join("\n");
}

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const label of document.querySelectorAll("#metrics label")) {
    const fits = words.every((word) => label.firstElementChild.value.toLowerCase().includes(word));
    label.hidden = !fits && !label.firstElementChild.checked;
    found += fits;
  }
  document.getElementById("none").hidden = found > 0;
}

let waiting = 0;
function choose() {
  const query = address();
  history.replaceState(null, "", `/compare?${query}`);
  clearTimeout(waiting);
  waiting = setTimeout(() => { draw(query); fill(query).catch(() => {}); }, PAUSE_MS);
}

form.addEventListener("change", (event) => { if (event.target !== search) choose(); });
form.addEventListener("input", (event) => {
  if (event.target === search) { filter(); history.replaceState(null, "", `/compare?${address()}`); }
  if (event.target.name === "smooth") { document.getElementById("smoothing").textContent = Number(event.target.value).toFixed(2); choose(); }
});
form.addEventListener("submit", (event) => { event.preventDefault(); choose(); });
filter();
draw(address());
