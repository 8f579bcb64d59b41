// View 1: the pool of blocks, one sequence's block table, and three other systems.

import { format } from "d3-format";
import { select } from "d3-selection";
import { linkVertical } from "d3-shape";
import { LineChart } from "./charts.js";
import { el, questions } from "./dom.js";
import { cssPaint, paintOf } from "./palette.js";
import { Pool } from "./pool.js";
import { ACTIVITY } from "./recording.js";
import { systemStyle } from "./systems.js";
import { activeSequences, frameIn, percents, summary } from "./words.js";

const OTHERS = ["max", "pow2", "oracle"];
const whole = format(",");

export function memoryView(app) {
  const { t } = app;
  const run = app.recording("paged");
  const frames = Math.max(...["paged", ...OTHERS].map((name) => app.recording(name).frames));
  let pinned = -1; // a sequence chosen for good
  let pointed = -1; // one under the pointer or the focus
  let moving = false; // while chips are put in order, which may take the focus away
  let shown = 0;

  const pool = new Pool(run, {
    label: t("memory.pool"),
    onPoint: (block) => point(block == null ? -1 : ownerOf(block)),
    onPick: (block) => pick(block == null ? -1 : ownerOf(block)),
  });
  const bytes = app.data.bytesPerToken;
  const sizes = {
    size: run.blockSize, token: whole(bytes), block: whole(bytes * run.blockSize),
  };
  const caption = el("p", { class: "caption" });
  const table = el("div", { class: "block-table", role: "list" });
  const tableTitle = el("p", { class: "table-title" });
  const arrows = select(document.createElementNS("http://www.w3.org/2000/svg", "svg"))
    .attr("class", "arrows").attr("aria-hidden", "true");
  const stage = el("div", { class: "stage" }, tableTitle, table, pool.element, arrows.node());
  const numbers = el("p", { class: "numbers" });
  const words = el("div", { class: "words" });
  const chips = el("div", { class: "chips", role: "group", tabindex: -1, "aria-label": t("memory.sequences") });
  pool.onSize = () => drawArrows();

  const others = OTHERS.map((name) => {
    const recording = app.recording(name);
    const small = new Pool(recording, { label: t(`systems.${name}`) });
    const numbers = el("p", { class: "numbers" });
    const element = el(
      "figure", { class: "other" },
      el("figcaption", {}, el("b", {}, t(`systems.${name}`)), el("span", {}, t(`memory.why.${name}`, { most: recording.maxModelLen }))),
      small.element, numbers,
    );
    return { name, recording, small, numbers, element };
  });

  const used = (name) => {
    const recording = app.recording(name);
    const slots = recording.numBlocks * recording.blockSize;
    return recording.log.live.map((live) => live / slots);
  };
  const chart = new LineChart(
    ["paged", ...OTHERS].map((name) => ({
      label: t(`systems.${name}`), values: used(name), ...systemStyle(name),
      strong: name === "paged",
    })),
    {
      label: t("memory.chart"), x: t("iteration"), top: 1, format: ".0%", right: frames,
      onSeek: (k) => app.seek(k),
    },
  );

  const element = el(
    "section", { class: "view" },
    el(
      "div", { class: "main" },
      el("h2", {}, t("memory.title")), el("p", { class: "lead" }, t("memory.lead", sizes)),
      el("div", { class: "side-by-side" },
        el("div", {}, caption, el("p", { class: "fine" }, t("memory.budget", { budget: run.tokenBudget })), stage, numbers, legend(app), chips, words),
        el("div", {},
          el("h3", {}, t("memory.others")), el("p", {}, t("memory.othersLead")),
          el("div", { class: "others" }, others.map((o) => o.element)))),
      el("h3", {}, t("memory.chart")), el("p", {}, t("memory.chartLead")), chart.element,
    ),
    questions(t("questions"), app.text.memory.questions, { size: run.blockSize }),
  );

  function ownerOf(block) {
    return run.blocksAt(shown)[block - 1].owners[0] ?? -1;
  }

  function point(sequence) {
    if (moving || sequence === pointed) return;
    pointed = sequence;
    show(shown);
  }

  function pick(sequence) {
    pinned = sequence === pinned ? -1 : sequence;
    show(shown);
  }

  function hasBlocks(sequence) {
    return sequence >= 0 && run.at(shown).owner.includes(sequence);
  }

  /** Whether a sequence is in the queue, and has no blocks. */
  function waits(sequence) {
    return sequence >= 0 && ["waiting", "preempted"].includes(ACTIVITY[run.activityAt(sequence, shown)]);
  }

  function selected() {
    return [pointed, pinned].find((s) => hasBlocks(s) || waits(s)) ?? -1;
  }

  /** The sequence whose table is shown: the selected one, or the longest. */
  function explained() {
    const chosen = selected();
    if (chosen >= 0) return chosen;
    const state = run.at(shown);
    let best = -1;
    for (let row = 0; row < state.owner.length; row++) {
      if (state.owner[row] < 0 || state.onHost[row]) continue;
      if (best < 0 || state.length[row] > state.length[best]) best = row;
    }
    return best < 0 ? -1 : state.owner[best];
  }

  function show(k) {
    shown = frameIn(run, k);
    caption.textContent = summary(app, run, k);
    const chosen = selected();
    pool.draw(shown, hasBlocks(chosen) ? chosen : -1);
    drawTable();
    drawChips();
    numbers.textContent = wasted(app, run, shown);
    for (const { recording, small, numbers } of others) {
      const at = frameIn(recording, k);
      small.draw(at);
      numbers.textContent = wasted(app, recording, at);
    }
    chart.show(k);
  }

  function drawTable() {
    const sequence = explained();
    const state = run.at(shown);
    const row = sequence < 0 ? -1 : state.owner.indexOf(sequence);
    const blocks = row < 0 ? [] : state.tables[row];
    const onHost = row >= 0 && state.onHost[row] === 1;
    tableTitle.textContent = title(sequence, row) + (onHost ? t("memory.onHost") : "");
    const size = run.blockSize;
    select(table).selectAll("span").data(blocks).join(
      (enter) => enter.append("span").attr("role", "listitem").call((s) => { s.append("i"); s.append("b"); }),
    ).call((cells) => {
      cells.style("--fill", (_, i) => Math.max(0, Math.min(1, (state.length[row] - i * size) / size)))
        .style("--paint", () => (sequence < 0 ? null : cssPaint(paintOf(run.sequences[sequence][0]))))
        .attr("title", (block, i) => t("memory.entry", { logical: i, physical: block }))
        .attr("aria-label", (block, i) => t("memory.entry", { logical: i, physical: block }));
      cells.select("i").text((_, i) => i);
      cells.select("b").text((block) => block);
    });
    const { prompt, output } = sequence < 0 ? { prompt: [], output: [] } : run.textAt(sequence, shown);
    const request = sequence < 0 ? null : run.requests[run.sequences[sequence][0]];
    words.replaceChildren(
      request == null ? "" : el("div", {},
        el("q", { class: "asked" }, request.prompt),
        el("span", { class: "answer" }, output.join("") || "…")),
    );
    words.hidden = !prompt.length && !request;
    drawArrows(onHost ? [] : blocks, sequence);
  }

  function title(sequence, row) {
    if (sequence < 0) return t("memory.nobody");
    const name = run.labels[sequence];
    if (row >= 0) return t("memory.table", { name, tokens: run.at(shown).length[row] });
    const activity = ACTIVITY[run.activityAt(sequence, shown)];
    return t("memory.noBlocks", { name, activity: t(`activity.${activity}`) });
  }

  let arrowArguments = [[], -1];
  function drawArrows(blocks = arrowArguments[0], sequence = arrowArguments[1]) {
    arrowArguments = [blocks, sequence];
    if (!pool.x) return;
    const outer = stage.getBoundingClientRect();
    arrows.attr("width", outer.width).attr("height", outer.height);
    const inner = pool.element.getBoundingClientRect();
    const curve = linkVertical().source((d) => d.from).target((d) => d.to);
    const cells = [...table.children];
    const links = blocks.map((block, i) => {
      const cell = cells[i].getBoundingClientRect();
      const place = pool.place(block);
      return {
        from: [cell.left + cell.width / 2 - outer.left, cell.bottom - outer.top],
        to: [
          inner.left - outer.left + place.x + place.width / 2,
          inner.top - outer.top + place.y + 1,
        ],
      };
    });
    const colour = sequence < 0 ? null : paintOf(run.sequences[sequence][0]).colour;
    arrows.selectAll("path.halo").data(links).join("path").attr("class", "halo").attr("d", curve);
    arrows.selectAll("path.arrow").data(links).join("path").attr("class", "arrow")
      .attr("d", curve).attr("stroke", colour);
    arrows.selectAll("circle").data(links).join("circle").attr("r", 3)
      .attr("cx", (d) => d.to[0]).attr("cy", (d) => d.to[1]).attr("fill", colour);
  }

  function drawChips() {
    const now = activeSequences(run, shown);
    const focused = document.activeElement;
    const place = [...chips.children].indexOf(focused);
    moving = true;
    select(chips).selectAll("button").data(now, (d) => d.sequence).join((enter) =>
      enter.append("button").attr("type", "button").attr("class", "chip").call((button) => {
        button.append("i").style("background", (d) => cssPaint(paintOf(run.sequences[d.sequence][0])));
        button.append("b").text((d) => run.labels[d.sequence]);
        button.append("span");
      })
        .on("pointerenter focus", (_, d) => point(d.sequence))
        .on("pointerleave blur", () => point(-1))
        .on("click", (_, d) => pick(d.sequence)),
    ).attr("data-activity", (d) => d.name).attr("aria-pressed", (d) => String(d.sequence === pinned))
      .order().select("span").text((d) => t(`activity.${d.name}`));
    moving = false;
    if (place < 0 || document.activeElement === focused) return;
    // It moved, or left: then the one in its place has the focus.
    const next = focused.isConnected ? focused : chips.children[Math.min(place, now.length - 1)];
    if (!next) pointed = -1;
    (next ?? chips).focus({ preventScroll: true });
  }

  return {
    element, show, frames,
    summary: (k) => summary(app, run, k),
    destroy() {
      pool.destroy();
      chart.destroy();
      for (const { small } of others) small.destroy();
    },
  };
}

/** What a system has granted and not used, in words. */
function wasted(app, recording, k) {
  const slots = recording.slotsAt(k);
  const all = recording.numBlocks * recording.blockSize;
  const [live, ahead, never, free] = percents(
    [slots.live, slots.ahead, slots.never, slots.free].map((part) => part / all),
  );
  const done = recording.sequences.filter((_, s) => recording.activityAt(s, k) >= 6).length;
  return app.t("memory.numbers", {
    live, ahead, never, free,
    running: recording.log.running[k], done, all: recording.sequences.length,
  });
}

function legend(app) {
  const { t } = app;
  return el(
    "ul", { class: "legend" },
    ["live", "ahead", "never", "free"].map((part) =>
      el("li", {}, el("i", { class: `key ${part}` }), t(`memory.legend.${part}`))),
  );
}
