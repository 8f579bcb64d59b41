"""Bring back: what was swapped out returns before anything else is admitted."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.admit import blocks_owed, blocks_to_leave, pending_tokens
from paged_jax.cached_blocks import cache_full_blocks
from paged_jax.config import StepConfig
from paged_jax.groups import distinct_tokens, promised
from paged_jax.memory_managers import MemoryManager
from paged_jax.paged_memory import held_tokens
from paged_jax.requests import RequestStatus, push_front
from paged_jax.sequences import SequenceStatus, blocks_for
from paged_jax.state import SchedulerState
from paged_jax.swap import (
    SwapSpace,
    blocks_to_swap_in,
    forget_moves,
    move_in,
    release_host_rows,
)


class _Next(NamedTuple):
    """The swapped-out request that is next in line.

    Attributes:
      rows: bool[S]. Its rows; none if nothing is swapped out.
      need: i32[S]. Blocks that each row is to name.
      copies: i32[]. Copies on write that its next tokens take.
      shared: i32[]. Blocks that it shares with a held prefix, as before.
      fits: bool[]. Whether it can be brought back.
    """

    rows: jax.Array
    need: jax.Array
    copies: jax.Array
    shared: jax.Array
    fits: jax.Array


def bring_back(
    config: StepConfig, manager: MemoryManager, state: SchedulerState
) -> tuple[SchedulerState, jax.Array]:
    """Swaps requests in, in order of arrival, while they fit.

    A request fits if the pool can grant the blocks that its sequences had and those of
    their next tokens beside what the running sequences need in this step, and leave
    what admission leaves (`blocks_to_leave`). All of its sequences come back, or none
    does. Whole blocks of a prefix that is still held are shared again.

    If nothing runs and the first in line does not fit, the pool will never have more
    for it, since held prefixes take the room. Then all that is swapped out is
    recomputed, and admission decides, so that nobody waits for ever.

    Args:
      config: static settings, with blocks of the host.
      manager: memory manager.
      state: scheduler's state; the moves of the last step have been made.

    Returns:
      The state, and i32[], tokens that will be computed again.
    """
    assert isinstance(state.swap, SwapSpace)
    state = dataclasses.replace(state, swap=forget_moves(state.swap))

    def bring_some(carry):
        state, lost, _ = carry
        state, more = _bring_what_fits(config, manager, state)
        return state, lost + more, jnp.bool_(False)

    # One turn or none: a branch would copy the pools.
    swapped = jnp.any(state.sequences.status == SequenceStatus.SWAPPED)
    state, lost, _ = jax.lax.while_loop(
        lambda carry: carry[2], bring_some, (state, jnp.int32(0), swapped)
    )
    return state, lost


def _bring_what_fits(
    config: StepConfig, manager: MemoryManager, state: SchedulerState
) -> tuple[SchedulerState, jax.Array]:
    """Does what `bring_back` says where something is swapped out."""
    pending = pending_tokens(config, state)
    owed = blocks_owed(config, state, pending) + promised(config, state)

    def bring_first(carry):
        state, owed, first = carry
        state = _swap_in(config, state, first)
        owed += first.copies
        return state, owed, _look(config, manager, state, owed)

    first = _look(config, manager, state, owed)
    state, _, first = jax.lax.while_loop(
        lambda carry: carry[2].fits, bring_first, (state, owed, first)
    )
    running = jnp.any(state.sequences.status == SequenceStatus.RUNNING)
    stuck = ~running & jnp.any(first.rows)
    return _recompute_all(config, state, stuck)


def _rows_of(state: SchedulerState, row: jax.Array) -> jax.Array:
    """Returns bool[S]: the SWAPPED rows of a SWAPPED row's request."""
    sequences = state.sequences
    leader = state.requests.leader(sequences.request)
    return (sequences.status == SequenceStatus.SWAPPED) & (leader == leader[row])


