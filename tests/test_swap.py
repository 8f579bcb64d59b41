"""Swapping rows out and in: tables, reference counts, content and moves."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_text import IN_PLACE, operations_on

from paged_jax.block_pool import init_block_pool
from paged_jax.block_tables import Status, allocate, append, fork, release, share_prefix
from paged_jax.kv_cache import init_kv_cache, move_blocks
from paged_jax.sequences import SequenceStatus, init_sequences
from paged_jax.swap import (
    forget_moves,
    init_swap_space,
    release_host_rows,
    swap_in,
    swap_out,
)

SIZE, ROWS, WIDTH = 4, 6, 5


class Memory:
    """Both pools, the rows, and one number in each slot; a dict says what is right.

    Attributes:
      tokens: row -> the numbers it should hold.
    """

    def __init__(self, num_blocks=30, host_blocks=20):
        self.pool = init_block_pool(num_blocks)
        self.space = init_swap_space(host_blocks)
        self.sequences = init_sequences(ROWS, WIDTH)
        self.device = np.zeros((num_blocks + 1, SIZE), int)
        self.host = np.zeros((host_blocks + 1, SIZE), int)
        self.tokens, self.next = {}, 1

    def write(self, row, count):
        """Notes `count` new numbers at the end of a row; its blocks are there."""
        table = np.asarray(self.sequences.block_table)[row]
        ref_count = np.asarray(self.pool.ref_count)
        for _ in range(count):
            position = len(self.tokens.setdefault(row, []))
            block = table[position // SIZE]
            assert ref_count[block] == 1, "a shared block is written"
            self.device[block, position % SIZE] = self.next
            self.tokens[row].append(self.next)
            self.next += 1

    def allocate(self, row, count):
        self.pool, self.sequences, status = allocate(
            self.pool, self.sequences, row, count, block_size=SIZE
        )
        if status == Status.OK:
            self.write(row, count)
        return Status(int(status))

    def append(self, *rows):
        self.pool, self.sequences, copies, status = append(
            self.pool, self.sequences, mask(*rows), block_size=SIZE
        )
        source, target, count = jax.device_get(copies)
        for i in range(count):
            self.device[target[i]] = self.device[source[i]]
        if status == Status.OK:
            for row in sorted(rows):
                self.write(row, 1)
        return Status(int(status))

    def share(self, source, target, count=None):
        if count is None:
            result = fork(self.pool, self.sequences, source, target, block_size=SIZE)
        else:
            result = share_prefix(
                self.pool, self.sequences, source, target, count, block_size=SIZE
            )
        self.pool, self.sequences, status = result
        if status == Status.OK:
            self.tokens[target] = self.tokens[source][:count]
        return Status(int(status))

    def release(self, row):
        if row in self.swapped():
            self.space, self.sequences = release_host_rows(
                self.space, self.sequences, mask(row), 0
            )
        else:
            self.pool, self.sequences, status = release(self.pool, self.sequences, row)
            assert status == Status.OK
        del self.tokens[row]

    def swap_out(self, *rows):
        self.pool, self.space, self.sequences, status = swap_out(
            self.pool, self.space, self.sequences, mask(*rows), block_size=SIZE
        )
        return self.moved(status)

    def swap_in(self, *rows, need=0):
        self.pool, self.space, self.sequences, status = swap_in(
            self.pool, self.space, self.sequences, mask(*rows), jnp.full(ROWS, need)
        )
        return self.moved(status)

    def moved(self, status):
        """Makes the moves; returns the status and how many there were, in and out."""
        ins, outs = jax.device_get((self.space.ins, self.space.outs))
        for i in range(ins.count):
            self.device[ins.target[i]] = self.host[ins.source[i]]
        for i in range(outs.count):
            self.host[outs.target[i]] = self.device[outs.source[i]]
        self.space = forget_moves(self.space)
        return Status(int(status)), int(ins.count), int(outs.count)

    def swapped(self):
        status = self.sequences.status.tolist()
        return [r for r in range(ROWS) if status[r] == SequenceStatus.SWAPPED]

    def table(self, row):
        rows = jax.device_get(self.sequences)
        return rows.block_table[row, : rows.num_blocks[row]].tolist()

    def check(self):
        """Each row holds its numbers, and all blocks are accounted for."""
        named = {"device": [], "host": []}
        rows, pools = jax.device_get((self.sequences, (self.pool, self.space.pool)))
        swapped = self.swapped()
        for row in range(ROWS):
            place = "host" if row in swapped else "device"
            table = self.table(row)
            named[place] += table
            slots = getattr(self, place)[table].ravel().tolist()
            tokens = self.tokens.get(row, [])
            assert slots[: len(tokens)] == tokens
            assert rows.length[row] == len(tokens)
            assert not rows.block_table[row, len(table) :].any()
        for place, pool in zip(("device", "host"), pools, strict=True):
            blocks = np.bincount(named[place], minlength=pool.num_blocks + 1)
            np.testing.assert_array_equal(pool.ref_count, blocks)
            free = pool.free_stack[: int(pool.num_free)].tolist()
            assert sorted([*free, *set(named[place])]) == [
                *range(1, pool.num_blocks + 1)
            ]


def mask(*rows):
    return jnp.isin(jnp.arange(ROWS), jnp.array(rows, int))


OK = Status.OK


def test_a_sequence_goes_to_the_host_and_comes_back():
    memory = Memory()
    memory.allocate(0, 10)
    memory.allocate(1, 3)
    assert memory.swap_out(0) == (OK, 0, 3)
    assert memory.table(0) == [1, 2, 3] and memory.pool.num_free == 29
    memory.check()
    memory.allocate(2, 12)  # takes the blocks it had
    memory.check()
    assert memory.swap_in(0) == (OK, 3, 0)
    assert memory.space.pool.num_free == 20
    memory.check()
    assert memory.append(0) == OK
    memory.check()


def test_a_shared_block_is_moved_once_and_stays_shared():
    memory = Memory()
    memory.allocate(0, 10)
    memory.share(0, 1)
    memory.share(0, 2)
    memory.append(1)  # copies the last block of three: the other two share it still
    assert memory.swap_out(0, 1, 2) == (OK, 0, 4)
    assert memory.pool.num_free == 30
    assert memory.space.pool.ref_count[np.array(memory.table(0))].tolist() == [3, 3, 2]
    assert memory.swap_in(0, 1, 2) == (OK, 4, 0)
    assert memory.pool.ref_count[np.array(memory.table(0))].tolist() == [3, 3, 2]
    memory.check()
    memory.append(0, 1, 2)
    memory.check()


def test_blocks_that_others_name_stay_where_they_are():
    memory = Memory()
    memory.allocate(0, 8)
    memory.share(0, 1, 6)
    assert memory.swap_out(1) == (OK, 0, 2)
    assert memory.pool.ref_count[np.array(memory.table(0))].tolist() == [1, 1]
    memory.append(0)
    memory.check()
    assert memory.swap_in(1) == (OK, 2, 0)
    assert not set(memory.table(0)) & set(memory.table(1))
    memory.check()


def test_only_blocks_with_tokens_are_moved():
    memory = Memory()
    memory.allocate(0, 8)
    memory.swap_out(0)
    assert memory.swap_in(0, need=4) == (OK, 2, 0)
    assert len(memory.table(0)) == 4 and memory.pool.num_free == 26
    assert memory.swap_out(0) == (OK, 0, 2)
    assert len(memory.table(0)) == 2 and memory.pool.num_free == 30
    memory.check()


def test_all_or_nothing():
    memory = Memory(num_blocks=8, host_blocks=4)
    memory.allocate(0, 12)
    memory.allocate(1, 8)
    nothing = (Status.OUT_OF_BLOCKS, 0, 0)
    assert memory.swap_out(0, 1) == nothing
    assert memory.swapped() == [] and memory.space.pool.num_free == 4
    memory.release(1)
    memory.share(0, 1)
    assert memory.swap_out(0, 1) == (OK, 0, 3)  # shared ones count once
    memory.allocate(2, 20)
    memory.allocate(3, 4)
    assert memory.swap_in(0, 1) == nothing
    assert memory.swapped() == [0, 1]
    memory.release(3)
    assert memory.swap_in(0, 1, need=4) == nothing
    assert memory.swap_in(0, 1, need=WIDTH + 1) == (Status.TABLE_OVERFLOW, 0, 0)
    assert memory.swap_in(0, 1) == (OK, 3, 0)
    memory.check()


def test_what_is_not_where_it_should_be_is_refused():
    memory = Memory()
    memory.allocate(0, 8)
    gone = (Status.NOT_LIVE, 0, 0)
    assert memory.swap_in(0) == gone
    assert memory.swap_out(0, 1) == gone  # row 1 is empty
    assert memory.swap_out(0) == (OK, 0, 2)
    assert memory.swap_out(0) == gone
    assert memory.append(0) == Status.NOT_LIVE
    assert memory.share(0, 1) == Status.NOT_LIVE
    assert memory.allocate(0, 3) == Status.ROW_IN_USE
    *_, status = release(memory.pool, memory.sequences, 0)
    assert status == Status.NOT_LIVE
    memory.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_lose_nothing(seed):
    rng = random.Random(seed)
    memory = Memory(num_blocks=16, host_blocks=10)
    done = {name: 0 for name in ("out", "in", "freed on the host", "shared out")}
    for _ in range(150):
        live = [r for r in memory.tokens if r not in memory.swapped()]
        empty = [r for r in range(ROWS) if r not in memory.tokens]
        some = [r for r in live if rng.random() < 0.6]
        kind = rng.choice(["allocate", "append", "append", "share", "out", "in", "end"])
        if kind == "allocate" and empty:
            memory.allocate(rng.choice(empty), rng.randint(1, 12))
        elif kind == "append" and some:
            memory.append(*some)
        elif kind == "share" and live and empty:
            source = rng.choice(live)
            count = rng.randint(1, len(memory.tokens[source]))
            memory.share(source, rng.choice(empty), rng.choice([None, count]))
        elif kind == "out" and some:
            entries = sum(-(-len(memory.tokens[r]) // SIZE) for r in some)
            status, _, moves = memory.swap_out(*some)
            done["out"] += status == OK
            done["shared out"] += 0 < moves < entries
        elif kind == "in" and memory.swapped():
            some = [r for r in memory.swapped() if rng.random() < 0.7]
            done["in"] += memory.swap_in(*some, need=rng.randint(0, 5))[1] > 0
        elif kind == "end" and memory.tokens:
            row = rng.choice([*memory.tokens])
            done["freed on the host"] += row in memory.swapped()
            memory.release(row)
        memory.check()
    assert all(done.values()), f"rare in this draw: {done}"


@pytest.mark.parametrize("way", ["in", "out"])
def test_moves_happen_in_place(way):
    def move(cache, host, source, target, count):
        if way == "in":
            return move_blocks(host, cache, source, target, count)[0], host
        return cache, move_blocks(cache, host, source, target, count)[0]

    small = init_kv_cache(2, 6, SIZE, 2, 8, jnp.float32)
    large = init_kv_cache(2, 9, SIZE, 2, 8, jnp.float32)
    blocks = jnp.array([5, 1, 2])
    program = jax.jit(move, donate_argnums=(0, 1)).lower(
        large, small, blocks, blocks + 1, 2
    )
    program = program.compile()
    for cache in (large, small):
        shape = ",".join(map(str, cache.k.shape))
        assert operations_on(program.as_text(), shape) <= IN_PLACE
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == small.nbytes + large.nbytes
    assert memory.temp_size_in_bytes <= small.block_nbytes + 1024

    rng = np.random.default_rng(0)
    filled = [
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache)
        for cache in (large, small)
    ]
    before = [(np.array(c.k), np.array(c.v)) for c in filled]
    after = program(*filled, blocks, blocks + 1, 2)
    origin, goal = (1, 0) if way == "in" else (0, 1)
    for i, name in enumerate("kv"):
        expected = before[goal][i].copy()
        expected[:, [6, 2]] = before[origin][i][:, [5, 1]]
        np.testing.assert_array_equal(getattr(after[goal], name), expected)
        np.testing.assert_array_equal(getattr(after[origin], name), before[origin][i])
