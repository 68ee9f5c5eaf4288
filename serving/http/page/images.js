/* Images of a message: pasted, dropped or chosen, shrunk in the browser, and shown above the text box. */

import { find, make, tool } from "./dom.js";

const LONGEST = 1536; // pixels of the longer side
const QUALITY = 0.9;

/** An image file as a data: URL, at most LONGEST pixels long; transparent parts are white. */
export async function shrink(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas", {
    width: Math.max(1, Math.round(bitmap.width * scale)),
    height: Math.max(1, Math.round(bitmap.height * scale)),
  });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

/** The images of a message that was sent. */
export function thumbnails(urls) {
  return make("div", { className: "images" }, ...urls.map((src, index) => make("img", { src, alt: `Image ${index + 1}` })));
}

/** The images of the message that is being written. */
export class Attachments {
  #limit = 0; // images of a prompt
  #urls = [];
  #onchange;

  constructor(area, drop, onchange) {
    this.#onchange = onchange;
    const picker = find("image-files");
    find("attach").onclick = () => picker.click();
    picker.onchange = () => {
      this.add(picker.files);
      picker.value = "";
    };
    area.onpaste = (event) => this.#take(event, event.clipboardData);
    drop.ondragover = (event) => {
      if (this.#limit && event.dataTransfer.types.includes("Files")) event.preventDefault();
    };
    drop.ondrop = (event) => this.#take(event, event.dataTransfer);
  }

  get urls() {
    return this.#urls;
  }

  /** How many images the model reads; 0: text alone. */
  set limit(limit) {
    if (this.#limit === limit) return;
    this.#limit = limit;
    find("attach").hidden = !limit;
    this.#show();
  }

  /** Adds the images among some files, as many as there is room for. */
  async add(files) {
    for (const file of [...files].filter(({ type }) => type.startsWith("image/"))) {
      try {
        const url = await shrink(file);
        if (this.#urls.length < this.#limit) this.#urls = [...this.#urls, url];
        else find("said").textContent = `The model reads at most ${this.#limit} images.`;
      } catch {
        find("said").textContent = `${file.name} is no image that this browser can read.`;
      }
    }
    this.#show();
  }

  clear() {
    this.#urls = [];
    this.#show();
  }

  #take(event, data) {
    const files = [...(data?.files ?? [])];
    if (!this.#limit || !files.some(({ type }) => type.startsWith("image/"))) return;
    event.preventDefault();
    this.add(files);
  }

  #show() {
    const remove = (url) => {
      this.#urls = this.#urls.filter((other) => other !== url);
      this.#show();
    };
    const item = (src, index) =>
      make("li", {}, make("img", { src, alt: `Image ${index + 1}` }), tool("close", `Remove image ${index + 1}`, () => remove(src)));
    find("attached").replaceChildren(...this.#urls.map(item));
    find("attached").hidden = !this.#urls.length;
    this.#onchange();
  }
}
