"""Requests on their way into slots of the device."""

import dataclasses
import functools
from typing import NamedTuple

import jax

from experiments.simulator.beams import Ancestry, EnteringBeams, enter_beams
from experiments.simulator.block_names import EnteringNames, put_names
from experiments.simulator.clock import Time
from experiments.simulator.closed_loop import ClosedLoop
from experiments.simulator.simulate import SimulatorState
from paged_jax.requests import RequestStatus, push_back


class Entry(NamedTuple):
    """Requests to put into slots, padded to R rows with the null request's.

    Attributes:
      slots: i32[R].
      leaders: i32[R]. Of those, the ones that will stand in the queue, in order.
      count: i32[]. How many of `leaders` are valid.
      prompt_len, max_len, reserved_len, arrival_order, group: i32[R].
      arrival: Time[R].
      prefix_row: i32[]. Row of the registered prefix; -1 without one.
      names: of the blocks of prompts; () without a prefix cache.
      beams: of beam searches; () where there are none.
    """

    slots: jax.Array
    leaders: jax.Array
    count: jax.Array
    prompt_len: jax.Array
    max_len: jax.Array
    reserved_len: jax.Array
    arrival_order: jax.Array
    group: jax.Array
    arrival: Time
    prefix_row: jax.Array
    names: EnteringNames | tuple[()]
    beams: EnteringBeams | tuple[()]


@functools.partial(jax.jit, donate_argnums=0)
def enter(state: SimulatorState, new: Entry) -> SimulatorState:
    """Puts requests into slots whose requests have ended; they are pending."""
    requests, slots = state.scheduler.requests, new.slots

    def put(old: jax.Array, values: jax.Array | int) -> jax.Array:
        return old.at[slots].set(values)

    group = requests.group
    if requests.grouped:
        group = put(group, new.group)
    tokens = requests.tokens
    if isinstance(new.names, EnteringNames):
        tokens = put_names(tokens, slots, new.names, new.prompt_len)
    closed = state.closed
    if isinstance(closed, ClosedLoop):
        closed = dataclasses.replace(closed, unsent=closed.unsent + new.count)
    requests = dataclasses.replace(
        requests,
        tokens=tokens,
        length=put(requests.length, new.prompt_len),
        prompt_len=put(requests.prompt_len, new.prompt_len),
        max_len=put(requests.max_len, new.max_len),
        reserved_len=put(requests.reserved_len, new.reserved_len),
        arrival=put(requests.arrival, new.arrival_order),
        prefix_row=put(requests.prefix_row, new.prefix_row),
        group=group,
        status=put(requests.status, RequestStatus.EMPTY),
        timeline=put(requests.timeline, -1),
    )
    beams, ancestry = state.scheduler.beams, state.ancestry
    if isinstance(new.beams, EnteringBeams) and isinstance(ancestry, Ancestry):
        beams, ancestry = enter_beams(beams, ancestry, slots, new.beams)
    return dataclasses.replace(
        state,
        scheduler=dataclasses.replace(state.scheduler, requests=requests, beams=beams),
        ancestry=ancestry,
        arrival=state.arrival.put(slots, new.arrival),
        pending=push_back(state.pending, new.leaders, new.count),
        closed=closed,
    )
