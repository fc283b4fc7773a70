// Keeps the overview in step with a live run: the state as the server renders it, the curves as points.
import { Chart } from "./charts.js";

const POLL_MS = 2000;
const RETRY_MS = 5000;
const holder = document.getElementById("charts");
const freshness = document.getElementById("freshness");
const charts = new Map();
let version = -1;

async function drawCharts() {
  const answer = await fetch(holder.dataset.url);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const tree = await answer.json();
  if (!tree.charts.length) return tree;
  if (!charts.size) holder.replaceChildren();
  for (const found of tree.charts) {
    let chart = charts.get(found.key);
    if (!chart) {
      chart = new Chart(found.key);
      charts.set(found.key, chart);
      holder.append(chart.figure);
    }
    chart.update(found);
  }
  return tree;
}

async function drawState() {
  const answer = await fetch(`${document.body.dataset.run}/state.html`);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("state");
  const old = document.getElementById("state");
  // Who stands on a link of it keeps his place.
  const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  old.replaceWith(fresh);
  if (focused) [...fresh.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
}

async function follow() {
  let pause = POLL_MS;
  try {
    if (!document.hidden) {
      const tree = await drawCharts();
      await drawState();
      freshness.textContent = tree.live ? "Live" : "The run is not going on.";
      if (!tree.live && version === tree.version) return;
      version = tree.version;
    }
  } catch {
    freshness.textContent = "The server of this page does not answer. What is shown may be old.";
    pause = RETRY_MS;
  }
  setTimeout(follow, pause);
}

let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => charts.forEach((chart) => chart.update(chart.tree)), 100);
});

drawCharts().then((tree) => { version = tree.version; if (tree.live) setTimeout(follow, POLL_MS); else if (!tree.charts.length) setTimeout(follow, POLL_MS); }).catch(() => follow());
