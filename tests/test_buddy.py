"""The buddy allocator against its plain-Python oracle, and its cost."""

import copy
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from oracles.buddy import BuddyOracle

from paged_jax import buddy
from paged_jax.buddy import BuddyPool, init_buddy, order_of
from paged_jax.compat import COMPILER_OPTIONS

allocate = jax.jit(buddy.allocate)
release = jax.jit(buddy.release)
can_allocate = jax.jit(buddy.can_allocate)
can_allocate_all = jax.jit(buddy.can_allocate_all)

# Blocks of the pool, blocks of a full-length request. With and without a remainder; one
# order only; a pool that is smaller than its largest chunk.
POOLS = [(1, 1), (7, 1), (16, 4), (23, 8), (87, 13), (50, 64)]
NUM_OPERATIONS = 96


def decode(pool: BuddyPool) -> tuple[list[list[int]], dict[int, int]]:
    """Returns the state in the oracle's terms; checks that the links agree."""
    following, previous, chunk = (
        np.asarray(x).tolist() for x in (pool.next, pool.previous, pool.chunk)
    )
    free: list[list[int]] = []
    for order in range(len(following) - len(chunk)):
        mark = node = len(chunk) + order
        free.append([])
        while (after := following[node]) != mark:
            assert previous[after] == node
            assert chunk[after] == order + 1
            free[order].append(after)
            node = after
        assert previous[mark] == node
        free[order].reverse()
    assert following[0] == previous[0] == chunk[0] == 0
    assert sum(c > 0 for c in chunk) == sum(map(len, free))
    return free, {block: -c - 1 for block, c in enumerate(chunk) if c < 0}


def check_invariants(free, allocated, num_free: int, num_blocks: int) -> None:
    """Free and allocated chunks tile the pool, and no two free chunks are buddies."""
    chunks = [(start, order) for order, starts in enumerate(free) for start in starts]
    assert sum(2**order for _, order in chunks) == num_free
    for start, order in chunks:
        buddy = 1 + ((start - 1) ^ 2**order)
        assert order == len(free) - 1 or buddy not in free[order]
    end = 1
    for start, order in sorted([*chunks, *allocated.items()]):
        assert start == end
        assert (start - 1) % 2**order == 0
        end = start + 2**order
    assert end == num_blocks + 1


@functools.partial(jax.jit, donate_argnums=0, compiler_options=COMPILER_OPTIONS)
def run_operations(pool, operations):
    """Runs (is_allocate, start, order, valid), [N] each; returns all that happened."""

    def body(pool, operation):
        is_allocate, start, order, valid = operation
        fits = buddy.can_allocate(pool, order)
        pool, taken, allocated = buddy.allocate(pool, order, valid & is_allocate)
        pool, released = buddy.release(pool, start, order, valid & ~is_allocate)
        return pool, (pool, fits, taken, allocated, released)

    return lax.scan(body, pool, operations)


def operations_of(data: bytes, oracle: BuddyOracle):
    """Decodes two bytes into an operation each, and yields it with its true result.

    Zero bytes are masked operations: a failing example shrinks to few real ones.
    """
    orders = len(oracle.free)
    for kind, value in zip(data[::2], data[1::2], strict=True):
        is_allocate, start, order, valid = True, 0, value % orders, True
        live = sorted(oracle.allocated.items())
        if kind % 8 == 0:  # masked: a release, or an allocation
            valid, is_allocate = False, value % 2 == 0
            start, order = live[value % len(live)] if live else (1, order)
        elif kind % 8 <= 3:  # allocate
            pass
        elif kind % 8 <= 5 and live:  # release a chunk
            is_allocate, (start, order) = False, live[value % len(live)]
        elif kind % 8 == 6:  # an order that may not exist
            order = value % (orders + 2) - 1
        else:  # release something, likely not a chunk, or not of that order
            is_allocate, start = False, value % (oracle.num_blocks + 4) - 1
            order = kind // 8 % (orders + 2) - 1
        fits, taken, released = oracle.can_allocate(order), 0, False
        if valid and is_allocate:
            taken = oracle.allocate(order)
        elif valid:
            released = oracle.release(start, order)
        snapshot = [list(starts) for starts in oracle.free], dict(oracle.allocated)
        yield (is_allocate, start, order, valid), (fits, taken, released), snapshot


