/* Settings that outlive the page, in the browser. A key is none of them. */

/** What was kept from an earlier visit, or null. */
export function recall(name) {
  try {
    return JSON.parse(localStorage.getItem(`quire.${name}`));
  } catch {
    return null;
  }
}

/** Keeps a setting for the next visit, where the browser lets the page. */
export function keep(name, value) {
  try {
    localStorage.setItem(`quire.${name}`, typeof value === "string" ? value : JSON.stringify(value));
  } catch {
    // It then lasts as long as the page.
  }
}
