// A recording, read frame by frame. The format is described in recording.py.

/** What a sequence does in an iteration; `Activity` of recorder.py. */
export const ACTIVITY = [
  "absent", "waiting", "prefill", "decode", "preempted", "swapped", "held", "done",
];

const CHECKPOINT = 128; // frames between two states that are kept

/** The engine after an iteration: block tables, lengths, counts and texts. */
class State {
  constructor(numRows, numBlocks, numSequences) {
    this.owner = new Int32Array(numRows).fill(-1);
    this.onHost = new Uint8Array(numRows);
    this.length = new Int32Array(numRows);
    this.pace = new Uint8Array(numRows);
    this.tables = Array.from({ length: numRows }, () => []);
    this.ref = new Int32Array(numBlocks + 1);
    this.text = Array.from({ length: numSequences }, () => []);
  }

  clone() {
    const copy = Object.create(State.prototype);
    for (const key of ["owner", "onHost", "length", "pace", "ref"]) {
      copy[key] = this[key].slice();
    }
    // Tables and texts are replaced when they change, never written to.
    copy.tables = this.tables.slice();
    copy.text = this.text.slice();
    return copy;
  }

  /** Goes on to the next frame, given what changes. */
  advance(rows, ref, text) {
    for (let row = 0; row < this.owner.length; row++) {
      this.length[row] += this.pace[row];
    }
    for (let i = 0; i < rows.length; ) {
      const [row, owner, onHost, length, kept, count] = rows.slice(i, i + 6);
      const before = this.length[row] - this.pace[row];
      const same = owner === this.owner[row] && onHost === this.onHost[row];
      this.pace[row] = owner >= 0 && !(same && length === before) ? 1 : 0;
      this.owner[row] = owner;
      this.onHost[row] = onHost;
      this.length[row] = length;
      this.tables[row] = [
        ...this.tables[row].slice(0, kept), ...rows.slice(i + 6, i + 6 + count),
      ];
      i += 6 + count;
    }
    for (let i = 0; i < ref.length; i += 2) this.ref[ref[i]] = ref[i + 1];
    for (let i = 0; i < text.length; ) {
      const [sequence, kept, count] = text.slice(i, i + 3);
      this.text[sequence] = [
        ...this.text[sequence].slice(0, kept), ...text.slice(i + 3, i + 3 + count),
      ];
      i += 3 + count;
    }
  }
}

export class Recording {
  constructor(data) {
    Object.assign(this, data);
    this._fresh = () => new State(data.numRows, data.numBlocks, data.sequences.length);
    this._checkpoints = [this._fresh()];
    this._state = this._fresh();
    this._next = 0; // frame that `_state` would advance to
    this.maxTokens = Math.max(
      ...data.requests.map((request) => request.promptTokens + request.mostTokens),
    );
    this.labels = data.sequences.map(([request, number]) => {
      const name = String(request + 1);
      return data.requests[request].n > 1 ? letter(number) : name;
    });
  }

  /** The state after frame k; valid until the next call. */
  at(k) {
    if (k < 0 || k >= this.frames) throw new RangeError(`no frame ${k}`);
    if (k + 1 < this._next || k - this._next >= CHECKPOINT) {
      const kept = Math.min(
        Math.floor((k + 1) / CHECKPOINT), this._checkpoints.length - 1,
      );
      if (k + 1 < this._next || kept * CHECKPOINT > this._next) {
        this._state = this._checkpoints[kept].clone();
        this._next = kept * CHECKPOINT;
      }
    }
    while (this._next <= k) {
      const frame = this._next++;
      this._state.advance(this.rows[frame], this.ref[frame], this.text[frame]);
      if (this._next % CHECKPOINT === 0) {
        const at = this._next / CHECKPOINT;
        if (at === this._checkpoints.length) this._checkpoints.push(this._state.clone());
      }
    }
    return this._state;
  }

