/* One answer: what has come of it so far, and how it looks. */

import { Failure } from "./api.js";
import { codeBox } from "./code.js";
import { copier } from "./copy.js";
import { make, tell, tool } from "./dom.js";
import { count, duration, plural, rate } from "./figures.js";
import { Markdown } from "./markdown.js";
import { Aligner, Tokens } from "./tokens.js";

const ENDS = {
  length: "ended at the most tokens it may have",
  abort: "ended by the server",
  timeout: "ran out of time",
  stopped: "stopped",
};

const BRIEF = 100; // milliseconds in which too little comes to tell how fast

const token = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** What the chunks of a stream amount to. */
export class Answer {
  name = `page-${token()}`; // the request's, from which the server makes its id
  id = null;
  content = "";
  reasoning = "";
  calls = []; // {name, arguments}
  aligner = new Aligner();
  finish = null;
  failure = null;
  usage = null;
  counted = 0; // tokens
  drafted = 0; // of them
  // When it was asked for, when the first came and how many tokens at once, the last, and the end of thinking.
  #times = { begun: performance.now(), first: null, last: 0, thought: null };

  /** An answer as `kept` told it. */
  static from({ pieces, times, failure, ...fields }) {
    const answer = Object.assign(new Answer(), fields);
    const dealt = pieces.reduce((length, { text }) => length + text.length, 0);
    answer.aligner.pieces = [...pieces, { text: answer.content.slice(dealt), tokens: [] }].filter(({ text }) => text);
    answer.#times = times;
    answer.failure = failure && new Failure(failure.message, failure);
    return answer;
  }

  /** What is to be remembered of it, with or without what is known of each token. */
  kept(tokens) {
    const { content, reasoning, calls, usage, counted, drafted, failure } = this;
    const finish = this.finish ?? (failure ? null : "stopped");
    const pieces = tokens ? this.aligner.pieces : [];
    const why = failure && { ...failure, message: failure.message };
    return { content, reasoning, calls, usage, counted, drafted, finish, pieces, times: this.#times, failure: why };
  }

  /** Takes a chunk in. */
  take(chunk) {
    if (chunk.error) throw new Failure(String(chunk.error.message), chunk.error);
    this.id ??= chunk.id;
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const tokens = choice.logprobs?.content ?? [];
    for (const place of choice.drafted ?? []) if (tokens[place]) tokens[place].drafted = true;
    this.drafted += choice.drafted?.length ?? 0;
    const [said, thought] = [delta.content ?? "", delta.reasoning ?? delta.reasoning_content ?? ""];
    const something = said || thought || delta.tool_calls?.length;
    this.#time(tokens.length || (something ? 1 : 0));
    this.content += said;
    this.reasoning += thought;
    if (said || delta.tool_calls) this.#times.thought ??= performance.now();
    for (const call of delta.tool_calls ?? []) {
      const known = (this.calls[call.index] ??= { name: "", arguments: "" });
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    if (said || !something) this.aligner.push(said, tokens);
    this.finish = choice.finish_reason ?? this.finish;
  }

  end(failure = null) {
    this.failure = failure;
    this.aligner.end();
    this.#times.thought ??= performance.now();
  }

  #time(tokens) {
    if (!tokens) return;
    this.#times.last = performance.now();
    this.#times.first ??= { at: this.#times.last, tokens };
    this.counted += tokens;
  }

  /** Whether a request of the engine is the one that asks for this answer. */
  owns(id) {
    return id === this.id || id.endsWith(this.name);
  }

  /** Seconds spent thinking, once that is over. */
  get thinking() {
    const { begun, first, thought } = this.#times;
    return this.reasoning && thought ? thought - (first?.at ?? begun) : null;
  }

  /** What is worth knowing of it: [figure, what it is, its class]. */
  get stats() {
    const found = [];
    const { begun, first, last } = this.#times;
    const tokens = this.usage?.completion_tokens ?? this.counted;
    if (tokens) found.push([count(tokens), tokens === 1 ? "token" : "tokens"]);
    if (this.drafted) found.push([count(this.drafted), "drafted", "drafted"]);
    const later = this.counted - (first?.tokens ?? 0);
    const speed = later > 0 && last - first.at >= BRIEF ? rate((later * 1000) / (last - first.at)) : "0";
    if (speed !== "0") found.push([speed, "tokens/s"]);
    if (first) found.push([duration(first.at - begun), "to the first token"]);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      found.push([count(cached), `of ${plural(this.usage.prompt_tokens, "prompt token")} from the cache`]);
    }
    return found;
  }
}

