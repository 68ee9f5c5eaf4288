/* The tokens of an answer: which piece of the text each one wrote, and how likely it was. */

import { make } from "./dom.js";

const BROKEN = "\ufffd";

const whole = (token) => token.bytes !== null && token.token !== "" && !token.token.includes(BROKEN);

/**
 * Deals the text of an answer out to its tokens, so that the pieces joined are the text, letter for letter.
 *
 * A token whose own text comes next gets just that. Tokens that are parts of a character get it together, as one
 * piece. Tokens that wrote nothing here (an end of thinking, a part of a tool call) get none.
 */
export class Aligner {
  pieces = []; // {text, tokens}
  #text = "";
  #tokens = [];

  push(text, tokens) {
    this.#text += text;
    this.#tokens.push(...tokens);
    this.#deal();
  }

  /** The rest, when nothing more comes. */
  end() {
    if (this.#text) this.pieces.push({ text: this.#text, tokens: this.#tokens });
    this.#text = "";
    this.#tokens = [];
  }

  #deal() {
    let [at, next] = [0, 0];
    const [text, tokens] = [this.#text, this.#tokens];
    while (at < text.length && next < tokens.length) {
      const own = tokens[next].token;
      if (whole(tokens[next]) && text.startsWith(own, at)) {
        this.pieces.push({ text: own, tokens: [tokens[next++]] });
        at += own.length;
        continue;
      }
      if (whole(tokens[next]) && own.startsWith(text.slice(at))) break; // the rest of it has yet to come
      const [end, after] = this.#resume(at, next);
      if (end > at) this.pieces.push({ text: text.slice(at, end), tokens: tokens.slice(next, after) });
      [at, next] = [end, after];
    }
    this.#text = text.slice(at);
    this.#tokens = tokens.slice(next);
  }

  /** Where a later token goes on, with all of its text or as much as is there: [in the text, which token]. */
  #resume(at, next) {
    const [text, tokens] = [this.#text, this.#tokens];
    const later = tokens.flatMap((token, i) => (i > next && whole(token) ? [i] : []));
    for (const i of later) {
      const found = text.indexOf(tokens[i].token, at);
      if (found >= 0) return [found, i];
      for (let from = Math.max(at, text.length - tokens[i].token.length); from < text.length; from++) {
        if (tokens[i].token.startsWith(text.slice(from))) return [from, i];
      }
    }
    return [text.length, later[0] ?? tokens.length];
  }
}

/** The tokens of a text as spans in `root`; pointing at one shows its card. */
export class Tokens {
  #root;
  #card;
  #pieces = new Map(); // span -> piece
  #pointed = null;

