"""Cancel: requests end before their time, and prefixes are let go."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.requests import RequestStatus
from paged_jax.sequences import Sequences, SequenceStatus, on_host
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
      The state. Rows of the requests are FINISHED, or DROPPED if they were swapped out:
      the next step gives their blocks back. Waiting ones are out of the queue. Nobody
      shares a cancelled prefix any more; sequences that do already keep their
      references. Of a group, the others go on; if it was the carrier that ended, one of
      them takes over its row.
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
    if requests.grouped:
        sequences = _hand_over(state, ended)
    row_ended = ended[sequences.request] & (sequences.status != SequenceStatus.EMPTY)
    prefix_gone = (requests.prefix_row >= 0) & row_ended[
        jnp.maximum(requests.prefix_row, 0)
    ]

    end = jnp.where(on_host(sequences), SequenceStatus.DROPPED, SequenceStatus.FINISHED)
    size = queue.slots.shape[0]
    place = jnp.arange(size)
    waiting = queue.slots[(queue.head + place) % size]
    if requests.grouped:
        still = new_status == RequestStatus.WAITING
        goes_on = jnp.zeros_like(ended).at[requests.group].max(still)
    else:
        goes_on = ~ended
    stays = (place < queue.count) & goes_on[waiting]
    front = jnp.argsort(~stays, stable=True)
    return dataclasses.replace(
        state,
        sequences=dataclasses.replace(
            sequences,
            status=jnp.where(row_ended, end, sequences.status),
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


def _hand_over(state: SchedulerState, ended: jax.Array) -> Sequences:
    """Lets a member that waits for the prompt take over the row that computes it.

    Args:
      state: scheduler's state.
      ended: bool[R + 1], requests that end now.

    Returns:
      The rows; a carrier that ends has changed places with an UNFORKED one that does
      not, if there is any. The blocks are those of the prompt, which is the same.
    """
    sequences, requests = state.sequences, state.requests
    slot = sequences.request
    group = requests.group[slot]
    rows = jnp.arange(sequences.num_rows, dtype=jnp.int32)
    heirs = (sequences.status == SequenceStatus.UNFORKED) & ~ended[slot]
    at = jnp.where(heirs, group, requests.null)
    heir = jnp.full(requests.null + 1, -1).at[at].max(jnp.where(heirs, rows, -1))
    heir = heir[group]
    leaves = (sequences.status == SequenceStatus.RUNNING) & ended[slot] & (heir >= 0)
    # Each takes the other's request; rows that take part in nothing keep theirs.
    other = jnp.where(leaves, heir, rows)
    swapped = jnp.where(leaves, slot[other], slot)
    last = sequences.num_rows
    given = jnp.append(swapped, 0).at[jnp.where(leaves, other, last)].set(slot)
    return dataclasses.replace(sequences, request=given[:last])
