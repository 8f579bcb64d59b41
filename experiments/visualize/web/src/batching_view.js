// View 3: who is in the batch when, under continuous and under static batching.

import { axisBottom } from "d3-axis";
import { scaleBand, scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { LineChart } from "./charts.js";
import { choice, el, questions, remPixels, watchSize } from "./dom.js";
import { ACTIVITY } from "./recording.js";
import { systemStyle } from "./systems.js";
import { events, frameIn, joined } from "./words.js";

const SHOWN = ["waiting", "prefill", "decode", "preempted", "swapped", "held"];
let whenShort = "paged";

export function batchingView(app) {
  const { t } = app;
  const names = [whenShort, "paged_static"];
  const runs = names.map((name) => app.recording(name));
  const frames = Math.max(...runs.map((run) => run.frames));
  const ganttOf = (run, kind) => new Gantt(app, run, frames, t(`batching.${kind}`));
  const gantts = [ganttOf(runs[0], "continuous"), ganttOf(runs[1], "static")];
  const series = (values) => runs.map((run, i) => ({
    label: t(`batching.${i ? "static" : "continuous"}`), values: values(run), strong: !i,
    ...systemStyle(names[i]), filled: true,
  }));
  const options = (label, more) => ({
    label, x: t("iteration"), right: frames, height: 10, steps: true, onSeek: (k) => app.seek(k), ...more,
  });
  const charts = [
    new LineChart(series((run) => run.log.running), options(t("batching.size"), { top: runs[0].maxSeqs })),
    new LineChart(
      series((run) => run.log.live.map((live, k) => live / Math.max(1, run.log.reserved[k]))),
      options(t("batching.used"), { top: 1, format: ".0%" }),
    ),
  ];
  const captions = runs.map(() => el("p", { class: "caption" }));
  const element = el(
    "section", { class: "view" },
    el(
      "div", { class: "main" },
      el("h2", {}, t("batching.title")), el("p", { class: "lead" }, t("batching.lead")),
      choice("short", t("batching.short"), [["paged", t("batching.recompute")], ["paged_swap", t("batching.swap")]],
        whenShort, (value) => { whenShort = value; app.redraw(); }),
      el("ul", { class: "legend" }, SHOWN.map((name) =>
        el("li", {}, el("i", { class: `key activity ${name}` }), t(`activity.${name}`)))),
      el("div", { class: "side-by-side even" }, runs.map((run, i) => el("div", { style: "--rows: 5" },
        el("h3", {}, t(`batching.${i ? "static" : "continuous"}`)),
        el("p", { class: "about" }, t(`batching.about.${i ? "static" : "continuous"}`, { budget: run.tokenBudget })), captions[i],
        gantts[i].element, requestTable(app, run)))),
      el("div", { class: "side-by-side even" }, charts.map((chart, i) => el("div", { style: "--rows: 3" },
        el("h3", {}, t(`batching.${i ? "used" : "size"}`)),
        el("p", { class: "about" }, t(`batching.${i ? "usedLead" : "sizeLead"}`)), chart.element))),
    ),
    questions(t("questions"), app.text.batching.questions),
  );

  function describe(run, k) {
    if (k >= run.iterations) return t("over", { iterations: run.iterations });
    const at = frameIn(run, k);
    const doing = Object.fromEntries(ACTIVITY.map((name) => [name, 0]));
    run.sequences.forEach((_, s) => { doing[ACTIVITY[run.activityAt(s, at)]] += 1; });
    doing.running = doing.prefill + doing.decode;
    const parts = ["running", "waiting", "preempted", "swapped", "held"].filter((name) => doing[name])
      .map((name) => t(`batching.doing.${name}`, { n: doing[name] }));
    return t("batching.state", {
      iteration: at + 1, parts: parts.join(app.language === "zh" ? "，" : ", "),
    });
  }

  return {
    element, frames,
    show(k) {
      runs.forEach((run, i) => {
        captions[i].textContent = describe(run, k);
        gantts[i].show(k);
      });
      for (const chart of charts) chart.show(k);
    },
    summary: (k) => joined(app, runs.map((run, i) => t(`batching.spoken.${i ? "static" : "continuous"}`, {
      state: joined(app, [describe(run, k), events(app, run, k)]),
    }))),
    destroy() {
      for (const part of [...gantts, ...charts]) part.destroy();
    },
  };
}

/** The Gantt chart in numbers, for those who want them or cannot see it. */
function requestTable(app, run) {
  const { t } = app;
  const WAITING = ACTIVITY.indexOf("waiting");
  const sum = (stretches) => stretches.reduce((all, { start, end }) => all + end - start, 0);
  const times = (s) => {
    const doing = (...names) => run.stretches(s).filter((d) => names.includes(ACTIVITY[d.activity]));
    const comes = run.stretches(s).find((d) => d.activity >= WAITING);
    const ran = doing("prefill", "decode");
    const gone = doing("preempted", "swapped");
    const waited = sum([...doing("waiting"), ...gone]);
    return [comes.start + 1, ran[0].start + 1, ran.at(-1).end, waited, gone.length];
  };
  const table = () => el("table", { class: "requests" },
    el("thead", {}, el("tr", {}, app.text.batching.columns.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, run.sequences.map((_, s) => el("tr", {},
      el("th", { scope: "row" }, run.labels[s]), times(s).map((value) => el("td", {}, String(value)))))));
  const details = el("details", { class: "as-table" }, el("summary", {}, t("batching.table")));
  details.addEventListener("toggle", () => details.append(table()), { once: true });
  return details;
}

/** One line a sequence; what has not happened yet is veiled. */
class Gantt {
  constructor(app, run, frames, label) {
    Object.assign(this, { app, run, frames });
    this.element = el("div", { class: "chart gantt" });
    this.svg = select(this.element).append("svg").attr("role", "img").attr("aria-label", label);
    this._k = 0;
    this._stop = watchSize(this.element, (width) => this._draw(width));
  }

  destroy() { this._stop(); }

  _draw(width) {
    const { run, svg, app } = this;
    const rem = remPixels();
    const count = run.sequences.length;
    const line = Math.max(2, Math.min(0.95 * rem, (26 * rem) / count));
    const margin = { top: 0.3 * rem, right: 0.8 * rem, bottom: 1.8 * rem, left: 3.2 * rem };
    const height = margin.top + line * count + margin.bottom;
    this.x = scaleLinear([0, this.frames], [margin.left, width - margin.right]);
    const y = scaleBand([...run.sequences.keys()], [margin.top, height - margin.bottom])
      .paddingInner(line > 6 ? 0.25 : 0);
    svg.attr("width", width).attr("height", height).selectAll("*").remove();
    svg.append("defs").html(patterns(rem / 16));
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - margin.bottom})`)
      .call(axisBottom(this.x).ticks(Math.max(3, Math.min(10, width / (6 * rem)))).tickSizeOuter(0));
    const stretches = run.sequences.flatMap((_, s) => run.stretches(s))
      .filter((d) => SHOWN.includes(ACTIVITY[d.activity]));
    svg.append("g").selectAll("rect").data(stretches).join("rect")
      .attr("class", (d) => `activity ${ACTIVITY[d.activity]}`)
      .attr("x", (d) => this.x(d.start)).attr("width", (d) => this.x(d.end) - this.x(d.start))
      .attr("y", (d) => y(d.sequence) + (d.activity === 1 ? y.bandwidth() * 0.35 : 0))
      .attr("height", (d) => y.bandwidth() * (d.activity === 1 ? 0.3 : 1))
      .append("title").text((d) => app.t("batching.stretch", {
        name: run.labels[d.sequence], activity: app.t(`activity.${ACTIVITY[d.activity]}`),
        start: d.start + 1, end: d.end,
      }));
    if (line > 0.5 * rem) {
      svg.append("g").attr("class", "names").selectAll("text").data(run.sequences).join("text")
        .attr("x", margin.left - 0.4 * rem).attr("y", (_, s) => y(s) + y.bandwidth() / 2)
        .attr("dy", "0.35em").attr("text-anchor", "end").attr("font-size", 0.8 * line)
        .text((_, s) => run.labels[s]);
    }
    this.veil = svg.append("rect").attr("class", "veil").attr("y", 0).attr("height", height - margin.bottom);
    this.mark = svg.append("line").attr("class", "cursor").attr("y1", 0).attr("y2", height - margin.bottom);
    const seek = (event) => {
      if (event.buttons !== 1) return;
      const box = svg.node().getBoundingClientRect();
      app.seek(Math.floor(this.x.invert(event.clientX - box.left)));
    };
    svg.style("cursor", "col-resize").on("pointerdown pointermove", seek);
    this.show(this._k);
  }

  show(k) {
    this._k = k;
    if (!this.x) return;
    const [, right] = this.x.range();
    const x = this.x(k + 1);
    this.veil.attr("x", x).attr("width", Math.max(0, right - x));
    this.mark.attr("x1", x).attr("x2", x);
  }
}

// Fills that can be told apart without their colours.
const stripes = (id, colour, turn, back, scale) => `
  <pattern id="${id}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(${turn}) scale(${scale})">
    <rect width="6" height="6" fill="${back}"/><rect width="2" height="6" fill="${colour}"/>
  </pattern>`;
const patterns = (scale) => stripes("fill-preempted", "#ffffff", 45, "#d55e00", scale)
  + stripes("fill-held", "var(--hatch)", -45, "transparent", scale)
  + `<pattern id="fill-swapped" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="scale(${scale})">
      <rect width="6" height="6" fill="#cc79a7"/><circle cx="3" cy="3" r="1.4" fill="#ffffff"/></pattern>`;
