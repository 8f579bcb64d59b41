// The pool of physical blocks as a grid on a canvas: 1,000 of them in a millisecond.

import { scaleBand } from "d3-scale";
import { range } from "d3-array";
import { canvasPaint, hatch, paintOf, variable } from "./palette.js";
import { el, remPixels, watchSize } from "./dom.js";

// More labels than these, and they cannot be read.
const MOST_LABELS = 400;
const NAMES = ["--cell-free", "--cell-line", "--ink", "--paper", "--hatch", "--dead"];

export class Pool {
  /**
   * `onPoint(block or null)` is called when the pointer comes to a block, and
   * `onPick(block)` when it is pressed.
   */
  constructor(recording, { label, onPoint, onPick } = {}) {
    this.recording = recording;
    this.canvas = el("canvas", { role: "img", "aria-label": label });
    this.element = el("div", { class: "pool" }, this.canvas);
    this.onSize = () => {};
    this._last = null;
    this._seen = true;
    this._sight = new IntersectionObserver((entries) => {
      const entry = entries.at(-1);
      const comes = entry.isIntersecting && !this._seen;
      this._seen = entry.isIntersecting;
      if (comes && this._last) this.draw(...this._last);
    }, { rootMargin: "100px" });
    this._sight.observe(this.element);
    this._stop = watchSize(this.element, (width) => this._resize(width));
    if (onPoint) {
      this.canvas.addEventListener("pointermove", (e) => onPoint(this.blockAt(e)));
      this.canvas.addEventListener("pointerleave", () => onPoint(null));
      this.canvas.addEventListener("click", (e) => onPick(this.blockAt(e)));
    }
  }

  destroy() {
    this._stop();
    this._sight.disconnect();
  }

  _resize(width) {
    const count = this.recording.numBlocks;
    const columns = count <= 256 ? Math.min(16, count) : Math.ceil(Math.sqrt(count * 2.2));
    const rows = Math.ceil(count / columns);
    this.columns = columns;
    const height = Math.round((width / columns) * rows);
    const gap = width / columns > 12 ? 0.1 : 0.06;
    this.x = scaleBand(range(columns), [0, width]).paddingInner(gap);
    this.y = scaleBand(range(rows), [0, height]).paddingInner(gap);
    this.scale = window.devicePixelRatio || 1;
    this.grain = remPixels() / 16;
    this._colours = Object.fromEntries(NAMES.map((name) => [name, variable(name)]));
    this._fills = new Map();
    this.canvas.width = Math.round(width * this.scale);
    this.canvas.height = Math.round(height * this.scale);
    this.canvas.style.height = `${height}px`;
    if (this._last) this.draw(...this._last);
    this.onSize(width);
  }

  /** Where a block is, in pixels of the element. */
  place(block) {
    const i = block - 1;
    const x = this.x(i % this.columns);
    const y = this.y(Math.floor(i / this.columns));
    return { x, y, width: this.x.bandwidth(), height: this.y.bandwidth() };
  }

  blockAt(event) {
    if (!this.x) return null;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.x.step());
    const row = Math.floor((event.clientY - box.top) / this.y.step());
    const block = row * this.columns + column + 1;
    return column < this.columns && block <= this.recording.numBlocks ? block : null;
  }

  /** Draws frame k; sequences other than `selected` (-1: none) step back. */
  draw(k, selected = -1) {
    this._last = [k, selected];
    // What nobody sees is drawn when it comes into sight.
    if (!this.x || !this._seen) return;
    const context = this.canvas.getContext("2d");
    const colours = this._colours;
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (const block of this.recording.blocksAt(k)) {
      this._cell(context, block, selected, colours);
    }
  }

  /** A fill that is made once: patterns are dear. */
  _fill(key, make) {
    if (!this._fills.has(key)) this._fills.set(key, make());
    return this._fills.get(key);
  }

  _cell(context, block, selected, colours) {
    const { x, y, width, height } = this.place(block.block);
    if (!block.owners.length) {
      context.globalAlpha = 1;
      context.fillStyle = colours["--cell-free"];
      context.fillRect(x, y, width, height);
      return;
    }
    const sequence = block.owners.includes(selected) ? selected : block.owners[0];
    const back = selected >= 0 && sequence !== selected;
    const strength = back ? 0.35 : 1;
    const paint = this.paintOf(sequence);
    const size = this.recording.blockSize;
    // From the bottom up: tokens, room for tokens to come, room that stays empty.
    const live = (height * block.live) / size;
    const ahead = (height * block.ahead) / size;
    if (live < height || back) {
      context.globalAlpha = 1;
      context.fillStyle = colours["--paper"];
      context.fillRect(x, y, width, height);
    }
    context.globalAlpha = strength;
    if (live + ahead < height) {
      context.fillStyle = this._fill("hatch", () => hatch(context, colours["--hatch"], this.scale, this.grain));
      context.fillRect(x, y, width, height - live - ahead);
    }
    if (ahead) {
      context.globalAlpha = 0.22 * strength;
      context.fillStyle = paint.colour;
      context.fillRect(x, y + height - live - ahead, width, ahead);
    }
    context.globalAlpha = strength;
    context.fillStyle = block.ended ? colours["--dead"]
      : this._fill(paint.colour + paint.pattern, () => canvasPaint(context, paint, this.scale, this.grain));
    context.fillRect(x, y + height - live, width, live);
    context.globalAlpha = back ? 0.5 : 1;
    if (width >= 20 || sequence === selected) {
      context.lineWidth = (sequence === selected ? 2 : 1) * this.grain;
      context.strokeStyle = sequence === selected ? colours["--ink"] : paint.colour;
      const inset = context.lineWidth / 2;
      context.strokeRect(x + inset, y + inset, width - 2 * inset, height - 2 * inset);
    }
    if (width >= 17 && this.recording.numBlocks <= MOST_LABELS) {
      this._label(context, block, sequence, { x, y, width, height }, colours);
    }
    context.globalAlpha = 1;
  }

  _label(context, block, sequence, { x, y, width, height }, colours) {
    const points = Math.min(34, Math.max(9, width * 0.36));
    context.font = `600 ${points}px ui-sans-serif, system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineJoin = "round";
    context.lineWidth = points / 4;
    context.strokeStyle = colours["--paper"];
    context.fillStyle = colours["--ink"];
    const text = block.ref > 1 ? `×${block.ref}` : this.recording.labels[sequence];
    context.strokeText(text, x + width / 2, y + height / 2 + 0.5);
    context.fillText(text, x + width / 2, y + height / 2 + 0.5);
  }

  paintOf(sequence) {
    return paintOf(this.recording.sequences[sequence][0]);
  }
}
