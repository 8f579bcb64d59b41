"""What is always true of the block pool and the block tables: for tests and debugging.

The checks look at the whole pool, so they belong to no step that is to be fast.
"""

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from paged_jax import prefix_invariants
from paged_jax.beams import BeamState
from paged_jax.block_pool import BlockPool
from paged_jax.requests import RequestStatus
from paged_jax.sequences import Sequences, SequenceStatus, on_host
from paged_jax.state import SchedulerState
from paged_jax.swap import SwapSpace

_MEANING = {
    "blocks_accounted": "each block but the null block is free, referenced or idle",
    "ref_counts_match": "a block's ref_count is the number of table entries naming it",
    "free_blocks_distinct": "the free list names real blocks, none of them twice",
    "free_blocks_unreferenced": "no block of the free list is referenced",
    "tables_well_formed": "a row names real blocks, none twice, then the null block",
    "empty_rows_hold_nothing": "a row without a sequence has no blocks and no tokens",
    **prefix_invariants.MEANING,
}

_SWAP_MEANING = {
    "host_blocks_accounted": "each block of the host is free or referenced",
    "host_ref_counts_match": "a host block's ref_count is the number of entries of "
    "swapped-out tables naming it",
    "host_free_blocks_distinct": "the host's free list names real blocks, none twice",
    "host_free_blocks_unreferenced": "no block of the host's free list is referenced",
    "host_tables_well_formed": "a swapped-out row names real blocks of the host",
    "swapped_requests_run": "a request that is swapped out is neither queued nor ended",
    "swapped_whole": "no request has sequences that run and others swapped out",
}

_GROUP_MEANING = {
    "unforked_rows_hold_nothing": "a row that waits for a prompt has no blocks yet",
    "unforked_rows_have_a_carrier": "one running row of the group computes the prompt",
    "carriers_stay_in_the_prompt": "a prompt that others wait for has no tokens beyond",
    "groups_are_whole": "no group has members in the batch and others in the queue",
    "queue_names_what_waits": "the leaders in the queue are those of waiting members",
    "beams_are_all_there": "a search has each beam once, all waiting or running",
    "beams_are_in_step": "the beams of a search know equally many tokens",
}


def check_blocks(pool: BlockPool, sequences: Sequences) -> dict[str, jax.Array]:
    """Checks the block pool against the block tables.

    Args:
      pool: the block pool.
      sequences: the sequence rows; all references to blocks are in their tables.

    Returns:
      Name of each invariant -> bool[], whether it holds.
    """
    here = ~on_host(sequences)
    table = sequences.block_table
    named = jnp.arange(sequences.table_width) < sequences.num_blocks[:, None]
    named &= here[:, None]
    real = (table >= 1) & (table <= pool.num_blocks)
    column = jnp.sort(jnp.where(named, table, -1), axis=1)  # equal neighbours: twice
    twice = (column[:, 1:] == column[:, :-1]) & (column[:, 1:] >= 0)
    occupied = sequences.status != SequenceStatus.EMPTY
    nothing = (sequences.num_blocks == 0) & (sequences.length == 0)
    well_formed = jnp.where(named, real, table == 0) | ~here[:, None]
    return {
        **_check_pool(pool, table, named),
        "tables_well_formed": jnp.all(well_formed) & ~jnp.any(twice),
        "empty_rows_hold_nothing": jnp.all(occupied | nothing),
        **prefix_invariants.check_prefix_cache(pool),
    }


def _check_pool(
    pool: BlockPool, table: jax.Array, named: jax.Array
) -> dict[str, jax.Array]:
    """Checks a pool against the entries of block tables that name its blocks.

    Args:
      pool: a block pool.
      table: i32[S, T], block tables.
      named: bool[S, T], which entries name blocks of this pool.
    """
    num_blocks, num_free = pool.num_blocks, pool.num_free
    used = jnp.where(named, table, 0).ravel()
    names = jnp.zeros_like(pool.ref_count).at[used].add(named.ravel().astype(jnp.int32))
    free = jnp.arange(num_blocks) < num_free
    stack = pool.free_stack[:num_blocks]
    times = jnp.zeros_like(pool.ref_count).at[jnp.where(free, stack, 0)].add(1)
    accounted = pool.num_available + jnp.sum(pool.ref_count > 0)
    return {
        "blocks_accounted": accounted == num_blocks,
        "ref_counts_match": jnp.all(pool.ref_count == names),
        "free_blocks_distinct": (num_free >= 0)
        & jnp.all(~free | ((stack >= 1) & (stack <= num_blocks)))
        & jnp.all(times[1:] <= 1),
        "free_blocks_unreferenced": jnp.all(~free | (pool.ref_count[stack] == 0)),
    }


def check_swap(state: SchedulerState) -> dict[str, jax.Array]:
    """Checks the blocks of the host; there is nothing to check if there are none.

    Args:
      state: scheduler's state, between two steps.

    Returns:
      Name of each invariant -> bool[], whether it holds.
    """
    space, sequences, requests = state.swap, state.sequences, state.requests
    if not isinstance(space, SwapSpace):
        return {}
    there = on_host(sequences)
    table = sequences.block_table
    named = jnp.arange(sequences.table_width) < sequences.num_blocks[:, None]
    named &= there[:, None]
    real = (table >= 1) & (table <= space.pool.num_blocks)
    well_formed = jnp.where(named, real, table == 0) | ~there[:, None]
    swapped = sequences.status == SequenceStatus.SWAPPED
    running = requests.status[sequences.request] == RequestStatus.RUNNING
    leader = requests.leader(sequences.request)
    going = (sequences.status == SequenceStatus.RUNNING) | (
        sequences.status == SequenceStatus.UNFORKED
    )
    apart = (leader[:, None] == leader) & swapped[:, None] & going
    return {
        **{f"host_{k}": v for k, v in _check_pool(space.pool, table, named).items()},
        "host_tables_well_formed": jnp.all(well_formed),
        "swapped_requests_run": jnp.all(~swapped | running),
        "swapped_whole": ~jnp.any(apart),
    }


