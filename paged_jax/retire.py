"""Retire: sequences that have ended give their blocks back."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.config import StepConfig
from paged_jax.memory_managers import MemoryManager
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState
from paged_jax.swap import SwapSpace, release_host_rows


def retire(
    config: StepConfig, manager: MemoryManager, state: SchedulerState
) -> tuple[SchedulerState, jax.Array]:
    """Releases finished rows; under static batching, once the whole batch has ended.

    Rows that have ended while they were swapped out give back blocks of the host.

    Args:
      config: static settings.
      manager: memory manager.
      state: scheduler's state.

    Returns:
      The state with those rows empty, and i32[], how many there were.
    """
    status = state.sequences.status
    finished = status == SequenceStatus.FINISHED
    batch_over = ~jnp.any(status == SequenceStatus.RUNNING)
    finished &= ~state.static_batching | batch_over

    def release_first(carry):
        pool, sequences, left = carry
        row = jnp.argmax(left).astype(jnp.int32)
        pool, sequences = manager.release(config, pool, sequences, row)
        sequences = dataclasses.replace(
            sequences, request=sequences.request.at[row].set(state.requests.null)
        )
        return pool, sequences, left.at[row].set(False)

    pool, sequences, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]),
        release_first,
        (state.pool, state.sequences, finished),
    )
    count = jnp.sum(finished, dtype=jnp.int32)
    space = state.swap
    if isinstance(space, SwapSpace):
        dropped = status == SequenceStatus.DROPPED
        count += jnp.sum(dropped, dtype=jnp.int32)
        space, sequences = release_host_rows(
            space, sequences, dropped, state.requests.null
        )
    state = dataclasses.replace(state, pool=pool, sequences=sequences, swap=space)
    return state, count
