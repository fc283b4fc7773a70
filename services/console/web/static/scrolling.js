// What does not fit scrolls in its own box; the box fades out at each side where there is more of it.

const BOXES = ".scroll, .wide, .tokens, .picks, pre.text";

function look(box) {
  const right = box.scrollWidth - box.clientWidth, below = box.scrollHeight - box.clientHeight;
  const sides = { left: box.scrollLeft > 1, right: box.scrollLeft < right - 1, top: box.scrollTop > 1, bottom: box.scrollTop < below - 1 };
  for (const [side, has] of Object.entries(sides)) box.classList.toggle(`more-${side}`, has);
}

export function hintScrolling() {
  const sizes = new ResizeObserver((entries) => { for (const { target } of entries) look(target.matches(BOXES) ? target : target.closest(BOXES) ?? target); });
  const watched = new WeakSet();
  function watch() {
    for (const box of document.querySelectorAll(BOXES)) {
      if (watched.has(box)) { look(box); continue; }
      watched.add(box);
      box.addEventListener("scroll", () => look(box), { passive: true });
      sizes.observe(box);
      look(box);
    }
  }
  let wanted = 0;
  new MutationObserver(() => { cancelAnimationFrame(wanted); wanted = requestAnimationFrame(watch); })
    .observe(document.getElementById("main"), { childList: true, subtree: true });
  document.addEventListener("toggle", watch, true);
  watch();
  for (const log of document.querySelectorAll(".log")) log.scrollTop = log.scrollHeight; // the newest lines
}