  constructor(root, card) {
    this.#root = root;
    this.#card = card;
    root.className = "text tokens";
    root.tabIndex = 0;
    root.role = "group";
    root.ariaLabel = "Tokens of the answer; the arrow keys go from one to the next";
    const point = (event) => this.#point(event.target.closest(".token"));
    const mouse = (act) => (event) => void (event.pointerType === "mouse" && act(event));
    root.onpointerover = mouse(point);
    root.onpointerleave = mouse(() => this.#point(null));
    root.onclick = point;
    root.onfocus = () => void (root.matches(":focus-visible") && this.#point(this.#pointed ?? root.firstElementChild));
    root.onblur = () => this.#point(null);
    root.onkeydown = (event) => this.#step(event);
  }

  add(pieces) {
    for (const piece of pieces) {
      const span = make("span", { className: "token" }, ...marked(piece.text));
      if (piece.tokens.length && piece.tokens.every(({ drafted }) => drafted)) span.classList.add("drafted");
      span.style.setProperty("--doubtful", (1 - probability(piece)).toFixed(3));
      this.#pieces.set(span, piece);
      this.#root.append(span);
    }
  }

  #point(span) {
    this.#pointed?.classList.remove("pointed");
    this.#pointed = span;
    if (!span) return this.#card.hide();
    span.classList.add("pointed");
    const boxes = [...span.getClientRects()].sort((a, b) => b.width - a.width); // one a line
    return this.#card.show(odds(this.#pieces.get(span)), boxes[0] ?? span.getBoundingClientRect());
  }

  #step(event) {
    const all = this.#root;
    const now = this.#pointed;
    const to = {
      ArrowRight: now?.nextElementSibling ?? now ?? all.firstElementChild,
      ArrowLeft: now?.previousElementSibling ?? now ?? all.firstElementChild,
      Home: all.firstElementChild,
      End: all.lastElementChild,
    }[event.key];
    if (event.key === "Escape" && this.#card.shown) {
      event.stopPropagation();
      this.#point(null);
    } else if (to) {
      event.preventDefault();
      to.scrollIntoView({ block: "nearest" });
      requestAnimationFrame(() => this.#point(to)); // after the scroll, which hides the card
    }
  }
}

/** A text with a mark where each of its lines ends. */
function marked(text) {
  const lines = text.split("\n");
  const last = lines.pop();
  const ended = lines.flatMap((line) => [line, make("span", { className: "newline" }), "\n"]);
  return [...ended, last].filter((part) => part !== "");
}

/** How likely a piece was, of several tokens all of them in turn. */
export const probability = (piece) => Math.exp(piece.tokens.reduce((sum, token) => sum + token.logprob, 0));

/** A token's text with its spaces to be seen. */
export function visible(token) {
  if (!whole(token)) return token.token === "" ? "nothing" : "part of a character";
  return token.token.replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replaceAll("\r", "\u240d");
}

/** A probability: one decimal, two for the small ones. */
function share(p) {
  if (p < 0.0001) return "<0.01 %";
  return p > 0.9999 && p < 1 ? ">99.99 %" : `${(p * 100).toFixed(p < 0.01 || p > 0.999 ? 2 : 1)} %`;
}

function bar(text, p, drawn) {
  const level = make("span", { className: "level" });
  level.style.width = `${Math.min(100, p * 100)}%`;
  return make("li", { className: drawn ? "drawn" : "" }, level, make("code", {}, text), make("span", {}, share(p)));
}

/** The card of a piece: its tokens, and what else could have stood there. */
function odds(piece) {
  const card = make("div", { className: "odds" });
  const text = piece.tokens.length === 1 && whole(piece.tokens[0]) ? visible(piece.tokens[0]) : piece.text;
  const head = make("div", { className: "chosen" }, make("code", {}, text));
  card.append(head);
  if (!piece.tokens.length) return card;
  const p = probability(piece);
  head.append(make("b", {}, share(p)));
  if (piece.tokens.length > 1) {
    card.append(make("p", { className: "logprob" }, `${piece.tokens.length} tokens wrote this together`));
    card.append(make("ol", {}, ...piece.tokens.map((token) => bar(visible(token), Math.exp(token.logprob), true))));
    return card;
  }
  const [token] = piece.tokens;
  const same = (other) => other.token === token.token && Math.abs(other.logprob - token.logprob) < 1e-6;
  const others = token.top_logprobs ?? [];
  const rows = others.some(same) ? others : [...others, token];
  const rest = 1 - rows.reduce((sum, row) => sum + Math.exp(row.logprob), 0);
  const drafted = token.drafted ? [", ", make("span", { className: "drafted" }, "drafted")] : [];
  card.append(make("p", { className: "logprob" }, `log-probability ${token.logprob.toFixed(3).replace("-", "\u2212")}`, ...drafted));
  const list = make("ol", {}, ...rows.map((row) => bar(visible(row), Math.exp(row.logprob), same(row))));
  if (rest > 0.0001) list.append(make("li", { className: "rest" }, make("span", {}, "all others"), make("span", {}, share(rest))));
  card.append(list);
  return card;
}