@pytest.mark.parametrize(("num_blocks", "max_blocks"), POOLS)
def test_same_as_oracle_after_every_operation(num_blocks, max_blocks):
    size = 2 * NUM_OPERATIONS

    @settings(max_examples=400, deadline=None)
    @given(st.binary(min_size=size, max_size=size))
    def check(data):
        oracle = BuddyOracle(num_blocks, max_blocks)
        operations, expected, snapshots = zip(*operations_of(data, oracle), strict=True)
        is_allocate, start, order, valid = np.array(operations, np.int32).T
        _, history = run_operations(
            init_buddy(num_blocks, max_blocks),
            (is_allocate == 1, start, order, valid == 1),
        )
        pools, fits, taken, allocated, released = jax.device_get(history)
        results = zip(fits.tolist(), taken.tolist(), released.tolist(), strict=True)
        assert list(results) == list(expected)
        assert allocated.tolist() == (taken > 0).tolist()
        for i, snapshot in enumerate(snapshots):
            pool = BuddyPool(
                pools.next[i], pools.previous[i], pools.chunk[i], pools.num_free[i]
            )
            assert decode(pool) == snapshot
            check_invariants(*snapshot, pool.num_free, num_blocks)

    check()


def test_paper_pool_starts_as_seven_chunks_and_a_remainder():
    free, allocated = decode(init_buddy(983, 128))
    assert {2**order: len(starts) for order, starts in enumerate(free) if starts} == {
        128: 7,
        64: 1,
        16: 1,
        4: 1,
        2: 1,
        1: 1,
    }
    assert not allocated


@pytest.mark.parametrize(("num_blocks", "requests"), [(1000, 7), (983, 7), (1024, 8)])
def test_full_length_requests_that_fit(num_blocks, requests):
    pool = init_buddy(num_blocks, 128)
    order = order_of(128)
    starts = []
    while can_allocate(pool, order):
        pool, start, ok = allocate(pool, order)
        assert ok
        starts.append(int(start))
    assert starts == [1 + 128 * i for i in range(requests)]
    assert pool.num_free == num_blocks - 128 * requests


def test_split_keeps_lower_half_and_merge_restores_it():
    pool = init_buddy(8, 8)
    pool, first, _ = allocate(pool, 0)
    assert decode(pool) == ([[2], [3], [5], []], {1: 0})
    pool, second, _ = allocate(pool, 1)
    assert (first, second) == (1, 3)
    assert decode(pool) == ([[2], [], [5], []], {1: 0, 3: 1})
    pool, ok = release(pool, 1, 0)
    assert ok
    assert decode(pool) == ([[], [1], [5], []], {3: 1})
    pool, ok = release(pool, 3, 1)
    assert ok
    assert decode(pool) == ([[], [], [], [1]], {})


def test_last_freed_chunk_of_smallest_order_is_taken():
    pool = init_buddy(8, 2)
    starts = []
    for _ in range(4):
        pool, start, _ = allocate(pool, 1)
        starts.append(start)
    for i in (2, 0, 3):
        pool, _ = release(pool, starts[i], 1)
    assert decode(pool)[0] == [[], [5, 1, 7]]
    pool, start, _ = allocate(pool, 0)
    assert start == 7
    pool, start, _ = allocate(pool, 1)
    assert start == 1


def test_buddy_that_leaves_from_the_middle_keeps_the_order_of_the_others():
    pool = init_buddy(8, 2)
    for _ in range(8):
        pool, _, _ = allocate(pool, 0)
    for start in (1, 3, 5, 7):
        pool, _ = release(pool, start, 0)
    pool, _ = release(pool, 4, 0)
    assert decode(pool)[0] == [[1, 5, 7], [3]]


def test_chunks_of_the_remainder_do_not_merge_past_the_end():
    pool = init_buddy(7, 4)
    pool, start, _ = allocate(pool, 1)
    assert start == 5
    pool, ok = release(pool, start, 1)
    assert ok
    assert decode(pool)[0] == [[7], [5], [1]]


@pytest.mark.parametrize(
    ("start", "order"),
    [
        (3, 2),
        (2, 1),
        (1, 1),
        (0, 0),
        (0, -1),
        (-1, 0),
        (8, 0),
        (99, 0),
        (1, -1),
        (1, 9),
    ],
    ids=str,
)
def test_release_of_what_is_not_allocated_changes_nothing(start, order):
    pool, _, _ = allocate(init_buddy(7, 4), 2)
    after, ok = release(pool, start, order)
    assert not ok
    chex.assert_trees_all_equal(after, pool)


def test_double_release_changes_nothing():
    pool, start, _ = allocate(init_buddy(7, 4), 1)
    pool, ok = release(pool, start, 1)
    assert ok
    after, ok = release(pool, start, 1)
    assert not ok
    chex.assert_trees_all_equal(after, pool)


