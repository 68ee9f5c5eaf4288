/* The page's beginning: makes the parts and joins them. */

import { Api } from "./api.js";
import { Card } from "./card.js";
import { Chat } from "./chat.js";
import { find, make } from "./dom.js";
import { Engine } from "./engine.js";
import { History } from "./history.js";
import { Live } from "./live.js";
import { keep } from "./memory.js";
import { Settings } from "./settings.js";

const STATES = { away: "connecting", locked: "locked", ready: "ready", failed: "failed" };
const dark = matchMedia("(prefers-color-scheme: dark)");

const api = new Api(askKey);
const card = new Card(find("card"));
const settings = new Settings();
const chat = new Chat(api, card, settings, (on) => engine.lightOwn(on));
const engine = new Engine(card, (id) => chat.owns(id));
const history = new History(chat);
const live = new Live(api, take, (why) => {
  showState(why);
  engine.away();
});

const KEYS = [
  ["Enter", "send"],
  ["Shift Enter", "new line"],
  ["Esc", "stop the answer"],
  ["/", "write a message", () => show("chat", () => chat.prompt.focus())],
  ["G", "go to the pages", () => show("engine", () => document.querySelector("#maps canvas")?.focus())],
  ["N", "new chat", () => chat.begin()],
  ["H", "all chats", () => history.open()],
  ["E", "edit the last message", () => chat.edit()],
  ["R", "regenerate the answer", () => chat.regenerate()],
  ["P", "probabilities of the tokens", () => chat.toggleProbabilities()],
  ["S", "settings", () => find("drawer").showModal()],
  ["T", "light or dark", toggleTheme],
  ["?", "these shortcuts", () => find("shortcuts").showModal()],
];

/** Resolves to the key that was typed, or to null. */
function askKey(refused) {
  const [dialog, box] = [find("lock"), find("key")];
  showState("locked");
  find("lock-title").textContent = refused ? "The server refused this key" : "This server asks for an API key";
  box.value = "";
  dialog.showModal();
  box.focus();
  return new Promise((resolve) => {
    const done = (key) => {
      dialog.onclose = null;
      dialog.close();
      resolve(key);
    };
    find("lock-form").onsubmit = (event) => {
      event.preventDefault();
      if (box.value.trim()) done(box.value.trim());
    };
    find("lock-cancel").onclick = () => done(null);
    dialog.onclose = () => done(null);
  });
}

async function loadModels() {
  try {
    const { data } = await (await api.send("v1/models")).json();
    const select = find("model");
    select.replaceChildren(...data.map(({ id }) => make("option", { value: id, title: id }, called(id))));
    select.disabled = data.length < 2;
    choose(data[0]?.id ?? null);
  } catch (error) {
    find("model").replaceChildren(make("option", {}, "no model"));
    if (error.status === 401) return api.addEventListener("key", loadModels, { once: true });
    setTimeout(loadModels, 3000);
    live.start();
  }
  return undefined;
}

/** A model that is named by its place is called by its file or folder; owner/name stays. */
function called(id) {
  const path = /^(\.{0,2}[\\/]|~|[A-Za-z]:)/.test(id) || /\.gguf$/i.test(id);
  return path ? (id.split(/[\\/]/).filter(Boolean).at(-1) ?? id) : id;
}

function choose(model) {
  chat.model = model;
  const name = model && called(model);
  find("greeting").textContent = name ? `Ask ${name}` : "Ask for something";
  find("taught").hidden = model !== "quill";
  document.title = name ? `${name} on Quire` : "Quire";
  live.watch(model);
}

function take(event) {
  showState(event.state);
  engine.update(event);
  if (!event.groups) return;
  chat.update(event);
  settings.suit(event.limits.max_len, event.defaults);
}

function showState(state) {
  const pill = find("state");
  if (pill.dataset.state === state) return;
  pill.dataset.state = state;
  find("state-text").textContent = STATES[state] ?? state;
}

function toggleTheme() {
  const root = document.documentElement;
  const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  keep("theme", root.dataset.theme);
  engine.recolor();
}

/** Brings a view to the front where only one has room. */
function show(view, then) {
  document.body.dataset.tab = view;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.id === `tab-${view}`;
    tab.ariaSelected = String(chosen);
    tab.tabIndex = chosen ? 0 : -1;
  }
  card.hide();
  then?.();
}

function shortcut(event) {
  const target = event.target;
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (chat.busy) chat.stop();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || target.isContentEditable) return;
  if (target.matches("input, textarea, select")) return;
  const found = KEYS.find(([key, , act]) => act && key === (event.key.length === 1 ? event.key.toUpperCase() : event.key));
  if (!found) return;
  event.preventDefault();
  found[2]();
}

function start() {
  addEventListener("keydown", shortcut);
  dark.addEventListener("change", () => engine.recolor());
  find("new").onclick = () => show("chat", () => chat.begin());
  find("all").onclick = () => show("chat", () => history.open());
  find("theme").onclick = toggleTheme;
  find("help").onclick = () => find("shortcuts").showModal();
  find("settings").onclick = () => find("drawer").showModal();
  find("model").onchange = (event) => choose(event.target.value);
  for (const dialog of document.querySelectorAll("#drawer, #history, #shortcuts")) {
    dialog.onclick = (event) => {
      if (event.target === dialog) dialog.close(); // a click beside it
    };
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      dialog.close();
    };
  }
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const view = tab.id.slice(4);
    tab.onclick = () => show(view);
    tab.onkeydown = (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = view === "chat" ? "engine" : "chat";
      show(other, () => find(`tab-${other}`).focus());
    };
  }
  const summarize = () => (find("settings-text").textContent = settings.summary);
  settings.addEventListener("change", summarize);
  summarize();
  const press = (keys) => make("dd", {}, ...keys.split(" ").map((key) => make("kbd", {}, key)));
  find("keys").replaceChildren(...KEYS.map(([keys, what]) => make("div", {}, make("dt", {}, what), press(keys))));
  if (matchMedia("(pointer: fine)").matches) chat.prompt.focus();
  loadModels();
}

start();
