/* Code in a box, with the colours of its language. */

import { copier } from "./copy.js";
import { make } from "./dom.js";
import highlighter from "./vendor/highlight.min.js";
import "./vendor/purify.min.js";

const MAX_COLOURED = 40000; // letters; longer code is shown without colours, so that a growing answer stays quick

/** Fills an element with code; in a language that is known its parts are spans with classes. */
function colour(element, text, language) {
  element.textContent = text;
  if (text.length > MAX_COLOURED || !highlighter.getLanguage(language)) return;
  const html = highlighter.highlight(text, { language, ignoreIllegals: true }).value;
  element.replaceChildren(globalThis.DOMPurify.sanitize(html, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true }));
}

/** A box with the code, its language and a button that copies it. `title` may be an element. */
export function codeBox(text, label, { title = label, className = "code", language = label.split(/\s/)[0].toLowerCase() } = {}) {
  const code = make("code");
  colour(code, text, language);
  const head = make("header", {}, make("span", {}, title), copier(() => code.textContent, "Copy code"));
  return make("div", { className }, head, make("pre", { tabIndex: 0, role: "region", ariaLabel: label || "Code" }, code));
}
