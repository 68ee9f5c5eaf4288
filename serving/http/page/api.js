/* The server: requests that carry the key, failures in one shape, and events read from a stream. */

/** What a request came to instead of an answer. */
export class Failure extends Error {
  constructor(message, { status = 0, type = null, param = null, code = null } = {}) {
    super(message);
    Object.assign(this, { status, type, param, code });
  }
}

/** Sends requests; asks for a key, once for all who wait, when the server wants one. Fires "key" when it is another. */
export class Api extends EventTarget {
  #ask;
  #asking = null;
  #key;

  /** `ask(refused)` resolves to a key, or to null where none is given. */
  constructor(ask) {
    super();
    this.#ask = ask;
    this.#key = stored();
  }

  /** A response that is not an error. With `quiet`, nobody is asked for a key. */
  async send(path, { body, signal, quiet = false } = {}) {
    for (;;) {
      const key = this.#key;
      const response = await this.#fetch(path, key, body, signal);
      if (response.ok) return response;
      const failure = await failureOf(response);
      if (failure.status !== 401 || quiet) throw failure;
      if (key === this.#key && !(await this.#unlock(key))) throw failure;
      signal?.throwIfAborted();
    }
  }

  async #fetch(path, key, body, signal) {
    const headers = {};
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const method = body === undefined ? "GET" : "POST";
    try {
      return await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The server cannot be reached.", { type: "connection_error" });
    }
  }

  async #unlock(refused) {
    this.#asking ??= this.#ask(refused !== null).finally(() => (this.#asking = null));
    const key = await this.#asking;
    if (key === null) return false;
    if (key !== this.#key) {
      this.#key = key;
      store(key);
      this.dispatchEvent(new Event("key"));
    }
    return true;
  }
}

async function failureOf(response) {
  const status = response.status;
  try {
    const { error } = await response.json();
    return new Failure(String(error.message), { ...error, status });
  } catch {
    return new Failure(`The server answered ${status} ${response.statusText}`.trim() + ".", { status });
  }
}

function stored() {
  try {
    return sessionStorage.getItem("quire.key");
  } catch {
    return null;
  }
}

function store(key) {
  try {
    sessionStorage.setItem("quire.key", key);
  } catch {
    // It then lasts as long as the page.
  }
}

/** The data of each server-sent event of a response, as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r\n\r\n|\n\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
