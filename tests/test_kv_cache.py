"""The KV cache: writes and block copies, and that they happen in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import tiny_model
from program_text import IN_PLACE, operations_on

from paged_jax import EngineConfig
from paged_jax.batch import TokenBatch
from paged_jax.kv_cache import (
    KVCache,
    copy_blocks,
    init_kv_cache,
    move_blocks,
    write_backend,
    write_kv,
)
from paged_jax.models import llama
from pallas_kernels import AttentionMetadata, compat
from pallas_kernels.quantised_kv import Quantised, dequantise, quantise

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM = 3, 7, 4, 2, 8


quantised = pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])


def filled_cache():
    shape = (2, LAYERS, BLOCKS + 1, BLOCK_SIZE, HEADS, DIM)
    k, v = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return KVCache(k=jnp.asarray(k), v=jnp.asarray(v))


def test_a_new_cache_has_room_for_the_null_block():
    cache = init_kv_cache(LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM, jnp.bfloat16)
    assert cache.k.shape == (LAYERS, BLOCKS + 1, BLOCK_SIZE, HEADS, DIM)
    assert cache.block_size == BLOCK_SIZE
    assert cache.nbytes == 2 * LAYERS * (BLOCKS + 1) * BLOCK_SIZE * HEADS * DIM * 2


def test_write_goes_to_the_slots_of_one_layer():
    cache = filled_cache()
    slots = np.array([13, 4, 0])  # block 3 offset 1, block 1 offset 0, padding
    new = -np.arange(1, 1 + 3 * HEADS * DIM, dtype=np.float32).reshape(3, HEADS, DIM)
    written = write_kv(cache, 1, jnp.asarray(new), jnp.asarray(2 * new), slots)
    for before, after, values in (
        (cache.k, written.k, new),
        (cache.v, written.v, 2 * new),
    ):
        expected = np.array(before)
        expected[1, [3, 1, 0], [1, 0, 0]] = values
        np.testing.assert_array_equal(after, expected)


@quantised
def test_8_bits_have_scales_which_count(dtype):
    cache = init_kv_cache(LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM, dtype)
    assert cache.k_scales.shape == (LAYERS, BLOCKS + 1, HEADS, BLOCK_SIZE)
    vectors = 2 * LAYERS * BLOCK_SIZE * HEADS
    assert cache.block_nbytes == vectors * (DIM + 4)
    assert cache.nbytes == (BLOCKS + 1) * cache.block_nbytes


@quantised
def test_8_bits_are_written_each_with_the_scale_of_its_token_and_head(dtype):
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 3, HEADS, DIM)).astype(np.float32)
    k[0] *= 100
    slots = np.array([13, 4, 0])
    cache = init_kv_cache(LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM, dtype)
    written = write_kv(cache, 1, jnp.asarray(k), jnp.asarray(v), slots)
    for values, scales, new in (
        (written.k, written.k_scales, k),
        (written.v, written.v_scales, v),
    ):
        numbers = np.array(dequantise(Quantised(values, scales.swapaxes(2, 3))))
        expected = np.asarray(dequantise(quantise(jnp.asarray(new), dtype)))
        for token, (block, offset) in enumerate([(3, 1), (1, 0), (0, 0)]):
            np.testing.assert_array_equal(numbers[1, block, offset], expected[token])
            numbers[1, block, offset] = 0
        assert not numbers.any()


@quantised
def test_whole_blocks_take_their_scales_along(dtype):
    cache = init_kv_cache(LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM, dtype)
    numbers = iter(range(1, 5))

    def number_blocks(x):
        number = next(numbers) * jnp.arange(BLOCKS + 1, dtype=x.dtype)
        return x + number.reshape(1, -1, *[1] * (x.ndim - 2))

    cache = jax.tree.map(number_blocks, cache)
    one, two = jnp.array([1]), jnp.array([2])
    copied = copy_blocks(cache, one, two, jnp.int32(1))
    moved, left = move_blocks(
        cache, copied, jnp.array([3]), jnp.array([4]), jnp.int32(1)
    )
    assert left == 0
    leaves = jax.tree.leaves(moved), jax.tree.leaves(cache)
    assert len(leaves[0]) == 4
    for after, before in zip(*leaves):
        expected = np.array(before)
        assert len(np.unique(expected)) == BLOCKS + 1
        expected[:, 2], expected[:, 4] = expected[:, 1], expected[:, 3]
        np.testing.assert_array_equal(after, expected)


@pytest.mark.skipif(not compat.has_mosaic(), reason="this jax is too old for pallas")
@quantised
def test_the_pallas_backend_leaves_the_same_8_bits(dtype):
    rng = np.random.default_rng(0)
    k, v = jnp.asarray(rng.normal(size=(2, 3, HEADS, 16)), jnp.float32)
    cache = init_kv_cache(LAYERS, BLOCKS, BLOCK_SIZE, HEADS, 16, dtype)

    @functools.partial(jax.jit, static_argnames="backend")
    def write_and_copy(cache, backend):
        cache = write_kv(cache, 1, k, v, jnp.array([13, 4, 0]), backend=backend)
        pairs = jnp.array([1, 3]), jnp.array([4, 2]), jnp.int32(2)
        return copy_blocks(cache, *pairs, backend=backend)

    xla, pallas = write_and_copy(cache, "xla"), write_and_copy(cache, "pallas")
    for ours, theirs in zip(jax.tree.leaves(pallas), jax.tree.leaves(xla)):
        np.testing.assert_array_equal(ours[:, 1:], theirs[:, 1:])
        assert np.asarray(ours).any()


@pytest.mark.skipif(not compat.has_mosaic(), reason="this jax is too old for pallas")
def test_the_pallas_backend_leaves_the_same_in_every_block_but_the_null_block():
    cache = filled_cache()
    slots = jnp.array([13, 4, 0])
    new = -jnp.arange(1, 1 + 3 * HEADS * DIM, dtype=jnp.float32).reshape(3, HEADS, DIM)

    @functools.partial(jax.jit, static_argnames="backend")
    def write_and_copy(cache, backend):
        cache = write_kv(cache, 1, new, 2 * new, slots, backend=backend)
        pairs = jnp.array([1, 3]), jnp.array([4, 2]), jnp.int32(2)
        return copy_blocks(cache, *pairs, backend=backend)

    xla, pallas = write_and_copy(cache, "xla"), write_and_copy(cache, "pallas")
    np.testing.assert_array_equal(pallas.k[:, 1:], xla.k[:, 1:])
    np.testing.assert_array_equal(pallas.v[:, 1:], xla.v[:, 1:])
    assert not np.array_equal(xla.k[:, 1:], cache.k[:, 1:])


def test_a_pallas_model_writes_with_pallas_where_there_is_a_gpu():
    config = EngineConfig(attention_backend="pallas", kv_dtype="bfloat16")
    assert write_backend("pallas") == config.step_config().cache_backend == "xla"
    with compat.for_gpu():
        assert write_backend("pallas") == config.step_config().cache_backend == "pallas"
        assert write_backend("xla") == write_backend("cpu") == "xla"


@pytest.mark.skipif(not compat.has_mosaic(), reason="this jax is too old for pallas")
@pytest.mark.parametrize(
    "backend,cascade,dtype,kernels",
    [
        ("pallas", False, jnp.bfloat16, 2),
        # What writes, passes over prefixes, decodes and the rest.
        ("pallas", True, jnp.int8, 4),
        ("xla", False, jnp.bfloat16, 0),
    ],
)
def test_a_layer_for_a_gpu_has_kernels_that_write_and_attend(
    backend, cascade, dtype, kernels
):
    model = tiny_model(head_dim=64, num_layers=1)
    cache = init_kv_cache(1, BLOCKS, 8, 2, 64, dtype)
    one, zero = jnp.ones(1, jnp.int32), jnp.int32(0)
    attention = AttentionMetadata(one[None], one, one, zero, zero, one, one, zero)
    batch = TokenBatch(one, one, one, attention, one, zero)
    options = dict(backend=backend, unroll=True, cascade=cascade)
    step = functools.partial(llama.forward, model.config, **options)
    with compat.for_gpu():
        traced = jax.jit(step).trace(model.params, batch, cache)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == kernels


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="Unknown cache backend 'cpu'; use 'xla' or"):
        copy_blocks(
            filled_cache(), *[jnp.zeros(1, int)] * 2, jnp.int32(0), backend="cpu"
        )


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_copy_makes_the_first_count_copies_in_every_layer(count):
    cache = filled_cache()
    source, target = jnp.array([1, 1, 6]), jnp.array([4, 2, 3])
    copied = copy_blocks(cache, source, target, jnp.int32(count))
    for before, after in ((cache.k, copied.k), (cache.v, copied.v)):
        expected = np.array(before)
        expected[:, target[:count]] = expected[:, source[:count]]
        np.testing.assert_array_equal(after, expected)


def compiled(function, dtype, num_blocks, *arguments):
    cache = init_kv_cache(LAYERS, num_blocks, BLOCK_SIZE, HEADS, DIM, dtype)
    program = jax.jit(function, donate_argnums=0).lower(cache, *arguments).compile()
    return cache, program


COPY = (copy_blocks, jnp.zeros(8, jnp.int32), jnp.zeros(8, jnp.int32), jnp.int32(0))
WRITE = (
    lambda cache, k, v, slots: write_kv(cache, 1, k, v, slots),
    jnp.zeros((5, HEADS, DIM)),
    jnp.zeros((5, HEADS, DIM)),
    jnp.zeros(5, jnp.int32),
)
BFLOAT16 = pytest.param(
    jnp.bfloat16,
    marks=pytest.mark.xfail(
        JAX_VERSION < (0, 11),
        reason="XLA of jax 0.10 widens a bfloat16 cache to float32 on CPU to write it",
    ),
)


@pytest.mark.parametrize("dtype", [jnp.float32, BFLOAT16, jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("case", [COPY, WRITE], ids=["copy_blocks", "write_kv"])
def test_the_donated_cache_is_changed_in_place(case, dtype):
    temporaries = []
    for num_blocks in (60, 6000):
        cache, program = compiled(case[0], dtype, num_blocks, *case[1:])
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == cache.nbytes
        for array in jax.tree.leaves(cache):
            shape = ",".join(map(str, array.shape))
            assert operations_on(program.as_text(), shape) <= IN_PLACE
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1]
    block_bytes = cache.nbytes // (num_blocks + 1)  # keys and values, all layers
    assert temporaries[0] <= 2 * block_bytes + 1024
