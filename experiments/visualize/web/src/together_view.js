// View 4: what each technique brings, and what-if runs of the simulator.

import { format } from "d3-format";
import { cumsum, mean } from "d3-array";
import { scaleLinear } from "d3-scale";
import { LineChart } from "./charts.js";
import { el, questions } from "./dom.js";
import { systemStyle } from "./systems.js";
import { frameIn, percent } from "./words.js";
import { whatIf } from "./what_if.js";

// From the first to the last, one thing is added at a time.
const LADDER = ["max_static", "max", "oracle", "paged_static", "paged"];
const one = format(".1f");
const two = format(".2f");

export function togetherView(app) {
  const { t, data } = app;
  const runs = LADDER.map((name) => app.recording(name));
  const frames = Math.max(...runs.map((run) => run.frames));
  const speeds = LADDER.map((name) => data.timed[name].outputTokens / data.timed[name].seconds);
  const width = scaleLinear([0, Math.max(...speeds)], [0, 6]); // rem
  const rows = LADDER.map((name, i) => {
    const { log, iterations } = runs[i];
    const use = mean(runs[i].logged("live"), (live, k) => live / Math.max(1, log.reserved[k]));
    const now = el("td", { class: "now" });
    return {
      now,
      element: el("tr", { class: name === "paged" ? "strong" : null },
        el("th", { scope: "row" }, el("i", { class: "dot", style: `background: ${systemStyle(name).colour}` }),
          t(`systems.${name}`)),
        el("td", {}, percent(use)), el("td", {}, one(mean(runs[i].logged("running")))), el("td", {}, String(iterations)),
        el("td", { class: "speed" },
          el("i", { style: `width: ${width(speeds[i])}rem; background: ${systemStyle(name).colour}` }),
          el("b", {}, one(speeds[i]))),
        el("td", {}, `${two(speeds[i] / speeds[0])}×`), now),
    };
  });
  const table = el("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": t("together.table") },
    el("table", { class: "ablation" },
      el("thead", {}, el("tr", {}, app.text.together.columns.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((row) => row.element))));
  const saving = Object.fromEntries(
    ["parallel", "beam"].map((name) => [name, percent(app.recording(name).blockSaving())]),
  );
  const tokens = runs.map((run) => Array.from(cumsum(run.log.sampled)));
  const race = new LineChart(
    LADDER.map((name, i) => ({
      label: t(`systems.${name}`), values: tokens[i], ...systemStyle(name), strong: name === "paged",
    })),
    { label: t("together.race"), x: t("iteration"), height: 14, right: frames, onSeek: (k) => app.seek(k) },
  );
  const simulated = whatIf(app);
  const caption = el("p", { class: "caption" });
  const element = el(
    "section", { class: "view" },
    el(
      "div", { class: "main" },
      el("h2", {}, t("together.title")), el("p", { class: "lead" }, t("together.lead")),
      table, el("p", { class: "saving" }, t("together.saving", saving)),
      el("p", { class: "fine" }, t("together.timed")),
      el("h3", {}, t("together.race")), el("p", {}, t("together.raceLead")), caption, race.element,
      simulated.element,
    ),
    questions(t("questions"), app.text.together.questions),
  );

  function describe(k) {
    return t("together.state", {
      iteration: Math.min(k + 1, Math.max(...runs.map((run) => run.iterations))),
      list: LADDER.map((name, i) => `${t(`systems.${name}`)} ${tokens[i][frameIn(runs[i], k)]}`).join(
        app.language === "zh" ? "；" : "; "),
    });
  }

  return {
    element, frames, summary: describe,
    show(k) {
      race.show(k);
      caption.textContent = describe(k);
      rows.forEach((row, i) => { row.now.textContent = String(tokens[i][frameIn(runs[i], k)]); });
    },
    destroy() {
      race.destroy();
      simulated.destroy();
    },
  };
}
