"""Submit: requests enter the state, in batches of a fixed size."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.beams import BeamState, NewBeams, init_beams, submit_beams
from paged_jax.compat import host_memory
from paged_jax.config import StepConfig
from paged_jax.kv_cache import KVCache, init_kv_cache
from paged_jax.memory_managers import MemoryManager
from paged_jax.new_arrays import full, zeros
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
from paged_jax.swap import init_swap_space


class NewRequest(NamedTuple):
    """One request on its way to the device; fields as in `NewRequests`.

    Of a request for several sequences each one comes as a request, all in one batch.
    """

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
    group: int | None = None  # None: its own slot
    sample: int = 0
    beams: tuple[int, float, int] | None = None  # a row of `NewBeams`


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
      group: i32[W]. Slot of the group's leader; R for padding.
      sample: i32[W]. Which of its request's sequences each is; i32[0] where requests
        are for one.
      beams: what is asked of beam searches; () if there are never any.
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
    group: jax.Array
    sample: jax.Array
    beams: NewBeams | tuple[()] = ()


def pack_requests(
    config: StepConfig, batch: Sequence[NewRequest], width: int
) -> NewRequests:
    """Returns up to `width` requests as arrays of `width` rows, padded.

    Those that will stand in the queue come first.
    """
    if config.groups:
        batch = sorted(batch, key=lambda r: r.group not in (None, r.slot))

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
        group=column(
            [r.slot if r.group is None else r.group for r in batch],
            config.num_requests,
        ),
        sample=column([r.sample for r in batch], 0)
        if config.several
        else jnp.zeros(0, jnp.int32),
        beams=_pack_beams(batch, column) if config.beams else (),
    )


def _pack_beams(batch: Sequence[NewRequest], column: Callable) -> NewBeams:
    """Returns what is asked of beam searches, padded by `column`."""
    rows = [r.beams or (0, 1.0, 0) for r in batch]
    return NewBeams(
        width=column([width for width, _, _ in rows], 0),
        length_penalty=column([penalty for _, penalty, _ in rows], 1, np.float32),
        stopping=column([stopping for _, _, stopping in rows], 0),
    )


def init_scheduler(
    config: StepConfig, manager: MemoryManager, static_batching: bool
) -> SchedulerState:
    """Returns a scheduler's state with nothing in it.

    Every leaf is a buffer of its own, so that all of them can be donated.
    """
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
            config.groups,
        ),
        queue=init_queue(config.num_requests),
        iteration=zeros(()),
        static_batching=full((), static_batching, np.bool_),
        log=zeros((config.log_length, len(Field)), np.float32),
        log_count=zeros(()),
        beams=init_beams(config.num_requests, config.max_model_len)
        if config.beams
        else (),
        swap=init_swap_space(config.host_blocks) if config.host_blocks else (),
    )


def init_state(
    config: StepConfig,
    manager: MemoryManager,
    cache: KVCache,
    static_batching: bool = False,
) -> EngineState:
    """Returns an engine's state with nothing in it.

    Every leaf is a buffer of its own, so that all of them can be donated; those of the
    cache are taken as they are.
    """
    state = EngineState(init_scheduler(config, manager, static_batching), cache)
    if not config.host_blocks:
        return state
    layers, _, size, heads, dim = cache.k.shape
    host = init_kv_cache(
        layers,
        config.host_blocks,
        size,
        heads,
        dim,
        cache.k.dtype,
        sharding=host_memory(),
    )
    return dataclasses.replace(state, host=host)


def submit(state: SchedulerState, new: NewRequests) -> SchedulerState:
    """Puts new requests at the end of the queue; of a group, its leader.

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

    group, queued = requests.group, new.count
    if requests.grouped:
        group = put(group, new.group)
        queued = jnp.sum(valid & (new.group == slots), dtype=jnp.int32)
    sampling = new.sampling
    if new.sample.shape[0]:
        sampling = dataclasses.replace(
            sampling, key=_sample_keys(sampling.key, new.sample)
        )
    beams = state.beams
    if isinstance(beams, BeamState):
        assert isinstance(new.beams, NewBeams)
        beams = submit_beams(beams, slots, new.beams, new.sample)
    return dataclasses.replace(
        state,
        beams=beams,
        requests=dataclasses.replace(
            requests,
            tokens=put(requests.tokens, new.tokens),
            length=put(requests.length, new.prompt_len),
            prompt_len=put(requests.prompt_len, new.prompt_len),
            max_len=put(requests.max_len, new.max_len),
            reserved_len=put(requests.reserved_len, new.reserved_len),
            arrival=put(requests.arrival, new.arrival),
            prefix_row=put(requests.prefix_row, new.prefix_row),
            group=group,
            status=put(requests.status, status),
            stop_ids=put(requests.stop_ids, new.stop_ids),
            timeline=put(requests.timeline, jnp.full((slots.shape[0], 3), -1)),
            sampling=jax.tree.map(put, requests.sampling, sampling),
        ),
        queue=push_back(state.queue, slots, queued),
    )


def _sample_keys(keys: jax.Array, sample: jax.Array) -> jax.Array:
    """Returns u32[W, 2]: a key for each of a request's sequences.

    The first one's is the request's own, so that it draws what it would alone. Others
    fold their number in counted down from 2**32, where no position of a token is.
    """

    def one(key: jax.Array, number: jax.Array) -> jax.Array:
        folded = jax.random.fold_in(
            jax.random.wrap_key_data(key, impl="threefry2x32"),
            jnp.uint32(0) - number.astype(jnp.uint32),
        )
        return jnp.where(number > 0, jax.random.key_data(folded), key)

    return jax.vmap(one)(keys, sample)


def clear(state: SchedulerState, slots: jax.Array) -> SchedulerState:
    """Frees request slots whose outputs the host has read; i32[W], R for padding."""
    requests = state.requests
    status = requests.status.at[slots].set(RequestStatus.EMPTY)
    return dataclasses.replace(
        state, requests=dataclasses.replace(requests, status=status)
    )
