"""Runs the scheduler without a model: what a test compares with the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.block_pool import BlockPool
from paged_jax.commit import commit
from paged_jax.config import EngineConfig
from paged_jax.invariants import check_blocks, check_groups, check_swap
from paged_jax.memory_managers import MANAGERS
from paged_jax.sampling import Samples
from paged_jax.schedule_timing import greedy_requests
from paged_jax.scheduler import schedule
from paged_jax.state import SchedulerState, has_work
from paged_jax.step_log import Field, write_log
from paged_jax.submit import init_scheduler, pack_requests, submit

LOG_LENGTH = 2048


def small_config(**changes) -> EngineConfig:
    """A small engine in which every limit is met."""
    settings = dict(
        block_size=4,
        max_model_len=32,
        max_seqs=6,
        max_requests=24,
        token_budget=16,
        num_blocks=20,
        watermark=0.05,
        spare_blocks=0,
        steps_per_sync=LOG_LENGTH,
        sharing=False,
    )
    return EngineConfig(**{**settings, **changes})


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _run(config, manager, state: SchedulerState):
    rows = config.num_rows
    samples = Samples(
        jnp.ones(rows, jnp.int32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, 0), jnp.int32),
        jnp.zeros((rows, 0), jnp.float32),
    )

    def body(carry):
        state, sound = carry
        state, plan = schedule(config, manager, state)
        state = commit(config, write_log(config, manager, state, plan), plan, samples)
        holds = check_groups(state) | check_swap(state)
        slots = state.sequences.num_blocks * config.block_size
        holds["tokens have slots"] = jnp.all(state.sequences.length <= slots)
        if isinstance(state.pool, BlockPool):
            holds |= check_blocks(state.pool, state.sequences)
        return state, {name: sound[name] & holds[name] for name in holds}

    def goes_on(carry):
        state, _ = carry
        return has_work(state) & (state.log_count < LOG_LENGTH)

    names = [*check_groups(state), *check_swap(state), "tokens have slots"]
    if isinstance(state.pool, BlockPool):
        names += check_blocks(state.pool, state.sequences)
    start = state, {name: jnp.bool_(True) for name in names}
    return jax.lax.while_loop(goes_on, body, start)


def run_schedule(
    config: EngineConfig, lengths: list[tuple[int, int | tuple[int, ...]]]
) -> tuple[dict[str, np.ndarray], SchedulerState]:
    """Serves requests of (prompt, output) lengths, all known at the start.

    A request with several output lengths has as many sequences. The invariants are
    checked after each step.

    Returns:
      Each column of the log, and the state at the end; sequences are in the slots in
      their order.
    """
    manager = MANAGERS[config.memory]
    static = config.step_config()
    state = init_scheduler(static, manager, config.batching == "static")
    requests = [
        (prompt, (outputs,) if isinstance(outputs, int) else outputs)
        for prompt, outputs in lengths
    ]
    new = greedy_requests(config, requests)
    # All prompts are of one token, so that each is another's start.
    new = [request._replace(tokens=[7] * len(request.tokens)) for request in new]
    packed = pack_requests(static, new, config.max_requests)
    state = _submit(state, packed)
    state, sound = _run(static, manager.on_device(), state)
    assert all(sound.values()), [name for name, holds in sound.items() if not holds]
    count = int(state.log_count)
    assert count < LOG_LENGTH, "the run did not end"
    log = np.asarray(state.log)[:count].astype(int)
    return {field.name: log[:, field] for field in Field}, state


_submit = jax.jit(submit)


def reserved(config: EngineConfig, prompt: int, output: int) -> int:
    """Tokens that the memory manager reserves for a request."""
    return MANAGERS[config.memory].reserve(prompt, output, config.max_model_len)
