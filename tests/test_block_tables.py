"""Worked cases of the operations on block tables, and what they refuse."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.block_pool import init_block_pool
from paged_jax.block_tables import (
    Status,
    allocate,
    append,
    copy_on_write,
    fork,
    release,
    share_prefix,
)
from paged_jax.sequences import SequenceStatus, blocks_for, init_sequences, slots_of

BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


class Memory:
    """A pool and its sequences, for tests that change them step by step."""

    def __init__(self, num_blocks=100, num_rows=5, table_width=8, block_size=16):
        self.block_size = block_size
        self.pool = init_block_pool(num_blocks)
        self.sequences = init_sequences(num_rows, table_width)
        self.copies = []

    def __call__(self, operation, *arguments):
        sized = {"block_size": self.block_size}
        if operation in (release, copy_on_write):
            sized = {}
        self.pool, self.sequences, *copies, status = operation(
            self.pool, self.sequences, *arguments, **sized
        )
        self.copies = []
        for source, target, count in copies:
            self.copies = list(zip(source.tolist(), target.tolist(), strict=True))
            assert not any(map(any, self.copies[int(count) :]))  # padding is zeros
            self.copies = self.copies[: int(count)]
        return Status(int(status))

    def append(self, *rows):
        appending = np.zeros(self.sequences.num_rows, bool)
        appending[list(rows)] = True
        return self(append, jnp.asarray(appending))

    def table(self, row):
        rows = jax.device_get(self.sequences)
        count = rows.num_blocks[row]
        assert not rows.block_table[row, count:].any()
        return rows.block_table[row, :count].tolist()

    def references(self, row):
        return np.asarray(self.pool.ref_count)[self.table(row)].tolist()

    @property
    def num_free(self):
        return int(self.pool.num_free)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_allocate_takes_just_enough_blocks(block_size):
    for num_tokens in (1, block_size - 1, block_size, block_size + 1, 3 * block_size):
        if num_tokens < 1:
            continue
        memory = Memory(num_blocks=4, table_width=3, block_size=block_size)
        assert memory(allocate, 2, num_tokens) == Status.OK
        count = -(-num_tokens // block_size)
        assert memory.table(2) == [1, 2, 3][:count]
        assert memory.references(2) == [1] * count
        assert memory.num_free == 4 - count
        assert memory.sequences.length.tolist() == [0, 0, num_tokens, 0, 0]
        assert memory.sequences.status[2] == SequenceStatus.RUNNING


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_append_takes_a_block_when_the_last_is_full(block_size):
    memory = Memory(num_blocks=4, table_width=3, block_size=block_size)
    assert memory(allocate, 0, max(1, block_size - 2)) == Status.OK
    length = int(memory.sequences.length[0])
    while length < 3 * block_size:
        assert memory.append(0) == Status.OK
        length += 1
        assert memory.sequences.length[0] == length
        assert memory.sequences.num_blocks[0] == -(-length // block_size)
    assert memory.table(0) == [1, 2, 3]
    assert memory.append(0) == Status.TABLE_OVERFLOW


def test_blocks_for():
    assert blocks_for(35, 16) == 3
    for tokens, blocks in ((0, 0), (1, 1), (16, 1), (17, 2), (2**31 - 1, 2**27)):
        assert blocks_for(jnp.int32(tokens), 16) == blocks


def test_35_tokens_fill_three_blocks_with_16_and_16_and_3():
    memory = Memory()
    assert memory(allocate, 0, 35) == Status.OK
    slots = slots_of(memory.sequences, jnp.zeros(35, int), jnp.arange(35), 16)
    blocks, counts = np.unique(np.asarray(slots) // 16, return_counts=True)
    assert blocks.tolist() == memory.table(0)
    assert counts.tolist() == [16, 16, 3]


def test_position_20_of_table_3_7_12_is_in_block_7_at_offset_4():
    memory = Memory(num_blocks=12, num_rows=13)
    for row in range(12):
        memory(allocate, row, 16)
    for block in (12, 7, 3):  # the last one freed is granted first
        memory(release, block - 1)
    assert memory(allocate, 12, 48) == Status.OK
    assert memory.table(12) == [3, 7, 12]
    slot = slots_of(memory.sequences, jnp.array([12]), jnp.array([20]), 16)
    assert divmod(int(slot[0]), 16) == (7, 4)


def test_both_samples_write_in_one_step():
    memory = Memory(block_size=4)
    memory(allocate, 0, 7)
    memory(fork, 0, 1)
    shared = memory.table(0)[1]
    assert memory.append(0, 1) == Status.OK
    assert memory.table(1)[1] == shared
    assert memory.copies == [(shared, memory.table(0)[1])]
    assert memory.references(0) == [2, 1] and memory.references(1) == [2, 1]


def test_a_full_shared_block_is_not_copied():
    memory = Memory(block_size=4)
    memory(allocate, 0, 8)
    memory(fork, 0, 1)
    assert memory.append(0, 1) == Status.OK
    assert memory.copies == []
    assert memory.references(0) == memory.references(1) == [2, 2, 1]


@pytest.mark.parametrize(
    "num_tokens, shared, copies", [(16, 1, 0), (17, 2, 1), (31, 2, 1), (32, 2, 0)]
)
def test_share_prefix_copies_only_a_partly_filled_last_block(
    num_tokens, shared, copies
):
    memory = Memory()
    memory(allocate, 0, 40)
    free = memory.num_free
    assert memory(share_prefix, 0, 1, num_tokens) == Status.OK
    assert memory.table(1) == memory.table(0)[:shared]
    assert memory.num_free == free
    assert memory.references(0) == [2] * shared + [1] * (3 - shared)
    assert memory.append(1) == Status.OK
    assert len(memory.copies) == copies
    assert memory.num_free == free - 1  # a copy, or a block of its own
    assert memory.sequences.length.tolist() == [40, num_tokens + 1, 0, 0, 0]


def test_release_frees_what_nobody_else_names():
    memory = Memory()
    memory(allocate, 0, 40)
    memory(share_prefix, 0, 1, 32)
    shared = memory.table(1)
    assert memory(release, 0) == Status.OK
    assert memory.num_free == 98
    assert memory.table(1) == shared and memory.references(1) == [1, 1]
    assert memory(release, 1) == Status.OK
    assert memory.num_free == 100 and not memory.pool.ref_count.any()
    chex.assert_trees_all_equal(memory.sequences, init_sequences(5, 8))


def test_copy_on_write_of_an_own_block_does_nothing():
    memory = Memory()
    memory(allocate, 0, 40)
    before = memory.pool, memory.sequences
    assert memory(copy_on_write, 0, 1) == Status.OK
    assert memory.copies == []
    chex.assert_trees_all_equal((memory.pool, memory.sequences), before)


def test_copy_on_write_of_a_shared_block():
    memory = Memory()
    memory(allocate, 0, 40)
    memory(fork, 0, 1)
    first, second, third = memory.table(0)
    assert memory(copy_on_write, 1, 1) == Status.OK
    new = memory.table(1)[1]
    assert memory.table(1) == [first, new, third]
    assert memory.table(0) == [first, second, third]
    assert memory.copies == [(second, new)]
    assert memory.references(0) == memory.references(1) == [2, 1, 2]


# Rows 0 (40 tokens) and 1 (its fork) share 3 of 10 blocks; row 2 has 64 tokens, and
# fills its table of 4; 3 blocks are free; rows 3 and 4 are empty.
REFUSED = [
    ("allocate: row in use", allocate, (0, 1), Status.ROW_IN_USE),
    ("allocate: no such row", allocate, (5, 1), Status.OUT_OF_RANGE),
    ("allocate: negative row", allocate, (-1, 1), Status.OUT_OF_RANGE),
    ("allocate: no tokens", allocate, (3, 0), Status.OUT_OF_RANGE),
    ("allocate: negative tokens", allocate, (3, -5), Status.OUT_OF_RANGE),
    ("allocate: too long", allocate, (3, 65), Status.TABLE_OVERFLOW),
    ("allocate: far too long", allocate, (3, 2**31 - 1), Status.TABLE_OVERFLOW),
    ("allocate: out of blocks", allocate, (3, 49), Status.OUT_OF_BLOCKS),
    ("append: empty row", append, ([3],), Status.NOT_LIVE),
    ("append: one of them empty", append, ([0, 3],), Status.NOT_LIVE),
    ("append: full table", append, ([2],), Status.TABLE_OVERFLOW),
    ("append: one of them full", append, ([0, 2],), Status.TABLE_OVERFLOW),
    ("fork: dead source", fork, (3, 4), Status.NOT_LIVE),
    ("fork: no such source", fork, (5, 4), Status.NOT_LIVE),
    ("fork: negative source", fork, (-1, 4), Status.NOT_LIVE),
    ("fork: target in use", fork, (0, 2), Status.ROW_IN_USE),
    ("fork: onto itself", fork, (0, 0), Status.ROW_IN_USE),
    ("fork: no such target", fork, (0, 5), Status.OUT_OF_RANGE),
    ("fork: negative target", fork, (0, -1), Status.OUT_OF_RANGE),
    ("share: dead source", share_prefix, (3, 4, 1), Status.NOT_LIVE),
    ("share: target in use", share_prefix, (0, 1, 1), Status.ROW_IN_USE),
    ("share: no tokens", share_prefix, (0, 3, 0), Status.OUT_OF_RANGE),
    ("share: more than there are", share_prefix, (0, 3, 41), Status.OUT_OF_RANGE),
    ("copy: dead row", copy_on_write, (3, 0), Status.NOT_LIVE),
    ("copy: no such row", copy_on_write, (5, 0), Status.NOT_LIVE),
    ("copy: negative row", copy_on_write, (-1, 0), Status.NOT_LIVE),
    ("copy: no such block", copy_on_write, (0, 3), Status.OUT_OF_RANGE),
    ("copy: negative block", copy_on_write, (0, -1), Status.OUT_OF_RANGE),
    ("copy: past the table", copy_on_write, (2, 4), Status.OUT_OF_RANGE),
    ("release: empty row", release, (3,), Status.NOT_LIVE),
    ("release: no such row", release, (5,), Status.NOT_LIVE),
    ("release: negative row", release, (-1,), Status.NOT_LIVE),
]


def crowded():
    memory = Memory(num_blocks=10, table_width=4)
    for operation, *arguments in ((allocate, 0, 40), (fork, 0, 1), (allocate, 2, 64)):
        assert memory(operation, *arguments) == Status.OK
    assert memory.num_free == 3
    return memory


@pytest.mark.parametrize(
    "operation, arguments, status",
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_refused_with_the_state_unchanged(operation, arguments, status):
    memory = crowded()
    before = jax.tree.map(np.array, (memory.pool, memory.sequences))
    if operation is append:
        assert memory.append(*arguments[0]) == status
    else:
        assert memory(operation, *arguments) == status
    assert memory.copies == []
    chex.assert_trees_all_equal((memory.pool, memory.sequences), before)


def test_double_release():
    memory = crowded()
    assert memory(release, 0) == Status.OK  # row 1 keeps its blocks in use
    before = memory.pool, memory.sequences
    assert memory(release, 0) == Status.NOT_LIVE
    chex.assert_trees_all_equal((memory.pool, memory.sequences), before)


@pytest.mark.parametrize("free, status", [(1, Status.OK), (0, Status.OUT_OF_BLOCKS)])
def test_a_copy_needs_a_free_block(free, status):
    memory = crowded()
    assert memory(allocate, 3, (3 - free) * 16) == Status.OK
    before = memory.pool, memory.sequences
    assert memory(copy_on_write, 0, 0) == status
    # Both sharers append: one copies the last block, the other writes in place.
    memory.pool, memory.sequences = before
    assert memory.append(0, 1) == status
    if status != Status.OK:
        chex.assert_trees_all_equal((memory.pool, memory.sequences), before)


def test_all_rows_append_or_none_does():
    memory = Memory(num_blocks=3, block_size=4)
    for row, num_tokens in enumerate((4, 4)):
        memory(allocate, row, num_tokens)
    before = memory.pool, memory.sequences
    assert memory.append(0, 1) == Status.OUT_OF_BLOCKS  # one block for two rows
    chex.assert_trees_all_equal((memory.pool, memory.sequences), before)
    assert memory.append(1) == Status.OK
    assert memory.num_free == 0


def test_rows_may_be_traced():
    chex.clear_trace_counter()
    count = jax.jit(
        chex.assert_max_traces(lambda *args: allocate(*args, block_size=16), 1)
    )
    pool, sequences = init_block_pool(9), init_sequences(3, 3)
    for row in range(3):
        pool, sequences, status = count(pool, sequences, row, 17 * (row + 1) - 16)
        assert status == Status.OK
    assert sequences.num_blocks.tolist() == [1, 2, 3]
