/* What outlives the page, in the browser: settings stay with it, with a tab which chat it shows. A key is none of them. */

const store = (name) => (name === "current" ? sessionStorage : localStorage);

/** What was kept from an earlier visit, or null. */
export function recall(name) {
  try {
    return JSON.parse(store(name).getItem(`quire.${name}`));
  } catch {
    return null;
  }
}

/** Keeps something for the next visit; whether the browser lets the page. */
export function keep(name, value) {
  try {
    store(name).setItem(`quire.${name}`, typeof value === "string" ? value : JSON.stringify(value));
    return true;
  } catch {
    return false; // It then lasts as long as the page.
  }
}
