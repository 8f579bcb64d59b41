"""Each invariant is broken once: the checks have to notice, and the plain ones too."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from oracles.invariants import broken_blocks, broken_groups, broken_swap

from paged_jax.block_pool import hold, init_block_pool, take
from paged_jax.block_tables import allocate, fork
from paged_jax.config import EngineConfig
from paged_jax.invariants import (
    assert_blocks,
    assert_groups,
    assert_swap,
    check_blocks,
    check_groups,
    check_swap,
    writes_are_private,
)
from paged_jax.memory_managers import MANAGERS
from paged_jax.requests import RequestStatus, push_back
from paged_jax.sequences import SequenceStatus, init_sequences
from paged_jax.submit import init_scheduler

BLOCK_SIZE = 4


@pytest.fixture
def state():
    """Row 0 has blocks 1 and 2; row 1 has block 3; row 2 shares it."""
    pool, sequences = init_block_pool(8), init_sequences(4, 3)
    for row, num_tokens in ((0, 6), (1, 3)):
        pool, sequences, _ = allocate(
            pool, sequences, row, num_tokens, block_size=BLOCK_SIZE
        )
    pool, sequences, _ = fork(pool, sequences, 1, 2, block_size=BLOCK_SIZE)
    return pool, sequences


def test_a_sound_state_passes(state):
    assert all(check_blocks(*state).values())
    assert all(check_blocks(init_block_pool(1), init_sequences(1, 1)).values())
    assert broken_blocks(*jax.device_get(state)) == set()


def ref_count(at, value):
    return lambda pool, sequences: (
        dataclasses.replace(pool, ref_count=pool.ref_count.at[at].set(value)),
        sequences,
    )


def free_stack(at, value):
    return lambda pool, sequences: (
        dataclasses.replace(pool, free_stack=pool.free_stack.at[at].set(value)),
        sequences,
    )


def num_free(value):
    return lambda pool, sequences: (
        dataclasses.replace(pool, num_free=jnp.int32(value)),
        sequences,
    )


def rows(field, at, value):
    def change(pool, sequences):
        values = getattr(sequences, field).at[at].set(value)
        return pool, dataclasses.replace(sequences, **{field: values})

    return change


BROKEN = [
    ("a block is lost", num_free(4), {"blocks_accounted"}),
    (
        "a used block is free too",
        num_free(6),
        {"blocks_accounted", "free_blocks_unreferenced"},
    ),
    ("a free block is listed twice", free_stack(0, 7), {"free_blocks_distinct"}),
    ("the null block is free", free_stack(0, 0), {"free_blocks_distinct"}),
    ("no such block", free_stack(0, 9), {"free_blocks_distinct"}),
    ("a count too high", ref_count(1, 2), {"ref_counts_match"}),
    ("a count too low", ref_count(3, 1), {"ref_counts_match"}),
    (
        "the null block is counted",
        ref_count(0, 1),
        {"blocks_accounted", "ref_counts_match"},
    ),
    ("an entry past the end", rows("block_table", (0, 2), 4), {"tables_well_formed"}),
    (
        "the null block in use",
        rows("block_table", (0, 1), 0),
        {"tables_well_formed", "ref_counts_match"},
    ),
    (
        "a block twice in a table",
        rows("block_table", (0, 1), 1),
        {"tables_well_formed", "ref_counts_match"},
    ),
    ("an empty row has blocks", rows("status", 0, 0), {"empty_rows_hold_nothing"}),
    ("an empty row has tokens", rows("length", 3, 1), {"empty_rows_hold_nothing"}),
]


@pytest.mark.parametrize(
    "change, broken", [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_broken_state(state, change, broken):
    checks = check_blocks(*change(*state))
    assert {name for name, holds in checks.items() if not holds} == broken
    assert broken_blocks(*jax.device_get(change(*state))) == broken


def test_writes_to_shared_blocks_are_seen(state):
    pool, _ = state
    private, shared, free = 1 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2, 5 * BLOCK_SIZE
    for slots, expected in (
        ([private, 0], True),
        ([0, 0], True),
        ([private, shared], False),
        ([free], False),
    ):
        assert writes_are_private(pool, jnp.array(slots), BLOCK_SIZE) == expected


def test_assert_blocks_under_checkify(state):
    checked = jax.jit(checkify.checkify(assert_blocks))
    error, _ = checked(*state)
    assert error.get() is None
    error, _ = checked(*num_free(4)(*state))
    with pytest.raises(checkify.JaxRuntimeError, match="blocks_accounted.*num_free 4"):
        error.throw()


# ------------------------------------------------------------------ groups


def scheduler_state(max_n=3, **changes):
    config = EngineConfig(
        max_seqs=4, max_requests=6, max_prefixes=0, max_n=max_n, **changes
    )
    return init_scheduler(config.step_config(), MANAGERS["paged"], False)


@pytest.fixture
def groups():
    """Slots 0 to 2 run: row 0 computes the prompt, of 5. Slots 3 and 4 wait."""
    state = scheduler_state()
    unforked = SequenceStatus.UNFORKED
    sequences = dataclasses.replace(
        state.sequences,
        request=jnp.array([0, 1, 2, 6]),
        status=jnp.array([SequenceStatus.RUNNING, unforked, unforked, 0]),
        num_blocks=jnp.array([1, 0, 0, 0]),
        length=jnp.array([4, 0, 0, 0]),
    )
    run, wait = RequestStatus.RUNNING, RequestStatus.WAITING
    requests = dataclasses.replace(
        state.requests,
        group=jnp.array([0, 0, 0, 3, 3, 5, 6]),
        status=jnp.array([run, run, run, wait, wait, 0, 0]),
        prompt_len=jnp.full(7, 5),
    )
    queue = push_back(state.queue, jnp.array([3]), jnp.int32(1))
    return dataclasses.replace(
        state, sequences=sequences, requests=requests, queue=queue
    )


def changed(part, field, at, value):
    def change(state):
        old = getattr(state, part)
        values = getattr(old, field).at[at].set(value)
        return dataclasses.replace(
            state, **{part: dataclasses.replace(old, **{field: values})}
        )

    return change


BROKEN_GROUPS = {
    "unforked_rows_hold_nothing": changed("sequences", "num_blocks", 1, 1),
    "unforked_rows_have_a_carrier": changed("sequences", "status", 0, 2),
    "carriers_stay_in_the_prompt": changed("sequences", "length", 0, 6),
    "groups_are_whole": changed("requests", "status", 4, RequestStatus.RUNNING),
    "queue_names_what_waits": changed("queue", "slots", 0, 5),
}


def test_sound_groups_pass(groups):
    assert all(check_groups(groups).values())
    assert check_groups(scheduler_state(max_n=1)) == {}
    assert set(check_groups(groups)) == set(BROKEN_GROUPS)
    assert broken_groups(jax.device_get(groups)) == set()


@pytest.mark.parametrize("name", BROKEN_GROUPS)
def test_a_broken_group_is_noticed(groups, name):
    state = BROKEN_GROUPS[name](groups)
    holds = check_groups(state)
    assert [name for name, value in holds.items() if not value] == [name]
    assert broken_groups(jax.device_get(state)) == {name}
    error, _ = jax.jit(checkify.checkify(assert_groups))(state)
    with pytest.raises(checkify.JaxRuntimeError, match=f"{name}: it must hold that"):
        error.throw()


@pytest.fixture
def searches():
    """Two searches wait: slots 0 and 1 have the beams of one, 2 to 4 of the other."""
    state = scheduler_state(max_n=1, max_beam_width=3)
    wait = RequestStatus.WAITING
    requests = dataclasses.replace(
        state.requests,
        group=jnp.array([0, 0, 2, 2, 2, 5, 6]),
        status=jnp.array([wait] * 5 + [0, 0]),
        length=jnp.array([7, 7, 9, 9, 9, 1, 0]),
    )
    beams = dataclasses.replace(
        state.beams,
        width=jnp.array([2, 2, 3, 3, 3, 0, 0]),
        number=jnp.array([1, 0, 0, 1, 2, 0, 0]),
    )
    queue = push_back(state.queue, jnp.array([0, 2]), jnp.int32(2))
    return dataclasses.replace(state, requests=requests, beams=beams, queue=queue)


BROKEN_SEARCHES = {
    "two beams of one number": (
        changed("beams", "number", 0, 0),
        "beams_are_all_there",
    ),
    "a beam that has left": (
        changed("requests", "status", 3, RequestStatus.ABORTED),
        "beams_are_all_there",
    ),
    "a beam that is ahead": (changed("requests", "length", 2, 10), "beams_are_in_step"),
}


def test_sound_searches_pass(searches):
    assert all(check_groups(searches).values())
    assert broken_groups(jax.device_get(searches)) == set()


@pytest.mark.parametrize("case", BROKEN_SEARCHES)
def test_a_broken_search_is_noticed(searches, case):
    change, broken = BROKEN_SEARCHES[case]
    holds = check_groups(change(searches))
    assert [name for name, value in holds.items() if not value] == [broken]
    assert broken_groups(jax.device_get(change(searches))) == {broken}
    error, _ = jax.jit(checkify.checkify(assert_groups))(change(searches))
    with pytest.raises(checkify.JaxRuntimeError, match=f"{broken}: it must hold that"):
        error.throw()


# ------------------------------------------------------------------ swap


@pytest.fixture
def swapped():
    """Slots 0 and 1 are swapped out and share a block of the host; slot 2 runs."""
    state = scheduler_state()
    out = SequenceStatus.SWAPPED
    table = jnp.zeros_like(state.sequences.block_table)
    sequences = dataclasses.replace(
        state.sequences,
        request=jnp.array([0, 1, 2, 6]),
        status=jnp.array([out, out, SequenceStatus.RUNNING, 0]),
        num_blocks=jnp.array([2, 2, 1, 0]),
        length=jnp.array([20, 20, 3, 0]),
        block_table=table.at[:3, :2].set(jnp.array([[1, 2], [1, 3], [1, 0]])),
    )
    run = RequestStatus.RUNNING
    requests = dataclasses.replace(
        state.requests,
        group=jnp.array([0, 0, 2, 3, 4, 5, 6]),
        status=jnp.array([run, run, run, 0, 0, 0, 0]),
    )
    pool, _ = take(state.pool, jnp.array([True]))
    host, _ = take(state.swap.pool, jnp.ones(3, bool))
    host = hold(host, jnp.array([1]), jnp.array([True]))
    swap = dataclasses.replace(state.swap, pool=host)
    return dataclasses.replace(
        state, pool=pool, sequences=sequences, requests=requests, swap=swap
    )


def on_the_host(field, at, value):
    def change(state):
        pool = state.swap.pool
        values = getattr(pool, field)
        values = values + value if at is None else values.at[at].set(value)
        pool = dataclasses.replace(pool, **{field: values})
        return dataclasses.replace(
            state, swap=dataclasses.replace(state.swap, pool=pool)
        )

    return change


BROKEN_SWAP = {
    "host_blocks_accounted": on_the_host("num_free", None, -1),
    "host_ref_counts_match": on_the_host("ref_count", 1, 1),
    "host_free_blocks_distinct": on_the_host("free_stack", 1, 20),
    "host_free_blocks_unreferenced": on_the_host("free_stack", 1, 2),
    "host_tables_well_formed": changed("sequences", "block_table", (0, 5), 4),
    "swapped_requests_run": changed("requests", "status", 1, RequestStatus.WAITING),
    "swapped_whole": changed("requests", "group", 2, 0),
}


def test_what_is_swapped_out_passes(swapped):
    assert all(check_swap(swapped).values())
    assert all(check_blocks(swapped.pool, swapped.sequences).values())
    assert set(check_swap(swapped)) == set(BROKEN_SWAP)
    assert check_swap(scheduler_state(max_n=1)) == {}
    assert broken_swap(jax.device_get(swapped)) == set()


@pytest.mark.parametrize("name", BROKEN_SWAP)
def test_a_wrong_block_of_the_host_is_noticed(swapped, name):
    state = BROKEN_SWAP[name](swapped)
    holds = check_swap(state)
    assert [name for name, value in holds.items() if not value] == [name]
    assert broken_swap(jax.device_get(state)) == {name}
    error, _ = jax.jit(checkify.checkify(assert_swap))(state)
    with pytest.raises(checkify.JaxRuntimeError, match=f"{name}: it must hold that"):
        error.throw()
