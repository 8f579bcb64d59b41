"""Preempt: when blocks run out, sequences give theirs up (paper, section 4.5)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.block_tables import write_needs
from paged_jax.config import StepConfig
from paged_jax.memory_managers import MemoryManager
from paged_jax.requests import RequestStatus, push_front
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState

# (state) -> i32[], the running row to preempt next.
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
      count: i32[]. Number of victims.
      recomputed: i32[]. Tokens they had in the cache and will compute again, but for
        those that the prefix cache still has when they are admitted anew.
    """

    chunk: jax.Array
    growing: jax.Array
    copying: jax.Array
    count: jax.Array
    recomputed: jax.Array


def preempt(
    config: StepConfig,
    manager: MemoryManager,
    state: SchedulerState,
    chunk: jax.Array,
    victim: VictimRule,
) -> tuple[SchedulerState, Preemption]:
    """Preempts running sequences until the others can write their next tokens.

    Recomputation: a victim's blocks are released, and its request goes back to the head
    of the queue with the tokens it has generated; they become part of its prompt.

    Args:
      config: static settings.
      manager: memory manager.
      state: scheduler's state.
      chunk: i32[S], tokens that each row is about to compute.
      victim: which row to preempt next.

    Returns:
      The state, and a `Preemption`; the pool holds enough blocks for it.
    """
    zero = jnp.int32(0)
    nobody = jnp.zeros_like(chunk, dtype=bool)
    if not manager.grows:
        return state, Preemption(chunk, nobody, nobody, zero, zero)

    def needs(state: SchedulerState, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        return write_needs(
            state.pool, state.sequences, chunk, config.block_size, config.sharing
        )

    def short(carry: tuple[SchedulerState, Preemption]) -> jax.Array:
        state, so_far = carry
        wanted = jnp.sum(so_far.growing | so_far.copying)
        return wanted > manager.num_free(state.pool)

    def preempt_one(
        carry: tuple[SchedulerState, Preemption],
    ) -> tuple[SchedulerState, Preemption]:
        state, so_far = carry
        row = victim(state)
        slot = state.sequences.request[row]
        lost = state.sequences.length[row]
        pool, sequences = manager.release(config, state.pool, state.sequences, row)
        requests = dataclasses.replace(
            state.requests,
            status=state.requests.status.at[slot].set(RequestStatus.WAITING),
        )
        state = dataclasses.replace(
            state,
            pool=pool,
            sequences=dataclasses.replace(
                sequences, request=sequences.request.at[row].set(requests.null)
            ),
            requests=requests,
            queue=push_front(state.queue, slot),
        )
        chunk = so_far.chunk.at[row].set(0)
        growing, copying = needs(state, chunk)
        return state, Preemption(
            chunk, growing, copying, so_far.count + 1, so_far.recomputed + lost
        )

    growing, copying = needs(state, chunk)
    start = Preemption(chunk, growing, copying, zero, zero)
    return jax.lax.while_loop(short, preempt_one, (state, start))
