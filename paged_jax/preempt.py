"""Preempt: when blocks run out, requests give theirs up (paper, section 4.5)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.block_tables import write_needs
from paged_jax.config import StepConfig
from paged_jax.fork import blocks_to_fork
from paged_jax.groups import rows_of_group
from paged_jax.memory_managers import MemoryManager
from paged_jax.paged_memory import held_tokens
from paged_jax.requests import RequestStatus, push_front
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState

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
      recomputed: i32[]. Tokens they had in the cache and will compute again, but for
        those that the prefix cache still has when they are admitted anew; those of a
        held prefix do not count.
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

    Recomputation: a victim's blocks are released, and its request goes back to the head
    of the queue with the tokens it has generated, to compute them again. Of a group,
    all sequences that have not ended lose their blocks together: all or nothing.

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
        slot, lost = state.sequences.request[row], state.sequences.length[row]
        shared = held_tokens(config, state.sequences, state.requests, slot)
        if config.groups:
            rows = rows_of_group(state, row)
            lost = _distinct_tokens(config, state, rows)
            leader = state.requests.group[slot]
            chunk = jnp.where(rows, 0, so_far.chunk)
            state = _evict_all(config, manager, state, rows)
        else:
            leader, chunk = slot, so_far.chunk.at[row].set(0)
            state = _evict(config, manager, state, row)
        state = dataclasses.replace(state, queue=push_front(state.queue, leader))
        recomputed = so_far.recomputed + lost - shared
        return state, look(state, chunk, so_far.count + 1, recomputed)

    return jax.lax.while_loop(
        short, preempt_one, (state, look(state, chunk, zero, zero))
    )


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


def _distinct_tokens(
    config: StepConfig, state: SchedulerState, rows: jax.Array
) -> jax.Array:
    """Returns the tokens that the rows of a group have in the cache, i32[].

    The prompt counts once if one of them will compute it for all.
    """
    sequences, requests = state.sequences, state.requests
    length = jnp.where(rows, sequences.length, 0)
    if not config.forks:
        return jnp.sum(length, dtype=jnp.int32)
    in_prompt = jnp.minimum(length, requests.prompt_len[sequences.request])
    return jnp.max(in_prompt) + jnp.sum(length - in_prompt, dtype=jnp.int32)
