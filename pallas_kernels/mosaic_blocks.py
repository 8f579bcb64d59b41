"""Writes to the paged cache on NVIDIA Hopper, in place, on Pallas's Mosaic GPU backend.

The cache is handed to a kernel as a mutable reference and taken back from it: where it
is donated, or carried through a loop, nothing of it is copied but what is asked for.
All copies go through shared memory by the TMA unit, in one launch for all layers.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic_tuning import choose_lanes, choose_piece

# The arrays of a cache: keys and values [L, P, B, K, D] and, where those have 8 bits,
# their scales f32[L, P, K, B].
Arrays = Sequence[jax.Array]


def write_kv_mosaic(
    cache: Arrays,
    new: Arrays,
    layer: int | jax.Array,
    slots: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Writes one layer's keys and values of a step's tokens.

    Args:
        cache: its arrays; donate them.
        new: keys and values [N, K, D] and, where the cache has scales, theirs
            f32[N, K].
        layer: which layer.
        slots: i32[N], where each token goes. What names a slot of the null block, as
            padding does, is not written.
        interpret: see `mosaic_decode.paged_attention_mosaic`.

    Returns:
        The arrays of the cache with the slots written.
    """
    k_cache = cache[0]
    shape, dtype = new[0].shape[1:], k_cache.dtype
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
    refs = tuple(map(jax.new_ref, cache))
    where = jnp.asarray(layer, jnp.int32).reshape(1)
    kernel(tuple(x.astype(y.dtype) for x, y in zip(new, cache)), slots, where, refs)
    return tuple(map(jax.freeze, refs))


