/* The conversations that this browser keeps, each under a key of its own, so that tabs do not overwrite each other's. */

const PREFIX = "quire.chat.";
const TITLE = 80; // letters

/** A name for a new one. */
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** What a conversation is called: the first line that was asked. */
export function titleOf(turns) {
  const line = (turns.find(({ text }) => text)?.text ?? "an image").trim().split("\n")[0];
  return line.length > TITLE ? `${line.slice(0, TITLE)}…` : line;
}

/** All that are kept, the newest first: {id, title, at}. */
export function list() {
  const found = ids().flatMap((id) => {
    const kept = read(id);
    return kept ? [{ id, title: kept.title, at: kept.at }] : [];
  });
  return found.sort((a, b) => b.at - a.at);
}

/** {title, at, turns}, or null where there is none that this version of the page can read. */
export function read(id) {
  try {
    const kept = JSON.parse(localStorage.getItem(PREFIX + id));
    return Array.isArray(kept?.turns) && typeof kept.title === "string" && Number.isFinite(kept.at) ? kept : null;
  } catch {
    return null;
  }
}

/**
 * Keeps a conversation; `turns(tokens)` gives its turns with or without images and what is known of each token.
 *
 * Where the browser has no room, older ones give up both, and then this one does.
 */
export function write(id, turns) {
  const text = (tokens) => JSON.stringify({ title: titleOf(turns(false)), at: Date.now(), turns: turns(tokens) });
  if (store(id, text(true))) return true;
  for (const other of list().reverse()) {
    if (other.id !== id) store(other.id, JSON.stringify(withoutTokens(read(other.id))));
  }
  return store(id, text(true)) || store(id, text(false));
}

/** Forgets one; what it was, for `restore`. */
export function remove(id) {
  const text = localStorage.getItem(PREFIX + id);
  localStorage.removeItem(PREFIX + id);
  return { id, text };
}

export const restore = ({ id, text }) => store(id, text);

function ids() {
  try {
    return Object.keys(localStorage).flatMap((key) => (key.startsWith(PREFIX) ? [key.slice(PREFIX.length)] : []));
  } catch {
    return [];
  }
}

function store(id, text) {
  try {
    localStorage.setItem(PREFIX + id, text);
    return true;
  } catch {
    return false;
  }
}

function withoutTokens(kept) {
  const turns = kept.turns.map((turn) => (turn.answer ? { answer: { ...turn.answer, pieces: [] } } : { text: turn.text || "[image]" }));
  return { ...kept, turns };
}
