// The page: tabs, the timeline that all views share, language and theme.

import { batchingView } from "./batching_view.js";
import { el, filled, leave } from "./dom.js";
import { memoryView } from "./memory_view.js";
import { Recording } from "./recording.js";
import { sharingView } from "./sharing_view.js";
import en from "./text_en.js";
import zh from "./text_zh.js";
import { togetherView } from "./together_view.js";

const VIEWS = { memory: memoryView, sharing: sharingView, batching: batchingView, together: togetherView };
const NAMES = Object.keys(VIEWS);
const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 500]; // iterations a second
const TEXTS = { en, zh };

const data = JSON.parse(document.getElementById("data").textContent);
const recordings = new Map();
// Iterations: of the workload, which three views show, and of the scenes of sharing.
const at = { workload: 0, sharing: 0 };
let view = NAMES.includes(location.hash.slice(1)) ? location.hash.slice(1) : "memory";
let language = stored("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");
// Iterations a second, of each view: to look at one, or to see a run go by.
const speeds = { memory: 5, sharing: 1, batching: 10, together: 20 };
let playing = false;
let current = null; // the view that is shown
let ticks = 0; // frames drawn while playing

const app = {
  data,
  get text() { return TEXTS[language]; },
  get language() { return language; },
  recording(name) {
    if (!recordings.has(name)) {
      recordings.set(name, new Recording(data.runs[name] ?? data.sharing[name]));
    }
    return recordings.get(name);
  },
  /** A text in the chosen language, with `{name}` replaced. */
  t(key, values = {}) {
    const text = key.split(".").reduce((part, name) => part?.[name], TEXTS[language]);
    if (typeof text !== "string") throw new Error(`no text ${key}`);
    return filled(text, values);
  },
  seek(k) { pause(); go(k); },
  /** Draws the view anew, after a choice that changes how long it is. */
  redraw() {
    const group = document.activeElement?.closest("[role=radiogroup]")?.id;
    mount();
    // The choice is a new element, and keeps the focus.
    if (group) document.getElementById(group)?.querySelector("[aria-checked=true]")?.focus();
  },
};

const t = app.t.bind(app);

// ------------------------------------------------------------------ the frame of the page

const header = document.getElementById("top");
const main = document.getElementById("main");
const bar = document.getElementById("timeline");
const controls = {};

function build() {
  document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
  document.title = t("title");
  const tabs = el(
    "div", { class: "tabs", role: "tablist", "aria-label": t("views") },
    NAMES.map((name, i) => el("button", {
      type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "main",
      on: { click: (event) => { leave(event); choose(name); }, keydown: (event) => moveTab(event, i) },
    }, el("span", { class: "number", "aria-hidden": "true" }, String(i + 1)), t(`${name}.tab`))),
  );
  header.replaceChildren(
    el("div", { class: "bar" },
      el("p", { class: "brand" }, "paged-jax"),
      el("div", { class: "switches" },
        el("button", {
          type: "button", id: "language", lang: language === "zh" ? "en" : "zh-Hans",
          on: { click: switchLanguage },
        }, language === "zh" ? "English" : "中文"),
        el("button", { type: "button", id: "theme", on: { click: switchTheme } }, t("theme")))),
    el("div", { class: "intro" },
      el("h1", {}, t("heading")),
      app.text.intro.map((paragraph) => el("p", {}, paragraph))),
    el("nav", { class: "views" }, tabs),
  );
  controls.play = button("play", toggle);
  controls.position = el("output", { id: "position", for: "scrub", "aria-live": "off" });
  controls.scrub = el("input", {
    type: "range", id: "scrub", min: 0, step: 1, "aria-label": t("iteration"),
    on: { input: () => app.seek(Number(controls.scrub.value)) },
  });
  controls.speed = el(
    "select", { id: "speed", "aria-label": t("speed"), on: { change: () => { speeds[view] = Number(controls.speed.value); } } },
    SPEEDS.map((s) => el("option", { value: s, selected: s === speeds[view] }, t("perSecond", { speed: s }))),
  );
  bar.setAttribute("aria-label", t("timeline"));
  controls.live = el("p", { id: "live", class: "hidden", "aria-live": "polite" });
  bar.replaceChildren(
    el("div", { class: "buttons" },
      button("first", () => app.seek(0)), button("back", () => step(-1)), controls.play,
      button("step", () => step(1)), button("last", () => app.seek(current.frames - 1))),
    controls.scrub, controls.position, controls.speed, controls.live,
  );
  document.getElementById("about").replaceChildren(...about());
  mount();
}

function button(name, action) {
  return el("button", {
    type: "button", id: name, title: t(`controls.${name}`), "aria-label": t(`controls.${name}`),
    on: { click: action },
  }, el("span", { class: `icon ${name}`, "aria-hidden": "true" }));
}

function about() {
  const { model, seed, command, environment } = data.about;
  return [
    el("h2", {}, t("used.title")), el("p", {}, t("used.lead")),
    el("dl", { class: "used" }, app.text.used.places.map(([place, why]) =>
      el("div", {}, el("dt", {}, place), el("dd", {}, why)))),
    el("h2", {}, t("made.title")),
    el("p", {}, t("made.text", {
      model, seed, cpu: environment.cpu, cores: environment.cores,
      started: environment.started, jax: environment.packages.jax,
      longest: data.about.longest_output,
    })),
    el("p", {}, el("code", {}, command)),
    el("p", {}, t("made.same", same())),
    el("p", {}, t("keys")),
    el("p", {}, el("a", { href: "https://arxiv.org/abs/2309.06180" }, t("paper"))),
  ];
}

