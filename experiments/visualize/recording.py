"""What was recorded, as small JSON: columns, and what changed from one iteration on.

`web/src/recording.js` reads it. A frame is the engine after one iteration; there is one
more than `iterations`, in which the last to end have given their blocks back.

- `rows`: flat `[row, sequence, on_host, length, kept, count, block, ...]` for each
  sequence row that did not do what was expected: keep its sequence and its table, and
  grow by as many tokens as at its last change, one or none. The first `kept` entries of
  its block table stay, `count` blocks follow.
- `ref`: flat `[block, count, ...]`, reference counts that changed.
- `text`: flat `[sequence, kept, count, piece, ...]`: the first `kept` tokens of a
  sequence's output stay, `count` follow. Pieces are indices into `pieces`.
- `copies`: flat `[source, target, sequence, ...]`.
- `dropped`: blocks that were granted in the iteration and that nobody names after it.
- `activity`: for each sequence flat `[frame, activity, ...]`, where it changes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.visualize.recorder import LOGGED, Moment, Recorded
from paged_jax.detokenizer import Detokenizer
from paged_jax.tokenizer import Tokenizer


def encode(recorded: Recorded, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns a recording that JSON can hold.

    Args:
      recorded: what was seen.
      tokenizer: for the texts of tokens; None leaves them out.
    """
    config = recorded.config
    moments = recorded.moments
    pieces = _Pieces(tokenizer)
    return {
        "memory": config.memory,
        "batching": config.batching,
        "preemption": config.preemption,
        "blockSize": config.block_size,
        "numBlocks": config.total_blocks,
        "numRows": config.step_config().num_rows,
        "maxSeqs": config.max_seqs,
        "tokenBudget": config.token_budget,
        "maxModelLen": config.max_model_len,
        "frames": len(moments),
        "iterations": recorded.iterations,
        "requests": [
            {
                "prompt": one.prompt,
                "promptTokens": len(one.tokens),
                "promptPieces": pieces.of(one.tokens),
                "mostTokens": one.params.most_tokens(
                    config.max_model_len - len(one.tokens)
                ),
                "n": one.params.num_sequences,
                "beams": one.params.searches,
                "arrival": one.arrival,
            }
            for one in recorded.asked
        ],
        "sequences": [[s.request, s.number] for s in recorded.sequences],
        "rows": list(_row_changes(moments)),
        "ref": list(_reference_changes(moments)),
        "text": list(_text_changes(moments, pieces)),
        "copies": [[x for copy in m.copies for x in copy] for m in moments],
        "dropped": [m.dropped for m in moments],
        "activity": _activity_changes(moments, len(recorded.sequences)),
        "free": [m.num_free for m in moments],
        "log": {
            field.name.lower(): [int(m.log[i]) for m in moments]
            for i, field in enumerate(LOGGED)
        },
        "pieces": pieces.known,
    }


class _Pieces:
    """The texts of tokens, each kept once."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.known: list[str] = []
        self._tokenizer = tokenizer
        self._index: dict[str, int] = {}
        self._cache: dict[tuple[int, ...], list[int]] = {}

    def of(self, tokens: tuple[int, ...]) -> list[int]:
        """Returns the index of each token's text.

        The parts of a character that is spread over tokens belong to its last one.
        """
        if self._tokenizer is None:
            return []
        if tokens not in self._cache:
            decoder = Detokenizer(self._tokenizer)
            texts = [decoder.push([token]) for token in tokens]
            if texts:
                texts[-1] += decoder.flush()
            self._cache[tokens] = [self._add(text) for text in texts]
        return self._cache[tokens]

    def _add(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.known)
            self.known.append(text)
        return self._index[text]


def _row_changes(moments: Sequence[Moment]) -> Iterable[list[int]]:
    if not moments:
        return
    rows = moments[0].owner.shape[0]
    owner, on_host = np.full(rows, -1), np.zeros(rows, bool)
    length, pace = np.zeros(rows, int), np.zeros(rows, int)
    tables: list[list[int]] = [[] for _ in range(rows)]
    for moment in moments:
        changes: list[int] = []
        for row in range(rows):
            table = moment.table[row, : moment.num_blocks[row]].tolist()
            same = moment.owner[row] == owner[row]
            same &= bool(moment.on_host[row] == on_host[row])
            if same and table == tables[row]:
                if moment.length[row] == length[row] + pace[row]:
                    length[row] = moment.length[row]
                    continue
            kept = _common(tables[row], table)
            changes += [row, int(moment.owner[row]), int(moment.on_host[row])]
            changes += [int(moment.length[row]), kept, len(table) - kept, *table[kept:]]
            pace[row] = not (same and moment.length[row] == length[row])
            pace[row] &= moment.owner[row] >= 0
            owner[row], on_host[row] = moment.owner[row], moment.on_host[row]
            length[row], tables[row] = moment.length[row], table
        yield changes


def _reference_changes(moments: Sequence[Moment]) -> Iterable[list[int]]:
    before: np.ndarray | None = None
    for moment in moments:
        now = moment.ref_count
        changed = np.flatnonzero(now if before is None else now != before)
        yield np.stack([changed, now[changed]], axis=1).ravel().tolist()
        before = now


def _text_changes(moments: Sequence[Moment], pieces: _Pieces) -> Iterable[list[int]]:
    before: dict[int, tuple[int, ...]] = {}
    shown: dict[int, list[int]] = {}
    for moment in moments:
        changes: list[int] = []
        for sequence, output in enumerate(moment.output):
            if output == before.get(sequence, ()):
                continue
            now, old = pieces.of(output), shown.get(sequence, [])
            before[sequence], shown[sequence] = output, now
            kept = _common(old, now)
            changes += [sequence, kept, len(now) - kept, *now[kept:]]
        yield changes


def _activity_changes(moments: Sequence[Moment], sequences: int) -> list[list[int]]:
    changes: list[list[int]] = [[] for _ in range(sequences)]
    for frame, moment in enumerate(moments):
        for sequence, activity in enumerate(moment.activity.tolist()):
            if not changes[sequence] or changes[sequence][-1] != activity:
                changes[sequence] += [frame, activity]
    return changes


def _common(old: Sequence[int], new: Sequence[int]) -> int:
    """Returns how many first entries are the same."""
    count = 0
    for a, b in zip(old, new):
        if a != b:
            break
        count += 1
    return count
