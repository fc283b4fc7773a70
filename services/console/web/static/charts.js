// Small line charts in SVG, hand-drawn: axes with few ticks, a cursor that reads values, keys for the keyboard.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;
const HAS_FRACTIONS = new Set(["hour", "minute"]);
const WIDTH = 400, HEIGHT = 150, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 18;

function make(name, attributes = {}, parent = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 }).replace("-", "−");
}

function ticks(least, most, count) {
  const rough = (most - least) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let tick = Math.ceil(least / step) * step; tick <= most + step * 1e-6; tick += step) found.push(Math.abs(tick) < step * 1e-6 ? 0 : tick);
  return found;
}

function extent(lines, unit) {
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const line of lines) for (const [x, y] of [...line.points, ...(line.raw ?? [])]) {
    x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
  }
  if (unit === "share") { y0 = 0; y1 = Math.max(0.1, y1); }
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 0.5; y0 -= pad; y1 += pad; }
  return { x0, x1, y0, y1 };
}

class Chart {
  constructor() {
    this.figure = document.createElement("figure");
    this.figure.className = "chart";
    this.figure.tabIndex = 0;
    this.caption = this.figure.appendChild(document.createElement("figcaption"));
    this.svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.figure);
    this.at = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.figure.addEventListener("blur", () => this.read(null));
    this.figure.addEventListener("keydown", (event) => this.step(event));
  }

  update(tree) {
    this.tree = tree;
    this.box = extent(tree.lines, tree.unit);
    this.width = Math.max(200, this.svg.clientWidth || WIDTH);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.xs = [...new Set(tree.lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
    this.draw();
    this.read(this.at);
  }

  x(value) { return LEFT + ((this.width - LEFT - RIGHT) * (value - this.box.x0)) / (this.box.x1 - this.box.x0); }
  y(value) { return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - this.box.y0) / (this.box.y1 - this.box.y0)); }

  draw() {
    this.svg.replaceChildren();
    const { x0, x1, y0, y1 } = this.box;
    for (const tick of ticks(y0, y1, 4)) {
      make("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(tick), y2: this.y(tick) }, this.svg);
      make("text", { x: LEFT - 5, y: this.y(tick) + 3.5, "text-anchor": "end" }, this.svg).textContent = short(tick);
    }
    for (const tick of ticks(x0, x1, 4).filter((tick) => HAS_FRACTIONS.has(this.tree.x) || Number.isInteger(tick))) {
      make("text", { x: this.x(tick), y: HEIGHT - 4, "text-anchor": "middle" }, this.svg).textContent = Number(tick.toPrecision(6)).toLocaleString("en");
    }
    this.tree.lines.forEach((line, i) => { if (line.raw) this.path(line.raw, `raw s${i % COLOURS}`); });
    this.tree.lines.forEach((line, i) => {
      if (line.points.length === 1) {
        const [[x, y]] = line.points;
        make("circle", { class: `dot s${i % COLOURS}`, cx: this.x(x), cy: this.y(y), r: 3 }, this.svg);
      } else if (line.points.length) this.path(line.points, `line s${i % COLOURS}`);
    });
    this.cursor = make("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, this.svg);
  }

  path(points, kind) {
    const path = points.map(([x, y], n) => `${n ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
    make("path", { class: kind, d: path }, this.svg);
  }

  // Lines of several runs are thinned apart from each other: their points are not at the same places.
  valueAt(line, x) {
    if (x === null) return line.points.at(-1);
    const next = line.points.findIndex(([at]) => at >= x);
    if (next < 0) return undefined; // this run has not come so far
    const [before, after] = [line.points[next - 1], line.points[next]];
    return before && x - before[0] < after[0] - x ? before : after;
  }

  // The caption says what the cursor points at, and the last values where there is no cursor.
  read(x) {
    if (!this.tree) return;
    this.at = x;
    const title = document.createElement("b");
    title.textContent = x === null ? this.tree.title : `${this.tree.title}, ${this.tree.x} ${Number.isInteger(x) ? x : short(x)}`;
    const keys = this.tree.lines.map((line, i) => {
      const found = this.valueAt(line, x);
      const key = document.createElement("span");
      key.className = "key";
      const sample = make("svg", { viewBox: "0 0 22 8" });
      make("line", { class: `s${i % COLOURS}`, x1: 0, x2: 22, y1: 4, y2: 4 }, sample);
      key.append(sample, `${line.label} ${short(found?.[1])}`);
      return key;
    });
    this.caption.replaceChildren(title, ...keys);
    this.cursor.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.x(x));
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const wanted = this.box.x0 + ((((event.clientX - box.left) * this.width) / box.width - LEFT) * (this.box.x1 - this.box.x0)) / (this.width - LEFT - RIGHT);
    this.read(this.xs.reduce((best, x) => (Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best), this.xs[0]));
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at = this.at === null ? (by > 0 ? -1 : this.xs.length) : this.xs.indexOf(this.at);
    this.read(this.xs[Math.min(this.xs.length - 1, Math.max(0, at + by))]);
  }
}

// The charts of a page, by key: each keeps its place and its cursor while its points change.
export class Board {
  constructor(holder) {
    this.holder = holder;
    this.charts = new Map();
    addEventListener("resize", () => this.charts.forEach((chart) => chart.update(chart.tree)));
  }

  show(trees) {
    if (!this.charts.size && trees.length) this.holder.replaceChildren();
    const wanted = new Set(trees.map((tree) => tree.key));
    for (const [key, chart] of this.charts) if (!wanted.has(key)) { chart.figure.remove(); this.charts.delete(key); }
    for (const tree of trees) {
      if (!this.charts.has(tree.key)) this.charts.set(tree.key, new Chart());
      const chart = this.charts.get(tree.key);
      // Moved only where it has to be: a chart that is moved loses the focus.
      const there = this.holder.children[trees.indexOf(tree)] ?? null;
      if (there !== chart.figure) this.holder.insertBefore(chart.figure, there);
      chart.update(tree);
    }
  }
}
