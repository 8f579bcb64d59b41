// What blocks hold and what happens to them, found by comparing two iterations.

/** Blocks that somebody names, with their column, lane (the first owner) and tokens. */
export function layers(run, k) {
  const size = run.blockSize;
  const state = run.at(k);
  const prompt = run.requests[0].promptPieces;
  return run.blocksAt(k).filter((b) => b.owners.length).map((b) => {
    const lane = Math.min(...b.owners);
    const pieces = [...prompt, ...state.text[lane]].slice(b.column * size, b.column * size + b.live);
    return { ...b, lane, texts: pieces.map((i) => run.pieces[i]) };
  });
}

/** Blocks in words. */
function blockNames(app, blocks) {
  return app.t(`sharing.${blocks.length > 1 ? "manyBlocks" : "oneBlock"}`, { list: blocks.join(", ") });
}

/** The events of iteration k as sentences, in the order in which they come. */
export function happenings(app, run, k) {
  const { t } = app;
  const lines = [];
  const before = k ? snapshot(run, k - 1) : { ref: new Map(), owners: new Map(), texts: [], running: [] };
  const now = snapshot(run, k);
  if (!before.ref.size && now.ref.size) {
    lines.push(t("sharing.event.prompt", {
      tokens: run.requests[0].promptTokens, blocks: blockNames(app, [...now.ref.keys()]),
    }));
  }
  lines.push(...forks(app, run, before, now));
  const copies = run.copiesAt(k);
  const left = new Map(before.ref);
  for (const { source, target, sequence } of copies) {
    const count = left.get(source) ?? 1;
    left.set(source, count - 1);
    lines.push(t("sharing.event.copy", {
      name: run.labels[sequence], source, target, before: count, after: count - 1,
    }));
    const rest = before.owners.get(source)?.filter(
      (s) => !copies.some((c) => c.source === source && c.sequence === s),
    );
    if (count - 1 === 1 && rest?.length === 1) {
      lines.push(t("sharing.event.last", { name: run.labels[rest[0]], source }));
    }
  }
  lines.push(...moves(app, run, before, now));
  const ended = now.running.flatMap((is, s) => (!is && before.running[s] ? [run.labels[s]] : []));
  if (ended.length) lines.push(t("sharing.event.ended", { names: ended.join(", ") }));
  const freed = [...before.ref.keys()].filter((block) => !now.ref.has(block));
  if (freed.length) lines.push(t("sharing.event.freed", { blocks: blockNames(app, freed) }));
  const isCopy = (block) => copies.some((c) => c.target === block);
  for (const { target, sequence } of copies) {
    if (!run.dropped[k].includes(target)) continue;
    lines.push(t("sharing.event.dropped", { name: run.labels[sequence], block: target }));
  }
  const unused = run.dropped[k].filter((block) => !isCopy(block));
  if (unused.length) lines.push(t("sharing.event.unused", { blocks: blockNames(app, unused) }));
  const fresh = [...now.ref.keys()].filter((block) => !before.ref.has(block) && !isCopy(block));
  if (fresh.length && before.ref.size) {
    lines.push(t("sharing.event.grown", { blocks: blockNames(app, fresh) }));
  }
  return lines;
}

function snapshot(run, k) {
  const named = run.blocksAt(k).filter((b) => b.owners.length);
  return {
    ref: new Map(named.map((b) => [b.block, b.ref])),
    owners: new Map(named.map((b) => [b.block, b.owners])),
    texts: run.at(k).text.map((text) => text.join(" ")),
    heads: run.at(k).text.map((text) => text.slice(0, -1).join(" ")),
    lengths: run.at(k).text.map((text) => text.length),
    running: run.sequences.map((_, s) => [2, 3].includes(run.activityAt(s, k))),
  };
}

/** The prompt, computed by one sequence, becomes everybody's. */
function forks(app, run, before, now) {
  // Computed before this iteration, or in it.
  const shared = [...now.ref].filter(([block, ref]) => ref > 1 && (before.ref.get(block) ?? 1) === 1);
  const all = shared.filter(([, ref]) => ref === run.sequences.length).map(([block]) => block);
  if (!all.length || before.running.filter(Boolean).length > 1) return [];
  return [app.t("sharing.event.fork", {
    n: run.sequences.length, blocks: blockNames(app, all), ref: run.sequences.length,
  })];
}

/** Beams that go on with another beam's text, and so with its table. */
function moves(app, run, before, now) {
  if (!run.requests[0].beams) return [];
  const lines = [];
  now.heads.forEach((head, s) => {
    const grew = now.lengths[s] === (before.lengths?.[s] ?? 0) + 1;
    if (!grew || now.lengths[s] < 2 || before.texts[s] === head) return;
    const parent = before.texts.indexOf(head);
    if (parent >= 0) {
      lines.push(app.t("sharing.event.moved", { name: run.labels[s], parent: run.labels[parent] }));
    }
  });
  return lines;
}
