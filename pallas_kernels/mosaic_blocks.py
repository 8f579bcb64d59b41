"""Writes to the paged cache on NVIDIA Hopper, in place, on Pallas's Mosaic GPU backend.

The cache is handed to a kernel as a mutable reference and taken back from it: where it
is donated, or carried through a loop, nothing of it is copied but what is asked for.
All copies go through shared memory by the TMA unit, in one launch for all layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat

# Thread blocks that share the copies of a step, for each layer and piece of a block:
# more would mostly be launched for nothing, few steps copy more than some blocks.
LANES = 8
# Bytes of keys, and as many of values, that a thread block copies at a time: twice what
# must be in flight to keep the memory busy.
PIECE_BYTES = 64 * 1024


def write_kv_mosaic(
    k_cache: jax.Array,
    v_cache: jax.Array,
    layer: int | jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes one layer's keys and values of a step's tokens.

    Args:
        k_cache: dtype[L, P, B, K, D]; donate it.
        v_cache: like `k_cache`.
        layer: which layer.
        k: dtype[N, K, D], keys.
        v: dtype[N, K, D], values.
        slots: i32[N], where each token goes. What names a slot of the null block, as
            padding does, is not written.
        interpret: see `mosaic_decode.paged_attention_mosaic`.

    Returns:
        The two caches with the slots written.
    """
    shape, dtype = k.shape[1:], k_cache.dtype
    _, _, block_size, *rest = k_cache.shape
    _check_row(shape, dtype, rest)
    kernel = _kernel(
        functools.partial(_write, block_size=block_size),
        out_type=(),
        scratch_types=(
            plgpu.SMEM(shape, dtype),
            plgpu.SMEM(shape, dtype),
            plgpu.Barrier(num_arrivals=2),
        ),
        grid=(slots.shape[0],),
        grid_names=("token",),
        interpret=interpret,
    )
    k_ref, v_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    where = jnp.asarray(layer, jnp.int32).reshape(1)
    kernel(k.astype(dtype), v.astype(dtype), slots, where, k_ref, v_ref)
    return jax.freeze(k_ref), jax.freeze(v_ref)