def writes_are_private(pool: BlockPool, slots: jax.Array, block_size: int) -> jax.Array:
    """Checks that no slot which is about to be written lies in a shared block.

    Args:
      pool: the block pool.
      slots: i32[N], slots to write; those of the null block, 0, are padding.
      block_size: tokens in a block.

    Returns:
      bool[].
    """
    block = slots // block_size
    return jnp.all((block == 0) | (pool.ref_count[block] == 1))


def assert_blocks(pool: BlockPool, sequences: Sequences) -> None:
    """Raises, under `checkify.checkify`, if an invariant of `check_blocks` is broken.

    Args:
      pool: the block pool.
      sequences: the sequence rows.

    Raises:
      checkify.JaxRuntimeError: from `err.throw()`, with the invariant and the counts.
    """
    for name, holds in check_blocks(pool, sequences).items():
        checkify.check(
            holds,
            f"{name}: it must hold that {_MEANING[name]}; "
            "got num_free {num_free}, {referenced} referenced blocks, "
            "{entries} table entries, ref_counts that sum to {references}",
            num_free=pool.num_free,
            referenced=jnp.sum(pool.ref_count > 0),
            entries=jnp.sum(sequences.num_blocks),
            references=jnp.sum(pool.ref_count),
        )


def check_groups(state: SchedulerState) -> dict[str, jax.Array]:
    """Checks the groups between two steps; there is nothing to check without them.

    Args:
      state: scheduler's state.

    Returns:
      Name of each invariant -> bool[], whether it holds.
    """
    sequences, requests, queue = state.sequences, state.requests, state.queue
    if not requests.grouped:
        return {}
    null = requests.null
    group = requests.group[sequences.request]
    unforked = sequences.status == SequenceStatus.UNFORKED
    running = sequences.status == SequenceStatus.RUNNING

    def per_group(rows: jax.Array, groups: jax.Array) -> jax.Array:
        count = jnp.zeros(null + 1, jnp.int32)
        return count.at[jnp.where(rows, groups, null)].add(rows.astype(jnp.int32))

    expected = per_group(unforked, group) > 0
    carriers = per_group(running, group)
    beyond = sequences.length > requests.prompt_len[sequences.request]
    waits = requests.status == RequestStatus.WAITING
    waiting = per_group(waits, requests.group)
    runs = per_group(requests.status == RequestStatus.RUNNING, requests.group)
    size = queue.slots.shape[0]
    place = jnp.arange(size)
    queued = per_group(place < queue.count, queue.slots[(queue.head + place) % size])
    return {
        "unforked_rows_hold_nothing": ~jnp.any(unforked & (sequences.num_blocks > 0)),
        "unforked_rows_have_a_carrier": jnp.all(~expected | (carriers == 1)),
        "carriers_stay_in_the_prompt": ~jnp.any(running & expected[group] & beyond),
        "groups_are_whole": ~jnp.any((waiting > 0) & (runs > 0)),
        "queue_names_what_waits": jnp.all(queued == (waiting > 0)),
        **_check_beams(state),
    }


def _check_beams(state: SchedulerState) -> dict[str, jax.Array]:
    """Checks the beam searches in service between two steps."""
    requests, beams = state.requests, state.beams
    if not isinstance(beams, BeamState):
        return {}
    going = (requests.status == RequestStatus.WAITING) | (
        requests.status == RequestStatus.RUNNING
    )
    going &= beams.width > 0
    at = jnp.where(going, requests.group, requests.null)
    zeros = jnp.zeros(requests.null + 1, jnp.int32)
    bit = jnp.where(going, jnp.left_shift(1, beams.number), 0)
    bits = zeros.at[at].add(bit)[requests.group]
    longest = zeros.at[at].max(requests.length)[requests.group]
    return {
        "beams_are_all_there": jnp.all(
            ~going | (bits == jnp.left_shift(1, beams.width) - 1)
        ),
        "beams_are_in_step": jnp.all(~going | (requests.length == longest)),
    }


def assert_groups(state: SchedulerState) -> None:
    """Raises, under `checkify.checkify`, if an invariant of `check_groups` is broken.

    Args:
      state: scheduler's state.

    Raises:
      checkify.JaxRuntimeError: from `err.throw()`, with the invariant.
    """
    for name, holds in check_groups(state).items():
        checkify.check(holds, f"{name}: it must hold that {_GROUP_MEANING[name]}")


def assert_swap(state: SchedulerState) -> None:
    """Raises, under `checkify.checkify`, if an invariant of `check_swap` is broken.

    Args:
      state: scheduler's state.

    Raises:
      checkify.JaxRuntimeError: from `err.throw()`, with the invariant.
    """
    for name, holds in check_swap(state).items():
        checkify.check(holds, f"{name}: it must hold that {_SWAP_MEANING[name]}")
