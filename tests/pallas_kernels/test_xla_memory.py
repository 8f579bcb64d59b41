"""The compiled xla path: the cache in place, and temporaries that follow the step."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from paged_jax.kv_cache import KVCache, write_kv
from pallas_kernels import AttentionMetadata, compat, paged_attention

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 3, 9, 3, 64, 16
BUCKETS = (16, 24, 32)


def shapes(num_blocks: int, width: int, num_tokens: int = 32):
    """Arguments of a step, as shapes."""

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    cache = jax.ShapeDtypeStruct(
        (LAYERS, num_blocks, BLOCK, KV_HEADS, HEAD_DIM), jnp.float32
    )
    metadata = AttentionMetadata(
        block_tables=i32(16, width),
        rows=i32(num_tokens),
        lengths=i32(num_tokens),
        num_decode=i32(),
        num_tokens=i32(),
        tile_start=i32(8),
        tile_len=i32(8),
        num_tiles=i32(),
    )
    x = jax.ShapeDtypeStruct((num_tokens, HEADS, HEAD_DIM), jnp.float32)
    return KVCache(cache, cache), x, i32(num_tokens), metadata


def write_and_attend(layer, cache: KVCache, x, slots, metadata):
    kv = x[:, :KV_HEADS]
    cache = write_kv(cache, layer, kv, kv, slots)
    x = paged_attention(
        x, cache.k, cache.v, layer, metadata, scale=0.125, backend="xla"
    )
    return cache, x


def unrolled_step(cache: KVCache, x, slots, metadata):
    """What a model does with the cache: writes a layer's tokens, then attends."""
    for layer in range(LAYERS):
        cache, x = write_and_attend(layer, cache, x, slots, metadata)
    return cache, x


def looped_step(cache: KVCache, x, slots, metadata):
    """The same, in a loop over the layers."""
    return lax.fori_loop(
        0,
        LAYERS,
        lambda layer, carry: write_and_attend(layer, *carry, slots, metadata),
        (cache, x),
    )


def loop_of_steps(step, cache: KVCache, x, slots, metadata):
    """Steps in a loop on the device, until the host is needed."""
    return lax.while_loop(
        lambda carry: carry[0] < metadata.num_tokens,
        lambda carry: (carry[0] + 1, *step(carry[0], *carry[1:], slots, metadata)),
        (0, cache, x),
    )[1:]


def in_bucket(num_tokens, cache: KVCache, x, slots, metadata):
    """A step of `num_tokens` tokens."""
    small = metadata._replace(
        rows=metadata.rows[:num_tokens], lengths=metadata.lengths[:num_tokens]
    )
    cache, y = looped_step(cache, x[:num_tokens], slots[:num_tokens], small)
    return cache, x.at[:num_tokens].set(y)


def loop_of_unrolled_steps(*args):
    return loop_of_steps(lambda i, *args: unrolled_step(*args), *args)


def loop_of_looped_steps(*args):
    return loop_of_steps(lambda i, *args: looped_step(*args), *args)


def loop_of_switched_buckets(*args):
    """The number of tokens of each step is chosen on the device, by a switch."""

    def step(i, cache, x, slots, metadata):
        branches = [
            lambda cache, x, n=n: in_bucket(n, cache, x, slots, metadata)
            for n in BUCKETS
        ]
        return lax.switch(i % len(BUCKETS), branches, cache, x)

    return loop_of_steps(step, *args)


def loop_of_looped_buckets(*args):
    """The same, by a loop of one turn or none for each bucket."""

    def step(i, cache, x, slots, metadata):
        chosen = i % len(BUCKETS)
        for bucket, num_tokens in enumerate(BUCKETS):
            chosen, cache, x = lax.while_loop(
                lambda carry, bucket=bucket: carry[0] == bucket,
                lambda carry, n=num_tokens: (
                    jnp.int32(-1),
                    *in_bucket(n, *carry[1:], slots, metadata),
                ),
                (chosen, cache, x),
            )
        return cache, x

    return loop_of_steps(step, *args)


@functools.lru_cache
def compiled(function, num_blocks: int, width: int):
    args = shapes(num_blocks, width)
    return jax.jit(function, donate_argnums=0).lower(*args).compile()


needs_in_place_switch = pytest.mark.skipif(
    compat.JAX_VERSION < (0, 11), reason="jax 0.10 copies what goes through a switch"
)
PROGRAMS = [
    unrolled_step,
    loop_of_unrolled_steps,
    loop_of_looped_steps,
    loop_of_looped_buckets,
    pytest.param(loop_of_switched_buckets, marks=needs_in_place_switch),
]


@pytest.mark.parametrize("function", PROGRAMS)
def test_the_cache_is_aliased_and_never_copied(function):
    num_blocks = 501
    program = compiled(function, num_blocks, 64)
    layer = num_blocks * BLOCK * KV_HEADS * HEAD_DIM * 4
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * LAYERS * layer
    assert memory.temp_size_in_bytes < layer / 2
    sizes = (f"[{LAYERS},{num_blocks},", f"[{LAYERS * num_blocks},", f"[{num_blocks},")
    for line in program.as_text().splitlines():
        result, _, operation = line.partition(" = ")[2].partition(" ")
        if any(size in result for size in sizes):
            assert not operation.startswith(("copy(", "transpose(", "slice(")), line
            assert "dynamic-slice(" not in operation, line


@pytest.mark.parametrize("function", PROGRAMS)
def test_temporaries_do_not_grow_with_the_pool_or_the_table(function):
    def temporaries(num_blocks, width):
        memory = compiled(function, num_blocks, width).memory_analysis()
        return memory.temp_size_in_bytes

    small = temporaries(501, 64)
    assert temporaries(4001, 64) == small
    # A table passed through the loop may be kept once more, nothing as wide as that
    # many tokens.
    table = 16 * 1024 * 4
    assert temporaries(501, 1024) <= small + 2 * table
