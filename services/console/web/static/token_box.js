// One completion: fetches parts of it, makes tokens of them, and tells about the token that is pointed at.
import { appendVisible, visibleText } from "./unseen.js";

const FIRST_TOKENS = 400, MORE_TOKENS = 2000;
const STEPS = [0.9, 0.5, 0.2, 0.05, 0.01];
const OLDEST = 4;
const tip = document.getElementById("tip");

function levelOf(logprob) {
  if (logprob === null) return 0;
  const probability = Math.exp(logprob);
  const level = STEPS.findIndex((least) => probability >= least);
  return level < 0 ? STEPS.length : level;
}

export class TokenBox {
  constructor(element) {
    this.element = element;
    this.url = element.dataset.url;
    this.step = Number(element.dataset.step);
    this.plain = [...element.childNodes]; // what the server rendered stands until there is better
    this.here = null;
    this.loaded = 0;
    this.turn = 0;
    element.addEventListener("mouseover", (event) => { if (event.target.closest(".t")) this.tell(event.target.closest(".t")); });
    element.addEventListener("mouseleave", () => this.tell(null));
    element.addEventListener("click", (event) => { if (event.target.closest(".t")) this.pick(event.target.closest(".t")); });
    element.addEventListener("blur", () => this.tell(null));
    element.addEventListener("keydown", (event) => this.walk(event));
  }

  open(shape) {
    this.segment = this.element.dataset.segment;
    if (this.segment) shape = "tokens"; // the recorded text is not that of a fork
    this.shape = shape;
    this.loaded = 0;
    this.version = null;
    this.text = document.createElement(shape === "tokens" ? "p" : "bdi");
    this.text.className = "text";
    if (shape === "text") this.text.classList.add("recorded");
    return this.more(FIRST_TOKENS);
  }

  close() {
    this.turn += 1;
    this.tell(null);
    this.element.replaceChildren(...this.plain);
  }

  async more(count) {
    const turn = this.turn;
    const name = this.shape === "tokens" ? "tokens.json" : "text.json";
    this.element.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch(`${this.url}/${name}?first=${this.loaded}&count=${count}&segment=${this.segment ?? 0}`);
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const part = await answer.json();
      if (turn !== this.turn) return; // another view was chosen meanwhile
      if (this.shape === "tokens") this.addTokens(part); else this.addText(part);
      this.element.replaceChildren(this.text, ...this.rest(part));
    } catch {
      if (turn !== this.turn) return;
      const note = document.createElement("p");
      note.className = "hint";
      note.textContent = "The tokens could not be loaded; this is the beginning of the text.";
      this.element.append(note);
    } finally {
      this.element.removeAttribute("aria-busy");
    }
  }

  rest(part) {
    if (this.loaded >= part.total) {
      if (part.total > 0) return [];
      const note = document.createElement("p");
      note.className = "hint";
      note.textContent = "Nothing was generated.";
      return [note];
    }
    const button = document.createElement("button");
    button.type = "button";
    const unit = this.shape === "tokens" ? "tokens" : "characters";
    button.textContent = `Show more (${(part.total - this.loaded).toLocaleString("en")} ${unit} left)`;
    button.addEventListener("click", () => { button.disabled = true; this.more(MORE_TOKENS).then(() => this.element.focus({ preventScroll: true })); });
    return [button];
  }

  addText(part) {
    appendVisible(this.text, part.text);
    this.loaded = part.next;
  }

  addTokens(part) {
    const made = document.createDocumentFragment();
    part.ids.forEach((id, i) => made.append(this.token(part, id, i)));
    this.text.append(made);
    this.loaded = part.first + part.ids.length;
  }

  token(part, id, i) {
    const token = document.createElement("span");
    const version = part.versions[i];
    const piece = part.pieces ? part.pieces[i] : null;
    token.className = `t l${levelOf(part.logprobs[i])} v${Math.min(OLDEST, Math.max(0, this.step - version))}`;
    token.classList.add(part.trained[i] ? "trained" : "untrained");
    const turn = part.turns ? part.turns[i] : null;
    if (turn !== null && turn < 0) token.classList.add("environment");
    if (version !== this.version) { token.dataset.from = version; this.version = version; }
    token.facts = { at: part.first + i, id, piece, logprob: part.logprobs[i], version, turn, trained: part.trained[i] };
    if (piece === null) { token.classList.add("id"); token.textContent = String(id); }
    else if (piece === "") token.textContent = "\u2060";
    else this.write(token, piece);
    return token;
  }

  // A line feed is shown and done.
  write(token, piece) {
    piece.split("\n").forEach((line, i) => {
      if (i) {
        const mark = document.createElement("span");
        mark.className = "nl";
        mark.textContent = "⏎";
        token.append(mark, "\n");
      }
      if (line) appendVisible(token, line);
    });
  }

  walk(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.tell(null);
    if (!by || event.target !== this.element) return;
    event.preventDefault();
    const next = this.here === null ? this.text?.querySelector(".t") : by > 0 ? this.here.nextElementSibling : this.here.previousElementSibling;
    if (next) { this.pick(next); next.scrollIntoView({ block: "nearest" }); this.place(next); }
  }

  // The address names the token that somebody chose: `at=17#c3`, of a fork `at=1.17#c3`.
  pick(token) {
    this.tell(token);
    const chosen = new URLSearchParams(location.search);
    chosen.set("at", (this.segment ? `${this.segment}.` : "") + token.facts.at);
    history.replaceState(null, "", `${location.pathname}?${chosen}#${this.element.closest(".sample").id}`);
    dispatchEvent(new Event("hashchange"));
  }

  async find(at) {
    const total = Number(this.element.dataset.total);
    for (let loaded = -1; this.loaded <= at && this.loaded < total && loaded < this.loaded; ) { loaded = this.loaded; await this.more(MORE_TOKENS); }
    const token = this.text.querySelectorAll(".t")[at];
    if (!token) return;
    token.scrollIntoView({ block: "center", behavior: "instant" });
    this.tell(token);
  }

  tell(token) {
    this.here?.classList.remove("here");
    this.here = token;
    tip.hidden = token === null;
    if (token === null) return;
    token.classList.add("here");
    const { at, id, piece, logprob, version, turn, trained } = token.facts;
    const name = document.createElement("b");
    name.textContent = piece === null ? `id ${id}` : piece === "" ? "(part of a character)" : visibleText(piece);
    const probability = logprob === null ? "unknown" : `${logprob.toFixed(3).replace("-", "−")} (${(100 * Math.exp(logprob)).toPrecision(3)} %)`;
    const steps = this.step - version;
    const age = this.step >= 0 ? `, ${steps} step${steps === 1 ? "" : "s"} old` : "";
    const made = turn !== null && turn < 0
      ? "the environment's"
      : `${turn === null ? "" : `turn ${turn} · `}logprob ${probability} · version ${version}${age}`;
    tip.replaceChildren(name, document.createElement("br"),
      `token ${at} · id ${id} · ${made}${trained ? "" : " · not trained"}`);
    this.place(token);
  }

  place(token) {
    const box = token.getBoundingClientRect();
    const height = tip.offsetHeight, width = tip.offsetWidth;
    const above = box.top - height - 6;
    tip.style.top = `${above > 4 ? above : Math.min(innerHeight - height - 4, box.bottom + 6)}px`;
    tip.style.left = `${Math.max(4, Math.min(innerWidth - width - 4, box.left))}px`;
  }
}