  /** What sequence s does in frame k, an index into ACTIVITY. */
  activityAt(s, k) {
    const changes = this.activity[s];
    let low = 0;
    let high = changes.length / 2;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (changes[2 * middle] <= k) low = middle;
      else high = middle;
    }
    return changes[2 * low + 1];
  }

  /** Stretches [start, end), of one activity each, of sequence s. */
  stretches(s) {
    const changes = this.activity[s];
    const found = [];
    for (let i = 0; i < changes.length; i += 2) {
      const end = i + 2 < changes.length ? changes[i + 2] : this.frames;
      found.push({ sequence: s, start: changes[i], end, activity: changes[i + 1] });
    }
    return found;
  }

  /** Slots of the memory at frame k by what they are for, as the engine logged them. */
  slotsAt(k) {
    const { live, reservation, reserved } = this.log;
    return {
      live: live[k],
      ahead: reservation[k],
      never: reserved[k] - live[k] - reservation[k],
      free: this.numBlocks * this.blockSize - reserved[k],
    };
  }

  /** Entries of all block tables at frame k, and the blocks that they name. */
  entriesAt(k) {
    const state = this.at(k);
    let logical = 0;
    state.tables.forEach((table, row) => { logical += state.onHost[row] ? 0 : table.length; });
    return { logical, physical: this.numBlocks - this.free[k] };
  }

  /** Share of the blocks that sharing saves in the mean, as `experiments.metrics` has it. */
  blockSaving() {
    let sum = 0;
    let count = 0;
    for (let k = 0; k < this.iterations; k++) {
      const { logical, physical } = this.entriesAt(k);
      if (physical) { sum += logical / physical; count++; }
    }
    return count ? 1 - count / sum : 0;
  }

  /** The values of a column of the log in the iterations there were. */
  logged(name) { return this.log[name].slice(0, this.iterations); }

  /** Copies on write of frame k. */
  copiesAt(k) {
    const flat = this.copies[k];
    const found = [];
    for (let i = 0; i < flat.length; i += 3) {
      found.push({ source: flat[i], target: flat[i + 1], sequence: flat[i + 2] });
    }
    return found;
  }

  /**
   * All blocks at frame k, from 1 up: who names them, and how far they are written.
   * Of its slots, `live` hold tokens, `ahead` will be written by their owner, and the
   * others of a block that is granted never will.
   */
  blocksAt(k) {
    const state = this.at(k);
    const size = this.blockSize;
    const blocks = Array.from({ length: this.numBlocks + 1 }, (_, block) => ({
      block, owners: [], ref: state.ref[block], live: 0, ahead: 0, column: -1, ended: false,
    }));
    for (let row = 0; row < state.owner.length; row++) {
      const sequence = state.owner[row];
      if (sequence < 0 || state.onHost[row]) continue;
      const ended = this.activityAt(sequence, k) >= 6;
      const request = this.requests[this.sequences[sequence][0]];
      const final = request.promptTokens + request.mostTokens;
      state.tables[row].forEach((number, column) => {
        const block = blocks[number];
        block.owners.push(sequence);
        block.column = column;
        block.ended = ended;
        const clip = (tokens) => Math.max(0, Math.min(size, tokens - column * size));
        const live = clip(state.length[row]);
        block.live = Math.max(block.live, live);
        if (!ended) block.ahead = Math.max(block.ahead, clip(final) - live);
      });
    }
    for (const block of blocks) block.ahead = Math.min(block.ahead, size - block.live);
    blocks.shift();
    return blocks;
  }

  /** What is drawn of frame k, for tests: equals what the engine was. */
  stateAt(k) {
    const blocks = this.blocksAt(k);
    return {
      free: this.free[k],
      owners: blocks.map((b) => b.owners.slice().sort((x, y) => x - y)),
      refs: blocks.map((b) => b.ref),
    };
  }

  /** Tokens of sequence s at frame k as texts: prompt and output. */
  textAt(s, k) {
    const request = this.requests[this.sequences[s][0]];
    const piece = (i) => this.pieces[i];
    return {
      prompt: request.promptPieces.map(piece),
      output: this.at(k).text[s].map(piece),
    };
  }

  /**
   * What happened in frame k: sequences that changed what they do. One has `ended` in the
   * last frame in which it writes, and has `left` in the first without its blocks.
   */
  eventsAt(k) {
    const events = {
      arrived: [], admitted: [], ended: [], left: [], preempted: [], swapped: [], back: [],
    };
    const next = Math.min(k + 1, this.frames - 1);
    for (let s = 0; s < this.sequences.length; s++) {
      const before = k ? this.activityAt(s, k - 1) : 0;
      const now = this.activityAt(s, k);
      if (now < 6 && this.activityAt(s, next) >= 6) events.ended.push(s);
      if (before === now) continue;
      const ran = now === 2 || now === 3;
      if (before === 0) events.arrived.push(s);
      if (ran && before < 2) events.admitted.push(s);
      if (ran && (before === 4 || before === 5)) events.back.push(s);
      if (now === 4) events.preempted.push(s);
      if (now === 5) events.swapped.push(s);
      if (now === 7) events.left.push(s);
    }
    return events;
  }
}

/** A, B, ... for the sequences of one request. */
export function letter(number) {
  return String.fromCharCode(65 + (number % 26));
}
