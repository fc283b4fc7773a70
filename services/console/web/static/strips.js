// Rewards of a group as dots on a line; all strips of a page share one scale.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 90, MIDDLE = 9;

export function drawStrips() {
  const strips = [...document.querySelectorAll(".strip[data-values]")];
  const values = strips.map((strip) => strip.dataset.values.trim().split(/\s+/).filter(Boolean).map(Number));
  let least = Infinity, most = -Infinity;
  for (const list of values) for (const value of list) { least = Math.min(least, value); most = Math.max(most, value); }
  const range = most - least || 1;
  strips.forEach((strip, i) => {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} 18`);
    svg.setAttribute("aria-hidden", "true");
    const axis = svg.appendChild(document.createElementNS(SVG, "line"));
    for (const [name, value] of [["x1", 4], ["x2", WIDTH - 4], ["y1", MIDDLE], ["y2", MIDDLE]]) axis.setAttribute(name, value);
    const heights = new Map();
    for (const value of values[i]) {
      const x = Math.round(4 + ((WIDTH - 8) * (value - least)) / range);
      const level = heights.get(x) || 0;
      heights.set(x, level + 1);
      const dot = svg.appendChild(document.createElementNS(SVG, "circle"));
      dot.setAttribute("cx", x);
      // Equal rewards pile up to both sides of the line.
      dot.setAttribute("cy", MIDDLE + Math.min(7, Math.ceil(level / 2)) * (level % 2 ? -1 : 1));
      dot.setAttribute("r", 2.4);
    }
    strip.replaceChildren(svg);
  });
}
