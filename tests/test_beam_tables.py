"""Beams forked and freed by repointing: figure 9 of the paper, and random searches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_text import IN_PLACE, operations_on
from test_block_tables import Memory

from paged_jax.beam_tables import repoint
from paged_jax.block_pool import init_block_pool
from paged_jax.block_tables import allocate, copy_on_write, release
from paged_jax.cached_blocks import cache_block
from paged_jax.invariants import check_blocks
from paged_jax.sequences import SequenceStatus, init_sequences

BLOCK_SIZE = 4


class BeamMemory(Memory):
    """A `Memory` whose rows can be repointed and set by hand."""

    def repoint(self, rows, parents, valid=None):
        valid = [True] * len(rows) if valid is None else valid
        self.pool, self.sequences = _repoint(
            self.pool,
            self.sequences,
            jnp.array(rows, jnp.int32),
            jnp.array(parents, jnp.int32),
            jnp.array(valid),
        )
        self.check()

    def check(self):
        holds = jax.device_get(_check_blocks(self.pool, self.sequences))
        assert all(holds.values()), [name for name, ok in holds.items() if not ok]

    def set_tables(self, tables, length):
        """Gives rows 0, 1, ... these tables, each with `length` tokens."""
        for row, table in enumerate(tables):
            padded = np.zeros(self.sequences.table_width, np.int32)
            padded[: len(table)] = table
            self.sequences = self.sequences.__class__(
                block_table=self.sequences.block_table.at[row].set(padded),
                num_blocks=self.sequences.num_blocks.at[row].set(len(table)),
                length=self.sequences.length.at[row].set(length),
                request=self.sequences.request,
                status=self.sequences.status.at[row].set(SequenceStatus.RUNNING),
            )
        used = [block for table in tables for block in table]
        free = [b for b in range(self.pool.num_blocks, 0, -1) if b not in used]
        stack = np.zeros_like(np.asarray(self.pool.free_stack))
        stack[: len(free)] = free
        self.pool = self.pool.__class__(
            free_stack=jnp.asarray(stack),
            num_free=jnp.int32(len(free)),
            ref_count=jnp.zeros_like(self.pool.ref_count).at[np.array(used)].add(1),
        )
        self.check()

    def free(self):
        return np.asarray(self.pool.free_stack)[: self.num_free].tolist()


_check_blocks = jax.jit(check_blocks)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _repoint(*arguments):
    return repoint(*arguments)


def test_figure_9():
    """The figure's block b is b + 1 here: block 0 is the null block."""
    memory = BeamMemory(num_blocks=20, num_rows=6, block_size=BLOCK_SIZE)
    before = [[1, 2, 4, 6], [1, 2, 4, 7], [1, 2, 4, 8], [1, 3, 5, 9]]
    memory.set_tables(before, length=16)
    was_free = set(memory.free())
    # "The top-4 probable candidates all originate from candidates 1 and 2."
    memory.repoint([0, 1, 2, 3], [1, 1, 2, 2])
    assert [memory.table(row) for row in range(4)] == [
        [1, 2, 4, 7],
        [1, 2, 4, 7],
        [1, 2, 4, 8],
        [1, 2, 4, 8],
    ]
    # "Frees all physical blocks whose reference counts reach 0 (blocks 2, 4, 5, 8)."
    assert set(memory.free()) - was_free == {3, 5, 6, 9}
    assert memory.num_free == len(was_free) + 4
    # "All candidates share blocks 0, 1, 3; candidates 0 and 1 share block 6, and
    # candidates 2 and 3 further share block 7."
    assert memory.references(0) == [4, 4, 4, 2] == memory.references(2)
    # "Then allocates new physical blocks": one each, since the last ones are full.
    memory.append(0, 1, 2, 3)
    assert memory.copies == []
    new = [memory.table(row)[4] for row in range(4)]
    assert len(set(new)) == 4 and [memory.references(r)[4] for r in range(4)] == [1] * 4
    memory.check()


def test_only_the_partly_filled_last_block_is_copied():
    memory = BeamMemory(num_blocks=20, num_rows=4, block_size=BLOCK_SIZE)
    memory.set_tables([[1, 2], [1, 3], [1, 4]], length=6)
    memory.repoint([0, 1, 2], [1, 1, 1])
    assert [memory.table(row) for row in range(3)] == [[1, 3]] * 3
    memory.append(0, 1, 2)
    # Of three sharers two copy, and the last writes in place.
    assert [source for source, _ in memory.copies] == [3, 3]
    assert memory.table(2) == [1, 3]
    memory.check()


def test_a_beam_that_goes_on_alone_changes_nothing():
    memory = BeamMemory(num_blocks=20, num_rows=4, block_size=BLOCK_SIZE)
    memory.set_tables([[1, 2], [1, 3]], length=6)
    pool, sequences = jax.tree.map(np.asarray, (memory.pool, memory.sequences))
    memory.repoint([0, 1], [0, 1])
    jax.tree.map(np.testing.assert_array_equal, pool, memory.pool)
    jax.tree.map(np.testing.assert_array_equal, sequences, memory.sequences)


