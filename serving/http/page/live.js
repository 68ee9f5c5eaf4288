/* The connection to /live: kept up while the page is seen, with longer and longer pauses while it fails. */

import { Failure, events } from "./api.js";

const PATIENCE = 10000; // milliseconds without an event after which a connection counts as lost
const [FIRST, MOST] = [500, 8000]; // milliseconds between two tries

export class Live {
  #api;
  #take;
  #away;
  #model = null;
  #stopper = null;

  /** `take(event)` gets each event, `away(why)` is told when there is no connection. */
  constructor(api, take, away) {
    [this.#api, this.#take, this.#away] = [api, take, away];
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
    api.addEventListener("key", () => this.restart());
  }

  /** Watches the engine of a model. */
  watch(model) {
    this.#model = model;
    this.restart();
  }

  restart() {
    this.stop();
    this.start();
  }

  stop() {
    this.#stopper?.abort();
    this.#stopper = null;
  }

  start() {
    if (this.#stopper || document.hidden) return;
    this.#stopper = new AbortController();
    this.#run(this.#stopper.signal);
  }

  async #run(signal) {
    for (let tries = 0; !signal.aborted; tries++) {
      let failure = new Failure("The server closed the connection.");
      try {
        await this.#listen(signal, () => (tries = 0));
      } catch (error) {
        failure = error;
      }
      if (signal.aborted) return;
      if (failure.status === 401) return this.#away("locked"); // another key starts it again
      this.#away("away");
      await pause(Math.min(MOST, FIRST * 2 ** tries) * (0.75 + Math.random() / 2), signal);
    }
    return undefined;
  }

  async #listen(signal, heard) {
    const lost = new AbortController();
    let timer = setTimeout(() => lost.abort(), PATIENCE);
    try {
      const path = this.#model === null ? "live" : `live?model=${encodeURIComponent(this.#model)}`;
      const both = AbortSignal.any([signal, lost.signal]);
      for await (const data of events(await this.#api.send(path, { signal: both, quiet: true }))) {
        clearTimeout(timer);
        timer = setTimeout(() => lost.abort(), PATIENCE);
        heard();
        if (!signal.aborted) this.#hand(JSON.parse(data));
      }
    } finally {
      clearTimeout(timer);
      lost.abort();
    }
  }

  /** An error in what is drawn is the page's own: it is reported, and the connection stays. */
  #hand(event) {
    try {
      this.#take(event);
    } catch (error) {
      reportError(error);
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
