// Keeps the overview of a live run up to date: the state as the server renders it, the curves as points.
import { Board } from "./charts.js";

const POLL_MS = 2000;
const RETRY_MS = 5000;
const NUM_FIRST = 3; // curves above the state, where they are seen without scrolling
const first = new Board(document.getElementById("first-charts"));
const rest = new Board(document.getElementById("charts"));
const freshness = document.getElementById("freshness");
let version = null;

async function drawCharts() {
  const answer = await fetch(rest.holder.dataset.url);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const tree = await answer.json();
  if (tree.charts.length) {
    rest.holder.querySelector(".empty")?.remove();
    first.show(tree.charts.slice(0, NUM_FIRST));
    rest.show(tree.charts.slice(NUM_FIRST));
  }
  return tree;
}

async function drawState() {
  const answer = await fetch(`${document.body.dataset.run}/state.html`);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const id of ["notices", "head", "state"]) {
    const fresh = page.getElementById(id), old = document.getElementById(id);
    // A link in it that has the focus keeps it.
    const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    old.replaceWith(fresh);
    if (focused) [...fresh.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
  }
}

async function follow() {
  let pause = POLL_MS;
  try {
    if (!document.hidden || version === null) {
      const tree = await drawCharts();
      // The server has just rendered the state; after that, until the run has ended and nothing is new.
      if (version !== null) {
        await drawState();
        const quiet = tree.changes ? "The run is being read." : "The run is not going on.";
        freshness.textContent = tree.live ? "Live" : tree.problem && tree.changes ? "The run cannot be read now." : quiet;
        if (!tree.changes && version === tree.version) return;
      } else if (!tree.changes && tree.charts.length) return;
      version = tree.version;
    }
  } catch {
    freshness.textContent = "The server of this page does not answer. What is shown may be old.";
    pause = RETRY_MS;
  }
  setTimeout(follow, pause);
}

follow();
