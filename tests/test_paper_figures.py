"""The paper's worked examples, replayed: figures 6 to 9 of Kwon et al., SOSP 2023.

All of them have blocks of four tokens. The figures count physical blocks from 0; here
0 is the null block, so `figure(7)` is block 8. Which block is granted next is the free
list's choice, and the figures' is no particular one: `with_free` arranges the list.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import drawn, greedy, make_engine
from test_block_tables import Memory

from paged_jax import beam_tables
from paged_jax.block_tables import Status, allocate, fork, release
from paged_jax.invariants import check_blocks
from paged_jax.sequences import slots_of

pytestmark = pytest.mark.newest(
    reason="tables and counts of one rule, which other tests meet on each jax"
)

BLOCK_SIZE = 4
FOUR_SCORE = "Four score and seven years ago our".split()
BEST_OF_TIMES = "It was the best of".split()


def figure(*blocks):
    """The blocks that the figures call so."""
    return [block + 1 for block in blocks]


class Figure(Memory):
    """Memory in which each token's slot can be asked for, and its word written."""

    def __init__(self, num_blocks, first_granted=()):
        super().__init__(num_blocks=num_blocks, num_rows=4, block_size=BLOCK_SIZE)
        self.words = [["" for _ in range(BLOCK_SIZE)] for _ in range(num_blocks + 1)]
        free = [*range(num_blocks, 0, -1)]
        free = [b for b in free if b not in first_granted] + [*first_granted[::-1]]
        stack = self.pool.free_stack.at[:num_blocks].set(jnp.array(free))
        self.pool = dataclasses.replace(self.pool, free_stack=stack)

    def prefill(self, row, words):
        assert self(allocate, row, len(words)) == Status.OK
        for position, word in enumerate(words):
            self._write(row, position, word)

    def decode(self, words):
        """Appends a word to each row of the dict; copies come before writes."""
        assert self.append(*words) == Status.OK
        for source, target in self.copies:
            self.words[target] = list(self.words[source])
        for row, word in words.items():
            self._write(row, int(self.sequences.length[row]) - 1, word)
        self.check()

    def repoint(self, *parents):
        """Row i goes on from row `parents[i]`."""
        rows = jnp.arange(len(parents))
        valid = jnp.ones(len(parents), bool)
        self.pool, self.sequences = jax.jit(beam_tables.repoint)(
            self.pool, self.sequences, rows, jnp.array(parents), valid
        )
        self.check()

    def block(self, block):
        """The words in one of the figure's blocks."""
        return [word for word in self.words[figure(block)[0]] if word]

    def filled(self, row):
        """How many slots of each of its blocks a row has filled."""
        length = int(self.sequences.length[row])
        return [
            min(length - start, BLOCK_SIZE)
            for start in range(0, len(self.table(row)) * BLOCK_SIZE, BLOCK_SIZE)
        ]

    def check(self):
        holds = jax.jit(check_blocks)(self.pool, self.sequences)
        assert all(holds.values()), [name for name, ok in holds.items() if not ok]

    def _write(self, row, position, word):
        slots = slots_of(
            self.sequences, jnp.array([row]), jnp.array([position]), BLOCK_SIZE
        )
        block, offset = divmod(int(slots[0]), BLOCK_SIZE)
        assert int(self.pool.ref_count[block]) == 1
        self.words[block][offset] = word


def test_figure_6_block_table_translation():
    memory = Figure(num_blocks=9, first_granted=figure(7, 1, 3))
    # 1: the prompt takes two blocks; one slot is left for what is generated.
    memory.prefill(0, FOUR_SCORE)
    assert memory.table(0) == figure(7, 1)
    assert memory.filled(0) == [4, 3]
    # 2: the first generated token goes into the last slot.
    memory.decode({0: "fathers"})
    assert memory.table(0) == figure(7, 1)
    assert memory.filled(0) == [4, 4]
    # 3: the next one needs another block.
    memory.decode({0: "brought"})
    assert memory.table(0) == figure(7, 1, 3)
    assert memory.filled(0) == [4, 4, 1]
    assert memory.block(7) == ["Four", "score", "and", "seven"]
    assert memory.block(1) == ["years", "ago", "our", "fathers"]
    assert memory.block(3) == ["brought"]
    assert memory.num_free == 6


def test_figure_7_two_requests_at_the_same_time():
    memory = Figure(num_blocks=9, first_granted=figure(7, 1, 5, 2, 3))
    memory.prefill(0, FOUR_SCORE)
    memory.prefill(1, BEST_OF_TIMES)
    memory.decode({0: "fathers", 1: "times"})
    memory.decode({0: "brought"})
    # Neighbours among the logical blocks are none among the physical ones.
    assert memory.table(0) == figure(7, 1, 3)
    assert memory.table(1) == figure(5, 2)
    assert memory.block(5) == ["It", "was", "the", "best"]
    assert memory.block(2) == ["of", "times"]
    # What one request leaves is there for the other.
    memory(release, 0)
    assert memory.num_free == 7
    for word in ("it", "was", "the"):
        memory.decode({1: word})
    assert memory.table(1)[2] in figure(7, 1, 3)


