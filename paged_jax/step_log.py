"""The log of a step: what memory and batch looked like, one row of numbers a step."""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from paged_jax.config import StepConfig
from paged_jax.memory_managers import MemoryManager
from paged_jax.scheduler import Plan
from paged_jax.sequences import SequenceStatus
from paged_jax.shared_blocks import read_counts
from paged_jax.state import SchedulerState, active_rows


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
    RECOMPUTED = 15  # tokens lost to preemption
    COPIED_BLOCKS = 16  # copy-on-write
    HIT_TOKENS = 17  # tokens that admitted sequences found in the prefix cache
    IDLE_BLOCKS = 18  # cached ones without a user, part of FREE_BLOCKS
    EVICTED_BLOCKS = 19  # idle ones that were granted anew


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
    sequences, requests = state.sequences, state.requests
    running = sequences.status == SequenceStatus.RUNNING
    active = active_rows(sequences)
    after = sequences.length + plan.chunk
    final = requests.max_len[sequences.request]
    granted = sequences.num_blocks * config.block_size
    live, physical = _distinct(config, manager, state, after)
    reserved = physical * config.block_size
    if manager.grows:
        expected = granted
    else:
        expected = jnp.minimum(granted, requests.reserved_len[sequences.request])
    ahead = jnp.where(running, jnp.minimum(final, granted) - after, 0)
    # Rows that have ended keep their slots until the batch is over: none is used again.
    ended = active & ~running
    unused = jnp.where(running, expected - jnp.minimum(final, expected), 0)
    unused += jnp.where(ended, granted, 0)

    pool, hits, idle, evicted = read_counts(state.pool)
    row = {
        Field.ITERATION: state.iteration,
        Field.RUNNING: jnp.sum(running),
        Field.WAITING: state.queue.count,
        Field.TOKENS: jnp.sum(plan.chunk),
        Field.SAMPLED: jnp.sum(plan.samples),
        Field.LIVE: live,
        Field.RESERVED: reserved,
        Field.RESERVATION: jnp.sum(ahead),
        Field.INTERNAL: jnp.sum(unused),
        Field.FREE_BLOCKS: manager.num_free(state.pool),
        Field.LOGICAL_BLOCKS: jnp.sum(jnp.where(active, sequences.num_blocks, 0)),
        Field.PHYSICAL_BLOCKS: physical,
        Field.RETIRED: plan.retired,
        Field.ADMITTED: plan.admitted,
        Field.PREEMPTED: plan.preempted,
        Field.RECOMPUTED: plan.recomputed,
        Field.COPIED_BLOCKS: plan.copies.count,
        Field.HIT_TOKENS: hits,
        Field.IDLE_BLOCKS: idle,
        Field.EVICTED_BLOCKS: evicted,
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


def _distinct(
    config: StepConfig,
    manager: MemoryManager,
    state: SchedulerState,
    filled: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Counts live slots and granted blocks, shared ones once.

    Args:
      config: static settings.
      manager: memory manager.
      state: scheduler's state.
      filled: i32[S], tokens in each row's blocks.

    Returns:
      f32[], slots that hold a token of a running sequence (of slots shared with ended
      members of a static batch, the running sequences' part); f32[], distinct blocks
      that the sequences of the batch name.
    """
    sequences = state.sequences
    running = sequences.status == SequenceStatus.RUNNING
    active = active_rows(sequences)

    def apart() -> tuple[jax.Array, jax.Array]:
        live = jnp.sum(jnp.where(running, filled, 0))
        physical = jnp.sum(jnp.where(active, sequences.num_blocks, 0))
        return live.astype(jnp.float32), physical.astype(jnp.float32)

    if not (config.sharing or config.prefix_caching):
        return apart()

    def together() -> tuple[jax.Array, jax.Array]:
        table = sequences.block_table
        column = jnp.arange(sequences.table_width, dtype=jnp.int32)
        # A held prefix does not count as a user; rows share equal columns only.
        held = sequences.status == SequenceStatus.HELD
        rows = jnp.argsort(~held, stable=True)[: config.num_rows - config.max_seqs]
        by_prefix = held[rows][:, None, None] & (table[rows][:, None] == table)
        users = state.pool.ref_count[table] - jnp.sum(by_prefix, axis=0)
        named = active[:, None] & (column < sequences.num_blocks[:, None])
        share = jnp.where(named, 1.0 / jnp.maximum(users, 1), 0.0)
        tokens = jnp.clip(
            filled[:, None] - column * config.block_size, 0, config.block_size
        )
        live = jnp.where(running[:, None], share * tokens, 0.0)
        return jnp.round(jnp.sum(live)), jnp.round(jnp.sum(share))

    in_use = config.num_blocks - manager.num_free(state.pool)
    shared = jnp.sum(sequences.num_blocks) > in_use
    return jax.lax.cond(shared, together, apart)
