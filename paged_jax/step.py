"""A step of the engine, and the loop that runs many of them on the device."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from paged_jax.batch import TokenBatch
from paged_jax.beam_step import beam_rows
from paged_jax.commit import commit
from paged_jax.config import StepConfig
from paged_jax.kv_cache import KVCache, copy_blocks, move_blocks
from paged_jax.memory_managers import MemoryManager
from paged_jax.pack import pack
from paged_jax.preempt import VictimRule, latest_arrival
from paged_jax.requests import RequestStatus
from paged_jax.sampling import Candidates, Samples, likeliest, sample
from paged_jax.scheduler import Plan, schedule
from paged_jax.state import EngineState, SchedulerState, has_work
from paged_jax.step_log import write_log
from paged_jax.swap import SwapSpace

Params = Any
LoopFn = Callable[..., Any]

# How often each bucket's forward pass was traced: one trace each in a process that
# serves one model, or something recompiles.
TRACES: collections.Counter = collections.Counter()


class Forward(Protocol):
    """A model: `(params, batch, cache) -> (logits f32[M, V], cache)`, hashable."""

    def __call__(
        self, params: Params, batch: TokenBatch, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Runs the model on one step's tokens."""
        ...


class Program(NamedTuple):
    """All that is static in a step: a hashable, static argument of the jitted loop.

    Attributes:
      config: static settings.
      forward: the model.
      manager: the memory manager, `on_device()`.
      victim: which request to preempt when blocks run out.
    """

    config: StepConfig
    forward: Forward
    manager: MemoryManager
    victim: VictimRule = latest_arrival


def bucket_of(config: StepConfig, plan: Plan) -> jax.Array:
    """Returns which bucket a plan runs in, i32[]: 0 for an empty step, else from 1."""
    total = jnp.sum(plan.chunk)
    sizes = jnp.array((0, *config.buckets), jnp.int32)
    return jnp.sum(total > sizes, dtype=jnp.int32)


def forward_and_sample(
    program: Program,
    bucket: int,
    params: Params,
    state: EngineState,
    plan: Plan,
) -> tuple[KVCache, Samples]:
    """Computes a plan's tokens in one bucket, and samples.

    Args:
      program: the static part.
      bucket: index from `bucket_of`, 1 or more.
      params: the model's parameters.
      state: engine's state with the plan's blocks granted.
      plan: the plan.

    Returns:
      The cache with the step's keys and values, and the samples in arrays of S rows.
    """
    config, scheduler = program.config, state.scheduler
    TRACES[(program, bucket)] += 1
    batch, place = pack(config, scheduler, plan, config.buckets[bucket - 1])
    cache = state.cache
    if config.sharing:
        cache = copy_blocks(cache, *plan.copies, backend=config.cache_backend)
    logits, cache = program.forward(params, batch, cache)
    # From places to rows and back: row r's sample stands at place[r].
    requests = scheduler.requests
    row_of = _invert(place, plan.samples & ~plan.forks, logits.shape[0])
    slot = scheduler.sequences.request[row_of]
    sampling = jax.tree.map(lambda x: x[slot], requests.sampling)
    samples = sample(logits, sampling, requests.length[slot], config.max_logprobs)
    samples = jax.tree.map(lambda x: x[place], samples)
    if config.forks:
        samples = _sample_forks(config, scheduler, plan, logits, place, samples)
    if config.beams:
        found = _find_candidates(config, scheduler, plan, logits, place)
        samples = samples._replace(candidates=found)
    return cache, samples


def _sample_forks(
    config: StepConfig,
    state: SchedulerState,
    plan: Plan,
    logits: jax.Array,
    place: jax.Array,
    samples: Samples,
) -> Samples:
    """Samples the first tokens of forked rows from their carriers' logits.

    A second pass with the rows' own keys, in the few steps in which there are such.
    """
    first = plan.forks & plan.samples
    if config.beams:
        first &= ~beam_rows(state)
    requests = state.requests

    def draw() -> Samples:
        slot = jnp.where(first, state.sequences.request, requests.null)
        sampling = jax.tree.map(lambda x: x[slot], requests.sampling)
        position = requests.length[slot]
        drawn = sample(logits[place], sampling, position, config.max_logprobs)
        return jax.tree.map(
            lambda new, old: jnp.where(_like(first, new), new, old), drawn, samples
        )

    return jax.lax.cond(jnp.any(first), draw, lambda: samples)


def _find_candidates(
    config: StepConfig,
    state: SchedulerState,
    plan: Plan,
    logits: jax.Array,
    place: jax.Array,
) -> Candidates:
    """Finds the likeliest tokens after each beam; a pass in steps that have beams."""
    count = config.num_candidates

    def find() -> Candidates:
        return jax.tree.map(lambda x: x[place], likeliest(logits, count))

    beams = plan.samples & beam_rows(state)
    none = _no_candidates(config)
    return jax.lax.cond(jnp.any(beams), find, lambda: none)


