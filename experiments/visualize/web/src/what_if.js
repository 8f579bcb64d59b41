// Sliders over runs of the simulator that were made before.

import { format } from "d3-format";
import { LineChart } from "./charts.js";
import { choice, el } from "./dom.js";
import { systemStyle } from "./systems.js";
import { percents } from "./words.js";

// Above it, in seconds a token, the paper's plots end: the queue only grows.
const TOP = 1;
const PARTS = ["live", "ahead", "never", "free"];
const chosen = { policy: "vllm", budget: null, blockSize: 16, rate: null };

export function whatIf(app) {
  const { t } = app;
  const { budgets, blockSizes, rates, policies, columns, points } = app.data.simulations;
  const as = (row) => Object.fromEntries(columns.map((name, i) => [name, row[i]]));
  const found = points.map(as);
  chosen.budget ??= budgets[Math.floor(budgets.length / 2)];
  chosen.rate ??= rates[Math.floor(rates.length / 2)];
  // Contiguous memory is reserved in blocks of 16 at any block size.
  const sizeOf = (policy) => (policy === "vllm" ? chosen.blockSize : 16);
  const at = (policy, rate) => found.find((p) => p.policy === policy && p.rate === rate
    && p.budget === chosen.budget && p.blockSize === sizeOf(policy));

  const plot = el("div");
  const result = el("p", { class: "caption", "aria-live": "polite" });
  const parts = el("div", { class: "parts", "aria-hidden": "true" });
  const legend = el("ul", { class: "legend" });
  let chart = null;

  function slider(key, values, text) {
    const output = el("output", { "aria-live": "off" }, text(chosen[key]));
    const input = el("input", {
      type: "range", min: 0, max: values.length - 1, step: 1, id: `what-if-${key}`,
      on: {
        input: () => {
          chosen[key] = values[Number(input.value)];
          output.textContent = text(chosen[key]);
          input.setAttribute("aria-valuetext", output.textContent);
          draw();
        },
      },
    });
    input.value = values.indexOf(chosen[key]);
    input.setAttribute("aria-valuetext", text(chosen[key]));
    return el("p", { class: "slider" }, el("label", { for: `what-if-${key}` }, t(`whatIf.${key}`)), input, output);
  }

  function draw() {
    chart?.destroy();
    chart = new LineChart(
      policies.map((policy) => ({
        label: t(`whatIf.policies.${policy}`), ...systemStyle(policy), strong: policy === chosen.policy,
        dots: true, points: rates.map((rate) => at(policy, rate)).filter(Boolean).map((p) => [p.rate, p.latency]),
      })),
      { label: t("whatIf.chart"), x: t("whatIf.rateAxis"), top: TOP, height: 14, left: rates[0], right: rates.at(-1), format: ".1f" },
    );
    plot.replaceChildren(chart.element);
    chart.show(chosen.rate);
    const point = at(chosen.policy, chosen.rate);
    parts.hidden = legend.hidden = !point;
    if (!point) {
      parts.replaceChildren();
      legend.replaceChildren();
      result.textContent = t("whatIf.hopeless");
      return;
    }
    const { live, ahead, internal } = point;
    const shares = [live, ahead, internal, Math.max(0, 1 - live - ahead - internal)];
    const said = percents(shares);
    result.textContent = t("whatIf.result", {
      latency: format(".3f")(point.latency), running: format(".1f")(point.running),
      live: said[0], when: t(`whatIf.when.${point.waits ? "waits" : "all"}`),
      served: format(".2f")(point.served), preemptions: point.preemptions,
    });
    // Paged memory has no gaps, and rounds nothing.
    const named = (name) => t(name === "free" && chosen.policy !== "vllm" ? "whatIf.rest" : `memory.legend.${name}`);
    parts.replaceChildren(...PARTS.map((name, i) =>
      el("i", { class: `key ${name}`, style: `width: ${100 * shares[i]}%`, title: `${named(name)} ${said[i]}` })));
    legend.replaceChildren(...PARTS.map((name, i) =>
      el("li", {}, el("i", { class: `key ${name}` }), named(name), el("b", {}, said[i]))));
  }

  const element = el(
    "div", { class: "what-if" },
    el("h3", {}, t("whatIf.title")), el("p", {}, t("whatIf.lead")),
    choice("policy", t("whatIf.policy"), policies.map((p) => [p, t(`whatIf.policies.${p}`)]), chosen.policy,
      (value) => { chosen.policy = value; draw(); }),
    el("div", { class: "sliders" },
      slider("rate", rates, (v) => t("whatIf.rateValue", { rate: v })),
      slider("budget", budgets, (v) => t("whatIf.budgetValue", { slots: format(",")(v) })),
      slider("blockSize", blockSizes, (v) => t("whatIf.blockValue", { size: v }))),
    result, parts, legend, el("p", { class: "axis-title" }, t("whatIf.chart")), plot,
    el("p", { class: "fine" }, t("whatIf.made")),
  );
  draw();
  return { element, destroy: () => chart.destroy() };
}
