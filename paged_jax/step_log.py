"""The log of a step: what memory and batch looked like, one row of numbers a step."""

import dataclasses
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.config import StepConfig
from paged_jax.memory_managers import MemoryManager
from paged_jax.scheduler import Plan
from paged_jax.sequences import SequenceStatus, on_host
from paged_jax.shared_blocks import read_counts
from paged_jax.state import SchedulerState, active_rows
from paged_jax.swap import SwapSpace

# Columns of the block tables that are counted at a time: the cost follows the blocks
# that there are, not the width of the tables.
_COLUMNS = 128


class Field(enum.IntEnum):
    """Columns of the log. Counts of slots are of distinct physical slots."""

    ITERATION = 0
    RUNNING = 1  # sequences that compute or could
    WAITING = 2  # requests in the queue
    TOKENS = 3  # tokens computed
    SAMPLED = 4  # tokens generated
    LIVE = 5  # slots that hold a token of a running sequence
    RESERVED = 6  # slots granted to sequences of the batch
    RESERVATION = 7  # granted, not yet written, and will be
    INTERNAL = 8  # granted, and never used (again) by its owner
    FREE_BLOCKS = 9  # that can be granted
    LOGICAL_BLOCKS = 10  # entries of the block tables
    PHYSICAL_BLOCKS = 11  # distinct blocks they name
    RETIRED = 12
    ADMITTED = 13
    PREEMPTED = 14
    RECOMPUTED = 15  # tokens lost to preemption, shared ones apart
    COPIED_BLOCKS = 16  # copy-on-write
    HIT_TOKENS = 17  # tokens that admitted sequences found in the prefix cache
    IDLE_BLOCKS = 18  # cached ones without a user, part of FREE_BLOCKS
    EVICTED_BLOCKS = 19  # idle ones that were granted anew
    SWAPPED = 20  # requests that are swapped out
    SWAPPED_OUT_BLOCKS = 21  # copied to the host
    SWAPPED_IN_BLOCKS = 22  # copied back


def write_log(
    config: StepConfig,
    manager: MemoryManager,
    state: SchedulerState,
    plan: Plan,
) -> SchedulerState:
    """Adds one row to the log; nothing is compiled if the log has no rows.

    A physical block that r sequences name counts 1 / r in each of them, so that shared
    slots count once. What contiguous memory grants beyond the tokens it
    estimated (the rounding of a chunk) counts as neither reservation nor internal: the
    paper's artifact adds it to the external part.

    Args:
      config: static settings.
      manager: memory manager.
      state: scheduler's state after planning, before the lengths are counted up.
      plan: the step's plan.

    Returns:
      The state with the row written.
    """
    if config.log_length == 0:
        return state
    sequences = state.sequences
    active = active_rows(sequences) & ~on_host(sequences)
    swapped, moved_out, moved_in = _count_swapped(state)
    count = _count_slots(config, manager, state, sequences.length + plan.chunk)
    running = sequences.status == SequenceStatus.RUNNING

    pool, hits, idle, evicted = read_counts(state.pool)
    row = {
        Field.ITERATION: state.iteration,
        Field.RUNNING: jnp.sum(running),
        Field.WAITING: state.queue.count,
        Field.TOKENS: jnp.sum(plan.chunk),
        Field.SAMPLED: jnp.sum(plan.samples),
        Field.LIVE: count.live,
        Field.RESERVED: count.blocks * config.block_size,
        Field.RESERVATION: count.ahead,
        Field.INTERNAL: count.unused,
        Field.FREE_BLOCKS: manager.num_free(state.pool),
        Field.LOGICAL_BLOCKS: jnp.sum(jnp.where(active, sequences.num_blocks, 0)),
        Field.PHYSICAL_BLOCKS: count.blocks,
        Field.RETIRED: plan.retired,
        Field.ADMITTED: plan.admitted,
        Field.PREEMPTED: plan.preempted,
        Field.RECOMPUTED: plan.recomputed,
        Field.COPIED_BLOCKS: plan.copies.count,
        Field.HIT_TOKENS: hits,
        Field.IDLE_BLOCKS: idle,
        Field.EVICTED_BLOCKS: evicted,
        Field.SWAPPED: swapped,
        Field.SWAPPED_OUT_BLOCKS: moved_out,
        Field.SWAPPED_IN_BLOCKS: moved_in,
    }
    values = jnp.stack([row[field].astype(jnp.float32) for field in Field])
    if config.prefix_caching:
        # The pool is read before `commit` changes it: XLA would else keep a copy.
        pool, values = jax.lax.optimization_barrier((pool, values))
    return dataclasses.replace(
        state,
        pool=pool,
        log=state.log.at[state.log_count].set(values),
        log_count=state.log_count + 1,
    )


