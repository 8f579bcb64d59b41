"""The compiled step: what it keeps in place, and what it never makes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from engines import SETTINGS, tiny_model
from program_text import IN_PLACE, operations_on

from paged_jax import EngineConfig
from paged_jax.compat import compiler_options
from paged_jax.kv_cache import init_kv_cache
from paged_jax.memory_managers import MANAGERS
from paged_jax.model_forward import ModelForward
from paged_jax.models import llama
from paged_jax.models.packed import can_pack, pack_model
from paged_jax.step import Program, bucket_of, run_steps
from paged_jax.submit import init_state

# A size of the pool that no other array of the program has: P is one more. Nothing is
# allocated, so that it may be much larger than all that a step computes.
NUM_BLOCKS = 200_000
MODEL = tiny_model().config
JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


@functools.cache
def case(memory, kv_dtype="float32", max_n=1, width=1, host_blocks=0, backend="xla"):
    """A program, and the shapes of its parameters and its state."""
    params = llama.param_shapes(MODEL)
    if backend == "cpu":
        params = jax.eval_shape(lambda: pack_model(tiny_model()).params)
    caching, memory = memory == "cached", memory.replace("cached", "paged")
    config = EngineConfig(
        **{
            **SETTINGS,
            "memory": memory,
            "prefix_caching": caching,
            "num_blocks": NUM_BLOCKS,
            "max_model_len": 32,
            "token_budget": 8,
            "max_n": max_n,
            "max_beam_width": width,
            "preemption": "swap",
            "host_blocks": host_blocks,
        }
    )
    static, manager = config.step_config(), MANAGERS[memory]
    program = Program(static, ModelForward(MODEL, backend), manager.on_device())

    def state():
        cache = init_kv_cache(
            MODEL.num_layers,
            NUM_BLOCKS,
            static.block_size,
            MODEL.num_kv_heads,
            MODEL.head_dim,
            jnp.dtype(kv_dtype),
        )
        return init_state(static, manager, cache)

    return program, params, jax.eval_shape(state)


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def dims(x):
    return ",".join(map(str, x.shape))


COUNT = jax.ShapeDtypeStruct((), jnp.int32)


@functools.cache
def compiled_loop(*arguments):
    program, params, state = case(*arguments)
    run = jax.jit(run_steps, static_argnums=0, donate_argnums=2)
    lowered = run.lower(program, params, state, COUNT)
    options = compiler_options(program.config.prefix_caching)
    return lowered.compile(compiler_options=options)


def check_in_place(compiled, state):
    """The donated state is aliased; nothing makes another cache, or another pool."""
    assert compiled.memory_analysis().alias_size_in_bytes >= nbytes(state)
    text = compiled.as_text()
    assert operations_on(text, dims(state.cache.k)) <= IN_PLACE
    if state.host:
        assert operations_on(text, dims(state.host.k)) <= IN_PLACE
    for leaf in jax.tree.leaves((state.scheduler.pool, state.scheduler.swap)):
        if leaf.ndim:
            assert operations_on(text, dims(leaf)) <= IN_PLACE


# What is known of the old jax need not be seen again by CI, and what is a part of the
# cases with beams and a host neither.
KNOWN = pytest.mark.newest(reason="jax 0.10 is known to make copies here")
PART = pytest.mark.newest(reason="a part of the case with beams and a host")
BFLOAT16 = pytest.param(
    "paged",
    "bfloat16",
    1,
    1,
    0,
    marks=[
        KNOWN,
        pytest.mark.xfail(
            JAX_VERSION < (0, 11),
            reason="XLA of jax 0.10 widens a bfloat16 cache to float32 on CPU to write "
            "it",
        ),
    ],
)
# Blocks of the host: a number of its own again.
HOST = 111
CACHED = [
    pytest.param(
        "cached",
        "float32",
        *several,
        marks=[
            KNOWN,
            pytest.mark.xfail(
                JAX_VERSION < (0, 11),
                reason="XLA of jax 0.10 copies the pool's arrays with a prefix cache",
            ),
        ],
    )
    for several in ((1, 1, 0), (4, 4, HOST))
]
CASES = [
    ("paged", "float32", 1, 1, 0),
    pytest.param("paged", "float32", 4, 1, 0, marks=PART),
    pytest.param("paged", "float32", 1, 1, HOST, marks=PART),
    ("paged", "float32", 4, 4, HOST),
    pytest.param("max", "float32", 1, 1, 0, marks=PART),
    ("max", "float32", 1, 4, 0),
]
CASES += CACHED


@pytest.mark.parametrize(
    ("memory", "kv_dtype", "max_n", "width", "host"), [*CASES, BFLOAT16]
)
def test_the_loop_changes_its_state_in_place(memory, kv_dtype, max_n, width, host):
    *_, state = case(memory, kv_dtype, max_n, width, host)
    assert bool(state.host) == bool(state.scheduler.swap) == bool(host)
    compiled = compiled_loop(memory, kv_dtype, max_n, width, host)
    check_in_place(compiled, state)
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes(state)
    # Less than a byte for each block: nothing grows with the pool.
    assert compiled.memory_analysis().temp_size_in_bytes < NUM_BLOCKS


def test_so_does_the_loop_that_a_cpu_runs_by_default():
    # Packed weights, products and attention of its own; with beams and swap.
    if not can_pack():
        pytest.skip("no AVX2 here, or no llvmlite: the default is the case above")
    arguments = "paged", "float32", 4, 4, HOST, "cpu"
    *_, state = case(*arguments)
    compiled = compiled_loop(*arguments)
    check_in_place(compiled, state)
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes(state)
    assert compiled.memory_analysis().temp_size_in_bytes < NUM_BLOCKS


def test_the_check_of_the_program_text_notices_a_copy():
    *_, state = case("paged")

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
    config = EngineConfig(
        **{**SETTINGS, "token_budget": 24, "min_bucket": 8}
    ).step_config()
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
