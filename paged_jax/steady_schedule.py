"""What scheduling costs in the middle of serving: a trace in which everything happens.

`schedule_timing` serves requests from the first to the last. Here the batch is full and
more requests wait: each iteration some end, some are admitted, others grow, and those
that were admitted copy the partly filled last block of the prefix that all share.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.memory_managers import MANAGERS
from paged_jax.schedule_timing import (
    greedy_requests,
    model_free_program,
    model_free_state,
)
from paged_jax.scheduler import schedule
from paged_jax.sequences import SequenceStatus
from paged_jax.state import EngineState
from paged_jax.submit import pack_requests, submit

_EVENTS = ("admitted", "retired", "grown", "copied")
_PREFIX = 40  # tokens; in blocks of 16 the last one is half full
_PROMPTS = (8, 73)  # tokens behind the prefix, drawn uniformly below the second
_OUTPUTS = (16, 145)
_WARM_UP = 150  # iterations until the first requests have left and others joined


class SteadySchedule(NamedTuple):
    """The cost of an iteration without a model, and what happens in one.

    Attributes:
      seconds: of one iteration, each repeat's mean.
      running: sequences in the batch, mean over the iterations.
      events: what happens in an iteration, in the mean: requests admitted and retired,
        blocks grown by and copied.
    """

    seconds: list[float]
    running: float
    events: dict[str, float]


def steady_config(num_rows: int, num_blocks: int) -> EngineConfig:
    """Returns the settings of the trace: of default kind, with a prefix to share.

    Args:
      num_rows: sequences that run at once.
      num_blocks: blocks of the pool; some 7 for each sequence fill it.
    """
    return EngineConfig(
        num_blocks=num_blocks,
        max_seqs=num_rows,
        max_requests=4 * num_rows,
        max_model_len=512,
        max_prefixes=1,
        token_budget=2 * num_rows,
        record=False,
    )


def time_steady_schedule(
    config: EngineConfig,
    *,
    iterations: int = 200,
    repeats: int = 5,
    clock: Callable[[], float] = time.process_time,
) -> SteadySchedule:
    """Times iterations of a steady state with the model taken out.

    The trace is recorded first, one iteration at a time; then the same iterations are
    run again in one go, from the same state, as often as asked.

    Args:
      config: from `steady_config`.
      iterations: of the trace.
      repeats: how often it is timed.
      clock: seconds; by default those of the processor, so that other programs on the
        core do not count. Run on one core.

    Raises:
      RuntimeError: the trace lacks admissions, retirements, growth or copies on write.
    """
    run, state = _start(config)
    state = run(state, _WARM_UP)
    look = _make_look(config)
    seen, recorded = [], _copy(state)
    for _ in range(iterations):
        seen.append(look(recorded))
        recorded = run(recorded, 1)
    running, *counts = np.mean(seen, axis=0).tolist()
    events: dict[str, float] = dict(zip(_EVENTS, counts))
    missing = [name for name, count in events.items() if count <= 0]
    if missing:
        raise RuntimeError(
            f"a trace of {iterations} iterations has no {missing[0]}; give it more"
        )

    seconds = []
    for _ in range(repeats):
        again = _copy(state)
        started = clock()
        jax.block_until_ready(run(again, iterations))
        seconds.append((clock() - started) / iterations)
    return SteadySchedule(seconds, running, events)


def _copy(state: EngineState) -> EngineState:
    """Returns a state to donate, so that the first one stays."""
    return jax.block_until_ready(jax.tree.map(lambda x: x.copy(), state))


def _make_look(config: EngineConfig) -> Callable[[EngineState], list[int]]:
    """Returns what says of a state what its next step does.

    That is: sequences that run, requests admitted, requests retired, blocks by which
    sequences grow, blocks copied.
    """
    manager = MANAGERS[config.memory].on_device()
    decide = jax.jit(functools.partial(schedule, config.step_config(), manager))

    def look(state: EngineState) -> list[int]:
        before = state.scheduler.sequences
        planned, plan = decide(state.scheduler)
        after, null = planned.sequences, planned.requests.null
        stays = (before.request == after.request) & (after.request != null)
        counts = (
            jnp.sum(after.status == SequenceStatus.RUNNING),
            plan.admitted,
            plan.retired,
            jnp.sum(jnp.where(stays, after.num_blocks - before.num_blocks, 0)),
            plan.copies.count,
        )
        return [int(count) for count in counts]

    return look


def _start(
    config: EngineConfig,
) -> tuple[Callable[[EngineState, int], EngineState], EngineState]:
    """Returns a loop without a model, and a state: the prefix held, requests wait."""
    program, loop = model_free_program(config)
    enter = jax.jit(submit, donate_argnums=0)

    def run(state: EngineState, steps: int) -> EngineState:
        return jax.block_until_ready(loop(program, None, state, jnp.int32(steps)))

    def put(state: EngineState, new: list) -> EngineState:
        packed = pack_requests(program.config, new, config.max_requests)
        return dataclasses.replace(state, scheduler=enter(state.scheduler, packed))

    rng = np.random.default_rng(0)
    prompts, outputs = (
        rng.integers(*limits, config.max_requests).tolist()
        for limits in (_PROMPTS, _OUTPUTS)
    )
    new = greedy_requests(config, [(p, [o]) for p, o in zip(prompts, outputs)])
    prefix = [0] * _PREFIX
    slot = program.config.num_requests - 1
    held = new[0]._replace(slot=slot, tokens=prefix, max_len=_PREFIX, group=slot)
    state = model_free_state(program, MANAGERS[config.memory])
    state = run(put(state, [held]), 1 + _PREFIX // config.token_budget)
    behind = [
        request._replace(
            tokens=[*prefix, *request.tokens],
            max_len=request.max_len + _PREFIX,
            prefix_row=0,
        )
        for request in new
    ]
    return run, put(state, behind)
