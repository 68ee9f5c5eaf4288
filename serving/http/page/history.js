/* The drawer with the conversations that are kept: to go on with one, or to delete it and think again. */

import * as conversations from "./conversations.js";
import { find, make, tool } from "./dom.js";

const days = new Intl.DateTimeFormat("en", { day: "numeric", month: "short", year: "numeric" });
const hours = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hour12: false });

function moment(at) {
  const [then, now] = [new Date(at), new Date()];
  return (then.toDateString() === now.toDateString() ? hours : days).format(then);
}

export class History {
  #chat;
  #drawer = find("history");
  #deleted = null; // the last one, and whether it was open

  constructor(chat) {
    this.#chat = chat;
    find("undo").onclick = () => this.#undo();
  }

  open() {
    this.#chat.keep();
    this.#show();
    this.#drawer.showModal();
  }

  #show() {
    const found = conversations.list();
    find("history-none").hidden = found.length > 0;
    find("conversations").replaceChildren(...found.map((one) => this.#line(one)));
    find("undo-line").hidden = this.#deleted === null;
  }

  #line({ id, title, at }) {
    const choose = () => {
      this.#drawer.close();
      this.#chat.open(id);
    };
    const name = make("span", { className: "title" }, title || "Untitled");
    const go = make("button", { type: "button", onclick: choose }, name, make("time", {}, moment(at)));
    if (id === this.#chat.id) go.setAttribute("aria-current", "true");
    return make("li", {}, go, tool("delete", `Delete ${title || "this chat"}`, () => this.#delete(id, title)));
  }

  #delete(id, title) {
    const current = id === this.#chat.id;
    if (current) this.#chat.begin(false);
    this.#deleted = { ...conversations.remove(id), current };
    find("undo-text").textContent = `Deleted “${title || "Untitled"}”.`;
    this.#show();
    find("undo").focus();
  }

  #undo() {
    const { current, ...deleted } = this.#deleted;
    this.#deleted = null;
    conversations.restore(deleted);
    if (current && this.#chat.empty) this.#chat.open(deleted.id);
    this.#show();
  }
}
