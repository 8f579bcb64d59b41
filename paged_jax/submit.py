"""Submit: requests enter the state, in batches of a fixed size."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.config import StepConfig
from paged_jax.kv_cache import KVCache
from paged_jax.memory_managers import MemoryManager
from paged_jax.requests import (
    RequestStatus,
    SamplingState,
    init_queue,
    init_requests,
    push_back,
)
from paged_jax.sequences import init_sequences
from paged_jax.state import EngineState, SchedulerState
from paged_jax.step_log import Field


class NewRequest(NamedTuple):
    """One request on its way to the device; fields as in `NewRequests`."""

    slot: int
    tokens: Sequence[int]
    max_len: int
    reserved_len: int
    arrival: int
    prefix_row: int
    stop_ids: Sequence[int]
    temperature: float
    top_p: float
    min_p: float
    top_k: int
    key: tuple[int, int]


class NewRequests(NamedTuple):
    """Requests to submit; the first `count` of W rows are valid.

    Attributes:
      count: i32[].
      slots: i32[W]. Free request slots to put them in; R for padding.
      tokens: i32[W, M]. Prompts.
      prompt_len: i32[W].
      max_len: i32[W]. Length at which each ends; `prompt_len` to hold it as a prefix.
      reserved_len: i32[W]. Tokens a contiguous manager reserves.
      arrival: i32[W]. Order of arrival.
      prefix_row: i32[W]. Row of the held prefix that the prompt starts with, or -1.
      stop_ids: i32[W, E]. -1 for none.
      sampling: how tokens are chosen, arrays of W rows.
    """

    count: jax.Array
    slots: jax.Array
    tokens: jax.Array
    prompt_len: jax.Array
    max_len: jax.Array
    reserved_len: jax.Array
    arrival: jax.Array
    prefix_row: jax.Array
    stop_ids: jax.Array
    sampling: SamplingState


def pack_requests(
    config: StepConfig, batch: Sequence[NewRequest], width: int
) -> NewRequests:
    """Returns up to `width` requests as arrays of `width` rows, padded."""

    def column(values: Sequence, fill: float, dtype: type = np.int32) -> jax.Array:
        return jnp.array([*values, *[fill] * (width - len(batch))], dtype)

    def table(rows: Sequence[Sequence[int]], columns: int, fill: int) -> jax.Array:
        out = np.full((width, columns), fill, np.int32)
        for row, values in zip(out, rows):
            row[: len(values)] = values
        return jnp.array(out)

    keys = np.zeros((width, 2), np.uint32)
    keys[: len(batch)] = [r.key for r in batch] or keys[:0]
    return NewRequests(
        count=jnp.int32(len(batch)),
        slots=column([r.slot for r in batch], config.num_requests),
        tokens=table([r.tokens for r in batch], config.max_model_len, 0),
        prompt_len=column([len(r.tokens) for r in batch], 0),
        max_len=column([r.max_len for r in batch], 0),
        reserved_len=column([r.reserved_len for r in batch], 0),
        arrival=column([r.arrival for r in batch], 0),
        prefix_row=column([r.prefix_row for r in batch], -1),
        stop_ids=table([r.stop_ids for r in batch], config.max_stop_ids, -1),
        sampling=SamplingState(
            temperature=column([r.temperature for r in batch], 0, np.float32),
            top_p=column([r.top_p for r in batch], 1, np.float32),
            min_p=column([r.min_p for r in batch], 0, np.float32),
            top_k=column([r.top_k for r in batch], 0),
            key=jnp.array(keys),
        ),
    )


def init_scheduler(
    config: StepConfig, manager: MemoryManager, static_batching: bool
) -> SchedulerState:
    """Returns a scheduler's state with nothing in it."""
    return SchedulerState(
        pool=manager.init(config),
        sequences=init_sequences(
            config.num_rows, config.table_width, null_request=config.num_requests
        ),
        requests=init_requests(
            config.num_requests,
            config.max_model_len,
            config.max_stop_ids,
            config.max_logprobs,
        ),
        queue=init_queue(config.num_requests),
        iteration=jnp.int32(0),
        static_batching=jnp.bool_(static_batching),
        log=jnp.zeros((config.log_length, len(Field)), jnp.float32),
        log_count=jnp.int32(0),
    )


def init_state(
    config: StepConfig,
    manager: MemoryManager,
    cache: KVCache,
    static_batching: bool = False,
) -> EngineState:
    """Returns an engine's state with nothing in it.

    Every leaf is a buffer of its own, so that all of them can be donated.
    """
    state = EngineState(init_scheduler(config, manager, static_batching), cache)
    return jax.tree.map(lambda x: x.copy(), state)


def submit(state: SchedulerState, new: NewRequests) -> SchedulerState:
    """Puts new requests at the end of the queue.

    Args:
      state: scheduler's state; donate it.
      new: the requests. Their slots are EMPTY, and they fit: the host has checked.

    Returns:
      The state with the requests WAITING.
    """
    requests, slots = state.requests, new.slots
    valid = jnp.arange(slots.shape[0]) < new.count
    status = jnp.where(valid, RequestStatus.WAITING, RequestStatus.EMPTY)

    def put(old: jax.Array, value: jax.Array) -> jax.Array:
        return old.at[slots].set(value)

    return dataclasses.replace(
        state,
        requests=dataclasses.replace(
            requests,
            tokens=put(requests.tokens, new.tokens),
            length=put(requests.length, new.prompt_len),
            prompt_len=put(requests.prompt_len, new.prompt_len),
            max_len=put(requests.max_len, new.max_len),
            reserved_len=put(requests.reserved_len, new.reserved_len),
            arrival=put(requests.arrival, new.arrival),
            prefix_row=put(requests.prefix_row, new.prefix_row),
            status=put(requests.status, status),
            stop_ids=put(requests.stop_ids, new.stop_ids),
            timeline=put(requests.timeline, jnp.full((slots.shape[0], 3), -1)),
            sampling=jax.tree.map(put, requests.sampling, new.sampling),
        ),
        queue=push_back(state.queue, slots, new.count),
    )


def clear(state: SchedulerState, slots: jax.Array) -> SchedulerState:
    """Frees request slots whose outputs the host has read; i32[W], R for padding."""
    requests = state.requests
    status = requests.status.at[slots].set(RequestStatus.EMPTY)
    return dataclasses.replace(
        state, requests=dataclasses.replace(requests, status=status)
    )
