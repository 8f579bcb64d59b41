"""A step of the engine, and the loop that runs many of them on the device."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from paged_jax.batch import TokenBatch
from paged_jax.commit import commit
from paged_jax.config import StepConfig
from paged_jax.kv_cache import KVCache, copy_blocks
from paged_jax.memory_managers import MemoryManager
from paged_jax.pack import pack
from paged_jax.preempt import VictimRule, latest_arrival
from paged_jax.sampling import Samples, sample
from paged_jax.scheduler import Plan, schedule
from paged_jax.state import EngineState, SchedulerState, has_work
from paged_jax.step_log import write_log

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
      victim: which sequence to preempt when blocks run out.
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
      bucket: index from `bucket_of`.
      params: the model's parameters.
      state: engine's state with the plan's blocks granted.
      plan: the plan.

    Returns:
      The cache with the step's keys and values, and the samples in arrays of S rows.
    """
    config, scheduler = program.config, state.scheduler
    TRACES[(program, bucket)] += 1
    if bucket == 0:
        rows = config.num_rows
        alternatives = (rows, config.max_logprobs)
        return state.cache, Samples(
            jnp.zeros(rows, jnp.int32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros(alternatives, jnp.int32),
            jnp.zeros(alternatives, jnp.float32),
        )
    batch, place = pack(config, scheduler, plan, config.buckets[bucket - 1])
    cache = state.cache
    if config.sharing:
        cache = copy_blocks(cache, *plan.copies)
    logits, cache = program.forward(params, batch, cache)
    # From places to rows and back: row r's sample stands at place[r].
    requests = scheduler.requests
    row_of = _invert(place, plan.samples, logits.shape[0])
    slot = scheduler.sequences.request[row_of]
    sampling = jax.tree.map(lambda x: x[slot], requests.sampling)
    samples = sample(logits, sampling, requests.length[slot], config.max_logprobs)
    return cache, jax.tree.map(lambda x: x[place], samples)


def _invert(place: jax.Array, valid: jax.Array, size: int) -> jax.Array:
    """Returns i32[size]: which valid row has each place, 0 for places nobody has."""
    at = jnp.where(valid, place, size)
    rows = jnp.arange(place.shape[0], dtype=jnp.int32)
    return jnp.zeros(size + 1, jnp.int32).at[at].set(rows)[:size]


def _finish(program: Program, state: EngineState, plan: Plan, cache, samples):
    scheduler = write_log(program.config, program.manager, state.scheduler, plan)
    return EngineState(commit(scheduler, plan, samples), cache)


def _schedule(
    program: Program, scheduler: SchedulerState
) -> tuple[SchedulerState, Plan]:
    return schedule(program.config, program.manager, scheduler, program.victim)


def step(program: Program, params: Params, state: EngineState) -> EngineState:
    """Takes one step: schedule, copy on write, forward, sample, commit.

    The bucket, the number of tokens that the step is padded to, is chosen on the
    device.

    Args:
      program: the static part.
      params: the model's parameters.
      state: engine's state; donate it.

    Returns:
      The next state. A step with nothing to do is legal.
    """
    scheduler, plan = _schedule(program, state.scheduler)
    state = dataclasses.replace(state, scheduler=scheduler)
    branches = [
        lambda bucket=bucket: forward_and_sample(program, bucket, params, state, plan)
        for bucket in range(len(program.config.buckets) + 1)
    ]
    cache, samples = jax.lax.switch(bucket_of(program.config, plan), branches)
    return _finish(program, state, plan, cache, samples)


def run_steps(
    program: Program,
    params: Params,
    state: EngineState,
    max_steps: jax.Array,
    *,
    loop: LoopFn = jax.lax.while_loop,
) -> EngineState:
    """Takes steps until there is nothing left to do, or `max_steps` of them.

    Args:
      program: the static part.
      params: the model's parameters.
      state: engine's state; donate it.
      max_steps: i32[], at most the length of the log if there is one.
      loop: `lax.while_loop`, or a Python loop with the same arguments for tests.

    Returns:
      The state.
    """

    def goes_on(carry):
        taken, state = carry
        return (taken < max_steps) & has_work(state.scheduler)

    def body(carry):
        taken, state = carry
        return taken + 1, step(program, params, state)

    return loop(goes_on, body, (jnp.int32(0), state))[1]


class Pending(NamedTuple):
    """A loop that has stopped before a step that needs another bucket.

    Attributes:
      taken: i32[]. Steps taken.
      bucket: i32[]. Bucket of the planned step; -1 if none is planned.
      plan: the planned step.
    """

    taken: jax.Array
    bucket: jax.Array
    plan: Plan


def begin_bucket_loop(
    program: Program, state: EngineState, max_steps: jax.Array
) -> tuple[EngineState, Pending]:
    """Plans the first step of a loop whose buckets the host chooses.

    For jax before 0.11, where a switch inside a loop copies the cache. Start here, then
    call `run_bucket` with the bucket that `Pending` names until that is -1.
    """
    more = (max_steps > 0) & has_work(state.scheduler)
    return _plan_next(program, state, jnp.int32(0), more)


def _plan_next(
    program: Program, state: EngineState, taken: jax.Array, more: jax.Array
) -> tuple[EngineState, Pending]:
    """Plans another step if `more`.

    A loop of one turn or none, since a branch would copy the block pool on the jax
    versions that come here.
    """
    scheduler = state.scheduler
    shapes = jax.eval_shape(functools.partial(_schedule, program), scheduler)[1]
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def plan_one(carry):
        _, scheduler, _ = carry
        return (jnp.bool_(False), *_schedule(program, scheduler))

    _, scheduler, plan = jax.lax.while_loop(
        lambda carry: carry[0], plan_one, (more, scheduler, nothing)
    )
    bucket = jnp.where(more, bucket_of(program.config, plan), -1)
    state = dataclasses.replace(state, scheduler=scheduler)
    return state, Pending(taken, bucket, plan)


def run_bucket(
    program: Program,
    bucket: int,
    params: Params,
    state: EngineState,
    pending: Pending,
    max_steps: jax.Array,
    *,
    loop: LoopFn = jax.lax.while_loop,
) -> tuple[EngineState, Pending]:
    """Takes the planned step and those after it that need the same bucket.

    Args:
      program: the static part.
      bucket: the bucket, static; that of `pending`.
      params: the model's parameters.
      state: engine's state; donate it.
      pending: the planned step.
      max_steps: i32[], steps after which the whole loop ends.
      loop: as in `run_steps`.

    Returns:
      The state and the next step to take. The states between two loops are those of
      `run_steps`: nothing is planned when the last one ends.
    """

    def goes_on(carry):
        return carry[1].bucket == bucket

    def body(carry):
        state, pending = carry
        cache, samples = forward_and_sample(
            program, bucket, params, state, pending.plan
        )
        state = _finish(program, state, pending.plan, cache, samples)
        taken = pending.taken + 1
        more = (taken < max_steps) & has_work(state.scheduler)
        return _plan_next(program, state, taken, more)

    return loop(goes_on, body, (state, pending))
