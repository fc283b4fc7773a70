// The group's page: completions become tokens, a part at a time, as they come into sight.
import { TokenBox } from "./token_box.js";

const SHAPES = ["tokens", "text", "chat"];
// Without a tokenizer, tokens are numbers: text comes first, and what was chosen for other runs does not count.
const hasTexts = document.getElementById("shapes")?.dataset.first !== "text";
if (!hasTexts) SHAPES.splice(0, 2, "text", "tokens");
const kept = (name) => `tidemill-${name}${name === "shape" && !hasTexts ? "-of-ids" : ""}`;
const COLOURS = ["logprob", "advantage", "version", "reward", "none"];
const samples = [...document.querySelectorAll("article.sample")];

// The address has the choices, so that it can be shared; choices that it does not have are the last ones.
function remembered(name, choices) {
  let value = new URLSearchParams(location.search).get(name);
  if (choices.includes(value)) return value;
  try { value = sessionStorage.getItem(kept(name)); } catch { /* the first one, then */ }
  return choices.includes(value) ? value : choices[0];
}

function remember(name, value, choices) {
  const chosen = new URLSearchParams(location.search);
  if (value === choices[0]) chosen.delete(name); else chosen.set(name, value);
  const query = chosen.size ? `?${chosen}` : "";
  if (query !== location.search) history.replaceState(null, "", location.pathname + query + location.hash);
  try { sessionStorage.setItem(kept(name), value); } catch { /* for this page only */ }
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

// As a chat, a session is unfolded from its first to its last message; a single turn is its text.
function unfold() {
  for (const fold of document.querySelectorAll("details:is(.session, .turn)")) fold.open = shape === "chat";
}

function choose(colour) {
  document.body.dataset.colour = colour;
  remember("colour", colour, COLOURS);
  const input = document.querySelector(`input[name=colour][value=${colour}]`);
  if (input) input.checked = true;
}

const boxes = new Map([...document.querySelectorAll(".tokens")].map((element) => [element, new TokenBox(element)]));
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { sight.unobserve(entry.target); boxes.get(entry.target).open(shape === "chat" ? "text" : shape); }
}, { rootMargin: "400px" });

let shape = remembered("shape", SHAPES);
grade();
choose(remembered("colour", COLOURS));
document.body.dataset.shape = shape;
remember("shape", shape, SHAPES);
const chosen = document.querySelector(`input[name=shape][value=${shape}]`);
if (chosen) chosen.checked = true;
boxes.forEach((_, element) => sight.observe(element));
unfold();

// A link to a token: its box is opened as far as that.
const [, fork, at] = (new URLSearchParams(location.search).get("at") ?? "").match(/^(?:(\d+)\.)?(\d{1,7})$/) ?? [];
const meant = at && samples.find((sample) => `#${sample.id}` === location.hash);
const opened = meant && shape === "tokens" && boxes.get(meant.querySelector(fork ? `.tokens[data-segment="${fork}"]` : ".tokens"));
if (opened) {
  sight.unobserve(opened.element);
  opened.open(shape).then(() => opened.find(Number(at)));
}

document.getElementById("colours")?.addEventListener("change", (event) => choose(event.target.value));
document.getElementById("shapes")?.addEventListener("change", (event) => {
  shape = event.target.value;
  remember("shape", shape, SHAPES);
  document.body.dataset.shape = shape;
  unfold();
  boxes.forEach((box, element) => { box.close(); sight.unobserve(element); sight.observe(element); });
});
for (const sample of samples) sample.addEventListener("focus", () => {
  const kept = new URLSearchParams(location.search);
  if (location.hash !== `#${sample.id}`) kept.delete("at");
  history.replaceState(null, "", `${location.pathname}${kept.size ? `?${kept}` : ""}#${sample.id}`);
  dispatchEvent(new Event("hashchange"));
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=radio]), select, textarea")) return;
  const colour = COLOURS[Number(event.key) - 1];
  if (colour && samples.length) choose(colour);
});
