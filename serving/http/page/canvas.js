/* What the drawings share: sharp canvases, one loop of frames, and the palette of the theme. */

/** A canvas whose pixels are the screen's. */
export class Surface {
  constructor(canvas, resized) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    new ResizeObserver(resized).observe(canvas);
  }

  get width() {
    return this.canvas.clientWidth;
  }

  get height() {
    return this.canvas.clientHeight;
  }

  /** A clean context in CSS pixels, or null when nothing is to be seen. */
  begin() {
    const { canvas, context, width, height } = this;
    if (!width || !height) return null;
    const ratio = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.globalAlpha = 1;
    context.clearRect(0, 0, width, height);
    return context;
  }
}

/** Draws once a frame what asks for it; a hidden tab has no frames. */
export class Frames {
  #drawn = [];
  #due = false;

  /** `draw(now)` says whether it wants the next frame too. */
  add(draw) {
    this.#drawn.push(draw);
    this.wake();
  }

  wake() {
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame((now) => {
      this.#due = false;
      const more = this.#drawn.map((draw) => draw(now));
      if (more.includes(true)) this.wake();
    });
  }
}

export const still = matchMedia("(prefers-reduced-motion: reduce)");

/** The theme's colours as a canvas takes them. */
export class Palette {
  #probe = document.createElement("span");
  #known = new Map();

  constructor() {
    this.#probe.hidden = true;
    document.body.append(this.#probe);
  }

  forget() {
    this.#known.clear();
  }

  /** The colour that a custom property stands for. */
  get(name) {
    if (!this.#known.has(name)) {
      this.#probe.style.color = `var(--${name})`;
      this.#known.set(name, getComputedStyle(this.#probe).color);
    }
    return this.#known.get(name);
  }

  /** A request's colour: blue-green to violet, neighbours far apart. */
  owner(number) {
    const turn = (number * 0.618034) % 1;
    return this.get("owner").replace(/[\d.]+\)$/, `${(200 + turn * 105).toFixed(1)})`);
  }
}
