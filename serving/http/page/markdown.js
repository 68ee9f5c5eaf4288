/* Markdown of the plainest kind, as elements: paragraphs, headings, lists, code, bold and italics. No links, no HTML. */

import { make } from "./dom.js";
import { copier } from "./copy.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;

/** The blocks of a text, each {kind, ...}; the last one may be unfinished. */
export function blocks(text) {
  const found = [];
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const last = found.at(-1);
    const [fence, heading, item] = [line.match(FENCE), line.match(HEADING), line.match(ITEM)];
    if (fence) {
      const body = [];
      const closed = (other) => other.trim().startsWith(fence[1]) && !other.trim().replaceAll(fence[1][0], "");
      while (++i < lines.length && !closed(lines[i])) body.push(lines[i]);
      found.push({ kind: "code", language: fence[2].trim(), text: body.join("\n") });
    } else if (!line.trim()) {
      if (last) last.closed = true;
    } else if (heading) {
      found.push({ kind: "heading", text: heading[2], closed: true });
    } else if (item) {
      const entry = { depth: item[1].length, ordered: /\d/.test(item[2]), start: parseInt(item[2]) || 0, text: item[3] };
      const another = last?.kind === "list" && entry.depth < 2 && entry.ordered !== last.items[0].ordered;
      if (last?.kind === "list" && !another) last.items.push(entry);
      else found.push({ kind: "list", items: [entry] });
      found.at(-1).closed = false;
    } else if (last?.kind === "list" && (!last.closed || line.startsWith("  "))) {
      last.items.at(-1).text += (last.closed ? "\n\n" : "\n") + line.trim();
      last.closed = false;
    } else if (last?.kind === "paragraph" && !last.closed) {
      last.text += "\n" + line;
    } else {
      found.push({ kind: "paragraph", text: line });
    }
  }
  return found;
}

/** Text with bold, italics and code as nodes. */
export function inline(text) {
  const nodes = [];
  let plain = 0;
  const take = (from, to, node) => {
    if (from > plain) nodes.push(text.slice(plain, from));
    nodes.push(node);
    plain = to;
  };
  const missing = new Set(); // marks that have no partner to the end: looking again would take quadratic time
  for (let at = 0; at < text.length; ) {
    const mark = opening(text, at);
    if (!mark || missing.has(mark)) {
      at += mark ? mark.length : 1;
      continue;
    }
    const end = closing(text, at + mark.length, mark);
    if (end < 0) {
      missing.add(mark);
      at += mark.length;
      continue;
    }
    const inner = text.slice(at + mark.length, end);
    if (mark[0] === "`") take(at, end + mark.length, make("code", {}, inner.replace(/^ (.*[^ ].*) $/, "$1")));
    else take(at, end + mark.length, make(mark === "**" ? "strong" : "em", {}, ...inline(inner)));
    at = end + mark.length;
  }
  if (plain < text.length) nodes.push(text.slice(plain));
  return nodes;
}

function opening(text, at) {
  const letter = text[at];
  if (letter !== "`" && letter !== "*") return null;
  let end = at;
  while (text[end] === letter) end++;
  const mark = text.slice(at, end);
  if (letter === "`") return mark;
  return mark.length <= 2 && /\S/.test(text[end] ?? " ") ? mark : null;
}

/** Where a run of just this mark closes, or -1. */
function closing(text, from, mark) {
  for (let at = text.indexOf(mark, from); at >= 0; ) {
    let end = at;
    while (text[end] === mark[0]) end++;
    if (end - at === mark.length && at > from && (mark[0] === "`" || /\S/.test(text[at - 1]))) return at;
    at = text.indexOf(mark, end);
  }
  return -1;
}

/** Code in a box with its language and a button that copies it. */
export function codeBox(text, label, title = label, className = "code") {
  const code = make("code", {}, text);
  const head = make("header", {}, make("span", {}, title), copier(() => code.textContent, "Copy code"));
  return make("div", { className }, head, make("pre", { tabIndex: 0, role: "region", ariaLabel: label || "Code" }, code));
}

function element(block) {
  if (block.kind === "code") return codeBox(block.text, block.language);
  if (block.kind === "heading") return make("h3", {}, ...inline(block.text));
  return block.kind === "list" ? list(block.items) : make("p", {}, ...inline(block.text));
}

/** Items as lists within lists, by how far they are indented. */
function list(items) {
  const open = [];
  const begin = (item) => {
    const made = make(item.ordered ? "ol" : "ul");
    if (item.ordered && item.start !== 1) made.start = item.start;
    open.push({ depth: item.depth, made });
    return made;
  };
  const root = begin(items[0]);
  for (const item of items) {
    while (open.length > 1 && item.depth < open.at(-1).depth) open.pop();
    if (item.depth >= open.at(-1).depth + 2 && open.at(-1).made.lastChild) {
      const parent = open.at(-1).made.lastChild;
      parent.append(begin(item));
    }
    open.at(-1).made.append(make("li", {}, ...inline(item.text)));
  }
  return root;
}

/** Shows a growing text: only blocks that changed are made anew. */
export class Markdown {
  #root;
  #shown = [];

  constructor(root) {
    this.#root = root;
  }

  update(text) {
    const wanted = blocks(text).map((block) => [JSON.stringify({ ...block, closed: undefined }), block]);
    wanted.forEach(([source, block], i) => {
      if (this.#shown[i] === source) return;
      const made = element(block);
      if (i < this.#shown.length) this.#root.children[i].replaceWith(made);
      else this.#root.append(made);
      this.#shown[i] = source;
    });
    while (this.#shown.length > wanted.length) {
      this.#shown.pop();
      this.#root.lastElementChild.remove();
    }
  }
}