def copy_blocks_mosaic(
    cache: Arrays,
    source: jax.Array,
    target: jax.Array,
    count: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Copies whole blocks in every layer: the copies of a step's copy-on-write.

    Args:
        cache: its arrays; donate them.
        source: i32[C], blocks to copy from.
        target: i32[C], blocks to copy to: distinct, and none of them a source.
        count: i32[], how many of the pairs are copied: the first ones.
        interpret: see `mosaic_decode.paged_attention_mosaic`.

    Returns:
        The arrays with the first `count` target blocks equal to their sources.
    """
    kernel, pieces = _mover(_copy_within, cache, source.shape[0], (), interpret)
    refs = tuple(jax.new_ref(_in_pieces(x, pieces)) for x in cache)
    kernel(source, target, count.reshape(1), refs)
    return tuple(jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, cache))


def gather_blocks_mosaic(
    cache: Arrays,
    blocks: jax.Array,
    count: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Copies whole blocks to a buffer beside the cache, to be swapped out from there.

    Args:
        cache: its arrays.
        blocks: i32[C], blocks to copy.
        count: i32[], how many of them are copied: the first ones.
        interpret: see `mosaic_decode.paged_attention_mosaic`.

    Returns:
        An array [L, C, ...] for each of the cache; past `count` they hold anything.
    """
    num_blocks = blocks.shape[0]
    staging = tuple(
        jax.ShapeDtypeStruct((x.shape[0], num_blocks, *x.shape[2:]), x.dtype)
        for x in cache
    )
    kernel, pieces = _mover(_copy_across, cache, num_blocks, staging, interpret)
    places = jnp.arange(num_blocks, dtype=jnp.int32)
    origin = tuple(_in_pieces(x, pieces) for x in cache)
    staged = kernel(blocks, places, count.reshape(1), origin)
    return tuple(x.reshape(like.shape) for x, like in zip(staged, staging))


def scatter_blocks_mosaic(
    cache: Arrays,
    staged: Arrays,
    blocks: jax.Array,
    count: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Copies whole blocks from a buffer into the cache: the way back of a gather.

    Args:
        cache: its arrays; donate them.
        staged: an array [L, C, ...] for each of the cache.
        blocks: i32[C], blocks of the cache to copy them to, distinct.
        count: i32[], how many are copied: the first ones.
        interpret: see `mosaic_decode.paged_attention_mosaic`.

    Returns:
        The arrays of the cache with the blocks written.
    """
    kernel, pieces = _mover(_copy_across, cache, blocks.shape[0], (), interpret)
    refs = tuple(jax.new_ref(_in_pieces(x, pieces)) for x in cache)
    places = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    origin = tuple(_in_pieces(x, pieces) for x in staged)
    kernel(places, blocks, count.reshape(1), origin, *refs)
    return tuple(jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, cache))


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


def _write(new, slots, layer, cache, k_buffer, v_buffer, ready, *, block_size) -> None:
    """The kernel of `write_kv_mosaic`: one token."""
    token = lax.axis_index("token")
    slot = slots[token]
    block = lax.div(slot, jnp.int32(block_size))
    offset = lax.rem(slot, jnp.int32(block_size))

    @pl.when(slot >= block_size)
    def _():
        buffers = (k_buffer, v_buffer)
        for ref, buffer in zip(new, buffers):
            compat.copy_contiguous(ref.at[token], buffer, ready)
        _await(ready)
        for ref, buffer in zip(cache, buffers):
            plgpu.copy_smem_to_gmem(buffer, ref.at[layer[0], block, offset])
        # Of one token, scales lie far apart: too small for the TMA unit.
        for source, target in zip(new[2:], cache[2:]):
            for head in range(source.shape[1]):
                target[layer[0], block, head, offset] = source[token, head]
        _drain()


def _mover(
    body: Any, cache: Arrays, num_pairs: int, out: Arrays | tuple, interpret: Any
) -> tuple[Any, int]:
    """Returns a kernel that copies blocks, and the number of pieces it cuts them into.

    It takes arrays, and returns `out`, in the form of `_in_pieces`.
    """
    layers, _, block_size, kv_heads, head_dim = cache[0].shape
    _check_row((kv_heads, head_dim), cache[0].dtype, [kv_heads, head_dim])
    slots = choose_piece(block_size, kv_heads * head_dim * cache[0].dtype.itemsize)
    pieces = block_size // slots
    shapes = [
        jax.eval_shape(functools.partial(_in_pieces, pieces=pieces), x) for x in out
    ]
    buffers = []
    for x in cache:
        size = math.prod(x.shape[2:]) // pieces
        if size * x.dtype.itemsize % 16:
            raise ValueError(
                f"The scales of {slots} slots of {kv_heads} KV heads are no multiple "
                "of 16 bytes; the TMA unit cannot copy them, use a larger block size "
                'or backend="xla".'
            )
        buffers.append(plgpu.SMEM((size,), x.dtype))
    lanes = choose_lanes(num_pairs)
    kernel = _kernel(
        functools.partial(body, lanes=lanes),
        out_type=tuple(shapes),
        scratch_types=(tuple(buffers), plgpu.Barrier(num_arrivals=len(cache))),
        grid=(lanes, layers, pieces),
        grid_names=("lane", "layer", "piece"),
        interpret=interpret,
    )
    return kernel, pieces


def _in_pieces(array: jax.Array, pieces: int) -> jax.Array:
    """Returns a view [L, P, pieces, n] of an array: its blocks have no gaps."""
    layers, num_blocks = array.shape[:2]
    return array.reshape(layers, num_blocks, pieces, -1)


def _copy_within(source, target, count, cache, *scratch, lanes):
    """The kernel of `copy_blocks_mosaic`."""
    _copy(source, target, count, cache, cache, *scratch, lanes=lanes)


def _copy_across(source, target, count, origin, *rest, lanes):
    """The kernel of `gather_blocks_mosaic` and `scatter_blocks_mosaic`."""
    *goal, buffers, ready = rest
    _copy(source, target, count, origin, goal, buffers, ready, lanes=lanes)


def _copy(source, target, count, origin, goal, buffers, ready, *, lanes) -> None:
    """Copies every `lanes`-th pair, one layer and one piece of each block."""
    lane, layer = lax.axis_index("lane"), lax.axis_index("layer")
    piece = lax.axis_index("piece")

    @pl.loop(0, lax.div(count[0] - lane + (lanes - 1), jnp.int32(lanes)))
    def _(turn):
        pair = lane + turn * lanes
        for ref, buffer in zip(origin, buffers):
            compat.copy_contiguous(ref.at[layer, source[pair], piece], buffer, ready)
        _await(ready)
        for ref, buffer in zip(goal, buffers):
            plgpu.copy_smem_to_gmem(buffer, ref.at[layer, target[pair], piece])
        _drain()


# These keep a buffer's readers and writers apart. They have names, so that tests can
# break one and see that the break is noticed.


def _await(barrier) -> None:
    plgpu.barrier_wait(barrier)


def _drain() -> None:
    """Waits until all of the buffers has gone out: they may be written again."""
    plgpu.wait_smem_to_gmem(0)
