"""Cancel: requests end before their time, and prefixes are let go."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.requests import RequestStatus
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState


def cancel(
    state: SchedulerState, slots: jax.Array, status: jax.Array
) -> SchedulerState:
    """Ends requests that wait, run or are held; others are left as they are.

    Args:
      state: scheduler's state; donate it.
      slots: i32[W], requests to end; R for padding.
      status: i32[W], the `RequestStatus` they end with.

    Returns:
      The state. Rows of the requests are FINISHED: the next step gives their blocks
      back. Waiting ones are out of the queue. Nobody shares a cancelled prefix any
      more; sequences that do already keep their references.
    """
    sequences, requests, queue = state.sequences, state.requests, state.queue
    old = requests.status[slots]
    going = (old > RequestStatus.EMPTY) & (old < RequestStatus.FINISHED_LENGTH)
    going &= slots != requests.null
    ends = jnp.where(going, slots, requests.null)
    new_status = requests.status.at[ends].set(jnp.where(going, status, 0))
    timeline = requests.timeline.at[ends, 2].set(state.iteration)

    ended = jnp.zeros(requests.null + 1, bool).at[ends].set(True)
    ended = ended.at[requests.null].set(False)
    row_ended = ended[sequences.request] & (sequences.status != SequenceStatus.EMPTY)
    prefix_gone = (requests.prefix_row >= 0) & row_ended[
        jnp.maximum(requests.prefix_row, 0)
    ]

    size = queue.slots.shape[0]
    place = jnp.arange(size)
    waiting = queue.slots[(queue.head + place) % size]
    stays = (place < queue.count) & ~ended[waiting]
    front = jnp.argsort(~stays, stable=True)
    return dataclasses.replace(
        state,
        sequences=dataclasses.replace(
            sequences,
            status=jnp.where(row_ended, SequenceStatus.FINISHED, sequences.status),
        ),
        requests=dataclasses.replace(
            requests,
            status=new_status,
            timeline=timeline,
            prefix_row=jnp.where(prefix_gone, -1, requests.prefix_row),
        ),
        queue=dataclasses.replace(
            queue,
            slots=waiting[front],
            head=jnp.int32(0),
            count=jnp.sum(stays, dtype=jnp.int32),
        ),
    )
