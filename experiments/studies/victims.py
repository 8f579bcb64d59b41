"""Rules for whom to preempt when blocks run out, to compare with the paper's."""

import jax
import jax.numpy as jnp

from paged_jax.preempt import VictimRule, latest_arrival
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState


def earliest_arrival(state: SchedulerState) -> jax.Array:
    """The running sequence whose request arrived first: the paper's rule reversed."""
    return _least(state, state.requests.arrival[state.sequences.request])


def fewest_blocks(state: SchedulerState) -> jax.Array:
    """The running sequence with the fewest blocks: the least is lost, least gained."""
    return _least(state, state.sequences.num_blocks)


def most_blocks(state: SchedulerState) -> jax.Array:
    """The running sequence with the most blocks: one victim makes the most room."""
    return _least(state, -state.sequences.num_blocks)


def most_to_come(state: SchedulerState) -> jax.Array:
    """The running sequence with the most tokens to come, which only an oracle knows."""
    slot = state.sequences.request
    left = state.requests.max_len[slot] - state.requests.length[slot]
    return _least(state, -left)


RULES: dict[str, VictimRule] = {
    "latest arrival": latest_arrival,
    "earliest arrival": earliest_arrival,
    "fewest blocks": fewest_blocks,
    "most blocks": most_blocks,
    "most to come": most_to_come,
}


def _least(state: SchedulerState, cost: jax.Array) -> jax.Array:
    """Returns the running row of the least cost i32[S]; of several the first."""
    running = state.sequences.status == SequenceStatus.RUNNING
    highest = jnp.iinfo(jnp.int32).max
    return jnp.argmin(jnp.where(running, cost, highest)).astype(jnp.int32)
