/* The chat: turns, the composer, and the request that is being answered. */

import { Answer, AnswerView } from "./answer.js";
import { Failure, events } from "./api.js";
import { copier } from "./copy.js";
import { find, make, tool } from "./dom.js";
import { count, plural } from "./figures.js";
import { Attachments, thumbnails } from "./images.js";
import * as conversations from "./conversations.js";
import { keep, recall } from "./memory.js";

const TAUGHT = ["Write a short story about a dog.", "Sort: 52 31 90 17 68", "What is 7 * 8?"]; // what quill can do
const STARTERS = [
  "Why is the sky blue, in three sentences?",
  "Write a Python function that counts the words of a text.",
  "Compare tea and coffee in a table.",
];
const NEAR = 48; // pixels from the end within which the view follows it

/** A message's content: its text, or its images and its text. */
function contentOf(text, images) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

export class Chat {
  #api;
  #card;
  #settings;
  #light;
  #images; // of the message that is being written
  #turns = []; // {role: "user", text, images, element} or {role: "assistant", answer, view, element}
  #stopper = null; // of the request that is being answered
  #pinned = true;
  #due = false;
  #probabilities = recall("probabilities") === true;
  #leaving = false; // the browser may end a stream before the page is gone
  #limit = null;
  #maxImages = 0; // of a prompt, which has all turns
  #drafts = false; // the engine drafts
  #used = 0;
  #model = null;
  id = recall("current")?.id ?? conversations.newId(); // of the conversation

  /** `light(on)` shows the pages of the request that is being answered. */
  constructor(api, card, settings, light) {
    [this.#api, this.#card, this.#settings, this.#light] = [api, card, settings, light];
    this.prompt = find("prompt");
    this.prompt.oninput = () => this.#fit(this.prompt);
    this.#images = new Attachments(this.prompt, find("chat"), () => this.#fit(this.prompt));
    this.prompt.onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.busy) this.#submit();
    };
    find("composer").onsubmit = (event) => {
      event.preventDefault();
      if (this.busy) this.stop();
      else this.#submit();
    };
    find("log").onscroll = () => this.#follow();
    find("latest").onclick = () => this.#toEnd();
    find("probabilities").onclick = () => this.toggleProbabilities();
    this.#showSwitch();
    this.#restore();
    this.#refresh();
    addEventListener("beforeunload", () => (this.#leaving = true));
    addEventListener("pagehide", () => this.keep());
  }

  get model() {
    return this.#model;
  }

  /** The model that is asked; the page proposes what it can do. */
  set model(name) {
    this.#model = name;
    const starter = (text) => make("button", { type: "button", disabled: this.busy, onclick: () => this.send(text) }, text);
    find("starters").replaceChildren(...(name === "quill" ? TAUGHT : STARTERS).map((text) => make("li", {}, starter(text))));
  }

  get empty() {
    return this.#turns.length === 0;
  }

  get busy() {
    return this.#stopper !== null;
  }

  stop() {
    this.#stopper?.abort();
  }

  /** A new conversation; the one before stays in the list, unless it is not to be kept. */
  begin(kept = true) {
    if (kept) this.keep();
    this.#leave(conversations.newId());
    this.#refresh();
    this.prompt.focus();
  }

  /** Goes on with one that was kept. */
  open(id) {
    this.keep();
    this.#leave(id);
    this.#restore();
    this.#refresh();
    this.prompt.focus();
  }

  #leave(id) {
    this.stop();
    this.#stopper = null;
    this.id = id;
    keep("current", { id });
    this.#turns = [];
    this.#used = 0;
    find("turns").replaceChildren();
    this.#card.hide();
    this.#showContext();
  }

