// Keeps the overview of a live run up to date: the state as the server renders it, the curves as points.
import { Board } from "./charts.js";

const POLL_MS = 2000;
const RETRY_MS = 5000;
const board = new Board(document.getElementById("charts"));
const freshness = document.getElementById("freshness");
let version = null;

async function drawCharts() {
  const answer = await fetch(board.holder.dataset.url);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const tree = await answer.json();
  if (tree.charts.length) board.show(tree.charts);
  return tree;
}

async function drawState() {
  const answer = await fetch(`${document.body.dataset.run}/state.html`);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("state");
  const old = document.getElementById("state");
  // A link in it that has the focus keeps it.
  const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  old.replaceWith(fresh);
  if (focused) [...fresh.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
}

async function follow() {
  let pause = POLL_MS;
  try {
    if (!document.hidden || version === null) {
      const tree = await drawCharts();
      // The server has just rendered the state; after that, until the run has ended and nothing is new.
      if (version !== null) {
        await drawState();
        freshness.textContent = tree.live ? "Live" : "The run is not going on.";
        if (!tree.live && version === tree.version) return;
      } else if (!tree.live && tree.charts.length) return;
      version = tree.version;
    }
  } catch {
    freshness.textContent = "The server of this page does not answer. What is shown may be old.";
    pause = RETRY_MS;
  }
  setTimeout(follow, pause);
}

follow();
