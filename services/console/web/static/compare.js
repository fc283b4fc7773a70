// Runs overlaid: whatever is chosen is in the address at once, and drawn without loading the page again.
import { Chart } from "./charts.js";

const POLL_MS = 5000;
const PAUSE_MS = 150;
const form = document.getElementById("choice");
const holder = document.getElementById("charts");
const trouble = document.getElementById("trouble");
const search = document.getElementById("search");
const charts = new Map();
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
    // Who was there keeps his place, and so his colour; none at all is not the same as the first ones.
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
    const answer = await fetch(`${holder.dataset.url}?${query}`);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const tree = await answer.json();
    if (mine !== turn) return; // something else was chosen meanwhile
    show(tree.charts);
    trouble.hidden = true;
    if (tree.live) timer = setTimeout(() => draw(query), POLL_MS);
  } catch {
    if (mine !== turn) return;
    trouble.textContent = "The server of this page does not answer. What is shown may be old.";
    trouble.hidden = false;
    timer = setTimeout(() => draw(query), POLL_MS);
  }
}

function show(trees) {
  if (!charts.size && trees.length) holder.replaceChildren();
  const wanted = new Set(trees.map((tree) => tree.key));
  for (const [key, chart] of charts) if (!wanted.has(key)) { chart.figure.remove(); charts.delete(key); }
  for (const tree of trees) {
    let chart = charts.get(tree.key);
    if (!chart) { chart = new Chart(tree.key); charts.set(tree.key, chart); }
    holder.append(chart.figure);
    chart.update({ ...tree, nearest: true });
  }
}

// Both tables and the colours of the runs come as the server renders them.
async function fill(query) {
  const mine = ++filling;
  const answer = await fetch(`/compare?${query}`);
  if (!answer.ok || mine !== filling) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of ["h1", "#found", "#tables"]) document.querySelector(part).replaceWith(fresh.querySelector(part));
  if (wanted.names) { document.getElementById("metrics").replaceWith(fresh.getElementById("metrics")); filter(); }
  wanted.names = false;
  for (const [i, title] of fresh.querySelectorAll("#choice summary").entries()) form.querySelectorAll("summary")[i].replaceWith(title);
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
const wanted = { tables: false, names: false };
function choose(change) {
  Object.assign(wanted, change); // what an earlier change wants is not forgotten when another follows at once
  const query = address();
  history.replaceState(null, "", `/compare?${query}`);
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    draw(query);
    if (wanted.tables) fill(query).catch(() => {});
    wanted.tables = false;
  }, PAUSE_MS);
}

form.addEventListener("change", (event) => { if (event.target !== search) choose({ ...(event.target.type === "checkbox" && { tables: true }), ...(event.target.name === "run" && { names: true }) }); });
form.addEventListener("input", (event) => {
  if (event.target === search) { filter(); history.replaceState(null, "", `/compare?${address()}`); }
  if (event.target.name === "smooth") { document.getElementById("smoothing").textContent = Number(event.target.value).toFixed(2); choose({}); }
});
form.addEventListener("submit", (event) => { event.preventDefault(); choose({ tables: true }); });
addEventListener("resize", () => charts.forEach((chart) => chart.update(chart.tree)));
draw(address());
