// Pages that say "not yet" (`data-wait`) load again by themselves once the server has what they wait for.

const POLL_MS = 2000;
const isOverview = Boolean(document.getElementById("freshness")); // overview.js keeps that one up to date
let isUsed = false;

for (const kind of ["input", "pointerdown", "keydown"]) addEventListener(kind, () => { isUsed = true; }, { once: true });

function waiting() { return [...document.querySelectorAll("[data-wait]")]; }

async function look() {
  const answer = await fetch(location.href);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  let isThere = false;
  for (const old of waiting()) {
    const now = fresh.getElementById(old.id);
    if (!now || !("wait" in now.dataset)) isThere = true;
    else if (now.textContent !== old.textContent) old.replaceWith(now);
  }
  return isThere;
}

// Who is reading or typing decides when the page changes.
function offer() {
  for (const old of waiting()) {
    const link = document.createElement("a");
    link.href = location.href;
    link.textContent = "There is more now: load again";
    old.replaceChildren(link);
    delete old.dataset.wait;
    link.addEventListener("click", (event) => { event.preventDefault(); location.reload(); });
  }
}

async function follow() {
  let isThere = false;
  try { isThere = !document.hidden && await look(); } catch { /* the server may come back */ }
  if (!isThere) setTimeout(follow, POLL_MS);
  else if (isUsed) offer();
  else location.reload();
}

if (!isOverview && waiting().length) setTimeout(follow, POLL_MS);