def _no_candidates(config: StepConfig) -> Candidates:
    shape = config.num_rows, config.num_candidates
    return Candidates(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


def _like(mask: jax.Array, values: jax.Array) -> jax.Array:
    """Returns bool[S, 1, ...] that selects rows of values."""
    return mask.reshape(mask.shape + (1,) * (values.ndim - 1))


def _invert(place: jax.Array, valid: jax.Array, size: int) -> jax.Array:
    """Returns i32[size]: which valid row has each place, 0 for places nobody has."""
    at = jnp.where(valid, place, size)
    rows = jnp.arange(place.shape[0], dtype=jnp.int32)
    return jnp.zeros(size + 1, jnp.int32).at[at].set(rows)[:size]


def _in_bucket(
    program: Program,
    params: Params,
    state: EngineState,
    plan: Plan,
    chosen: jax.Array,
) -> tuple[KVCache, Samples]:
    """Computes a plan's tokens in the chosen bucket, i32[], see `bucket_of`.

    A loop of one turn or none for each bucket: a `lax.switch` would do, but copies the
    cache on jax 0.10, and on later versions if the layers are unrolled.
    """
    rows, alternatives = program.config.num_rows, program.config.max_logprobs
    samples = Samples(
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, alternatives), jnp.int32),
        jnp.zeros((rows, alternatives), jnp.float32),
        _no_candidates(program.config) if program.config.beams else (),
    )
    carry = chosen, state.cache, samples
    for bucket in range(1, len(program.config.buckets) + 1):

        def compute(carry, bucket=bucket):
            _, cache, _ = carry
            now = EngineState(state.scheduler, cache)
            return jnp.int32(0), *forward_and_sample(program, bucket, params, now, plan)

        carry = jax.lax.while_loop(
            lambda carry, bucket=bucket: carry[0] == bucket, compute, carry
        )
    return carry[1], carry[2]


def _move(state: EngineState) -> tuple[EngineState, jax.Array]:
    """Makes the moves between the device and the host that a plan asks for.

    Returns the state, and i32[], moves that are left: 0 (see `move_blocks`).

    Swap-ins, then swap-outs, then (with the forward pass) copies on write. That order
    is right whatever was granted in which order:

    - A swap-in writes to blocks that were free when the step began or that it was
      granted itself: no swap-out reads anything else there.
    - The blocks of the host that it reads may be granted to a swap-out of the same
      step, which writes them after they were read. None is read that is written in this
      step: sequences come back before others go.
    - The blocks that a swap-out reads may be granted to rows that grow or copy, and to
      nobody else: they are written after they were read. A copy reads blocks that some
      row of the batch names, and that a swap-in may just have filled.
    """
    space = state.scheduler.swap
    if not (isinstance(space, SwapSpace) and isinstance(state.host, KVCache)):
        return state, jnp.int32(0)
    ins, outs = space.ins, space.outs
    cache, _ = move_blocks(state.host, state.cache, ins.source, ins.target, ins.count)
    host, left = move_blocks(cache, state.host, outs.source, outs.target, outs.count)
    return dataclasses.replace(state, cache=cache, host=host), left


def step(program: Program, params: Params, state: EngineState) -> EngineState:
    """Takes one step: schedule, swap, copy on write, forward, sample, commit.

    The bucket, the number of tokens that the step is padded to, is chosen on the
    device.

    Args:
      program: the static part.
      params: the model's parameters.
      state: engine's state; donate it.

    Returns:
      The next state. A step with nothing to do is legal.
    """
    scheduler, plan = schedule(
        program.config, program.manager, state.scheduler, program.victim
    )
    state, left = _move(dataclasses.replace(state, scheduler=scheduler))
    # The bucket is known when the moves are made, and they read what it writes.
    bucket = bucket_of(program.config, plan) + left
    cache, samples = _in_bucket(program, params, state, plan, bucket)
    scheduler = write_log(program.config, program.manager, scheduler, plan)
    if program.config.groups:
        # The log has read the counts before forks change them, in place.
        scheduler = jax.lax.optimization_barrier(scheduler)
    scheduler = commit(program.config, scheduler, plan, samples)
    return dataclasses.replace(state, scheduler=scheduler, cache=cache)


def run_steps(
    program: Program,
    params: Params,
    state: EngineState,
    max_steps: jax.Array,
    most_ended: jax.Array | None = None,
    *,
    loop: LoopFn = jax.lax.while_loop,
) -> EngineState:
    """Takes steps until there is nothing left to do, or `max_steps` of them.

    Args:
      program: the static part.
      params: the model's parameters.
      state: engine's state; donate it.
      max_steps: i32[], at most what is free of the log if there is one.
      most_ended: i32[], if others wait for a slot on the host: the loop ends as soon as
        no request waits on the device and more than so many slots hold one that has
        ended.
      loop: `lax.while_loop`, or a Python loop with the same arguments for tests.

    Returns:
      The state.
    """

    def goes_on(carry):
        taken, state = carry
        goes_on = (taken < max_steps) & has_work(state.scheduler)
        if most_ended is not None:
            ended = state.scheduler.requests.status >= RequestStatus.FINISHED_LENGTH
            goes_on &= (state.scheduler.queue.count > 0) | (
                jnp.sum(ended, dtype=jnp.int32) <= most_ended
            )
        return goes_on

    def body(carry):
        taken, state = carry
        return taken + 1, step(program, params, state)

    return loop(goes_on, body, (jnp.int32(0), state))[1]
