"""Closed loop: clients that send a request when their last one is done.

The requests of the trace are sent in its order, each by whichever client is free first.
At time 0 every client sends one. At the end of the step in which a request is done, or
is rejected, its client starts to think, and sends the next one when it has: so at most
as many requests are in the system as there are clients. Requests of a static batch that
comes back as one are done when it does.

A request that has been sent has a time of arrival, and is then treated like any other.
Those that have not been sent stand behind them among the pending, without one.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from experiments.errors import UserError
from experiments.simulator.clock import advance
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState, active_rows

if TYPE_CHECKING:
    from experiments.simulator.simulate import SimulatorState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClosedLoop:
    """The clients.

    Attributes:
      clients: i32[]. How many.
      think: f32[]. Seconds between the end of a request and the next one, 0 or more.
      unsent: i32[]. Pending requests that nobody has sent yet: the last ones.
    """

    clients: jax.Array
    think: jax.Array
    unsent: jax.Array


def check_clients(clients: int, think_s: float) -> None:
    """Raises UserError for numbers that no clients have."""
    if clients < 1:
        raise UserError(f"clients is {clients}; it must be 1 or more")
    if not 0 <= think_s < float("inf"):
        raise UserError(f"think_s is {think_s}; it must be 0 or more, and finite")


def init_clients(clients: int, think_s: float) -> ClosedLoop:
    """Returns clients that have not sent anything."""
    return ClosedLoop(jnp.int32(clients), jnp.float32(think_s), jnp.int32(0))


def _in_service(scheduler: SchedulerState, together: bool) -> jax.Array:
    """Counts requests that have arrived and are not done, i32[]."""
    sequences, requests = scheduler.sequences, scheduler.requests
    status = sequences.status
    over = (status == SequenceStatus.FINISHED) | (status == SequenceStatus.DROPPED)
    if together:
        over &= ~jnp.any(status == SequenceStatus.RUNNING)
    going = active_rows(sequences) & ~over
    count = jnp.sum(going, dtype=jnp.int32)
    if requests.grouped:
        leader = requests.leader(sequences.request)
        leader = jnp.sort(jnp.where(going, leader, requests.null))
        first = jnp.append(True, leader[1:] != leader[:-1])
        count = jnp.sum(first & (leader < requests.null), dtype=jnp.int32)
    return scheduler.queue.count + count


def idle_clients(state: "SimulatorState", together: bool) -> jax.Array:
    """Counts clients that neither wait for an answer nor think, i32[]."""
    closed = state.closed
    assert isinstance(closed, ClosedLoop)
    sent = state.pending.count - closed.unsent
    return closed.clients - sent - _in_service(state.scheduler, together)


def send(
    state: "SimulatorState", together: bool, think: bool = True
) -> "SimulatorState":
    """Lets every idle client send its next request, as long as there is one.

    Args:
      state: at the end of a step; or before the first one, or when requests have
        entered that clients had been waiting to send.
      together: see `SimulatorProgram`.
      think: whether they think before they do; if not, it is the start.
    """
    closed, pending = state.closed, state.pending
    assert isinstance(closed, ClosedLoop)
    at = advance(state.now, closed.think) if think else state.now
    count = jnp.clip(idle_clients(state, together), 0, closed.unsent)
    first = pending.head + pending.count - closed.unsent
    size = pending.slots.shape[0]

    def send_one(i, arrival):
        return arrival.put(pending.slots[(first + i) % size], at)

    # A loop over those that are sent: none in most steps.
    arrival = jax.lax.fori_loop(0, count, send_one, state.arrival)
    closed = dataclasses.replace(closed, unsent=closed.unsent - count)
    return dataclasses.replace(state, arrival=arrival, closed=closed)
