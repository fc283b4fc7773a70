// One completion: fetches parts of it as the server renders them, and describes the token under the pointer.

const FIRST_TOKENS = 400, MORE_TOKENS = 2000;
const tip = document.getElementById("tip");

function hint(words) {
  const note = document.createElement("p");
  note.className = "hint";
  note.textContent = words;
  return note;
}

export class TokenBox {
  constructor(element) {
    this.element = element;
    this.segment = element.dataset.segment; // of a fork
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
    this.shape = this.segment ? "tokens" : shape; // the recorded text is not that of a fork
    this.loaded = 0;
    this.text = null;
    return this.more(FIRST_TOKENS);
  }

  close() {
    this.turn += 1;
    this.tell(null);
    this.element.replaceChildren(...this.plain);
  }

  async more(count) {
    const turn = this.turn;
    this.element.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch(`${this.element.dataset.url}/${this.shape}?first=${this.loaded}&count=${count}&segment=${this.segment ?? 0}`);
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const part = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("p.text");
      if (turn !== this.turn) return; // another view was chosen meanwhile
      this.loaded = Number(part.dataset.next);
      if (this.text) this.text.append(...part.childNodes); else this.text = part;
      this.element.replaceChildren(this.text, ...this.rest(Number(part.dataset.total)));
    } catch {
      if (turn === this.turn) this.element.append(hint("The tokens could not be loaded; this is the beginning of the text."));
    } finally {
      this.element.removeAttribute("aria-busy");
    }
  }

  rest(total) {
    if (!total) return [hint("Nothing was generated.")];
    if (this.loaded >= total) return [];
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `Show more (${(total - this.loaded).toLocaleString("en")} ${this.shape === "tokens" ? "tokens" : "characters"} left)`;
    button.addEventListener("click", () => { button.disabled = true; this.more(MORE_TOKENS).then(() => this.element.focus({ preventScroll: true })); });
    return [button];
  }

  walk(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.tell(null);
    if (!by || event.target !== this.element) return;
    event.preventDefault();
    const next = this.here === null ? this.text?.querySelector(".t") : by > 0 ? this.here.nextElementSibling : this.here.previousElementSibling;
    if (next) { this.pick(next); next.scrollIntoView({ block: "nearest" }); this.place(next); }
  }

  // The address names the chosen token: `at=17#c3`, of a fork `at=1.17#c3`.
  pick(token) {
    this.tell(token);
    const chosen = new URLSearchParams(location.search);
    chosen.set("at", (this.segment ? `${this.segment}.` : "") + [...this.text.children].indexOf(token));
    history.replaceState(null, "", `${location.pathname}?${chosen}#${this.element.closest(".sample").id}`);
    dispatchEvent(new Event("hashchange"));
  }

  async find(at) {
    const total = Number(this.element.dataset.total);
    for (let loaded = -1; this.loaded <= at && this.loaded < total && loaded < this.loaded; ) { loaded = this.loaded; await this.more(MORE_TOKENS); }
    const token = this.text.children[at];
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
    const name = document.createElement("b");
    name.textContent = token.textContent;
    tip.replaceChildren(name, document.createElement("br"), token.dataset.tip);
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
