// Lines over iterations or other numbers, with axes and a mark at the current one.

import { max } from "d3-array";
import { axisBottom, axisLeft } from "d3-axis";
import { format } from "d3-format";
import { scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { area, curveStepBefore, line, symbol, symbolTriangle } from "d3-shape";
import { el, remPixels, watchSize } from "./dom.js";

const MOST_POINTS = 1200;

/**
 * A chart of series `{ label, values | points, colour, dash, strong, filled }`, of one
 * value an iteration, counted from 1, or of points [x, y]; `dash` in sixteenths of a
 * rem. `options`: `label`, `x`, `y` (names of the axes), `height`, `top` (of y), `format`
 * (of y), `onSeek(k)`. The legend of values has those at the mark. A line that leaves the
 * chart at the top ends there, with an arrowhead.
 */
export class LineChart {
  constructor(series, options) {
    this.series = series.map((s) => ({
      ...s, points: s.points ?? thin(overIterations(s.values, options.steps)),
    }));
    this.options = options;
    this.element = el("div", { class: "chart" });
    this.svg = select(this.element).append("svg")
      .attr("role", "img").attr("aria-label", options.label);
    this.values = this.series.map(() => el("b", {}));
    this.legend = el(
      "ul", { class: "legend" },
      this.series.map((s, i) => el("li", {}, swatch(s), s.label, s.values && this.values[i])),
    );
    if (this.series.length > 1) this.element.append(this.legend);
    this.format = format(options.format ?? ",");
    this._cursor = null;
    this._stop = watchSize(this.element, (width) => this._draw(width));
  }

  destroy() { this._stop(); }

  _draw(width) {
    const { options, series } = this;
    const rem = remPixels();
    const margin = { top: 0.6 * rem, right: 0.8 * rem, bottom: 2.6 * rem, left: 3.2 * rem };
    const height = (options.height ?? 11) * rem;
    const top = options.top ?? (max(series, (s) => max(s.points, (p) => p[1])) || 1);
    const last = options.right ?? max(series, (s) => max(s.points, (p) => p[0])) ?? 1;
    this.x = scaleLinear([options.left ?? 0, last], [margin.left, width - margin.right]);
    this.y = scaleLinear([0, top], [height - margin.bottom, margin.top]);
    if (options.top == null) this.y.nice(4);
    this.svg.attr("width", width).attr("height", height).selectAll("*").remove();
    this.svg.append("g").attr("class", "axis")
      .attr("transform", `translate(0,${height - margin.bottom})`)
      .call(axisBottom(this.x).ticks(Math.max(3, Math.min(10, width / (6 * rem)))).tickSizeOuter(0));
    this.svg.append("g").attr("class", "axis grid").attr("transform", `translate(${margin.left},0)`)
      .call(axisLeft(this.y).ticks(4, options.format).tickSize(-(width - margin.left - margin.right)));
    this.svg.append("text").attr("class", "axis-name").attr("x", width - margin.right)
      .attr("y", height - 0.3 * rem).attr("text-anchor", "end").text(options.x);
    const shape = line((p) => this.x(p[0]), (p) => this.y(p[1]));
    if (options.steps) shape.curve(curveStepBefore);
    for (const s of series) {
      if (s.filled) {
        const filled = area((p) => this.x(p[0]), this.y(0), (p) => this.y(p[1]));
        if (options.steps) filled.curve(curveStepBefore);
        this.svg.append("path").attr("d", filled(s.points)).attr("fill", s.colour)
          .attr("fill-opacity", 0.18);
      }
      const { inside, exit } = upTo(top, s.points);
      this.svg.append("path").attr("class", s.strong ? "series strong" : "series")
        .attr("d", shape(inside)).attr("stroke", s.colour).attr("stroke-dasharray", dashes(s, rem));
      if (s.dots) {
        this.svg.selectAll(null).data(inside.filter((p) => p !== exit)).join("circle")
          .attr("cx", (p) => this.x(p[0])).attr("cy", (p) => this.y(p[1])).attr("r", 0.19 * rem)
          .attr("fill", s.colour);
      }
      if (exit) {
        this.svg.append("path").attr("class", "exit").attr("fill", s.colour)
          .attr("d", symbol(symbolTriangle, 0.22 * rem ** 2))
          .attr("transform", `translate(${this.x(exit[0])},${this.y(top)})`);
      }
    }
    this.mark = this.svg.append("line").attr("class", "cursor")
      .attr("y1", margin.top).attr("y2", height - margin.bottom).attr("visibility", "hidden");
    if (options.onSeek) {
      const seek = (event) => {
        if (event.buttons !== 1) return;
        const box = this.svg.node().getBoundingClientRect();
        const iteration = this.x.invert(event.clientX - box.left);
        options.onSeek((options.steps ? Math.ceil(iteration) : Math.round(iteration)) - 1);
      };
      this.svg.style("cursor", "col-resize").on("pointerdown pointermove", seek);
    }
    if (this._cursor != null) this.show(this._cursor);
  }

  /** Puts the mark at a number of points, or at frame k of values: iteration k + 1. */
  show(at) {
    this._cursor = at;
    this.series.forEach(({ values }, i) => {
      // What is over stays as it ended.
      if (values) this.values[i].textContent = this.format(values[Math.min(at, values.length - 1)]);
    });
    if (!this.mark) return;
    const shown = this.series[0].values ? at + 1 : at;
    const x = this.x(Math.min(shown, this.x.domain()[1]));
    this.mark.attr("x1", x).attr("x2", x).attr("visibility", null);
  }
}

/** Points of values, one an iteration; steps have the value during the iteration. */
function overIterations(values, steps) {
  const points = values.map((value, k) => [k + 1, value]);
  return steps && values.length ? [[0, values[0]], ...points] : points;
}

/** Points up to where a line first goes above `top`, and that place: `exit`, or null. */
function upTo(top, points) {
  const out = points.findIndex((p) => p[1] > top);
  if (out < 0) return { inside: points, exit: null };
  const [x, y] = points[out];
  const [x0, y0] = points[Math.max(0, out - 1)];
  const exit = [out ? x0 + ((x - x0) * (top - y0)) / (y - y0) : x, top];
  return { inside: [...points.slice(0, out), exit], exit };
}

/** Fewer points: of each stretch the least and the largest. */
function thin(points) {
  const stretch = Math.ceil((2 * points.length) / MOST_POINTS);
  if (stretch < 2) return points;
  const kept = [];
  for (let i = 0; i < points.length; i += stretch) {
    const some = points.slice(i, i + stretch);
    const low = some.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = some.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

function dashes(s, rem) {
  return s.dash.length ? s.dash.map((length) => (length * rem) / 16).join(" ") : null;
}

function swatch(s) {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  const rem = remPixels();
  select(svg).attr("width", 1.75 * rem).attr("height", 0.6 * rem).append("line")
    .attr("x1", 0).attr("x2", 1.75 * rem).attr("y1", 0.3 * rem).attr("y2", 0.3 * rem)
    .attr("stroke", s.colour).attr("stroke-width", (s.strong ? 0.22 : 0.16) * rem)
    .attr("stroke-dasharray", dashes(s, rem));
  return svg;
}
