"""Preempt: when blocks run out, requests give theirs up (paper, section 4.5).

Which request is a function, the `VictimRule`; what becomes of it is a setting:

- *Recompute*: its blocks are released, and it goes back to the head of the queue with
  the tokens that it has generated, to compute them again.
- *Swap*: its content goes to blocks of the host. It keeps its rows, and is brought back
  before anything else is admitted (`bring_back.py`).

All of its sequences that have not ended go together: all or nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.block_tables import write_needs
from paged_jax.config import StepConfig
from paged_jax.groups import distinct_tokens, rows_of_group
from paged_jax.memory_managers import MemoryManager
from paged_jax.paged_memory import held_tokens
from paged_jax.prompt_forks import blocks_to_fork
from paged_jax.requests import RequestStatus, push_front
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState
from paged_jax.swap import SwapSpace, blocks_to_swap_out, move_out

# (state) -> i32[], the running row to preempt next, and its whole group with it.
VictimRule = Callable[[SchedulerState], jax.Array]


def latest_arrival(state: SchedulerState) -> jax.Array:
    """The running sequence whose request arrived last: first come, first served."""
    arrival = state.requests.arrival[state.sequences.request]
    running = state.sequences.status == SequenceStatus.RUNNING
    lowest = jnp.iinfo(jnp.int32).min
    return jnp.argmax(jnp.where(running, arrival, lowest)).astype(jnp.int32)


class Preemption(NamedTuple):
    """What preemption leaves to be done, and what it cost.

    Attributes:
      chunk: i32[S]. Tokens to compute in each row; 0 for victims.
      growing: bool[S]. Rows that get one more block in this step.
      copying: bool[S]. Rows that copy a shared block before they write to it.
      wanted: i32[]. Blocks that the step takes.
      count: i32[]. Number of victims; a group is one.
      recomputed: i32[]. Tokens that those which are not swapped out had in the cache
        and will compute again, but for those that the prefix cache still has when they
        are admitted anew; those of a held prefix do not count.
    """

    chunk: jax.Array
    growing: jax.Array
    copying: jax.Array
    wanted: jax.Array
    count: jax.Array
    recomputed: jax.Array


def preempt(
    config: StepConfig,
    manager: MemoryManager,
    state: SchedulerState,
    chunk: jax.Array,
    victim: VictimRule,
) -> tuple[SchedulerState, Preemption]:
    """Preempts running requests until the others can write their next tokens.

    A victim is swapped out if the settings say so for as many sequences, if it has
    computed something, if none of its sequences waits for the prompt, and if the host
    has room. Else it is recomputed.

    Args:
      config: static settings.
      manager: memory manager.
      state: scheduler's state.
      chunk: i32[S], tokens that each row is about to compute.
      victim: which row to preempt next; its group goes with it.

    Returns:
      The state, and a `Preemption`; the pool holds enough blocks for it.
    """
    zero = jnp.int32(0)
    nobody = jnp.zeros_like(chunk, dtype=bool)
    if not manager.grows:
        return state, Preemption(chunk, nobody, nobody, zero, zero, zero)

    def look(state: SchedulerState, chunk, count, recomputed) -> Preemption:
        growing, copying = write_needs(
            state.pool, state.sequences, chunk, config.block_size, config.sharing
        )
        wanted = jnp.sum(growing | copying, dtype=jnp.int32)
        if config.forks:
            wanted += blocks_to_fork(config, state, chunk)
        return Preemption(chunk, growing, copying, wanted, count, recomputed)

    def short(carry: tuple[SchedulerState, Preemption]) -> jax.Array:
        state, so_far = carry
        return so_far.wanted > manager.num_free(state.pool)

    def preempt_one(
        carry: tuple[SchedulerState, Preemption],
    ) -> tuple[SchedulerState, Preemption]:
        state, so_far = carry
        row = victim(state)
        slot = state.sequences.request[row]
        rows = rows_of_group(state, row)
        lost = distinct_tokens(config, state, rows)
        lost -= held_tokens(config, state.sequences, state.requests, slot)
        chunk = jnp.where(rows, 0, so_far.chunk)
        swaps = _swaps(config, state, rows, lost)
        state = _evict_all(config, manager, state, rows & ~swaps)
        if config.host_blocks:
            state = _swap_out(config, state, rows & swaps)
        queue = push_front(state.queue, state.requests.leader(slot), ~swaps)
        state = dataclasses.replace(state, queue=queue)
        recomputed = so_far.recomputed + jnp.where(swaps, 0, lost)
        return state, look(state, chunk, so_far.count + 1, recomputed)

    return jax.lax.while_loop(
        short, preempt_one, (state, look(state, chunk, zero, zero))
    )


def _swaps(
    config: StepConfig, state: SchedulerState, rows: jax.Array, lost: jax.Array
) -> jax.Array:
    """Whether a victim's rows bool[S] are swapped out, bool[]; see `preempt`."""
    if not isinstance(state.swap, SwapSpace):
        return jnp.bool_(False)
    sequences = state.sequences
    need = blocks_to_swap_out(sequences, rows, config.block_size)
    unforked = jnp.any(rows & (sequences.status == SequenceStatus.UNFORKED))
    several = config.swaps_single | (jnp.sum(rows) > 1)
    return several & ~unforked & (lost > 0) & (need <= state.swap.pool.num_free)


def _swap_out(
    config: StepConfig, state: SchedulerState, rows: jax.Array
) -> SchedulerState:
    """Swaps rows bool[S] out, for which there is room; their request is RUNNING."""
    assert isinstance(state.swap, SwapSpace)
    pool, space, sequences = move_out(
        state.pool, state.swap, state.sequences, rows, config.block_size
    )
    return dataclasses.replace(state, pool=pool, sequences=sequences, swap=space)


def _evict(
    config: StepConfig, manager: MemoryManager, state: SchedulerState, row: jax.Array
) -> SchedulerState:
    """Releases a row's blocks; its request waits again, though not yet in the queue."""
    slot = state.sequences.request[row]
    pool, sequences = manager.release(config, state.pool, state.sequences, row)
    requests = state.requests
    return dataclasses.replace(
        state,
        pool=pool,
        sequences=dataclasses.replace(
            sequences, request=sequences.request.at[row].set(requests.null)
        ),
        requests=dataclasses.replace(
            requests, status=requests.status.at[slot].set(RequestStatus.WAITING)
        ),
    )


def _evict_all(
    config: StepConfig, manager: MemoryManager, state: SchedulerState, rows: jax.Array
) -> SchedulerState:
    """Evicts rows bool[S], one after the other, since they share blocks."""

    def evict_first(carry):
        state, left = carry
        row = jnp.argmax(left).astype(jnp.int32)
        return _evict(config, manager, state, row), left.at[row].set(False)

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]), evict_first, (state, rows)
    )[0]
