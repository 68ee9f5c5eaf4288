/* Copying to the clipboard, also where the page came over plain http from another machine. */

import { icon, make, tool } from "./dom.js";

export async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = make("textarea", { value: text, className: "unseen", readOnly: true });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

/** A button that copies what `text()` gives, and says so. */
export function copier(text, label) {
  const button = tool("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("done"));
    button.ariaLabel = button.title = "Copied";
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.ariaLabel = button.title = label;
    }, 1500);
  });
  return button;
}
