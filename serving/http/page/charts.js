/* The strip of steps and the line of throughput. */

import { Surface, still } from "./canvas.js";
import { make } from "./dom.js";
import { count, measured, plural } from "./figures.js";

const WINDOW = 10; // seconds that the strip shows
const PITCH = 3; // pixels from bar to bar
const DELAY = 0.2; // seconds that the strip lags, so that its edge is never empty
const MINUTE = 60;

/** The rows of each step, scrolling: a bar is the fullest step of its moment. */
export class Strip {
  #surface;
  #palette;
  #card;
  #steps = []; // [t, rows, decodes, sequences, seconds, drafts, accepted]
  #limit = 1;
  #skew = null; // our clock less the server's
  #x = null; // where the pointer is

  constructor(canvas, palette, card, wake) {
    [this.#palette, this.#card] = [palette, card];
    this.#surface = new Surface(canvas, wake);
    canvas.onpointermove = (event) => this.#point(event.offsetX);
    canvas.onpointerleave = () => this.#point(null);
  }

  update({ t, steps, limits }) {
    const skew = performance.now() / 1000 - t;
    const jumped = this.#skew === null || Math.abs(skew - this.#skew) > 1;
    if (jumped) this.#steps = [];
    this.#skew = jumped ? skew : this.#skew + (skew - this.#skew) * 0.1;
    this.#limit = Math.max(1, limits.max_rows);
    this.#steps.push(...steps);
    const old = this.#steps.findIndex((step) => step[0] > t - WINDOW - 2);
    this.#steps.splice(0, old < 0 ? this.#steps.length : old);
    if (this.#x !== null) this.#point(this.#x);
  }

  /** Draws; whether there is something to scroll. */
  draw() {
    const context = this.#surface.begin();
    if (!context) return false;
    const { width, height } = this.#surface;
    const scale = (rows) => (Math.log2(1 + Math.min(rows, this.#limit)) / Math.log2(1 + this.#limit)) * (height - 8);
    this.#grid(context, scale, width, height);
    const bars = { decode: [], drafted: [], rejected: [], read: [] };
    for (const [x, { rows, decodes, drafts, accepted }] of this.#bars(width)) {
      let low = 0;
      const ends = [decodes, decodes + accepted, decodes + drafts, rows];
      Object.values(bars).forEach((own, i) => {
        const top = scale(ends[i]);
        if (top > low) own.push([x, height - top, top - low]);
        low = top;
      });
    }
    for (const [name, own] of Object.entries(bars)) {
      context.fillStyle = this.#palette.get(name);
      for (const [x, y, high] of own) context.fillRect(x, y, PITCH - 1, high);
    }
    return this.#steps.length > 0 && !still.matches;
  }

  get #now() {
    return performance.now() / 1000 - this.#skew - DELAY;
  }

  /** The limit and some smaller numbers of rows. The scale is logarithmic: one row is still seen beside hundreds. */
  #grid(context, scale, width, height) {
    context.font = `11px ${getComputedStyle(this.#surface.canvas).fontFamily}`;
    context.textAlign = "right";
    for (const rows of [this.#limit, this.#limit / 8, this.#limit / 64].filter((rows) => rows >= 1)) {
      const y = Math.round(height - scale(rows)) + 0.5;
      context.strokeStyle = this.#palette.get(rows === this.#limit ? "edge" : "line");
      context.setLineDash(rows === this.#limit ? [4, 3] : []);
      context.beginPath();
      context.moveTo(0, y);
      context.lineTo(width - 28, y);
      context.stroke();
      context.fillStyle = this.#palette.get("ink-3");
      context.fillText(measured(rows), width, y + 3.5);
    }
    context.setLineDash([]);
  }

  /** [x, the fullest step there, and how many there were]. */
  *#bars(width) {
    const columns = Math.max(1, Math.floor((width - 32) / PITCH));
    const span = WINDOW / columns; // seconds a bar
    const found = new Map();
    for (const [t, rows, decodes, sequences, seconds, drafts, accepted] of this.#steps) {
      const last = Math.floor(t / span); // t is its end
      const first = Math.max(last - columns, Math.floor((t - seconds) / span));
      for (let bin = first; bin <= last; bin++) {
        const bar = found.get(bin);
        const steps = (bar?.steps ?? 0) + 1;
        if (!bar || rows > bar.rows) found.set(bin, { rows, decodes, sequences, seconds, drafts, accepted, steps });
        else bar.steps = steps;
      }
    }
    const now = still.matches ? Math.ceil(this.#now / span) * span : this.#now;
    for (const [bin, bar] of found) {
      const x = width - 32 - (now - bin * span) * (PITCH / span);
      if (x > -PITCH && bin * span <= now) yield [x, bar];
    }
  }

  #point(x) {
    this.#x = x;
    if (x === null) return this.#card.hide();
    const { width, canvas } = this.#surface;
    let near = null;
    for (const [at, bar] of this.#bars(width)) {
      if (!near || Math.abs(at + 1 - x) < Math.abs(near[0] + 1 - x)) near = [at, bar];
    }
    if (!near || Math.abs(near[0] + 1 - x) > 12) return this.#card.hide();
    const { rows, decodes, sequences, seconds, drafts, accepted, steps } = near[1];
    const title = `${plural(sequences, "sequence")}, ${measured(seconds * 1000)} ms`;
    const text = `${plural(rows - decodes - drafts, "prompt row")}, ${plural(decodes, "decode row")}`;
    const body = make("div", { className: "page-card" }, make("b", {}, title), make("p", {}, text));
    if (drafts) body.append(make("p", {}, `${plural(drafts, "draft")}, ${count(accepted)} accepted`));
    if (steps > 1) body.append(make("p", {}, `the fullest of ${count(steps)} steps`));
    const box = canvas.getBoundingClientRect();
    return this.#card.show(body, { left: box.left + near[0], top: box.top, width: 2, bottom: box.bottom });
  }
}

/** Tokens written a second, over the last minute. */
export class Spark {
  #surface;
  #palette;
  #points = []; // [t, rate]

  constructor(canvas, palette, wake) {
    this.#palette = palette;
    this.#surface = new Surface(canvas, wake);
  }

  update({ t, rates }) {
    if (this.#points.length && t < this.#points.at(-1)[0]) this.#points = [];
    this.#points.push([t, rates.generation]);
    while (this.#points[0][0] < t - MINUTE - 1) this.#points.shift();
  }

  draw() {
    const context = this.#surface.begin();
    if (!context || !this.#points.length) return false;
    const { width, height } = this.#surface;
    const end = this.#points.at(-1)[0];
    const most = Math.max(10, ...this.#points.map(([, rate]) => rate));
    const place = ([t, rate]) => [width - 6 - ((end - t) / MINUTE) * (width - 6), height - 4 - (rate / most) * (height - 14)];
    const line = new Path2D();
    this.#points.map(place).forEach(([x, y], i) => (i ? line.lineTo(x, y) : line.moveTo(x, y)));
    const [x, y] = place(this.#points.at(-1));
    const area = new Path2D(line);
    area.lineTo(x, height - 3.5);
    area.lineTo(place(this.#points[0])[0], height - 3.5);
    const color = this.#palette.get("decode");
    context.fillStyle = context.strokeStyle = color;
    context.globalAlpha = 0.13;
    context.fill(area);
    context.globalAlpha = 1;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke(line);
    context.beginPath();
    context.arc(x, y, 2.75, 0, 2 * Math.PI);
    context.fill();
    context.strokeStyle = this.#palette.get("line");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(0, height - 3.5);
    context.lineTo(width, height - 3.5);
    context.stroke();
    return false;
  }
}