/** The elements of an answer. */
export class AnswerView {
  #card;
  #text;
  #reasoning = make("div");
  #summary = make("summary");
  #details = make("details", { className: "reasoning", hidden: true }, this.#summary, this.#reasoning);
  #calls = make("div");
  #trouble = make("div");
  #stats = make("span", { className: "stats" });
  #place;
  #copy;
  #kind = null; // what the text is shown by: Tokens or Markdown
  #shown = 0; // pieces

  /** `again()` writes it anew; `light(on)` shows its pages. */
  constructor(answer, card, again, light) {
    this.answer = answer;
    this.#card = card;
    this.again = tool("again", "Regenerate (R)", again);
    const on = () => light(true);
    const off = () => light(false);
    this.#place = make("button", { type: "button", className: "place", hidden: true, onpointerenter: on, onpointerleave: off, onfocus: on, onblur: off });
    this.#copy = copier(() => this.answer.content, "Copy");
    const tools = make("span", { className: "tools" }, this.#copy, this.again);
    this.#text = make("div");
    const foot = make("div", { className: "foot" }, tools, this.#place, this.#stats);
    this.element = make("article", { className: "turn answer writing", ariaLabel: "Answer", ariaBusy: "true" }, this.#details, this.#text, this.#calls, this.#trouble, foot);
  }

  render(probabilities) {
    const { answer } = this;
    this.#renderText(probabilities);
    this.#renderThoughts();
    answer.calls.forEach((call, i) => this.#renderCall(call, i));
    this.#renderStats();
    this.#copy.hidden = !answer.content;
  }

  /** The end, whatever it was; `retry` is offered after a failure. */
  close(probabilities, retry) {
    this.element.classList.remove("writing");
    this.element.ariaBusy = "false";
    this.place(null);
    this.render(probabilities);
    const { failure } = this.answer;
    if (!failure) return;
    const about = [failure.status || null, failure.type, failure.param && `field ${failure.param}`, failure.code];
    const kind = about.filter(Boolean).join(", ");
    const words = make("div", {}, make("p", {}, failure.message), make("p", { className: "kind" }, kind));
    const button = make("button", { type: "button", className: "quiet", onclick: retry }, "Retry");
    this.#trouble.replaceChildren(make("div", { className: "failure", role: "alert" }, words, button));
    this.again.hidden = true;
  }

  /** Where the request is in the engine: a text, or null when it is no longer there. */
  place(text) {
    this.#place.hidden = text === null;
    if (text !== null) tell(this.#place, text);
  }

  #renderText(probabilities) {
    const { answer } = this;
    const wanted = probabilities ? Tokens : Markdown;
    if (!(this.#kind instanceof wanted)) {
      const fresh = make("div", { className: "text" });
      this.#text.replaceWith(fresh);
      this.#text = fresh;
      this.#kind = new wanted(fresh, this.#card);
      this.#shown = 0;
    }
    if (!probabilities) return this.#kind.update(answer.content);
    this.#kind.add(answer.aligner.pieces.slice(this.#shown));
    this.#shown = answer.aligner.pieces.length;
    return undefined;
  }

  #renderThoughts() {
    const { answer } = this;
    this.#details.hidden = !answer.reasoning;
    tell(this.#reasoning, answer.reasoning.trim());
    tell(this.#summary, answer.thinking === null ? "Thinking …" : `Thought for ${duration(answer.thinking)}`);
  }

  #renderCall(call, i) {
    const source = JSON.stringify(call);
    const shown = this.#calls.children[i];
    if (shown?.dataset.source === source) return;
    const title = make("span", {}, "calls ", make("b", {}, call.name));
    const box = codeBox(pretty(call.arguments), `Call of ${call.name}`, { title, className: "code call", language: "json" });
    box.dataset.source = source;
    if (shown) shown.replaceWith(box);
    else this.#calls.append(box);
  }

  #renderStats() {
    const end = this.answer.failure ? null : ENDS[this.answer.finish];
    const words = this.answer.stats.map(([figure, name, className = ""]) => make("span", { className }, make("b", {}, figure), ` ${name}`));
    if (end) words.push(make("span", {}, end));
    this.#stats.replaceChildren(...words);
  }
}

/** JSON with its lines and indents, or as it came while it is not whole. */
function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
