"""The loop on the device, against the same steps one by one."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import SETTINGS, make_engine, prompts, tiny_model
from jax.experimental import checkify
from scheduling import run_schedule, small_config

from paged_jax import EngineConfig, Field, debug
from paged_jax.invariants import check_blocks, check_swap
from paged_jax.kv_cache import init_kv_cache
from paged_jax.memory_managers import MANAGERS
from paged_jax.model_forward import ModelForward
from paged_jax.requests import RequestStatus
from paged_jax.sequences import SequenceStatus
from paged_jax.step import Program, run_steps
from paged_jax.submit import NewRequest, init_state, pack_requests, submit

# The host has room for one of those that are preempted: others are recomputed.
CHANGES = dict(steps_per_sync=256, preemption="swap", host_blocks=6, min_bucket=8)
CONFIG = EngineConfig(**{**SETTINGS, **CHANGES}).step_config()
PREFIX = (10, 11, 12, 13, 14, 15)
MODEL = tiny_model()
PROGRAM = Program(CONFIG, ModelForward(MODEL.config, "xla"), MANAGERS["paged"])
NEVER = 10**6


def request(slot, tokens, output, **changes):
    fields = dict(
        slot=slot,
        tokens=tokens,
        max_len=len(tokens) + output,
        reserved_len=0,
        arrival=slot,
        prefix_row=-1,
        stop_ids=(7, 9),
        temperature=0.0,
        top_p=1.0,
        min_p=0.0,
        top_k=0,
        key=(0, slot),
    )
    return NewRequest(**{**fields, **changes})


def workload():
    """Greedy and drawn requests; some share the prefix; more than the blocks hold."""
    asked = prompts(7, 20, seed=1)
    return [
        request(
            1 + i,
            (*PREFIX, *tokens) if i % 3 == 0 else tokens,
            30,
            prefix_row=0 if i % 3 == 0 else -1,
            temperature=i % 2 * 1.0,
        )
        for i, tokens in enumerate(asked)
    ]


submit_jitted = jax.jit(submit)


def submitted(state, new):
    packed = pack_requests(CONFIG, new, 8)
    scheduler = submit_jitted(state.scheduler, packed)
    return dataclasses.replace(state, scheduler=scheduler)


def empty_state():
    c = MODEL.config
    cache = init_kv_cache(
        c.num_layers,
        CONFIG.num_blocks,
        CONFIG.block_size,
        c.num_kv_heads,
        c.head_dim,
        jnp.dtype(jnp.float32),
    )
    return init_state(CONFIG, MANAGERS["paged"], cache)


@jax.jit
def holding(scheduler):
    """Name of each invariant of the blocks -> bool[], whether it holds."""
    holds = check_blocks(scheduler.pool, scheduler.sequences)
    return holds | check_swap(scheduler)


class PythonLoop:
    """A `while_loop` in Python that keeps every carry, and checks the blocks."""

    def __init__(self):
        self.carries = []

    def __call__(self, goes_on, body, carry):
        body = jax.jit(body)
        while goes_on(carry):
            carry = body(carry)
            self.carries.append(carry)
            for name, holds in jax.device_get(holding(carry[1].scheduler)).items():
                assert holds, f"{name} after step {len(self.carries)}"
        return carry


@functools.cache
def device_loop():
    return jax.jit(run_steps, static_argnums=0)


@functools.cache
def start():
    """A state in which the prefix is held and the other requests wait."""
    state = submitted(empty_state(), [request(0, PREFIX, 0, arrival=-1)])
    state = device_loop()(PROGRAM, MODEL.params, state, jnp.int32(NEVER))
    assert state.scheduler.requests.status[0] == RequestStatus.HELD
    assert state.scheduler.sequences.status[0] == SequenceStatus.HELD
    return submitted(state, workload())


@functools.cache
def steps():
    """The state after each step, by the Python loop."""
    loop = PythonLoop()
    run_steps(PROGRAM, MODEL.params, start(), NEVER, loop=loop)
    return [state for _, state in loop.carries]


def test_the_workload_meets_what_can_happen():
    log = np.asarray(steps()[-1].scheduler.log)[: len(steps()) + 1]
    fields = ("PREEMPTED", "RECOMPUTED", "SWAPPED_OUT_BLOCKS", "SWAPPED_IN_BLOCKS")
    for field in (*fields, "COPIED_BLOCKS", "RETIRED", "WAITING"):
        assert log[:, Field[field]].sum() > 0, field
    assert {1, 16} <= set(log[:, Field.TOKENS].astype(int))
    requests = steps()[-1].scheduler.requests
    assert {int(s) for s in requests.status[1:8]} == {
        RequestStatus.FINISHED_LENGTH,
        RequestStatus.FINISHED_STOP,
    }


@pytest.mark.parametrize("count", [0, 1, 2, 7, 30, NEVER])
def test_the_device_loop_gives_the_states_of_a_python_loop(count):
    state = device_loop()(PROGRAM, MODEL.params, start(), jnp.int32(count))
    states = [start(), *steps()]
    chex.assert_trees_all_equal(state, states[min(count, len(states) - 1)])


def test_a_loop_over_nothing_changes_nothing():
    state = empty_state()
    after = device_loop()(PROGRAM, MODEL.params, state, jnp.int32(5))
    chex.assert_trees_all_equal(after, state)


def test_a_step_with_nothing_to_do_is_legal():
    before = empty_state()

    def once(goes_on, body, carry):
        assert not goes_on(carry)
        return jax.jit(body)(carry)  # the program of `PythonLoop`, from the cache

    after = run_steps(PROGRAM, MODEL.params, before, NEVER, loop=once)
    assert int(after.scheduler.iteration) == 1
    chex.assert_trees_all_equal(after.cache, before.cache)
    for part in ("pool", "sequences", "requests", "queue"):
        chex.assert_trees_all_equal(
            getattr(after.scheduler, part), getattr(before.scheduler, part)
        )


def test_it_ends_with_the_blocks_given_back():
    scheduler = steps()[-1].scheduler
    held = -(-len(PREFIX) // CONFIG.block_size)
    assert int(scheduler.pool.num_free) == CONFIG.num_blocks - held
    assert int(scheduler.queue.count) == 0


def test_engines_of_equal_settings_share_their_programs():
    first, second = make_engine(), make_engine(batching="static", debug=True)
    assert first._device.programs is second._device.programs


def test_debugging_notices_a_wrong_ref_count():
    engine = make_engine(debug=True)
    name = engine.submit([3, 4, 5, 6, 7], None)
    engine.step()
    assert engine.stats.iterations == 1, "one step at a time"
    state = engine._device.state
    pool = state.scheduler.pool
    block = int(state.scheduler.sequences.block_table[0, 1])
    broken = dataclasses.replace(pool, ref_count=pool.ref_count.at[block].add(1))
    engine._device.state = dataclasses.replace(
        state, scheduler=dataclasses.replace(state.scheduler, pool=broken)
    )
    with pytest.raises(
        checkify.JaxRuntimeError, match="ref_counts_match: .*table entries"
    ):
        engine.step()
    assert name in engine._table.records


def test_debugging_has_nothing_to_check_in_contiguous_memory():
    _, state = run_schedule(small_config(memory="max"), [(3, 3)])
    debug.raise_if_broken(state)