def copy_blocks_mosaic(
    k_cache: jax.Array,
    v_cache: jax.Array,
    source: jax.Array,
    target: jax.Array,
    count: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies whole blocks in every layer: the copies of a step's copy-on-write.

    Args:
        k_cache: dtype[L, P, B, K, D]; donate it.
        v_cache: like `k_cache`.
        source: i32[C], blocks to copy from.
        target: i32[C], blocks to copy to: distinct, and none of them a source.
        count: i32[], how many of the pairs are copied: the first ones.
        interpret: see `mosaic_decode.paged_attention_mosaic`.

    Returns:
        The two caches with the first `count` target blocks equal to their sources.
    """
    k_ref, v_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    kernel = _mover(_copy_within, k_cache, source.shape[0], (), interpret)
    kernel(source, target, count.reshape(1), k_ref, v_ref)
    return jax.freeze(k_ref), jax.freeze(v_ref)


def gather_blocks_mosaic(
    k_cache: jax.Array,
    v_cache: jax.Array,
    blocks: jax.Array,
    count: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies whole blocks to a buffer beside the cache, to be swapped out from there.

    Args:
        k_cache: dtype[L, P, B, K, D].
        v_cache: like `k_cache`.
        blocks: i32[C], blocks to copy.
        count: i32[], how many of them are copied: the first ones.
        interpret: see `mosaic_decode.paged_attention_mosaic`.

    Returns:
        Keys and values dtype[L, C, B, K, D]; past `count` they hold anything.
    """
    layers, _, *block = k_cache.shape
    num_blocks = blocks.shape[0]
    staging = jax.ShapeDtypeStruct((layers, num_blocks, *block), k_cache.dtype)
    kernel = _mover(_copy_across, k_cache, num_blocks, (staging, staging), interpret)
    places = jnp.arange(num_blocks, dtype=jnp.int32)
    return kernel(blocks, places, count.reshape(1), k_cache, v_cache)


def scatter_blocks_mosaic(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_blocks: jax.Array,
    v_blocks: jax.Array,
    blocks: jax.Array,
    count: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies whole blocks from a buffer into the cache: the way back of a gather.

    Args:
        k_cache: dtype[L, P, B, K, D]; donate it.
        v_cache: like `k_cache`.
        k_blocks: dtype[L, C, B, K, D], keys.
        v_blocks: like `k_blocks`, values.
        blocks: i32[C], blocks of the cache to copy them to, distinct.
        count: i32[], how many are copied: the first ones.
        interpret: see `mosaic_decode.paged_attention_mosaic`.

    Returns:
        The two caches with the blocks written.
    """
    k_ref, v_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    kernel = _mover(_copy_across, k_cache, blocks.shape[0], (), interpret)
    places = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    kernel(places, blocks, count.reshape(1), k_blocks, v_blocks, k_ref, v_ref)
    return jax.freeze(k_ref), jax.freeze(v_ref)


def _kernel(body: Any, *, interpret: Any, **options: Any) -> Any:
    if interpret is None or isinstance(interpret, bool):
        interpret = compat.interpret_params(interpret)
    return plgpu.kernel(
        body, compiler_params=compat.compiler_params(), interpret=interpret, **options
    )


def _check_row(shape: tuple[int, ...], dtype: Any, cache: list[int]) -> None:
    if list(shape) != cache:
        raise ValueError(
            f"Keys and values must be [N, {cache[0]}, {cache[1]}] as in the cache, got "
            f"[N, {', '.join(map(str, shape))}]."
        )
    if shape[-1] * jnp.dtype(dtype).itemsize % 16:
        raise ValueError(
            f"Head dim {shape[-1]} of {jnp.dtype(dtype)} is no multiple of 16 bytes; "
            'the TMA unit cannot copy it, use backend="xla".'
        )


def _write(
    k_new, v_new, slots, layer, k_ref, v_ref, k_buffer, v_buffer, ready, *, block_size
):
    """The kernel of `write_kv_mosaic`: one token."""
    token = lax.axis_index("token")
    slot = slots[token]
    place = (
        layer[0],
        lax.div(slot, jnp.int32(block_size)),
        lax.rem(slot, jnp.int32(block_size)),
    )

    @pl.when(slot >= block_size)
    def _():
        plgpu.copy_gmem_to_smem(k_new.at[token], k_buffer, ready)
        plgpu.copy_gmem_to_smem(v_new.at[token], v_buffer, ready)
        _await(ready)
        plgpu.copy_smem_to_gmem(k_buffer, k_ref.at[place])
        plgpu.copy_smem_to_gmem(v_buffer, v_ref.at[place])
        _drain()


def _mover(
    body: Any, cache: jax.Array, num_pairs: int, out_type: Any, interpret: Any
) -> Any:
    """Returns a kernel that copies blocks of the shape of a cache's."""
    layers, _, block_size, kv_heads, head_dim = cache.shape
    _check_row((kv_heads, head_dim), cache.dtype, [kv_heads, head_dim])
    row = kv_heads * head_dim * cache.dtype.itemsize
    slots = block_size
    while slots > 1 and slots * row > PIECE_BYTES:
        slots //= 2
    lanes = min(LANES, num_pairs)
    buffer = plgpu.SMEM((slots, kv_heads, head_dim), cache.dtype)
    return _kernel(
        functools.partial(body, lanes=lanes),
        out_type=out_type,
        scratch_types=(buffer, buffer, plgpu.Barrier(num_arrivals=2)),
        grid=(lanes, layers, block_size // slots),
        grid_names=("lane", "layer", "piece"),
        interpret=interpret,
    )


def _copy_within(source, target, count, k_ref, v_ref, *scratch, lanes):
    """The kernel of `copy_blocks_mosaic`."""
    _copy(source, target, count, (k_ref, v_ref), (k_ref, v_ref), *scratch, lanes=lanes)


def _copy_across(source, target, count, k_from, v_from, k_to, v_to, *scratch, lanes):
    """The kernel of `gather_blocks_mosaic` and `scatter_blocks_mosaic`."""
    _copy(source, target, count, (k_from, v_from), (k_to, v_to), *scratch, lanes=lanes)


def _copy(
    source, target, count, origin, goal, k_buffer, v_buffer, ready, *, lanes
) -> None:
    """Copies every `lanes`-th pair, one layer and one piece of each block."""
    lane, layer = lax.axis_index("lane"), lax.axis_index("layer")
    size = k_buffer.shape[0]
    slots = pl.ds(lax.axis_index("piece") * size, size)
    buffers = (k_buffer, v_buffer)

    @pl.loop(0, lax.div(count[0] - lane + (lanes - 1), jnp.int32(lanes)))
    def _(turn):
        pair = lane + turn * lanes
        for ref, buffer in zip(origin, buffers):
            plgpu.copy_gmem_to_smem(ref.at[layer, source[pair], slots], buffer, ready)
        _await(ready)
        for ref, buffer in zip(goal, buffers):
            plgpu.copy_smem_to_gmem(buffer, ref.at[layer, target[pair], slots])
        _drain()


# These keep a buffer's readers and writers apart. They have names, so that tests can
# break one and see that the break is noticed.


def _await(barrier) -> None:
    plgpu.barrier_wait(barrier)


def _drain() -> None:
    """Waits until all of the buffers has gone out: they may be written again."""
    plgpu.wait_smem_to_gmem(0)
