/* The drawer: the system prompt, how tokens are drawn, and when an answer ends. What is empty is not sent. */

import { find, make } from "./dom.js";
import { keep, recall } from "./memory.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", low: 0, high: 2, step: 0.05, neutral: 1, hint: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top p", low: 0.01, high: 1, step: 0.01, neutral: 1, hint: "the likeliest that make up this share" },
  { name: "top_k", label: "Top k", low: 0, high: 200, step: 1, neutral: 0, hint: "so many of the likeliest; 0 is all" },
  { name: "min_p", label: "Min p", low: 0, high: 1, step: 0.01, neutral: 0, hint: "none less likely than this share of the likeliest" },
  { name: "repetition_penalty", label: "Repetition penalty", low: 0.5, high: 2, step: 0.01, neutral: 1, hint: "above 1 avoids tokens that were there" },
  { name: "max_tokens", label: "Max tokens", low: 1, high: 1024, step: 1, hint: "what an answer may have at most" },
];

/** The chosen settings; fires "change". */
export class Settings extends EventTarget {
  #values = {};
  #inputs = new Map(); // name -> what shows its value
  #most = 1024; // tokens
  #own = {}; // the model's defaults, by name

  constructor() {
    super();
    const kept = recall("settings");
    if (kept && typeof kept === "object") this.#values = kept;
    const lines = this.#area("system", "System prompt", 4, "Said before the chat");
    const stop = this.#area("stop", "Stop strings", 2, "One a line; \\n is a new line");
    find("fields").replaceChildren(lines, ...NUMBERS.map((field) => this.#number(field)), this.#seed(), stop);
    find("defaults").onclick = () => this.#set({});
    this.#show();
  }

  get system() {
    return (this.#values.system ?? "").trim();
  }

  /** The fields of a request: what was chosen, else what the page shows as the model's. */
  get params() {
    return { ...this.#own, ...this.#chosen };
  }

  get #chosen() {
    const found = {};
    for (const { name } of [...NUMBERS, { name: "seed" }]) {
      if (Number.isFinite(this.#values[name])) found[name] = this.#values[name];
    }
    const stop = (this.#values.stop ?? "").split("\n").filter(Boolean);
    if (stop.length) found.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
    return found;
  }

  /** What differs from the defaults, in a few words. */
  get summary() {
    const { temperature, max_tokens: most, ...others } = this.#chosen;
    const words = [];
    if (temperature !== undefined) words.push(`temperature ${temperature}`);
    if (most !== undefined) words.push(`${most} tokens`);
    const more = Object.keys(others).length + (this.system ? 1 : 0);
    if (more) words.push(words.length ? `${more} more` : `${more} changed`);
    return words.join(", ") || "Settings";
  }

  /** Show what holds for this model where nothing is chosen: the most tokens of an answer, and its own defaults. */
  suit(most, own) {
    const { range } = this.#inputs.get("max_tokens");
    if (range.max === String(most) && JSON.stringify(own) === JSON.stringify(this.#own)) return;
    this.#most = range.max = most;
    this.#own = own;
    this.#show();
  }

  #number({ name, label, low, high, step, hint }) {
    const id = `set-${name}`;
    const box = make("input", { type: "number", id, step: "any", inputMode: "decimal" });
    box.setAttribute("aria-describedby", `${id}-hint`);
    const range = make("input", { type: "range", min: low, max: high, step, ariaLabel: `${label}, slider` });
    box.oninput = () => this.#change(name, box.value === "" ? undefined : box.valueAsNumber, box);
    range.oninput = () => this.#change(name, range.valueAsNumber, range);
    this.#inputs.set(name, { box, range });
    const words = make("span", { id: `${id}-hint`, className: "hint" }, hint);
    return make("div", { className: "row" }, make("label", { htmlFor: id }, label), box, range, words);
  }

  #seed() {
    const box = make("input", { type: "number", id: "set-seed", step: 1, placeholder: "random", inputMode: "numeric" });
    box.oninput = () => this.#change("seed", box.value === "" ? undefined : box.valueAsNumber, box);
    this.#inputs.set("seed", { box });
    const words = make("span", { className: "hint" }, "the same seed draws the same tokens");
    return make("div", { className: "row" }, make("label", { htmlFor: "set-seed" }, "Seed"), box, words);
  }

  #area(name, label, rows, placeholder) {
    const box = make("textarea", { id: `set-${name}`, className: "field", rows, placeholder, spellcheck: false });
    box.oninput = () => this.#change(name, box.value || undefined, box);
    this.#inputs.set(name, { box });
    return make("div", { className: "row" }, make("label", { htmlFor: box.id }, label), box);
  }

  #change(name, value, from) {
    this.#set({ ...this.#values, [name]: value }, from);
  }

  #set(values, from = null) {
    this.#values = values;
    keep("settings", values);
    this.#show(from);
    this.dispatchEvent(new Event("change"));
  }

  #show(from = null) {
    for (const [name, { box, range }] of this.#inputs) {
      const value = this.#values[name];
      if (box !== from) box.value = value ?? "";
      if (!range) continue;
      range.classList.toggle("unset", value === undefined);
      const { neutral } = NUMBERS.find((field) => field.name === name);
      const unset = this.#own[name] ?? neutral;
      box.placeholder = unset ?? "default";
      if (range !== from) range.value = value ?? unset ?? this.#most;
    }
  }
}
