"""What scheduling costs: the same requests served with the model taken out."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.compat import compiler_options
from paged_jax.config import EngineConfig
from paged_jax.kv_cache import init_kv_cache
from paged_jax.memory_managers import MANAGERS, MemoryManager
from paged_jax.model_forward import NoModel
from paged_jax.state import EngineState
from paged_jax.step import Program, run_steps
from paged_jax.submit import NewRequest, init_state, pack_requests, submit


def greedy_requests(
    config: EngineConfig, lengths: Sequence[tuple[int, Sequence[int]]]
) -> list[NewRequest]:
    """Returns requests of which only the lengths matter, in slots 0, 1, ...

    Args:
      config: the settings.
      lengths: of each request, in order of arrival, the length of its prompt and those
        of the outputs of its sequences.
    """
    reserve, limit = MANAGERS[config.memory].reserve, config.max_model_len
    new: list[NewRequest] = []
    for arrival, (prompt, outputs) in enumerate(lengths):
        leader = len(new)
        new += [
            NewRequest(
                slot=leader + sample,
                tokens=[arrival] * prompt,  # nothing in common
                max_len=min(prompt + output, limit),
                reserved_len=reserve(prompt, output, limit),
                arrival=arrival,
                prefix_row=-1,
                stop_ids=(),
                temperature=0.0,
                top_p=1.0,
                min_p=0.0,
                top_k=0,
                key=(0, 0),
                group=leader,
                sample=sample,
            )
            for sample, output in enumerate(outputs)
        ]
    return new


def model_free_program(config: EngineConfig) -> tuple[Program, Callable[..., Any]]:
    """Returns the program without a model, and the jitted `run_steps` for it."""
    static = dataclasses.replace(config, max_logprobs=0).step_config()
    program = Program(static, NoModel(), MANAGERS[config.memory].on_device())
    run = jax.jit(
        run_steps,
        static_argnums=0,
        donate_argnums=2,
        compiler_options=compiler_options(config.prefix_caching),
    )
    return program, run


def model_free_state(
    program: Program, manager: MemoryManager, static_batching: bool = False
) -> EngineState:
    """Returns a state with nothing in it; a slot of the cache is one number."""
    config, dtype = program.config, jnp.dtype(jnp.float32)
    cache = init_kv_cache(1, config.num_blocks, config.block_size, 1, 1, dtype)
    return init_state(config, manager, cache, static_batching)


def schedule_seconds(
    config: EngineConfig,
    lengths: Sequence[tuple[int, Sequence[int]]],
    *,
    max_iterations: int = 4000,
) -> float:
    """Returns the time of one iteration without a model, in seconds.

    Everything else of a step is there: retirement, admission, the division of the
    budget, growth, preemption, packing, sampling from one logit, and the commit; only
    the log is left out. All requests are known at the start; no prefix is registered.

    Args:
      config: the settings.
      lengths: as for `greedy_requests`; of as many requests as there are slots for.
      max_iterations: where a long run is cut.
    """
    program, run = model_free_program(dataclasses.replace(config, record=False))
    static, manager = program.config, MANAGERS[config.memory]
    sequences = itertools.accumulate(len(outputs) for _, outputs in lengths)
    count = sum(total <= config.max_requests for total in sequences)
    new = greedy_requests(config, lengths[:count])
    packed = pack_requests(static, new, config.max_requests)

    def serve() -> float:
        state = model_free_state(program, manager, config.batching == "static")
        state = dataclasses.replace(state, scheduler=submit(state.scheduler, packed))
        jax.block_until_ready(state)
        started = time.perf_counter()
        state = jax.block_until_ready(
            run(program, None, state, jnp.int32(max_iterations))
        )
        elapsed = time.perf_counter() - started
        return elapsed / max(int(state.scheduler.iteration), 1)

    serve()  # compiles
    return min(serve() for _ in range(3))
