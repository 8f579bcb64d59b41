"""The compiled programs of an engine, shared by all engines that look the same."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.beams import BeamState
from paged_jax.cancel import cancel
from paged_jax.compat import compiler_options, shape_of
from paged_jax.requests import RequestStatus
from paged_jax.state import EngineState, SchedulerState, has_work
from paged_jax.step import (
    Params,
    Program,
    run_steps,
)
from paged_jax.submit import NewRequests, clear, submit

# Numbers of tokens that a report may bring: 2 MiB, made in a fraction of a millisecond.
_REPORT_NUMBERS = 2**19


class Orders(NamedTuple):
    """What the host asks of a run of steps.

    Attributes:
      max_steps: i32[].
      most_ended: i32[]. See `run_steps`; R + 1 if nobody waits on the host.
      new_log: bool[]. Whether the log has been read, and starts anew.
      early: bool[R + 1]. Requests whose tokens are wanted though they have not ended.
    """

    max_steps: jax.Array
    most_ended: jax.Array
    new_log: jax.Array
    early: jax.Array


def make_orders(
    num_requests: int,
    max_steps: int,
    *,
    most_ended: int | None = None,
    new_log: bool = True,
    early: Sequence[int] = (),
) -> Orders:
    """Returns orders as arrays of the host; `early` are slots."""
    marks = np.zeros(num_requests + 1, bool)
    marks[list(early)] = True
    most_ended = num_requests + 1 if most_ended is None else most_ended
    # Of numpy: the compiled program takes them as they are.
    values: Any = np.int32(max_steps), np.int32(most_ended), np.bool_(new_log), marks
    return Orders(*values)


class Report(NamedTuple):
    """What the host reads after a run of steps; everything else stays on the device.

    Attributes:
      status: i32[R + 1]. `RequestStatus` of each request.
      length: i32[R + 1]. Tokens of each request, prompt and output.
      timeline: i32[R + 1, 3]. See `Requests`.
      row: i32[S]. Request of each sequence row.
      iteration: i32[]. Steps taken since the start.
      has_work: bool[]. Whether another step would do anything.
      log: f32[G, F]. The log; its first `log_count` rows are new.
      log_count: i32[].
      slots: i32[W']. Requests that have ended or are wanted early, the first W' (W or
        more) of them; R for padding.
      outputs: their tokens, arrays of W' rows.
    """

    status: jax.Array
    length: jax.Array
    timeline: jax.Array
    row: jax.Array
    iteration: jax.Array
    has_work: jax.Array
    log: jax.Array
    log_count: jax.Array
    slots: jax.Array
    outputs: "Outputs"


class Outputs(NamedTuple):
    """What some requests have generated.

    Attributes:
      tokens: i32[W, M]. See `Requests`.
      logprobs: f32[W, M].
      top_ids: i32[W, M, A].
      top_logprobs: f32[W, M, A].
      parents: i32[W, M]. See `BeamState`; () without beam search.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    parents: jax.Array | tuple[()] = ()


class Programs(NamedTuple):
    """Compiled functions; those that take the state donate it.

    Attributes:
      run: `(params, state, Orders) -> (state, Report)`.
      submit: `(state, NewRequests) -> state`.
      clear: `(state, slots i32[W]) -> state`.
      cancel: `(state, slots i32[W], status i32[W]) -> state`.
      collect: `(state, slots i32[W]) -> Outputs`; donates nothing.
      activation_bytes: temporaries of `run`.
      compile_seconds: what compiling took, or loading from the persistent cache.
    """

    run: Callable[..., tuple[EngineState, Report]]
    submit: Callable[[EngineState, NewRequests], EngineState]
    clear: Callable[[EngineState, jax.Array], EngineState]
    cancel: Callable[[EngineState, jax.Array, jax.Array], EngineState]
    collect: Callable[[EngineState, jax.Array], Outputs]
    activation_bytes: int
    compile_seconds: float


def _run_and_report(
    program: Program, width: int, params: Params, state: EngineState, orders: Orders
) -> tuple[EngineState, Report]:
    """Runs steps, and makes the report, with the tokens of `width` requests."""
    scheduler = state.scheduler
    count = jnp.where(orders.new_log, 0, scheduler.log_count)
    scheduler = dataclasses.replace(scheduler, log_count=count)
    state = dataclasses.replace(state, scheduler=scheduler)
    state = run_steps(program, params, state, orders.max_steps, orders.most_ended)
    scheduler = state.scheduler
    requests = scheduler.requests
    wanted = orders.early | (requests.status >= RequestStatus.FINISHED_LENGTH)
    (slots,) = jnp.nonzero(
        wanted[: requests.null], size=width, fill_value=requests.null
    )
    slots = slots.astype(jnp.int32)
    return state, Report(
        status=requests.status,
        length=requests.length,
        timeline=requests.timeline,
        row=scheduler.sequences.request,
        iteration=scheduler.iteration,
        has_work=has_work(scheduler),
        log=scheduler.log,
        log_count=scheduler.log_count,
        slots=slots,
        outputs=_collect(state, slots),
    )


def _collect(state: EngineState, slots: jax.Array) -> Outputs:
    requests, beams = state.scheduler.requests, state.scheduler.beams
    return Outputs(
        requests.tokens[slots],
        requests.logprobs[slots],
        requests.top_ids[slots],
        requests.top_logprobs[slots],
        beams.parents[slots] if isinstance(beams, BeamState) else (),
    )


def _on_scheduler(
    function: Callable[..., SchedulerState],
) -> Callable[..., EngineState]:
    """Lifts a function of the scheduler's state to one of the engine's."""

    def lifted(state: EngineState, *args: Any) -> EngineState:
        scheduler = function(state.scheduler, *args)
        return dataclasses.replace(state, scheduler=scheduler)

    return lifted


def compile_programs(
    program: Program, params: Params, state: EngineState, new: NewRequests
) -> Programs:
    """Compiles an engine's programs, or returns those of an equal engine.

    Args:
      program: the static part.
      params: the model's parameters, or their shapes.
      state: a state of the right shapes.
      new: requests of the right shapes.
    """
    shapes = jax.tree.map(shape_of, (params, state, new))
    leaves, structure = jax.tree.flatten(shapes)
    return _compile(program, tuple(leaves), structure)


@functools.lru_cache(maxsize=8)
def _compile(program: Program, leaves: tuple, structure: Any) -> Programs:
    params, state, new = jax.tree.unflatten(structure, leaves)
    started = time.perf_counter()
    orders = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        make_orders(program.config.num_requests, 1),
    )
    slots = jax.ShapeDtypeStruct(new.slots.shape, jnp.int32)
    run = (
        jax.jit(_run_and_report, static_argnums=(0, 1), donate_argnums=3)
        .lower(program, _report_width(program, slots), params, state, orders)
        .compile(compiler_options=compiler_options(program.config.prefix_caching))
    )

    def aot(function: Callable, donate: tuple[int, ...], *args: Any) -> Callable:
        return jax.jit(function, donate_argnums=donate).lower(*args).compile()

    return Programs(
        run=run,
        submit=aot(_on_scheduler(submit), (0,), state, new),
        clear=aot(_on_scheduler(clear), (0,), state, slots),
        cancel=aot(_on_scheduler(cancel), (0,), state, slots, slots),
        collect=aot(_collect, (), state, slots),
        activation_bytes=_temporaries(run),
        compile_seconds=time.perf_counter() - started,
    )


def _report_width(program: Program, slots: jax.ShapeDtypeStruct) -> int:
    """Returns of how many requests a report brings the tokens: W, or more if cheap."""
    config = program.config
    numbers = config.max_model_len * (2 + 2 * config.max_logprobs)
    most = max(slots.shape[0], _REPORT_NUMBERS // numbers)
    return min(most, config.num_requests)


def _temporaries(compiled: Any) -> int:
    """Returns the bytes of a program's temporaries."""
    return compiled.memory_analysis().temp_size_in_bytes