def _look(
    config: StepConfig, manager: MemoryManager, state: SchedulerState, owed: jax.Array
) -> _Next:
    """Looks at the request that is next in line, if there is one."""
    sequences, requests = state.sequences, state.requests
    size = config.block_size
    swapped = sequences.status == SequenceStatus.SWAPPED
    arrival = requests.arrival[sequences.request]
    last = jnp.iinfo(jnp.int32).max
    row = jnp.argmin(jnp.where(swapped, arrival, last)).astype(jnp.int32)
    rows = _rows_of(state, row)
    need = blocks_for(requests.length[sequences.request], size)
    # Of rows that write to one block all but one copy it.
    logical = sequences.length // size
    every = jnp.arange(config.num_rows, dtype=jnp.int32)
    written = sequences.block_table[every, jnp.minimum(logical, config.table_width - 1)]
    inside = rows & (logical < sequences.num_blocks)
    same = (written[:, None] == written) & inside & (every[:, None] > every)
    copies = jnp.sum(inside & jnp.any(same, axis=1), dtype=jnp.int32)
    held = held_tokens(config, sequences, requests, sequences.request[row])
    computed = jnp.min(jnp.where(rows, sequences.length, last))
    shared = jnp.minimum(held, computed) // size
    total = blocks_to_swap_in(sequences, rows, need) - shared + copies + owed
    running = jnp.sum(sequences.status == SequenceStatus.RUNNING, dtype=jnp.int32)
    total += blocks_to_leave(config, state, running)
    fits = jnp.any(swapped) & (total <= manager.num_free(state.pool))
    return _Next(rows, need, copies, shared, fits)


def _swap_in(config: StepConfig, state: SchedulerState, first: _Next) -> SchedulerState:
    """Swaps a request in, which fits; it looks as it did when it was swapped out."""
    assert isinstance(state.swap, SwapSpace)
    prefix = None
    if config.sharing:
        slot = state.sequences.request[jnp.argmax(first.rows)]
        prefix_row = jnp.maximum(state.requests.prefix_row[slot], 0)
        prefix = state.sequences.block_table[prefix_row]
    pool, space, sequences = move_in(
        state.pool,
        state.swap,
        state.sequences,
        first.rows,
        first.need,
        prefix,
        first.shared,
    )
    state = dataclasses.replace(state, pool=pool, sequences=sequences, swap=space)
    # What is cached of it is shared again. The moves are made before anything is read.
    start = jnp.where(first.rows, 0, sequences.length)
    return cache_full_blocks(state, start)


def _recompute_all(
    config: StepConfig, state: SchedulerState, stuck: jax.Array
) -> tuple[SchedulerState, jax.Array]:
    """Sends what is swapped out back to the queue if `stuck`, the last to come first.

    Returns:
      The state, and i32[], tokens that will be computed again.
    """

    def swapped(state: SchedulerState) -> jax.Array:
        return state.sequences.status == SequenceStatus.SWAPPED

    def goes_on(carry):
        state, _ = carry
        return stuck & jnp.any(swapped(state))

    def recompute_last(carry):
        state, lost = carry
        sequences, requests = state.sequences, state.requests
        arrival = requests.arrival[sequences.request]
        lowest = jnp.iinfo(jnp.int32).min
        row = jnp.argmax(jnp.where(swapped(state), arrival, lowest)).astype(jnp.int32)
        rows = _rows_of(state, row)
        slot = sequences.request[row]
        lost += distinct_tokens(config, state, rows)
        lost -= held_tokens(config, sequences, requests, slot)
        slots = jnp.where(rows, sequences.request, requests.null)
        status = jnp.where(rows, RequestStatus.WAITING, requests.status[requests.null])
        status = requests.status.at[slots].set(status)
        space, sequences = release_host_rows(state.swap, sequences, rows, requests.null)
        state = dataclasses.replace(
            state,
            sequences=sequences,
            requests=dataclasses.replace(requests, status=status),
            queue=push_front(state.queue, requests.leader(slot)),
            swap=space,
        )
        return state, lost

    return jax.lax.while_loop(goes_on, recompute_last, (state, jnp.int32(0)))
