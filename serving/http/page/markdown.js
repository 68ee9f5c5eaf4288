/* Markdown as elements: parsed by markdown-it, HTML as text and images as links, and sanitised by DOMPurify. */

import { codeBox } from "./code.js";
import MarkdownIt from "./vendor/markdown-it.min.js";
import "./vendor/purify.min.js";

const LINK = /^(https?:\/\/|mailto:)/i; // others would lead into this server, or run
const TAGS = "a blockquote br code em h3 h4 h5 h6 hr li ol p pre s strong table tbody td th thead tr ul".split(" ");
const ATTRIBUTES = ["class", "href", "rel", "start", "target", "title"];

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // README.md is no address
parser.validateLink = (url) => LINK.test(url);

/** The page has headings of its own above those of an answer. */
function lowerHeading(tokens, i, options, env, self) {
  tokens[i].tag = `h${Math.min(6, Math.max(3, Number(tokens[i].tag[1]) + 1))}`;
  return self.renderToken(tokens, i, options);
}

/** Columns are aligned by classes: the page's policy allows no styles in attributes. */
function alignCell(tokens, i, options, env, self) {
  const style = tokens[i].attrGet("style");
  if (style) tokens[i].attrs = [["class", style.replace("text-align:", "align-")]];
  return self.renderToken(tokens, i, options);
}

function openLink(tokens, i, options, env, self) {
  tokens[i].attrSet("target", "_blank");
  tokens[i].attrSet("rel", "noopener noreferrer nofollow");
  return self.renderToken(tokens, i, options);
}

/** A picture of another site would tell it that this answer was read: it is shown when its link is followed. */
function linkImage(tokens, i, options, env, self) {
  const link = new tokens[i].constructor("link_open", "a", 1);
  link.attrSet("href", tokens[i].attrGet("src"));
  const words = self.renderInlineAsText(tokens[i].children, options, env);
  return `${openLink([link], 0, options, env, self)}${parser.utils.escapeHtml(words || "image")}</a>`;
}

const rules = parser.renderer.rules;
rules.image = linkImage;
rules.heading_open = rules.heading_close = lowerHeading;
rules.th_open = rules.td_open = alignCell;
rules.link_open = openLink;
rules.fence = (tokens, i) => {
  const { content, info } = tokens[i];
  const escape = parser.utils.escapeHtml;
  return `<pre title="${escape(info.trim())}"><code>${escape(content.replace(/\n$/, ""))}</code></pre>\n`;
};

/** The HTML of each block of a text; the last one may be unfinished. */
export function blocks(text) {
  const env = {};
  const tokens = parser.parse(text, env);
  const found = [];
  for (let [begin, depth, i] = [0, 0, 0]; i < tokens.length; i++) {
    depth += tokens[i].nesting;
    if (depth > 0) continue;
    found.push(parser.renderer.render(tokens.slice(begin, i + 1), parser.options, env));
    begin = i + 1;
  }
  return found;
}

/** The one element of a block. */
function element(html) {
  const body = globalThis.DOMPurify.sanitize(html, { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, RETURN_DOM: true });
  for (const pre of body.querySelectorAll("pre")) pre.replaceWith(codeBox(pre.textContent, pre.title));
  for (const table of body.querySelectorAll("table")) wrap(table);
  return document.adoptNode(body.firstElementChild ?? document.createElement("p"));
}

/** A table that is wider than the answer scrolls by itself. */
function wrap(table) {
  const box = document.createElement("div");
  box.className = "table";
  box.tabIndex = 0;
  table.replaceWith(box);
  box.append(table);
}

/** Shows a growing text: only blocks that changed are made anew. */
export class Markdown {
  #root;
  #shown = [];

  constructor(root) {
    this.#root = root;
  }

  update(text) {
    const wanted = blocks(text);
    wanted.forEach((html, i) => {
      if (this.#shown[i] === html) return;
      const made = element(html);
      if (i < this.#shown.length) this.#root.children[i].replaceWith(made);
      else this.#root.append(made);
      this.#shown[i] = html;
    });
    while (this.#shown.length > wanted.length) {
      this.#shown.pop();
      this.#root.lastElementChild.remove();
    }
  }
}
