/* The map of a group's pages: a cell each, lit when it changes. */

import { Surface, still } from "./canvas.js";
import { make } from "./dom.js";
import { count } from "./figures.js";

const FADE = 900; // milliseconds that a change glows
const [LARGEST, SMALLEST] = [20, 3]; // widths of a cell
const NAMES = { 0: "free", "-1": "cached", "-2": "shared" };

/** What a cell's number says: free, cached, shared, yours or running. */
export const stateOf = (cell, own) => NAMES[cell] ?? (own.has(cell) ? "yours" : "running");

/** The measures of the largest cells with which maps of `counts` cells are together no higher than `room`. */
export function measures(counts, width, room) {
  for (let wide = LARGEST; ; wide--) {
    const gap = wide >= 8 ? 2 : 1;
    const high = Math.round(wide * 1.3);
    const columns = Math.max(1, Math.floor((width + gap) / (wide + gap)));
    const rows = counts.reduce((sum, cells) => sum + Math.ceil(cells / columns), 0);
    if (rows * (high + gap) <= room || wide === SMALLEST) return { wide, high, gap, columns };
  }
}

export class PageMap {
  #surface;
  #base = document.createElement("canvas");
  #palette;
  #card;
  #events;
  #group = { cells: [], pages: 0, each: 1, name: "" };
  #own = new Set();
  #runs = new Map(); // number -> the request
  #size = null;
  #changed = new Map(); // cell -> {at, from}
  #lit = null;
  #stale = true; // whether the base is to be painted anew
  #at = -1; // the cell pointed at

