// View 2: which sequences share which blocks, and what a write to a shared one does.

import { select } from "d3-selection";
import { linkHorizontal } from "d3-shape";
import { choice, el, questions, remPixels, watchSize } from "./dom.js";
import { cssPaint, paintOf } from "./palette.js";
import { layers, happenings } from "./sharing_events.js";
import { frameIn, percent } from "./words.js";

// In rem: of a block's card, and between cards.
const CARD = { width: 8.6, height: 5.3, right: 1.9, below: 0.8, top: 1.6, left: 2.4 };
let scene = "parallel";

export function sharingView(app) {
  const { t } = app;
  const run = app.recording(scene);
  const group = run.sequences.length;
  const caption = el("p", { class: "caption" });
  const threads = select(document.createElementNS("http://www.w3.org/2000/svg", "svg"))
    .attr("class", "threads").attr("aria-hidden", "true");
  const cards = el("div", { class: "cards" });
  const plane = el("div", { class: "plane" }, threads.node(), cards);
  const scroller = el(
    "div", { class: "scroller", tabindex: 0, role: "region", "aria-label": t("sharing.plane") }, plane,
  );
  const events = el("ol", { class: "events" });
  const bars = el("div", { class: "bars" });
  const texts = el("ul", { class: "texts" }, run.sequences.map(([, number], s) => el(
    "li", {}, el("b", { class: "letter", style: `--paint: ${cssPaint(paintOf(number))}` }, run.labels[s]),
    el("span", { class: "asked" }, run.requests[0].prompt), el("span", { class: "answer" }),
  )));
  const element = el(
    "section", { class: "view" },
    el(
      "div", { class: "main" },
      el("h2", {}, t("sharing.title")), el("p", { class: "lead" }, t("sharing.lead")),
      choice("scene", t("sharing.scene"), [["parallel", t("sharing.parallel")], ["beam", t("sharing.beam")]],
        scene, (value) => { scene = value; app.redraw(); }),
      el("p", {}, t(`sharing.about.${scene}`, { size: run.blockSize })),
      caption, scroller, el("div", { class: "beside" },
        el("div", {}, el("h3", {}, t("sharing.happens")), events),
        el("div", {}, el("h3", {}, t("sharing.saved")), bars)),
      el("h3", {}, t("sharing.texts")), el("p", { class: "fine" }, t("sharing.textsLead")), texts,
    ),
    questions(t("questions"), app.text.sharing.questions),
  );
  let shown = 0;
  let newest = -1;
  const stop = watchSize(scroller, () => draw(shown));

  function show(k) {
    shown = frameIn(run, k);
    caption.textContent = describe(shown);
    draw(shown);
    const happened = happenings(app, run, shown);
    events.replaceChildren(...(happened.length ? happened : [t("sharing.nothing")])
      .map((line) => el("li", {}, line)));
    drawBars(shown);
    const state = run.at(shown);
    [...texts.children].forEach((item, s) => {
      item.lastChild.textContent = state.text[s].map((i) => run.pieces[i]).join("");
      item.classList.toggle("over", run.activityAt(s, shown) >= 6);
    });
  }

  function describe(k) {
    const { logical, physical } = run.entriesAt(k);
    if (k >= run.iterations) {
      return t("sharing.over", { iterations: run.iterations, free: run.free[k], blocks: run.numBlocks });
    }
    return t("sharing.state", {
      iteration: k + 1, logical, physical, free: run.free[k], blocks: run.numBlocks,
    });
  }

  /** Where a card stands, in rem. */
  function place({ column, lane }) {
    return {
      x: CARD.left + column * (CARD.width + CARD.right),
      y: CARD.top + lane * (CARD.height + CARD.below),
    };
  }

  function draw(k) {
    const rem = remPixels();
    const now = layers(run, k);
    const before = k ? layers(run, k - 1) : [];
    const taken = new Set(now.map((card) => `${card.column} ${card.lane}`));
    const here = new Set(now.map((card) => card.block));
    const gone = before.filter((c) => !here.has(c.block) && !taken.has(`${c.column} ${c.lane}`))
      .map((card) => ({ ...card, gone: true, owners: [], ref: 0 }));
    const widest = Math.ceil(run.maxTokens / run.blockSize);
    plane.style.width = `${CARD.left + widest * (CARD.width + CARD.right)}rem`;
    plane.style.height = `${CARD.top + group * (CARD.height + CARD.below)}rem`;
    select(cards).selectAll("div.card").data([...now, ...gone], (card) => card.block).join((enter) =>
      enter.append("div").attr("class", "card").call((card) => {
        card.append("p").attr("class", "head").call((head) => {
          head.append("span").attr("class", "name");
          head.append("span").attr("class", "owners hidden");
          head.append("span").attr("class", "ref");
        });
        card.append("p").attr("class", "tokens");
        card.append("div").attr("class", "slots");
      }),
    ).each(function (card) {
      const { x, y } = place(card);
      const copied = run.copiesAt(k).some((copy) => copy.target === card.block);
      this.className = ["card", card.gone && "gone", card.ref > 1 && "shared", copied && "copied"]
        .filter(Boolean).join(" ");
      this.dataset.block = card.block;
      this.dataset.ref = card.ref;
      this.style.left = `${x}rem`;
      this.style.top = `${y}rem`;
      this.style.setProperty("--paint", cssPaint(paintOf(card.lane)));
      this.style.setProperty("--colour", paintOf(card.lane).colour);
      const node = select(this);
      node.select(".name").text(t("sharing.block", { block: card.block }));
      // The threads say it to the eye.
      node.select(".owners").text(card.gone ? "" : t("sharing.owners", {
        names: card.owners.slice().sort((a, b) => a - b).map((s) => run.labels[s]).join(", "),
      }));
      node.select(".ref").text(card.gone ? t("sharing.freed") : `×${card.ref}`)
        .attr("title", t("sharing.references", { ref: card.ref }));
      node.select(".tokens").selectAll("span").data(card.texts).join("span").text((text) => text);
      node.select(".slots").style("--fill", card.live / run.blockSize);
    });
    drawThreads(now, k, rem);
    follow(now, rem);
  }

  /** Where the plane is wider than the screen, keeps its newest column in sight. */
  function follow(now, rem) {
    const column = Math.max(0, ...now.map((card) => card.column));
    if (column === newest) return;
    newest = column;
    const right = (place({ column, lane: 0 }).x + CARD.width + 1) * rem;
    scroller.scrollLeft = Math.max(0, right - scroller.clientWidth);
  }

  function drawThreads(now, k, rem) {
    threads.attr("width", plane.clientWidth).attr("height", plane.clientHeight);
    const at = new Map(now.map((card) => [card.block, card]));
    const curve = linkHorizontal().source((d) => d.from).target((d) => d.to);
    const shift = (s) => (1.35 + s * 0.85) * rem;
    const links = [];
    const state = run.at(k);
    for (let row = 0; row < state.owner.length; row++) {
      const sequence = state.owner[row];
      if (sequence < 0 || state.onHost[row]) continue;
      const tableCards = state.tables[row].map((block) => at.get(block));
      tableCards.forEach((card, i) => {
        const { x, y } = place(card);
        const previous = i ? place(tableCards[i - 1]) : null;
        links.push({
          sequence,
          from: previous
            ? [(previous.x + CARD.width) * rem, previous.y * rem + shift(sequence)]
            : [1.3 * rem, y * rem + shift(sequence)],
          to: [x * rem, y * rem + shift(sequence)],
        });
      });
    }
    threads.selectAll("path.thread").data(links).join("path").attr("class", "thread")
      .attr("d", curve).attr("stroke", (d) => paintOf(d.sequence).colour);
    const first = links.filter((d) => d.from[0] === 1.3 * rem);
    threads.selectAll("text.name").data(first).join("text").attr("class", "name")
      .attr("x", 0.25 * rem).attr("y", (d) => d.from[1] + 0.3 * rem)
      .text((d) => run.labels[d.sequence]);
    const copies = run.copiesAt(k).map(({ source, target }) => [at.get(source), at.get(target)])
      .filter(([a, b]) => a && b).map(([a, b]) => {
        const [from, to] = [place(a), place(b)];
        const x = (from.x + CARD.width * 0.72) * rem;
        const down = to.y > from.y;
        return `M${x},${(from.y + (down ? CARD.height : 0)) * rem}`
          + ` L${x},${(to.y + (down ? -0.2 : CARD.height + 0.2)) * rem}`;
      });
    threads.selectAll("path.copy").data(copies).join("path").attr("class", "copy")
      .attr("d", (d) => d).attr("marker-end", "url(#copy-head)");
    if (threads.select("marker").empty()) {
      threads.append("marker").attr("id", "copy-head").attr("viewBox", "0 0 8 8").attr("refX", 6)
        .attr("refY", 4).attr("markerWidth", 5).attr("markerHeight", 5).attr("orient", "auto")
        .append("path").attr("d", "M0,0 L8,4 L0,8 z").attr("class", "copy-head");
    }
  }

  function drawBars(k) {
    const { logical, physical } = run.entriesAt(k);
    bars.replaceChildren(
      bar(t("sharing.apart"), logical, logical, "apart"),
      bar(t("sharing.shared"), physical, logical, "together"),
      el("p", { class: "numbers" }, logical ? t("sharing.saving", { saved: percent(1 - physical / logical) }) : t("sharing.none")),
    );
  }

  function bar(name, value, most, kind) {
    return el("p", { class: "share" }, el("span", {}, name),
      el("i", { class: kind, style: `width: ${most ? (60 * value) / most : 0}%` }), el("b", {}, String(value)));
  }

  return {
    element, show, frames: run.frames,
    summary: (k) => [describe(k), ...happenings(app, run, k)].join(" "),
    destroy: stop,
  };
}
