/* Elements without markup: whatever text they get stays text. */

/** An element with properties, classes and children; strings become text nodes. */
export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const find = (id) => document.getElementById(id);

/** One of the page's icons. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const use = document.createElementNS(space, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows an icon alone. */
export function tool(name, label, onclick) {
  return make("button", { type: "button", className: "tool", title: label, ariaLabel: label, onclick }, icon(name));
}

/** Sets a text only where it differs, so that nothing is laid out anew for nothing. */
export function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
