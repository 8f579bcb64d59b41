"""What a consumer warpgroup of a Hopper kernel does: wgmma and the online softmax."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, mosaic_ring
from pallas_kernels.mosaic_ring import KV_TILE, MAX_COLUMNS, MIN_TILED_UNIT, Ring, Tiles

LOG2_E = math.log2(math.e)
# Rows of a wgmma product.
ROWS = 64
# Score of a masked slot. Finite: an all-masked row must not give exp2(-inf + inf).
MASKED = -1e30


class Operands(NamedTuple):
    """Shared memory of one consumer: what its products read beside the ring.

    `k_tile` and `v_tile` are for blocks of fewer than `MIN_TILED_UNIT` tokens only: a
    tile as wgmma reads it, where the ring holds it as the cache does.
    """

    q: Any
    p: Any
    k_tile: Any
    v_tile: Any


def make_operands(tiles: Tiles, head_dim: int) -> Operands:
    """Returns the types of a consumer's operands, for `run_scoped`."""
    dtype, columns = tiles.dtype, min(head_dim, MAX_COLUMNS)
    tiled = tiles.unit >= MIN_TILED_UNIT
    tile = (KV_TILE, head_dim), (KV_TILE, columns)
    return Operands(
        q=mosaic_ring.swizzled((ROWS, head_dim), dtype),
        p=mosaic_ring.swizzled((ROWS, KV_TILE), dtype, like=head_dim),
        k_tile=None if tiled else mosaic_ring.swizzled(tile[0], dtype),
        v_tile=None if tiled else mosaic_ring.swizzled(tile[1], dtype),
    )


def matmul(acc, a, b, *, transpose_b: bool = False) -> None:
    """Adds `a @ b` to an accumulator; all three stay where they are."""
    plgpu.wgmma(acc, a, b.transpose((1, 0)) if transpose_b else b)


def _accumulator(shape: tuple[int, int]) -> Any:
    return plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def attend(start, count, visible, ring: Ring, operands: Operands, tiles: Tiles):
    """Attends to tiles `start` to `start + count`, of tokens `visible[0]` to `[1]`.

    Returns:
        The sums of weighted values, f32[ROWS, columns]; the largest score, in units of
        log2, and the sum of the weights, f32[ROWS].
    """
    columns = ring.v.shape[-1]
    low, length = visible

    def step(i, carry):
        out, top, total = carry
        stage = mosaic_ring.stage_of(i, tiles)
        first = (start + i) * KV_TILE
        left = length - first  # tokens from this tile to the end
        hidden = low - first  # tokens of this tile that are before the window

        def is_visible(index):
            return (index < left) & (index >= hidden) if tiles.window else index < left

        scores = _multiply_keys(stage, ring, operands, tiles)
        column = lax.broadcasted_iota(jnp.int32, (ROWS, KV_TILE), 1)
        scores = jnp.where(is_visible(column), _in_log2(scores, tiles), MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        fade = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        # Rounded before they are summed: so the weights of the result add up to 1.
        rounded = weights.astype(tiles.dtype)
        total = total * fade + rounded.astype(jnp.float32).sum(axis=1)
        # Through shared memory: the interpreter has no wgmma on registers.
        operands.p[...] = rounded

        mosaic_ring.await_ready(ring.v_ready.at[stage])
        values = ring.v.at[stage]

        def cleared(tile):
            line = lax.broadcasted_iota(jnp.int32, tile.shape, 0)
            return jnp.where(is_visible(line), tile, jnp.zeros_like(tile))

        # 0 * NaN is NaN: what no query may see must be cleared. Only the last tile of a
        # sequence and the first of a window have such slots.
        if operands.v_tile is not None:
            operands.v_tile[...] = cleared(_load(values, tiles))
        else:

            @pl.when(
                (left < KV_TILE) | (hidden > 0) if tiles.window else left < KV_TILE
            )
            def _():
                values[...] = cleared(values[...])

        mosaic_ring.publish()
        if operands.v_tile is not None:
            mosaic_ring.release(ring.v_free.at[stage])
            values = operands.v_tile

        def multiply_values(acc):
            matmul(acc, operands.p, values)
            return acc[...]

        added = pl.run_scoped(multiply_values, _accumulator((ROWS, columns)))
        out = out * lax.broadcast_in_dim(fade, out.shape, [0]) + added
        if operands.v_tile is None:
            mosaic_ring.release(ring.v_free.at[stage])
        return out, new_top, total

    init = (
        jnp.full((ROWS, columns), 0, jnp.float32),
        jnp.full((ROWS,), MASKED, jnp.float32),
        jnp.full((ROWS,), 0, jnp.float32),
    )
    return lax.fori_loop(0, count, step, init)


def _multiply_keys(stage, ring: Ring, operands: Operands, tiles: Tiles):
    """Returns the products of the queries with a stage's keys, f32[ROWS, KV_TILE]."""
    mosaic_ring.await_ready(ring.k_ready.at[stage])
    keys = ring.k.at[stage]
    if operands.k_tile is not None:
        columns = ring.v.shape[-1]
        for first in range(0, operands.q.shape[-1], columns):
            piece = pl.ds(first, columns)  # at once, it would not fit in registers
            operands.k_tile[:, piece] = _load(keys.at[:, piece], tiles)
        mosaic_ring.publish()
        # After the fence: before it, not all that was asked of the stage need be
        # there, and the producer would write over it.
        mosaic_ring.release(ring.k_free.at[stage])
        keys = operands.k_tile

    def multiply(acc):
        matmul(acc, operands.q, keys, transpose_b=True)
        return acc[...]

    # `run_scoped` on an accumulator and not `run_state`, and no explicit layouts: so
    # the same code runs in the interpreter.
    scores = pl.run_scoped(multiply, _accumulator((ROWS, KV_TILE)))
    if operands.k_tile is None:
        mosaic_ring.release(ring.k_free.at[stage])
    return scores


def _load(ref, tiles: Tiles):
    """Returns a tile of the ring, laid out over the threads as a product wants it."""
    return compat.load_for_wgmma(ref) if tiles.hints else ref[...]


def _in_log2(scores, tiles: Tiles):
    """Scales and caps products of queries and keys; the softmax is in powers of 2."""
    if tiles.soft_cap is None:
        return scores * (tiles.scale * LOG2_E)
    # cap * tanh(scale * x / cap). The hardware's own tanh has 11 bits; this has 22.
    powers = jnp.exp2(scores * (2 * tiles.scale * LOG2_E / tiles.soft_cap))
    cap = tiles.soft_cap * LOG2_E
    return cap - (2 * cap) / (powers + 1)