  /** `light(predicate or null)` lights cells on every map, `wake()` asks for a frame. */
  constructor(canvas, palette, card, events) {
    [this.#palette, this.#card, this.#events] = [palette, card, events];
    this.canvas = canvas;
    this.#surface = new Surface(canvas, events.resized);
    canvas.tabIndex = 0;
    canvas.role = "img";
    canvas.onpointermove = (event) => this.#point(this.#cellAt(event));
    canvas.onpointerleave = () => this.#point(-1);
    canvas.onclick = (event) => this.#point(this.#cellAt(event));
    canvas.onblur = () => this.#point(-1);
    canvas.onkeydown = (event) => this.#step(event);
  }

  update(group, runs, own, size) {
    const before = this.#group.cells;
    const known = before.length === group.cells.length;
    const now = performance.now();
    group.cells.forEach((cell, i) => {
      if (known && cell !== before[i] && !still.matches) this.#changed.set(i, { at: now, from: this.#color(before[i]) });
    });
    if (!known) this.#changed.clear();
    [this.#group, this.#runs, this.#own, this.#size] = [group, runs, own, size];
    const high = `${Math.ceil(group.cells.length / size.columns) * (size.high + size.gap) - size.gap}px`;
    if (this.canvas.style.height !== high) this.canvas.style.height = high;
    this.repaint();
    if (this.#at >= 0 && this.#card.shown) this.#tell();
  }

  label(text) {
    if (this.canvas.ariaLabel !== text) this.canvas.ariaLabel = text;
  }

  light(lit) {
    this.#lit = lit;
    this.repaint();
  }

  repaint() {
    this.#stale = true;
    this.#events.wake();
  }

  /** Draws; whether something still glows. */
  draw(now) {
    const context = this.#surface.begin();
    if (!context || !this.#size) return false;
    if (this.#stale) this.#paint();
    const { width, height } = this.#surface;
    context.drawImage(this.#base, 0, 0, width, height);
    for (const [i, { at, from }] of this.#changed) {
      const left = 1 - (now - at) / FADE;
      if (left <= 0) this.#changed.delete(i);
      else this.#glow(context, i, Math.min(1, left), from);
    }
    if (this.#at >= 0) this.#frame(context, this.#at);
    return this.#changed.size > 0;
  }

  #color(cell) {
    const state = stateOf(cell, this.#own);
    return state === "running" ? this.#palette.owner(cell) : this.#palette.get(state);
  }

  #place(i) {
    const { wide, high, gap, columns } = this.#size;
    return [(i % columns) * (wide + gap), Math.floor(i / columns) * (high + gap)];
  }

  #cell(context, i, grow = 0) {
    const { wide, high } = this.#size;
    const [x, y] = this.#place(i);
    const box = [x - grow, y - grow, wide + 2 * grow, high + 2 * grow];
    if (wide >= 6) context.roundRect(...box, wide >= 10 ? 2 : 1);
    else context.rect(...box);
  }

  /** All cells as they are, on a canvas of their own: frames then only add what glows. */
  #paint() {
    this.#stale = false;
    const { canvas } = this.#surface;
    [this.#base.width, this.#base.height] = [canvas.width, canvas.height];
    const context = this.#base.getContext("2d");
    context.setTransform(this.#surface.context.getTransform());
    const alike = new Map();
    this.#group.cells.forEach((cell, i) => {
      const key = `${cell} ${!this.#lit || this.#lit(cell)}`;
      if (!alike.has(key)) alike.set(key, []);
      alike.get(key).push(i);
    });
    for (const cells of alike.values()) {
      const cell = this.#group.cells[cells[0]];
      context.globalAlpha = !this.#lit || this.#lit(cell) ? 1 : 0.22;
      context.fillStyle = this.#color(cell);
      context.beginPath();
      for (const i of cells) this.#cell(context, i);
      context.fill();
    }
  }

  /** A cell that came alive flashes, one that was let go fades from what it was. */
  #glow(context, i, left, from) {
    const cell = this.#group.cells[i];
    const dim = this.#lit && !this.#lit(cell) ? 0.22 : 1;
    const fill = (color, alpha, grow) => {
      context.globalAlpha = alpha * dim;
      context.fillStyle = color;
      context.beginPath();
      this.#cell(context, i, grow);
      context.fill();
    };
    if (cell === 0 || cell === -1) return fill(from, left, 0);
    fill(this.#color(cell), left * 0.45, Math.min(3, this.#size.gap + 1));
    return fill(this.#palette.get("glow"), left * left * 0.7, 0);
  }

  #frame(context, i) {
    context.globalAlpha = 1;
    context.strokeStyle = this.#palette.get("ink");
    context.lineWidth = 1.5;
    context.beginPath();
    this.#cell(context, i, 1.25);
    context.stroke();
  }

  #cellAt(event) {
    if (!this.#size) return -1;
    const { wide, high, gap, columns } = this.#size;
    const column = Math.floor(event.offsetX / (wide + gap));
    const i = Math.floor(event.offsetY / (high + gap)) * columns + column;
    return column >= 0 && column < columns && i >= 0 && i < this.#group.cells.length ? i : -1;
  }

  #step(event) {
    const { columns } = this.#size ?? { columns: 1 };
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (event.key === "Escape" && this.#at >= 0) {
      event.stopPropagation();
      this.#point(-1);
    } else if (step) {
      event.preventDefault();
      const to = this.#at < 0 ? 0 : this.#at + step;
      if (to >= 0 && to < this.#group.cells.length) this.#point(to);
    }
  }

  #point(i) {
    if (i === this.#at) return;
    this.#at = i;
    const cell = this.#group.cells[i];
    this.#events.light(cell > 0 ? (other) => other === cell : null);
    if (i < 0) this.#card.hide();
    else this.#tell();
    this.#events.wake();
  }

  /** The card of the cell pointed at. */
  #tell() {
    const { each, pages, cells } = this.#group;
    const i = Math.min(this.#at, cells.length - 1);
    const [first, last] = [i * each, Math.min((i + 1) * each, Math.max(pages, i * each + 1)) - 1];
    const title = first === last ? `Page ${count(first)}` : `Pages ${count(first)} to ${count(last)}`;
    const body = make("div", { className: "page-card" }, make("b", {}, title), make("p", {}, this.#story(cells[i])));
    const [x, y] = this.#place(i);
    const box = this.canvas.getBoundingClientRect();
    this.#card.show(body, { left: box.left + x, top: box.top + y, width: this.#size.wide, bottom: box.top + y + this.#size.high });
  }

  #story(cell) {
    if (cell === 0) return "free";
    if (cell === -1) return "cached: nobody needs it now, but the next prompt that begins alike will find it";
    if (cell === -2) return "shared by several requests that begin alike";
    const run = this.#runs.get(cell);
    const whose = `request ${count(cell)}${this.#own.has(cell) ? ", yours" : ""}`;
    return run ? `${whose}: ${count(run.prompt)} tokens of prompt, ${count(run.tokens)} written` : whose;
  }
}