def _count_swapped(
    state: SchedulerState,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Counts requests that are swapped out, and blocks moved out and in, i32[]."""
    zero = jnp.int32(0)
    if not isinstance(state.swap, SwapSpace):
        return zero, zero, zero
    requests = state.requests
    swapped = state.sequences.status == SequenceStatus.SWAPPED
    leader = requests.leader(state.sequences.request)

    def count() -> jax.Array:
        at = jnp.where(swapped, leader, requests.null)
        return jnp.sum(
            jnp.zeros(requests.null + 1, jnp.int32)
            .at[at]
            .max(swapped.astype(jnp.int32))
        )

    number = jax.lax.cond(jnp.any(swapped), count, lambda: zero)
    return number, state.swap.outs.count, state.swap.ins.count


class _Slots(NamedTuple):
    """Slots and blocks that the sequences of the batch name, f32[]; shared ones once.

    Attributes:
      live: slots that hold a token of a running sequence.
      ahead: slots that a running sequence will still write.
      unused: slots that their owners never use (again).
      blocks: distinct blocks.
    """

    live: jax.Array
    ahead: jax.Array
    unused: jax.Array
    blocks: jax.Array


def _count_slots(
    config: StepConfig,
    manager: MemoryManager,
    state: SchedulerState,
    filled: jax.Array,
) -> _Slots:
    """Counts slots by what they are for; `filled` i32[S] tokens are in each row.

    Of slots that running sequences share with ended members of a static batch, each
    counts its part.
    """
    sequences, requests = state.sequences, state.requests
    running = sequences.status == SequenceStatus.RUNNING
    active = active_rows(sequences) & ~on_host(sequences)
    granted = sequences.num_blocks * config.block_size
    if manager.grows:
        expected = granted
    else:
        expected = jnp.minimum(granted, requests.reserved_len[sequences.request])
    final = requests.max_len[sequences.request]
    # Slots of a row up to where they are live, will be, and are expected to be. Rows
    # that have ended keep theirs until the batch is over: none is used again.
    live = jnp.where(running, filled, 0)
    ahead = jnp.where(running, jnp.minimum(final, granted), 0)
    used = jnp.where(running, jnp.minimum(final, expected), 0)
    kept = jnp.where(running, expected, jnp.where(active, granted, 0))

    def apart() -> _Slots:
        blocks = jnp.where(active, sequences.num_blocks, 0)
        sums = (live, ahead - live, kept - used, blocks)
        return _Slots(*(jnp.sum(x).astype(jnp.float32) for x in sums))

    if not (config.sharing or config.prefix_caching):
        return apart()

    width = min(sequences.table_width, _COLUMNS)
    # A held prefix does not count as a user; rows share equal columns only.
    held = sequences.status == SequenceStatus.HELD
    prefixes = jnp.argsort(~held, stable=True)[: config.num_rows - config.max_seqs]

    def part(number: jax.Array, sums: jax.Array) -> jax.Array:
        """Adds what some columns hold: slots before each of four ends, and blocks."""
        first = number * width
        start = jnp.minimum(first, sequences.table_width - width)
        table = jax.lax.dynamic_slice_in_dim(sequences.block_table, start, width, 1)
        column = start + jnp.arange(width, dtype=jnp.int32)
        by_prefix = held[prefixes][:, None, None] & (table[prefixes][:, None] == table)
        users = state.pool.ref_count[table] - jnp.sum(by_prefix, axis=0)
        named = active[:, None] & (column < sequences.num_blocks[:, None])
        named &= column >= first
        share = jnp.where(named, 1.0 / jnp.maximum(users, 1), 0.0)

        def shared(tokens: jax.Array) -> jax.Array:
            """Sums up the slots before `tokens` i32[S], each by the row's share."""
            inside = tokens[:, None] - column * config.block_size
            return jnp.sum(share * jnp.clip(inside, 0, config.block_size))

        ends = [shared(tokens) for tokens in (live, ahead, kept, used)]
        return sums + jnp.stack([*ends, jnp.sum(share)])

    def together() -> _Slots:
        # As many columns as the longest table has blocks in.
        parts = (jnp.max(sequences.num_blocks) + width - 1) // width
        sums = jax.lax.fori_loop(0, parts, part, jnp.zeros(5, jnp.float32))
        filled, until_end, kept_slots, used_slots, blocks = jnp.round(sums)
        return _Slots(filled, until_end - filled, kept_slots - used_slots, blocks)

    in_use = config.num_blocks - manager.num_free(state.pool)
    named = jnp.where(on_host(sequences), 0, sequences.num_blocks)
    is_shared = jnp.sum(named) > in_use
    return jax.lax.cond(is_shared, together, apart)
