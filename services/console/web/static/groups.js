// The browser of groups: draws rewards, and says when there is more than the page shows. Rows never move by themselves.
import { drawStrips } from "./strips.js";

const POLL_MS = 3000;
const news = document.getElementById("news");

async function look() {
  if (document.hidden) return true;
  try {
    const answer = await fetch(news.dataset.url);
    if (!answer.ok) return true;
    const { live, groups } = await answer.json();
    const more = groups[news.dataset.lane] - Number(news.dataset.known);
    if (more > 0) {
      let link = news.querySelector("a");
      if (!link) { link = document.createElement("a"); link.href = location.href; news.append(" · ", link); }
      link.textContent = `${more.toLocaleString()} more since: load again`;
    }
    return live;
  } catch { return true; /* the server may come back */ }
}

async function follow() {
  if (await look()) setTimeout(follow, POLL_MS);
}

drawStrips();
if (news) setTimeout(follow, POLL_MS);
