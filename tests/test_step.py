"""The compiled step: what it keeps in place, and what it never makes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import SETTINGS, tiny_model
from program_text import IN_PLACE, operations_on

from paged_jax import EngineConfig
from paged_jax.kv_cache import init_kv_cache
from paged_jax.memory_managers import MANAGERS
from paged_jax.model_forward import ModelForward, NoModel
from paged_jax.models import llama
from paged_jax.programs import BUCKET_ON_DEVICE
from paged_jax.step import (
    Program,
    begin_bucket_loop,
    bucket_of,
    forward_and_sample,
    run_bucket,
    run_steps,
)
from paged_jax.submit import init_state

# Sizes of the pool that no other array of the program has: P is one more.
SIZES = (222, 888)
MODEL = tiny_model().config

on_device = pytest.mark.skipif(
    not BUCKET_ON_DEVICE, reason="before jax 0.11 the host chooses the bucket"
)
by_host = pytest.mark.skipif(
    BUCKET_ON_DEVICE, reason="from jax 0.11 on the device chooses the bucket"
)


@functools.cache
def case(memory, num_blocks, kv_dtype="float32"):
    """A program, and the shapes of its parameters and its state."""
    config = EngineConfig(
        **{
            **SETTINGS,
            "memory": memory,
            "num_blocks": num_blocks,
            "max_model_len": 32,
            "token_budget": 8,
        }
    )
    static, manager = config.step_config(), MANAGERS[memory]
    program = Program(static, ModelForward(MODEL, "xla"), manager.on_device())

    def state():
        cache = init_kv_cache(
            MODEL.num_layers,
            num_blocks,
            static.block_size,
            MODEL.num_kv_heads,
            MODEL.head_dim,
            jnp.dtype(kv_dtype),
        )
        return init_state(static, manager, cache)

    return program, llama.param_shapes(MODEL), jax.eval_shape(state)


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def dims(x):
    return ",".join(map(str, x.shape))


COUNT = jax.ShapeDtypeStruct((), jnp.int32)


@functools.cache
def compiled_loop(*arguments):
    program, params, state = case(*arguments)
    run = jax.jit(run_steps, static_argnums=0, donate_argnums=2)
    return run.lower(program, params, state, COUNT).compile()


@functools.cache
def compiled_bucket_loops(*arguments):
    """The programs that jax before 0.11 runs; on any jax."""
    program, params, state = case(*arguments)
    begin = jax.jit(begin_bucket_loop, static_argnums=0, donate_argnums=1)
    pending = jax.eval_shape(
        functools.partial(begin_bucket_loop, program), state, COUNT
    )[1]
    run = jax.jit(run_bucket, static_argnums=(0, 1), donate_argnums=(3, 4))
    return [
        begin.lower(program, state, COUNT).compile(),
        run.lower(program, 1, params, state, pending, COUNT).compile(),
    ]


def check_in_place(compiled, state):
    """The donated state is aliased; nothing makes another cache, or another pool."""
    assert compiled.memory_analysis().alias_size_in_bytes >= nbytes(state)
    text = compiled.as_text()
    assert operations_on(text, dims(state.cache.k)) <= IN_PLACE
    for leaf in jax.tree.leaves(state.scheduler.pool):
        if leaf.ndim:
            assert operations_on(text, dims(leaf)) <= IN_PLACE


CASES = [("paged", "float32"), ("max", "float32"), ("paged", "bfloat16")]


@on_device
@pytest.mark.parametrize(("memory", "kv_dtype"), CASES)
def test_the_loop_changes_its_state_in_place(memory, kv_dtype):
    temporaries = []
    for num_blocks in SIZES:
        *_, state = case(memory, num_blocks, kv_dtype)
        compiled = compiled_loop(memory, num_blocks, kv_dtype)
        check_in_place(compiled, state)
        assert compiled.memory_analysis().alias_size_in_bytes == nbytes(state)
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[0] == temporaries[1], "temporaries grow with the pool"


@by_host
@pytest.mark.parametrize("memory", ["paged", "max"])
def test_the_bucket_loops_never_copy_the_cache(memory):
    # XLA of jax 0.10 may keep the pool twice around a loop: its bound is two arrays
    # i32[P] in each program, beside temporaries that do not grow with the pool. (It
    # also widens a bfloat16 cache on CPU; see test_kv_cache.py.)
    temporaries = []
    for num_blocks in SIZES:
        *_, state = case(memory, num_blocks)
        programs = compiled_bucket_loops(memory, num_blocks)
        for compiled in programs:
            text = compiled.as_text()
            assert compiled.memory_analysis().alias_size_in_bytes >= nbytes(state)
            assert operations_on(text, dims(state.cache.k)) <= IN_PLACE
            for leaf in jax.tree.leaves(state.scheduler.pool):
                if leaf.ndim:
                    assert operations_on(text, dims(leaf)) <= IN_PLACE | {"copy"}
            assert len(pool_copies(text, state)) <= 2
        temporaries.append([c.memory_analysis().temp_size_in_bytes for c in programs])
    growth = np.subtract(*reversed(temporaries))
    assert (growth <= 2 * 4 * (SIZES[1] - SIZES[0])).all()


def pool_copies(text, state):
    """The instructions that copy an array of the pool."""
    shapes = {dims(x) for x in jax.tree.leaves(state.scheduler.pool) if x.ndim}
    found = re.findall(r"= s32\[([\d,]+)\]\S* copy\(", text)
    return [shape for shape in found if shape in shapes]


def test_the_check_of_the_program_text_notices_a_copy():
    *_, state = case("paged", SIZES[0])

    def copying(state):
        pool = state.scheduler.pool
        doubled = dataclasses.replace(pool, ref_count=pool.ref_count * 2)
        scheduler = dataclasses.replace(state.scheduler, pool=doubled)
        cache = jax.tree.map(lambda x: x.at[0, 0].add(x[1, 0]), state.cache)
        return dataclasses.replace(state, scheduler=scheduler, cache=cache)

    compiled = jax.jit(copying, donate_argnums=0).lower(state).compile()
    with pytest.raises(AssertionError):
        check_in_place(compiled, state)


@functools.cache
def small_buckets():
    config = EngineConfig(**{**SETTINGS, "token_budget": 24}).step_config()
    assert config.buckets == (8, 16, 24)
    return config


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (24, 3)],
)
def test_the_smallest_bucket_that_fits_is_taken(tokens, bucket):
    class Chunks:
        chunk = jnp.array([tokens // 2, tokens - tokens // 2])

    assert int(bucket_of(small_buckets(), Chunks)) == bucket  # type: ignore[arg-type]


def test_an_empty_step_computes_nothing():
    program, params, state = case("paged", SIZES[0])
    program = program._replace(forward=NoModel())
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    cache, samples = forward_and_sample(program, 0, params, state, None)  # type: ignore[arg-type]
    assert cache is state.cache
    assert samples.tokens.shape == (program.config.num_rows,)