@pytest.mark.parametrize("order", [-1, 3, 31, 32, 1000])
def test_allocate_of_an_order_that_does_not_exist_changes_nothing(order):
    pool = init_buddy(7, 4)
    assert not can_allocate(pool, order)
    after, start, ok = allocate(pool, order)
    assert (start, ok) == (0, False)
    chex.assert_trees_all_equal(after, pool)


def test_masked_operations_change_nothing():
    pool, start, _ = allocate(init_buddy(7, 4), 1)
    after, none, ok = allocate(pool, 0, valid=False)
    assert (none, ok) == (0, False)
    chex.assert_trees_all_equal(after, pool)
    after, ok = release(pool, start, 1, valid=False)
    assert not ok
    chex.assert_trees_all_equal(after, pool)


def test_order_of():
    blocks = [0, 1, 2, 3, 4, 5, 8, 9, 127, 128, 129, 2**30, 2**30 + 1]
    assert order_of(jnp.array(blocks)).tolist() == [
        *(0, 0, 1, 2, 2, 3, 3, 4, 7, 7, 8, 30, 31),
    ]
    assert order_of(128) == 7


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_empty_pool_is_refused(sizes):
    with pytest.raises(ValueError, match=rf"num_blocks={sizes[0]}.*at least 1"):
        init_buddy(*sizes)


def test_state_is_few_leaves():
    chex.assert_trees_all_equal_dtypes(init_buddy(7, 4), BuddyPool(*[jnp.int32(0)] * 4))


@functools.partial(jax.jit, donate_argnums=0, compiler_options=COMPILER_OPTIONS)
def replace_chunks(pool, held, orders):
    """Releases the chunks of a ring, oldest first, for new ones; uses all results."""

    def body(carry):
        i, pool, held, failed = carry
        start, order = held[i % held.shape[0]]
        pool, released = buddy.release(pool, start, order, order >= 0)
        pool, start, ok = buddy.allocate(pool, orders[i])
        held = held.at[i % held.shape[0]].set(jnp.stack([start, orders[i]]))
        return i + 1, pool, held, failed + ~ok + ~released

    carry = jnp.int32(0), pool, held, jnp.int32(0)
    return lax.while_loop(lambda carry: carry[0] < orders.shape[0], body, carry)


def compile_replace_chunks(num_blocks):
    pool = init_buddy(num_blocks, 128)
    arguments = pool, jnp.full((32, 2), -1), jnp.arange(64) % 5
    return pool, replace_chunks.lower(*arguments).compile()


def test_no_operation_has_a_pool_sized_result_but_the_state():
    pool, compiled = compile_replace_chunks(5003)
    sizes = f"{pool.chunk.size}|{pool.next.size}"
    found = re.findall(rf"= s32\[(?:{sizes})[^ ]* ([\w-]+)\(", compiled.as_text())
    in_place = {"scatter", "dynamic-update-slice"}
    assert in_place & set(found)
    assert set(found) <= in_place | {"parameter", "get-tuple-element", "fusion"}


def test_temporaries_do_not_grow_with_the_pool():
    _, small = compile_replace_chunks(1000)
    pool, large = compile_replace_chunks(100_000)
    small, large_memory = small.memory_analysis(), large.memory_analysis()
    assert large_memory.temp_size_in_bytes == small.temp_size_in_bytes
    assert large_memory.alias_size_in_bytes >= sum(
        x.nbytes for x in jax.tree.leaves(pool)
    )


@pytest.mark.parametrize(("num_blocks", "longest"), POOLS)
def test_several_chunks_can_be_had_if_taking_them_one_by_one_works(num_blocks, longest):
    rng = np.random.default_rng(num_blocks)
    pool, oracle = init_buddy(num_blocks, longest), BuddyOracle(num_blocks, longest)
    orders = len(oracle.free)
    for _ in range(12):
        order = int(rng.integers(0, orders))
        if rng.random() < 0.6:
            pool, _, _ = allocate(pool, order)
            oracle.allocate(order)
        elif oracle.allocated:
            chunks = list(oracle.allocated.items())
            start, order = chunks[rng.integers(len(chunks))]
            pool, _ = release(pool, start, order)
            oracle.release(start, order)
        for order in range(orders + 1):
            trial = copy.deepcopy(oracle)
            most = sum(
                order < orders and trial.allocate(order) > 0 for _ in range(num_blocks)
            )
            assert bool(can_allocate_all(pool, order, most))
            assert not bool(can_allocate_all(pool, order, most + 1))
