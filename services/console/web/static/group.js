// The group's page: completions become tokens, a part at a time, as they come into sight.
import { TokenBox } from "./token_box.js";

const COLOURS = ["logprob", "advantage", "version", "reward", "none"];
const samples = [...document.querySelectorAll("article.sample")];

function remembered(name, choices) {
  let value = null;
  try { value = sessionStorage.getItem(`tidemill-${name}`); } catch { /* the first one, then */ }
  return choices.includes(value) ? value : choices[0];
}

function remember(name, value) {
  try { sessionStorage.setItem(`tidemill-${name}`, value); } catch { /* for this page only */ }
}

// Advantage and reward belong to whole completions: classes say where each stands in its group.
function grade() {
  const advantages = samples.map((s) => Number(s.dataset.advantage)).filter(Number.isFinite);
  const greatest = Math.max(...advantages.map(Math.abs), 0);
  const rewards = samples.map((s) => (s.dataset.reward === undefined ? NaN : Number(s.dataset.reward)));
  const known = rewards.filter(Number.isFinite);
  const least = Math.min(...known), most = Math.max(...known);
  samples.forEach((sample, i) => {
    const advantage = Number(sample.dataset.advantage);
    if (advantage && greatest) {
      sample.classList.add(`a-${advantage > 0 ? "p" : "n"}${Math.min(3, Math.ceil((3 * Math.abs(advantage)) / greatest))}`);
    }
    if (Number.isFinite(rewards[i])) sample.classList.add(`r${most > least ? Math.round((4 * (rewards[i] - least)) / (most - least)) : 2}`);
  });
}

function choose(colour) {
  document.body.dataset.colour = colour;
  remember("colour", colour);
  const input = document.querySelector(`input[name=colour][value=${colour}]`);
  if (input) input.checked = true;
}

const boxes = new Map([...document.querySelectorAll(".tokens")].map((element) => [element, new TokenBox(element)]));
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { sight.unobserve(entry.target); boxes.get(entry.target).open(shape); }
}, { rootMargin: "400px" });

let shape = remembered("shape", ["tokens", "text"]);
grade();
choose(remembered("colour", COLOURS));
document.body.dataset.shape = shape;
const chosen = document.querySelector(`input[name=shape][value=${shape}]`);
if (chosen) chosen.checked = true;
boxes.forEach((_, element) => sight.observe(element));

document.getElementById("colours")?.addEventListener("change", (event) => choose(event.target.value));
document.getElementById("shapes")?.addEventListener("change", (event) => {
  shape = event.target.value;
  remember("shape", shape);
  document.body.dataset.shape = shape;
  boxes.forEach((box, element) => { box.close(); sight.unobserve(element); sight.observe(element); });
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=radio]), select, textarea")) return;
  const colour = COLOURS[Number(event.key) - 1];
  if (colour && samples.length) choose(colour);
});