function same() {
  const timed = Object.values(data.timed);
  return { same: Math.min(...timed.map((x) => x.same)), all: data.runs.paged.requests.length };
}

// ------------------------------------------------------------------ views and timeline

function mount() {
  current?.destroy();
  current = VIEWS[view](app);
  main.replaceChildren(current.element);
  main.setAttribute("aria-labelledby", `tab-${view}`);
  for (const name of NAMES) {
    const tab = document.getElementById(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
    // Where not all of them fit.
    if (name === view) tab.parentElement.scrollLeft = tab.offsetLeft - tab.parentElement.offsetLeft - 40;
  }
  controls.scrub.max = current.frames - 1;
  controls.speed.value = speeds[view];
  draw();
}

function choose(name) {
  if (name === view) return;
  pause();
  view = name;
  history.replaceState(null, "", `#${name}`);
  mount();
}

function moveTab(event, i) {
  const next = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: NAMES.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  const name = NAMES[(next + NAMES.length) % NAMES.length];
  choose(name);
  document.getElementById(`tab-${name}`).focus();
}

function timeline() {
  return view === "sharing" ? "sharing" : "workload";
}

/** Where the view stands: at its end, if the timeline is past it. */
function position() {
  return Math.min(at[timeline()], current.frames - 1);
}

function go(k) {
  at[timeline()] = Math.max(0, Math.min(current.frames - 1, k));
  draw();
}

function draw() {
  const last = current.frames - 1;
  const frame = Math.floor(position());
  current.show(frame);
  controls.scrub.value = frame;
  controls.position.textContent = t("position", { at: frame + 1, all: last + 1 });
  controls.scrub.setAttribute("aria-valuetext", controls.position.textContent);
  // Spoken when somebody steps, and not while it plays.
  if (!playing) controls.live.textContent = current.summary(frame);
}

function step(by) {
  pause();
  go(Math.floor(position()) + by);
}

function toggle() {
  if (playing) { pause(); draw(); return; }
  if (position() >= current.frames - 1) go(0);
  playing = true;
  setPlay();
  let before = performance.now();
  requestAnimationFrame(function frame(now) {
    if (!playing) return;
    const k = position() + (speeds[view] * Math.max(0, now - before)) / 1000;
    before = now;
    ticks++;
    if (k >= current.frames - 1) { playing = false; setPlay(); }
    if (Math.floor(k) !== Math.floor(position()) || !playing) go(k);
    else at[timeline()] = k;
    if (playing) requestAnimationFrame(frame);
  });
}

function pause() {
  playing = false;
  setPlay();
}

function setPlay() {
  const name = playing ? "pause" : "play";
  const label = t(`controls.${name}`);
  controls.play.setAttribute("aria-label", label);
  controls.play.title = label;
  controls.play.firstChild.className = `icon ${name}`;
}

// ------------------------------------------------------------------ keys, language, theme

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target.closest("input, select, button, summary, a");
  // Keys that a control has a use of its own for are the control's.
  if (target && (event.key === " " || event.key === "Enter")) return;
  if (target?.matches("input, select") && /^(Arrow|Home|End|Page|[0-9])/.test(event.key)) return;
  const scroller = event.target.closest(".scroller");
  if (scroller?.scrollWidth > scroller?.clientWidth && /^Arrow(Left|Right)/.test(event.key)) return;
  const far = event.shiftKey ? 10 : 1;
  const action = {
    " ": toggle, ArrowRight: () => step(far), ArrowLeft: () => step(-far),
    Home: () => app.seek(0), End: () => app.seek(current.frames - 1),
    "+": () => faster(1), "=": () => faster(1), "-": () => faster(-1), l: switchLanguage,
    1: () => choose(NAMES[0]), 2: () => choose(NAMES[1]), 3: () => choose(NAMES[2]), 4: () => choose(NAMES[3]),
  }[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

function faster(by) {
  const next = SPEEDS.indexOf(speeds[view]) + by;
  speeds[view] = SPEEDS[Math.max(0, Math.min(SPEEDS.length - 1, next))];
  controls.speed.value = speeds[view];
}

function switchLanguage() {
  language = language === "zh" ? "en" : "zh";
  store("language", language);
  const focused = document.activeElement?.id;
  pause();
  build();
  if (focused) document.getElementById(focused)?.focus();
}

function switchTheme() {
  const dark = isDark();
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  store("theme", dark ? "light" : "dark");
  mount();
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// A page that was opened from disk may have no storage.
function stored(name) {
  try { return localStorage.getItem(`paged-jax-${name}`); } catch { return null; }
}

function store(name, value) {
  try { localStorage.setItem(`paged-jax-${name}`, value); } catch { /* only not kept */ }
}

const theme = stored("theme");
if (theme) document.documentElement.dataset.theme = theme;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => mount());
build();

/** For tests: what is drawn, and where the page stands. */
window.pagedJax = {
  stateAt: (k, run = "paged") => app.recording(run).stateAt(k),
  frames: (run) => app.recording(run).frames,
  show: (k) => app.seek(k),
  get view() { return view; },
  get at() { return Math.floor(position()); },
  get playing() { return playing; },
  get ticks() { return ticks; },
};