def test_beams_may_change_places():
    memory = BeamMemory(num_blocks=20, num_rows=4, block_size=BLOCK_SIZE)
    memory.set_tables([[1, 2], [1, 3], [1, 4, 5]], length=6)
    free = memory.free()
    memory.repoint([2, 0, 1], [0, 1, 2])
    assert [memory.table(row) for row in range(3)] == [[1, 3], [1, 4, 5], [1, 2]]
    assert memory.free() == free


@pytest.mark.parametrize("valid", [[False] * 3, [False, True, True]])
def test_rows_that_are_not_valid_stay(valid):
    memory = BeamMemory(num_blocks=20, num_rows=4, block_size=BLOCK_SIZE)
    memory.set_tables([[1, 2], [1, 3], [1, 4]], length=6)
    memory.repoint([0, 1, 2], [2, 2, 2], valid)
    last = [1, 4] if any(valid) else [1, 3]
    assert [memory.table(row) for row in range(3)] == [[1, 2], last, [1, 4]]


def test_blocks_of_dead_beams_are_freed_once_though_several_name_them():
    memory = BeamMemory(num_blocks=20, num_rows=4, block_size=BLOCK_SIZE)
    memory.set_tables([[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 2, 4]], length=12)
    memory.repoint([0, 1, 2, 3], [2, 2, 2, 2])
    assert sorted(memory.free()) == [2, 3, 4, *range(7, 21)]
    assert memory.references(0) == [4, 4, 4]


def test_blocks_that_others_name_stay():
    memory = BeamMemory(num_blocks=20, num_rows=4, block_size=BLOCK_SIZE)
    memory.set_tables([[1, 2], [1, 3], [1, 2]], length=8)
    memory.repoint([0, 1], [1, 1])
    assert memory.table(2) == [1, 2] and memory.references(2) == [3, 1]


class Naive:
    """Tables and reference counts of beams, in lists and dicts."""

    def __init__(self, tables):
        self.tables = dict(enumerate(map(list, tables)))

    def repoint(self, rows, parents):
        self.tables |= {r: list(self.tables[p]) for r, p in zip(rows, parents)}

    def references(self):
        named = [block for table in self.tables.values() for block in table]
        return {block: named.count(block) for block in named}


@pytest.mark.parametrize("seed", range(10))
def test_random_searches_keep_the_counts_of_a_plain_model(seed):
    rng = np.random.default_rng(seed)
    memory = BeamMemory(num_blocks=60, num_rows=6, table_width=12, block_size=2)
    prompt = int(rng.integers(1, 6))
    memory(allocate, 0, prompt)
    memory.set_tables([memory.table(0)] * 4, length=prompt)
    rows = rng.permutation(4)
    for _ in range(16):
        naive = Naive([memory.table(row) for row in range(4)])
        parents = rows[rng.integers(0, rng.integers(1, 5), 4)]
        memory.repoint(rows, parents)
        naive.repoint(rows, parents)
        assert {r: memory.table(r) for r in range(4)} == naive.tables
        counts = np.asarray(memory.pool.ref_count)
        used = {int(b): int(counts[b]) for b in np.flatnonzero(counts)}
        assert used == naive.references()
        assert memory.num_free == 60 - len(used)
        memory.append(0, 1, 2, 3)
        memory.check()
    for row in range(4):
        memory(release, row)
    assert memory.num_free == 60


def test_a_cached_block_becomes_idle_and_is_evicted_before_its_parent():
    pool = init_block_pool(8, cached_block_size=2)
    sequences = init_sequences(3, 4)
    memory = BeamMemory(num_blocks=8, num_rows=3, table_width=4, block_size=2)
    memory.pool, memory.sequences = pool, sequences
    memory(allocate, 0, 6)
    memory(allocate, 1, 6)
    for row in (0, 1):
        parent = jnp.int32(0)
        for block in memory.table(row):
            tokens = jnp.array([block, block])
            memory.pool, parent = jax.jit(cache_block)(
                memory.pool, jnp.int32(block), parent, tokens, jnp.bool_(True)
            )
    memory.check()
    assert memory.num_free == 2
    memory.repoint([0, 1], [0, 0])
    idle = memory.pool.prefix_cache.idle
    assert memory.num_free == 2 and int(idle.count) == 3
    order, block = [], int(idle.first)
    while block:
        order.append(block)
        block = int(idle.next[block])
    assert order == [6, 5, 4]
    # Two free blocks, and then the idle ones.
    assert memory(copy_on_write, 0, 2) == 0
    memory.append(0, 1)
    assert memory.num_free == 0 and int(memory.pool.prefix_cache.idle.count) == 2
    memory.check()


def test_no_array_of_the_pool_is_copied():
    for cached in (0, 4):
        pool, sequences = jax.eval_shape(
            lambda cached=cached: (init_block_pool(887, cached), init_sequences(9, 5))
        )
        ids = jax.ShapeDtypeStruct((4,), jnp.int32)
        compiled = _repoint.lower(
            pool, sequences, ids, ids, jax.ShapeDtypeStruct((4,), bool)
        ).compile()
        text = compiled.as_text()
        assert operations_on(text, "888") <= IN_PLACE
        assert operations_on(text, "888,4") <= IN_PLACE
