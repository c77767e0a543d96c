// One answer of the race: its text by token, its clock, its steps.

const SVG = "http://www.w3.org/2000/svg";
const KNOWN = /^(model|lookup|grammar|head [1-4])$/;
const classOf = (source) => (KNOWN.test(source) ? source.replace(" ", "-") : "other");
const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;

export class Lane {
  constructor(name) {
    this.section = document.getElementById(name);
    this.clock = this.section.querySelector(".clock");
    this.answer = this.section.querySelector(".answer");
    this.about = this.section.querySelector(".about");
    this.bars = document.getElementById(`${name}-steps`);
    this.name = name;
    this.answer.addEventListener("pointerover", (event) => this.tell(event.target));
    this.answer.addEventListener("keydown", (event) => this.move(event));
    this.forget();
  }

  forget() {
    this.events = [];
    this.steps = [];
    this.report = null;
    this.clear();
    this.bars.replaceChildren();
  }

  clear() {
    this.answer.replaceChildren();
    this.about.textContent = "";
    this.clock.textContent = "";
    this.text = [];
    this.waiting = [];
    this.shown = 0;
  }

  get ids() {
    return this.steps.flatMap((step) => step.tokens.map((token) => token.id));
  }

  /** From the first token to the last, in milliseconds: prompts are left out, as the second of two finds its own cached. */
  get took() {
    return this.events.length ? this.events.at(-1).at - this.events[0].at : 0;
  }

  /** Take one event of the stream, `at` milliseconds after the start. */
  take(event, at) {
    const { trace, ...report } = event.decoding ?? {};
    const text = event.choices.map((choice) => choice.delta.content ?? "").join("");
    if (report.method) this.report = report;
    if (trace) this.steps.push(...trace);
    if (trace || text) {
      this.events.push({ at, trace: trace ?? [], text });
      this.show(this.events.at(-1));
    }
  }

  show({ at, trace, text }) {
    this.clock.textContent = seconds(at - this.events[0].at);
    for (const step of trace) for (const token of step.tokens) this.waiting.push({ step, token });
    this.text.push(...text);
    this.draw(false);
  }

  /** Tokens whose text is there; at the end all, as a stop may have cut it. */
  draw(all) {
    while (this.waiting.length && (all || this.waiting[0].token.end <= this.text.length)) {
      const { step, token } = this.waiting.shift();
      const span = document.createElement("span");
      span.className = classOf(token.source);
      span.textContent = this.text.slice(this.shown, token.end).join("");
      const chance = token.chance === null ? "" : `, chance ${token.chance.toFixed(2)}`;
      const depth = token.depth ? `, depth ${token.depth}` : "";
      span.title = `token ${token.id} by ${token.source}: step ${step.step}${depth}${chance}; ${step.nodes} candidates`;
      this.answer.append(span);
      this.shown = Math.max(this.shown, token.end);
    }
    if (all && this.shown < this.text.length) this.answer.append(this.text.slice(this.shown).join(""));
    this.answer.scrollTop = this.answer.scrollHeight;
  }

  end() {
    this.draw(true);
    this.answer.scrollTop = 0;
    this.clock.textContent = seconds(this.took);
    const perStep = this.steps.length ? (this.ids.length / this.steps.length).toFixed(2) : "0";
    this.about.textContent = `${this.ids.length} tokens in ${this.steps.length} steps, ${perStep} a step`;
  }

  tell(target) {
    if (!target.title) return;
    this.answer.querySelector(".chosen")?.classList.remove("chosen");
    target.classList.add("chosen");
    this.about.textContent = target.title;
  }

  move(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const spans = [...this.answer.querySelectorAll("span")];
    if (!by || !spans.length) return;
    event.preventDefault();
    const at = spans.findIndex((span) => span.classList.contains("chosen"));
    const next = spans[Math.min(Math.max(at + by, 0), spans.length - 1)];
    this.tell(next);
    next.scrollIntoView({ block: "nearest" });
  }

  /** The steps after the first, which reads the prompt, over `total` milliseconds; `most` tokens is full height. */
  drawSteps(total, most) {
    let x = 0;
    this.bars.replaceChildren();
    for (const step of this.steps.slice(1)) {
      const width = (step.ms / total) * 1000;
      step.tokens.forEach((token, index) => {
        const bar = document.createElementNS(SVG, "rect");
        const height = 78 / most;
        bar.setAttribute("x", x);
        bar.setAttribute("y", 80 - height * (index + 1));
        bar.setAttribute("width", Math.max(width - Math.min(1, width / 4), 0.2));
        bar.setAttribute("height", height - 1);
        bar.setAttribute("class", classOf(token.source));
        this.bars.append(bar);
      });
      x += width;
    }
    this.bars.setAttribute("aria-label", `${this.steps.length} steps, ${this.name}, ${seconds(this.took)}`);
  }
}
