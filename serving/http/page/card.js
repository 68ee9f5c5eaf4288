/* The floating card: one for the page, placed by what it tells of, inside the window. */

const GAP = 8;
const BAR = 56; // pixels at the top that stay free where they can

export class Card {
  #element;

  constructor(element) {
    this.#element = element;
    addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
    addEventListener("resize", () => this.hide());
  }

  /** Shows `content` above the rectangle `at`, or below it where the page's bar would be covered. */
  show(content, at) {
    const card = this.#element;
    card.replaceChildren(content);
    card.hidden = false;
    const { width, height } = card.getBoundingClientRect();
    const [wide, high] = [document.documentElement.clientWidth, document.documentElement.clientHeight];
    const left = Math.min(Math.max(GAP, at.left + at.width / 2 - width / 2), wide - width - GAP);
    const above = at.top - height - GAP;
    const top = above >= BAR ? above : Math.min(at.bottom + GAP, high - height - GAP);
    card.style.transform = `translate(${Math.round(left)}px, ${Math.round(Math.max(GAP, top))}px)`;
  }

  hide() {
    this.#element.hidden = true;
  }

  get shown() {
    return !this.#element.hidden;
  }
}
