// Frames in words and numbers.

import { format } from "d3-format";
import { ACTIVITY } from "./recording.js";

export const percent = format(".0%");

/**
 * Parts of a whole in percent, which add up to 100. The first is rounded as it is
 * everywhere on the page, and the others make up for it: those with the largest rests.
 */
export function percents([first, ...others]) {
  const head = percent(first);
  const parts = others.map((share) => Math.floor(100 * share));
  const missing = 100 - parseInt(head, 10) - parts.reduce((sum, part) => sum + part, 0);
  const rest = (i) => 100 * others[i] - Math.floor(100 * others[i]);
  const largest = [...parts.keys()].sort((a, b) => rest(b) - rest(a));
  for (const i of largest.slice(0, Math.max(0, missing))) parts[i] += 1;
  return [head, ...parts.map((part) => `${part}%`)];
}

/** The frame of a recording at position k of the timeline: its last one at the end. */
export function frameIn(recording, k) {
  return Math.max(0, Math.min(k, recording.frames - 1));
}

const MOST_WAITING = 24;

/** Sequences to show as chips: those with a row first, then those that wait. */
export function activeSequences(recording, k) {
  const running = [];
  const waiting = [];
  for (let sequence = 0; sequence < recording.sequences.length; sequence++) {
    const activity = recording.activityAt(sequence, k);
    if (activity === 0 || activity === 7) continue;
    const entry = { sequence, name: ACTIVITY[activity] };
    (activity === 1 || activity === 4 ? waiting : running).push(entry);
  }
  return [...running, ...waiting.slice(0, MOST_WAITING)];
}

/** What a frame is, and what happened in it, as a sentence or two; k may be past the end. */
export function summary(app, recording, k) {
  return joined(app, [state(app, recording, k), events(app, recording, k)]);
}

/** Sentences, one after another. */
export function joined(app, sentences) {
  return sentences.filter(Boolean).join(app.language === "zh" ? "" : " ");
}

function state(app, recording, k) {
  const { t } = app;
  if (k >= recording.iterations) return t("over", { iterations: recording.iterations });
  const log = recording.log;
  const swapped = recording.sequences.filter((_, s) => recording.activityAt(s, k) === 5).length;
  const parts = [
    t("summary.state", {
      iteration: k + 1, running: log.running[k], waiting: log.waiting[k],
      used: recording.numBlocks - recording.free[k], blocks: recording.numBlocks,
      free: recording.free[k],
    }),
  ];
  if (swapped) parts.push(t("summary.swappedOut", { swapped }));
  return joined(app, parts);
}

/** What happened in a frame. */
export function events(app, recording, k) {
  if (k >= recording.frames) return "";
  const { t } = app;
  const parts = [];
  const found = recording.eventsAt(k);
  const names = (sequences) => sequences.slice(0, 8).map((s) => recording.labels[s]).join(", ")
    + (sequences.length > 8 ? " …" : "");
  for (const kind of ["admitted", "back", "preempted", "swapped", "ended", "left"]) {
    if (found[kind].length) parts.push(t(`summary.${kind}`, { names: names(found[kind]) }));
  }
  const copies = recording.copiesAt(k).length;
  if (copies) parts.push(t("summary.copies", { copies }));
  return joined(app, parts);
}
