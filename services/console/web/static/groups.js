// The browser of groups: says when there is more than the page shows. Rows never move by themselves.

const POLL_MS = 3000;
const changes = document.getElementById("changes");

async function look() {
  if (document.hidden) return true;
  try {
    const answer = await fetch(changes.dataset.url);
    if (!answer.ok) return true;
    const { live, groups } = await answer.json();
    const more = groups[changes.dataset.lane] - Number(changes.dataset.known);
    if (more > 0) {
      let link = changes.querySelector(".more"); // its other links lead to files
      if (!link) { link = document.createElement("a"); link.className = "more"; link.href = location.href; changes.append(" · ", link); }
      link.textContent = `${more.toLocaleString()} more since: load again`;
    }
    return live;
  } catch { return true; /* the server may come back */ }
}

async function follow() {
  if (await look()) setTimeout(follow, POLL_MS);
}

setTimeout(follow, POLL_MS);