def test_figure_8_parallel_sampling():
    memory = Figure(num_blocks=9, first_granted=figure(7, 1, 3))
    memory.prefill(0, FOUR_SCORE)
    assert memory(fork, 0, 1) == Status.OK
    for sample in (0, 1):
        assert memory.table(sample) == figure(7, 1)
        assert memory.references(sample) == [2, 2]
    # Sample A1 writes first: it copies, and block 1 keeps one reference.
    memory.decode({0: "fathers"})
    assert memory.copies == [tuple(figure(1, 3))]
    assert memory.table(0) == figure(7, 3) and memory.references(0) == [2, 1]
    assert memory.table(1) == figure(7, 1) and memory.references(1) == [2, 1]
    # A2 is then alone with block 1, and writes where it is.
    memory.decode({1: "mothers"})
    assert memory.copies == []
    assert memory.table(1) == figure(7, 1)
    assert memory.block(3) == ["years", "ago", "our", "fathers"]
    assert memory.block(1) == ["years", "ago", "our", "mothers"]
    assert memory.num_free == 6


def test_figure_9_beam_search():
    """Four beams; what leads to the figure's left side is replayed, too."""
    memory = Figure(num_blocks=13)
    memory.prefill(0, ["prompt"] * 4)
    memory(fork, 0, 3)  # candidate 3 differs from the second block on
    for _ in range(8):
        memory.decode({0: "a", 3: "b"})
    memory(fork, 0, 1)
    memory(fork, 0, 2)  # candidates 0 to 2 share three blocks
    for _ in range(4):
        memory.decode({0: "c", 1: "d", 2: "e", 3: "f"})
    assert [memory.table(row) for row in range(4)] == [
        figure(0, 1, 3, 5),
        figure(0, 1, 3, 6),
        figure(0, 1, 3, 7),
        figure(0, 2, 4, 8),
    ]
    assert memory.references(0) == [4, 3, 3, 1] and memory.references(3) == [4, 1, 1, 1]
    assert memory.num_free == 4

    # The best four continuations come from candidates 1 and 2.
    memory.repoint(1, 1, 2, 2)
    freed = memory.pool.free_stack[4 : memory.num_free].tolist()
    assert sorted(freed) == figure(2, 4, 5, 8)
    assert memory.table(0) == memory.table(1) == figure(0, 1, 3, 6)
    assert memory.table(2) == memory.table(3) == figure(0, 1, 3, 7)
    assert memory.references(0) == memory.references(2) == [4, 4, 4, 2]

    # Each takes a new block: the figure's 9 to 12; here, those freed are used again.
    memory.decode({0: "g", 1: "h", 2: "i", 3: "j"})
    assert memory.copies == []
    assert sorted(memory.table(row)[4] for row in range(4)) == sorted(freed)
    assert memory.references(0) == [4, 4, 4, 2, 1]
    assert memory.num_free == 4
    # Beams that fork in a block copy that one, and no other.
    memory.repoint(0, 0, 0, 3)
    last = memory.table(0)[4]
    memory.decode({0: "k", 1: "l", 2: "m", 3: "n"})
    assert [source for source, _ in memory.copies] == [last, last]
    assert [memory.words[memory.table(row)[4]][:2] for row in range(4)] == [
        ["g", "k"],
        ["g", "l"],
        ["g", "m"],
        ["j", "n"],
    ]


# ------------------------------------------------------------------ in the engine


@pytest.fixture(scope="module")
def engine():
    return make_engine(max_n=4, num_blocks=26, max_seqs=6, max_requests=8)


def tables(engine, count):
    """Tables and lengths of the first rows, and the references of their blocks."""
    state = engine.state.scheduler
    rows = state.sequences
    found = [rows.block_table[r, : rows.num_blocks[r]].tolist() for r in range(count)]
    references = np.asarray(state.pool.ref_count)
    return found, rows.length[:count].tolist(), [references[t].tolist() for t in found]


def test_the_engine_serves_figure_6(engine):
    engine.submit(list(range(10, 17)), greedy(4))
    filled = []
    while engine.has_unfinished():
        engine.step(max_steps=1)
        (table,), (length,), _ = tables(engine, 1)
        filled.append((len(table), length))
    # The prompt, and a step for each token but the last, whose keys nobody needs.
    assert filled[:4] == [(2, 7), (2, 8), (3, 9), (3, 10)]


def test_the_engine_serves_figure_8(engine):
    engine.submit(list(range(10, 17)), drawn(4, seed=1, n=2))
    engine.step(max_steps=1)
    (one, two), lengths, references = tables(engine, 2)
    assert one == two and lengths == [7, 7] and references == [[2, 2], [2, 2]]
    engine.step(max_steps=1)
    # Both write in one step: one of them copies, the other writes in place.
    (first, second), lengths, references = tables(engine, 2)
    assert lengths == [8, 8] and references == [[2, 1], [2, 1]]
    assert first[0] == second[0] == one[0]
    assert first[1] != second[1] and one[1] in (first[1], second[1])
    while engine.has_unfinished():
        engine.step()
