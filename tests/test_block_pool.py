"""The free list and the reference counts, and what they cost."""

import json
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_text import IN_PLACE, operations_on

from paged_jax import block_tables
from paged_jax.block_pool import drop, hold, init_block_pool, take
from paged_jax.sequences import init_sequences

ROOT = Path(__file__).parents[1]


def everywhere(*blocks):
    return jnp.array(blocks), jnp.ones(len(blocks), bool)


def grant(pool, count):
    return take(pool, jnp.ones(count, bool))


def free_list(pool):
    return pool.free_stack[: pool.num_free].tolist()


def test_a_new_pool_is_all_free_but_for_the_null_block():
    pool = init_block_pool(5)
    assert pool.num_blocks == 5
    assert free_list(pool) == [5, 4, 3, 2, 1]
    assert pool.ref_count.tolist() == [0] * 6


@pytest.mark.parametrize(
    "wanted, granted",
    [
        ([], []),
        ([0, 0], [0, 0]),
        ([1, 1, 1], [1, 2, 3]),
        ([0, 1, 0, 0, 1, 1], [0, 1, 0, 0, 2, 3]),
        ([1] * 5, [1, 2, 3, 4, 5]),
    ],
)
def test_take_serves_the_places_that_want_a_block_in_order(wanted, granted):
    pool, blocks = take(init_block_pool(5), jnp.array(wanted + [0], bool))
    assert blocks.tolist() == [*granted, 0]
    assert pool.num_free == 5 - sum(wanted)
    taken = [block for block in granted if block]
    assert np.flatnonzero(pool.ref_count).tolist() == taken
    assert pool.ref_count.max() <= 1


def test_the_block_freed_last_is_granted_first():
    pool, _ = grant(init_block_pool(6), 5)
    pool = drop(pool, *everywhere(2, 5, 3))
    assert free_list(pool) == [6, 2, 5, 3]
    _, blocks = grant(pool, 4)
    assert blocks.tolist() == [3, 5, 2, 6]


def test_a_block_is_freed_by_the_last_of_its_users():
    pool, _ = grant(init_block_pool(4), 2)
    pool = hold(pool, jnp.array([1, 2, 1]), jnp.array([True, False, True]))
    assert pool.ref_count.tolist() == [0, 3, 1, 0, 0]
    for users in (2, 1):
        pool = drop(pool, *everywhere(1))
        assert pool.ref_count[1] == users and pool.num_free == 2
    pool = drop(pool, *everywhere(1, 2))
    assert pool.ref_count.tolist() == [0] * 5
    assert free_list(pool) == [4, 3, 1, 2]


def test_a_pool_can_be_emptied_and_filled_again():
    full = init_block_pool(7)
    empty, blocks = grant(full, 7)
    assert empty.num_free == 0
    again = drop(empty, blocks[::-1], jnp.ones(7, bool))
    chex.assert_trees_all_equal(again, full)


def test_masked_places_change_nothing_bit_for_bit():
    pool, _ = grant(init_block_pool(6), 4)
    pool = hold(pool, *everywhere(1, 2))
    pool = drop(pool, *everywhere(1, 2, 3))  # 1 and 2 stay in use: masked pushes
    nobody = jnp.zeros(3, bool)
    chex.assert_trees_all_equal(drop(pool, jnp.array([1, 2, 4]), nobody), pool)
    chex.assert_trees_all_equal(hold(pool, jnp.array([1, 2, 4]), nobody), pool)
    chex.assert_trees_all_equal(take(pool, nobody)[0], pool)


def operations(num_blocks):
    pool, sequences = init_block_pool(num_blocks), init_sequences(16, 8)
    blocks, mask = jnp.zeros(64, jnp.int32), jnp.zeros(64, bool)
    row = jnp.int32(0)
    return {
        "take": (take, (pool,), mask),
        "hold": (hold, (pool,), blocks, mask),
        "drop": (drop, (pool,), blocks, mask),
        "allocate": (block_tables.allocate, (pool, sequences), row, row),
        "append": (block_tables.append, (pool, sequences), mask[:16]),
        "fork": (block_tables.fork, (pool, sequences), row, row),
        "share_prefix": (block_tables.share_prefix, (pool, sequences), row, row, row),
        "copy_on_write": (block_tables.copy_on_write, (pool, sequences), row, row),
        "release": (block_tables.release, (pool, sequences), row),
    }


SIZED = {"allocate", "append", "fork", "share_prefix"}  # they take the block size


@pytest.mark.parametrize("name", operations(1))
def test_the_work_follows_the_blocks_touched_and_not_the_pool(name):
    temporaries = []
    for num_blocks in (1236, 123456):
        function, state, *arguments = operations(num_blocks)[name]

        def step(state, *arguments, function=function):
            sized = {"block_size": 16} if name in SIZED else {}
            return function(*state, *arguments, **sized)

        program = jax.jit(step, donate_argnums=0).lower(state, *arguments).compile()
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == sum(
            leaf.nbytes for leaf in jax.tree.leaves(state)
        )
        sized_ops = operations_on(program.as_text(), f"{num_blocks + 1}")
        assert sized_ops <= IN_PLACE
        assert "parameter" in sized_ops  # the text was understood
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1] < 4096


def test_the_text_of_a_program_that_copies_is_told_apart():
    def twice(pool):
        return pool, drop(pool, *everywhere(1))

    program = jax.jit(twice).lower(init_block_pool(1236)).compile()
    assert "copy" in operations_on(program.as_text(), "1237")


def test_the_benchmark_runs():
    command = [sys.executable, ROOT / "scripts/bench_allocator", "--json"]
    sizes = ["--blocks", "1000", "20000", "--iterations", "20", "--repeats", "3"]
    done = subprocess.run(
        [*command, *sizes], capture_output=True, text=True, timeout=120, check=True
    )
    result = json.loads(done.stdout)
    assert [row["num_blocks"] for row in result["rows"]] == [1000, 20000]
    for key, ratio in (
        ("us_per_iteration", "ratio"),
        ("us_fastest", "ratio_fastest"),
    ):
        first, last = (row[key] for row in result["rows"])
        assert first > 0 and result[ratio] == pytest.approx(last / first)
