/* The engine's side of the page: what each event of /live says, in numbers, lists and drawings. */

import { Frames, Palette } from "./canvas.js";
import { Spark, Strip } from "./charts.js";
import { find, make, tell } from "./dom.js";
import { compact, count, measured, percent, plural, rate } from "./figures.js";
import { PageMap, measures, stateOf } from "./pages.js";

const ROOM = [150, 0.26, 300]; // pixels that the maps may be high together: at least, of the window, at most
const WAITING = 6; // requests that are listed
const MINUTE = 60; // seconds that the figures of drafts are of
const STATES = ["yours", "running", "shared", "cached", "free"];

export class Engine {
  #frames = new Frames();
  #palette = new Palette();
  #card;
  #owns;
  #maps = []; // {map, name, size}
  #strip;
  #spark;
  #rows = new Map(); // of running requests, by number and id
  #own = new Set(); // numbers of the page's own requests
  #drafts = []; // [t, [proposals, drafts, accepted]] of the last minute, of one model
  #model = null;
  #last = null;

  /** `owns(id)` says which requests are the page's. */
  constructor(card, owns) {
    [this.#card, this.#owns] = [card, owns];
    const wake = () => this.#frames.wake();
    this.#strip = new Strip(find("strip"), this.#palette, card, wake);
    this.#spark = new Spark(find("spark"), this.#palette, wake);
    this.#frames.add((now) => {
      const more = this.#maps.map(({ map }) => map.draw(now));
      return [this.#strip.draw(), this.#spark.draw(), ...more].includes(true);
    });
    find("legend").replaceChildren(...STATES.map((state) => this.#legend(state)));
  }

  /** Takes an event in; one of an engine that is not ready tells only its state. */
  update(event) {
    find("engine").classList.toggle("away", !event.groups);
    if (!event.groups) return;
    this.#last = event;
    this.#own = new Set(event.running.filter(({ id }) => this.#owns(id)).map(({ number }) => number));
    this.#showRates(event);
    this.#showPages(event);
    this.#showSteps(event);
    this.#showDrafts(event);
    this.#showRequests(event);
    this.#showLatency(event.latency);
    this.#showTotals(event.totals);
    this.#frames.wake();
  }

  /** No event comes. */
  away() {
    find("engine").classList.add("away");
  }

  /** Lights the pages of the request that the page is waiting for. */
  lightOwn(on) {
    this.#light(on ? (cell) => this.#own.has(cell) : null);
  }

  /** The theme has changed. */
  recolor() {
    this.#palette.forget();
    for (const { map } of this.#maps) map.repaint();
    for (const { number, chip } of this.#rows.values()) this.#tint(chip, number);
    this.#frames.wake();
  }

  #light(lit) {
    for (const { map } of this.#maps) map.light(lit);
  }

  #legend(state) {
    const item = make("li", { tabIndex: 0 }, make("span", { className: `swatch ${state}` }), `${state} `, make("b", { id: `count-${state}` }, "0"));
    item.onpointerenter = item.onfocus = () => this.#light((cell) => stateOf(cell, this.#own) === state);
    item.onpointerleave = item.onblur = () => this.#light(null);
    return item;
  }

  #showRates({ rates }) {
    tell(find("generation"), rate(rates.generation));
    tell(find("prompt-rate"), rate(rates.prompt));
    tell(find("tab-rate"), rate(rates.generation) === "0" ? "" : `${rate(rates.generation)}/s`);
    this.#spark.update(this.#last);
  }

  #showPages({ groups, running, used }) {
    tell(find("used"), percent(used));
    if (this.#maps.map(({ name }) => name).join("\n") !== groups.map(({ name }) => name).join("\n")) this.#makeMaps(groups);
    const width = find("maps").clientWidth;
    const room = Math.min(ROOM[2], Math.max(ROOM[0], ROOM[1] * window.innerHeight));
    const size = width ? measures(groups.map(({ cells }) => cells.length), width, room) : null;
    const runs = new Map(running.map((run) => [run.number, run]));
    const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
    groups.forEach((group, i) => {
      const here = Object.fromEntries(STATES.map((state) => [state, 0]));
      group.cells.forEach((cell, at) => {
        const pages = Math.max(0, Math.min(group.each, group.pages - at * group.each));
        here[stateOf(cell, this.#own)] += pages;
      });
      for (const state of STATES) counts[state] += here[state];
      const { map, note } = this.#maps[i];
      const told = Object.entries(here).filter(([, pages]) => pages).map(([state, pages]) => `${count(pages)} ${state}`);
      map.label(`Pages${groups.length > 1 ? ` of ${group.name}` : ""}: ${told.join(", ")}. The arrow keys read one at a time.`);
      const cell = group.each > 1 ? `a cell is ${count(group.each)} pages` : "a cell is a page";
      tell(note, `${plural(group.pages, "page")} of ${plural(this.#last.page_size, "token")}, ${cell}`);
      if (size) map.update(group, runs, this.#own, size);
    });
    for (const [state, pages] of Object.entries(counts)) tell(find(`count-${state}`), compact(pages));
  }

  #makeMaps(groups) {
    const events = {
      wake: () => this.#frames.wake(),
      light: (lit) => this.#light(lit),
      resized: () => this.#last && this.#showPages(this.#last),
    };
    this.#maps = groups.map(({ name }) => {
      const canvas = make("canvas");
      const note = make("span");
      const label = make("p", { className: "map-name" }, ...(groups.length > 1 ? [make("span", {}, name)] : []), note);
      return { name, note, map: new PageMap(canvas, this.#palette, this.#card, events), element: make("div", {}, label, canvas) };
    });
    find("maps").replaceChildren(...this.#maps.map(({ element }) => element));
  }

  #showSteps({ steps, num_running: running }) {
    this.#strip.update(this.#last);
    const last = steps.at(-1);
    if (last) tell(find("step-now"), `${plural(last[3], "sequence")}, ${plural(last[1], "row")}, ${measured(last[4] * 1000)} ms`);
    else if (!running) tell(find("step-now"), "idle");
  }

  /** How many are drafted at a time, and how many of them are right. */
  #showDrafts({ t, model, drafts }) {
    for (const part of document.querySelectorAll(".of-drafts")) part.hidden = !drafts;
    if (!drafts) return;
    if (model !== this.#model || drafts[0] < this.#drafts.at(-1)?.[1][0]) this.#drafts = []; // another engine
    this.#model = model;
    this.#drafts.push([t, drafts]);
    while (this.#drafts[0][0] < t - MINUTE) this.#drafts.shift();
    const [proposals, drafted, accepted] = drafts.map((total, i) => total - this.#drafts[0][1][i]);
    tell(find("drafts-each"), proposals ? measured(drafted / proposals) : "–");
    tell(find("drafts-share"), drafted ? percent(accepted / drafted) : "–");
    tell(find("drafts-length"), proposals ? measured(1 + accepted / proposals) : "–");
  }

  #showRequests({ running, waiting, num_running: runs, num_waiting: waits }) {
    tell(find("num-running"), count(runs));
    tell(find("num-waiting"), count(waits));
    find("nobody").hidden = runs + waits > 0;
    const longest = Math.max(1, ...running.map(({ prompt, tokens }) => prompt + tokens));
    const seen = new Set();
    for (const run of running) {
      const key = `${run.number} ${run.id}`;
      seen.add(key);
      if (!this.#rows.has(key)) this.#rows.set(key, this.#row(run.number));
      this.#showRun(this.#rows.get(key), run, longest);
    }
    for (const [key, row] of this.#rows) {
      if (seen.has(key)) continue;
      row.element.remove();
      this.#rows.delete(key);
      if (row.pointed) this.#light(null);
    }
    this.#showWaiting(waiting, waits);
  }

  /** Those who wait: the page's own first, and no more than a few. */
  #showWaiting(waiting, all) {
    const shown = waiting.toSorted((a, b) => this.#owns(b.id) - this.#owns(a.id)).slice(0, WAITING);
    const chips = shown.map(({ id, prompt }) => {
      const own = this.#owns(id);
      return make("li", { className: own ? "own" : "" }, `${own ? "yours, " : ""}${plural(prompt, "token")}`);
    });
    if (all > shown.length) chips.push(make("li", {}, `and ${count(all - shown.length)} more`));
    find("waiting").replaceChildren(...chips);
  }

  #row(number) {
    const [chip, who, count_, doing] = ["chip", "who", "count", "doing"].map((className) => make("span", { className }));
    const parts = ["found", "done", "written"].map((className) => make("span", { className }));
    const way = make("span", { className: "way" }, ...parts);
    const element = make("li", { tabIndex: 0 }, chip, who, way, count_, doing);
    const row = { number, element, chip, who, count: count_, doing, parts, pointed: false };
    const point = (on) => () => {
      row.pointed = on;
      this.#light(on ? (cell) => cell === number : null);
    };
    element.onpointerenter = element.onfocus = point(true);
    element.onpointerleave = element.onblur = point(false);
    if (this.#own.has(number)) find("running").prepend(element);
    else find("running").append(element);
    return row;
  }

  #showRun(row, run, longest) {
    const own = this.#own.has(run.number);
    row.element.classList.toggle("own", own);
    this.#tint(row.chip, run.number);
    tell(row.who, own ? "yours" : `no. ${run.number}`);
    tell(row.doing, run.state);
    tell(row.count, `${compact(run.prompt)} + ${compact(run.tokens)}`);
    const about = `${own ? "Your request" : `Request ${run.number}`}, ${run.state}: ${run.prompt} tokens of prompt, ${run.cached} of them from the cache; ${run.tokens} written`;
    if (row.element.ariaLabel !== about) row.element.ariaLabel = row.element.title = about;
    const ends = [run.cached, Math.min(run.computed, run.prompt), run.tokens ? run.prompt + run.tokens : 0];
    const starts = [0, run.cached, run.prompt];
    row.parts.forEach((part, i) => {
      part.style.left = `${(starts[i] / longest) * 100}%`;
      part.style.width = `${(Math.max(0, ends[i] - starts[i]) / longest) * 100}%`;
    });
  }

  #tint(chip, number) {
    const color = this.#own.has(number) ? this.#palette.get("yours") : this.#palette.owner(number);
    if (chip.dataset.color === color) return;
    chip.dataset.color = chip.style.backgroundColor = color;
  }

  #showLatency({ ttft, itl }) {
    for (const [name, values] of Object.entries({ ttft, itl })) {
      const cells = find(name).querySelectorAll("td");
      cells.forEach((cell, i) => tell(cell, values ? measured(values[i]) : "–"));
    }
  }

  #showTotals(totals) {
    tell(find("total-requests"), compact(totals.requests));
    tell(find("total-prompt"), compact(totals.prompt_tokens));
    tell(find("total-generation"), compact(totals.generation_tokens));
    tell(find("total-cached"), totals.prompt_tokens ? percent(totals.cached_tokens / totals.prompt_tokens) : "–");
    tell(find("total-preemptions"), count(totals.preemptions));
    tell(find("total-recompiles"), count(totals.recompiles));
    find("total-recompiles").classList.toggle("bad", totals.recompiles > 0);
  }
}