  /** Whether a request of the engine is this page's own. */
  owns(id) {
    return this.busy && Boolean(this.#turns.at(-1)?.answer?.owns(id));
  }

  send(text, images = []) {
    if (this.busy || !(text.trim() || images.length)) return;
    this.#ask(text.trim(), images);
    this.#answer();
  }

  regenerate() {
    if (this.busy || this.#turns.at(-1)?.role !== "assistant") return;
    this.#turns.pop().element.remove();
    this.#answer();
  }

  /** The last message, to be said differently. */
  edit() {
    const turn = this.#turns.findLast(({ role }) => role === "user");
    if (turn && !this.busy) this.#revise(turn);
  }

  toggleProbabilities() {
    this.#probabilities = !this.#probabilities;
    keep("probabilities", this.#probabilities);
    this.#card.hide();
    this.#showSwitch();
    for (const turn of this.#turns) turn.view?.render(this.#probabilities);
  }

  /** What the engine says of the request that is being answered. */
  update({ limits, running, waiting, groups, drafts }) {
    this.#limit = limits.max_len;
    this.#maxImages = limits.max_images ?? 0;
    this.#limitImages();
    this.#drafts = Boolean(drafts);
    find("probabilities").title = `Tint each token by its probability${drafts ? "; green ones were drafted" : ""} (P)`;
    this.#showContext();
    const { view } = this.#turns.at(-1) ?? {};
    if (!this.busy || !view) return;
    const run = running.find(({ id }) => this.owns(id));
    if (!run) {
      view.place(waiting.some(({ id }) => this.owns(id)) ? "waiting for its turn" : null);
    } else if (run.state === "reading") {
      view.place(`reading ${count(run.computed)} of ${plural(run.prompt, "token")}`);
    } else {
      const held = ({ cells, each }) => cells.filter((cell) => cell === run.number).length * each;
      view.place(`on ${plural(Math.max(0, ...groups.map(held)), "page")} of its own`);
    }
  }

  #submit() {
    const text = this.prompt.value;
    const images = this.#images.urls;
    if (!text.trim() && !images.length) return;
    this.prompt.value = "";
    this.#images.clear();
    this.send(text, images);
  }

  #ask(text, images = []) {
    const turn = { role: "user", text, images };
    turn.element = make("article", { className: "turn asked", ariaLabel: "You" });
    this.#showAsked(turn);
    this.#turns.push(turn);
    find("turns").append(turn.element);
  }

  #showAsked(turn) {
    turn.edit = tool("edit", "Edit (E)", () => this.#revise(turn));
    const tools = make("span", { className: "tools" }, copier(() => turn.text, "Copy"), turn.edit);
    const content = make("div", { className: "content" }, ...(turn.images.length ? [thumbnails(turn.images)] : []));
    if (turn.text) content.append(make("div", { className: "text" }, turn.text));
    turn.element.replaceChildren(content, make("div", { className: "foot" }, tools));
  }

  #revise(turn) {
    const area = make("textarea", { value: turn.text, ariaLabel: "Your message" });
    const back = () => {
      this.#showAsked(turn);
      this.#refresh();
      turn.edit.focus();
    };
    const send = () => {
      const text = area.value.trim();
      if (!(text || turn.images.length) || this.busy) return;
      for (const old of this.#turns.splice(this.#turns.indexOf(turn))) old.element.remove();
      this.send(text, turn.images);
      this.prompt.focus();
    };
    area.oninput = () => this.#fit(area);
    area.onkeydown = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        back();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    };
    const cancel = make("button", { type: "button", className: "quiet", onclick: back }, "Cancel");
    const again = make("button", { type: "button", className: "primary", onclick: send }, "Send");
    turn.element.replaceChildren(make("div", { className: "revise" }, area, make("div", {}, cancel, again)));
    this.#fit(area);
    area.focus();
  }

  /** The body of a request: failed and stopped answers without text are left out. */
  #body(name) {
    const message = ({ role, text, images, answer }) => ({ role, content: role === "user" ? contentOf(text, images) : answer.content });
    const messages = this.#turns.map(message).filter(({ content }) => content);
    if (this.#settings.system) messages.unshift({ role: "system", content: this.#settings.system });
    return {
      ...(this.#model && { model: this.#model }),
      messages,
      ...this.#settings.params,
      stream: true,
      stream_options: { include_usage: true, ...(this.#drafts && { include_drafted: true }) },
      logprobs: true,
      top_logprobs: 5,
      request_id: name,
    };
  }

  #reply(answer) {
    const view = new AnswerView(answer, this.#card, () => this.regenerate(), this.#light);
    this.#turns.push({ role: "assistant", answer, view, element: view.element });
    find("turns").append(view.element);
    return view;
  }

  async #answer() {
    const stopper = (this.#stopper = new AbortController());
    const answer = new Answer();
    this.#leaving = false;
    const body = this.#body(answer.name);
    const view = this.#reply(answer);
    view.render(this.#probabilities);
    this.#refresh();
    this.#toEnd();
    let failure = null;
    try {
      await this.#stream(body, answer, view, stopper.signal);
    } catch (error) {
      if (stopper.signal.aborted || this.#leaving) answer.finish = "stopped";
      else failure = error instanceof Failure ? error : new Failure(String(error.message ?? error));
    }
    answer.end(failure);
    view.close(this.#probabilities, () => this.regenerate());
    if (this.#stopper !== stopper) return; // the chat was cleared
    this.#stopper = null;
    this.#count(answer);
    this.keep();
    this.#showContext();
    this.#refresh();
    this.#keepEnd();
    find("said").textContent = failure ? failure.message : `The answer has ended, ${plural(answer.counted, "token")}.`;
  }

  #count({ usage }) {
    if (usage) this.#used = usage.prompt_tokens + usage.completion_tokens;
  }

  /** Keeps the conversation in the browser. */
  keep() {
    if (this.empty) return;
    keep("current", { id: this.id });
    conversations.write(this.id, (tokens) =>
      this.#turns.map(({ role, text, images, answer }) =>
        role === "user"
          ? { text: text || (tokens ? "" : "[image]"), ...(tokens && images.length && { images }) }
          : { answer: answer.kept(tokens) },
      ),
    );
  }

  #restore() {
    try {
      for (const { text, images, answer } of conversations.read(this.id)?.turns ?? []) {
        if (answer) this.#remember(Answer.from(answer));
        else this.#ask(text, images);
      }
    } catch {
      this.begin(false); // it was kept by another version of the page
    }
    this.#toEnd();
  }

  #remember(answer) {
    this.#reply(answer).close(this.#probabilities, () => this.regenerate());
    this.#count(answer);
  }

  async #stream(body, answer, view, signal) {
    const response = await this.#api.send("v1/chat/completions", { body, signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      answer.take(JSON.parse(data));
      this.#draw(view);
    }
    if (answer.finish === null) throw new Failure("The connection closed before the answer ended.", { type: "connection_error" });
  }

  /** Draws once a frame, however many chunks come. */
  #draw(view) {
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => {
      this.#due = false;
      view.render(this.#probabilities);
      this.#keepEnd();
    });
  }

  /** What depends on whether an answer is being written, and on which turn is the last. */
  #refresh() {
    const last = this.#turns.at(-1);
    const asked = this.#turns.findLast(({ role }) => role === "user");
    for (const turn of this.#turns) {
      if (turn.view) turn.view.again.hidden = turn !== last || turn.answer.failure !== null;
      else turn.edit.hidden = turn !== asked || this.busy;
    }
    const label = this.busy ? "Stop" : "Send";
    const send = find("send");
    send.ariaLabel = label;
    send.title = this.busy ? "Stop (Esc)" : "Send (Enter)";
    find("send-icon").setAttribute("href", this.busy ? "#i-stop" : "#i-send");
    for (const button of find("starters").querySelectorAll("button")) button.disabled = this.busy;
    this.#fit(this.prompt);
  }

  #showSwitch() {
    find("probabilities").ariaChecked = String(this.#probabilities);
  }

  /** How many images the next message may have. */
  #limitImages() {
    const used = this.#turns.reduce((sum, { images }) => sum + (images?.length ?? 0), 0);
    this.#images.limit = Math.max(0, this.#maxImages - used);
  }

  #showContext() {
    const known = this.#used > 0 && this.#limit;
    find("context").textContent = known ? `${count(this.#used)} of ${count(this.#limit)} tokens` : "";
    find("context").classList.toggle("full", Boolean(known) && this.#used >= this.#limit);
  }

  /** A text box as high as its text. */
  #fit(area) {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
    find("send").disabled = !this.busy && !this.prompt.value.trim() && !this.#images?.urls.length;
  }

  #follow() {
    const log = find("log");
    this.#pinned = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    find("latest").hidden = this.#pinned;
  }

  #keepEnd() {
    if (this.#pinned) this.#toEnd();
    else this.#follow();
  }

  #toEnd() {
    const log = find("log");
    log.scrollTop = log.scrollHeight;
    this.#pinned = true;
    find("latest").hidden = true;
  }
}
