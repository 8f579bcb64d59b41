"""What a consumer warpgroup of a Hopper kernel does: wgmma and the online softmax."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, mosaic_ring
from pallas_kernels.mosaic_ring import KV_TILE, MAX_COLUMNS, Ring, Tiles

LOG2_E = math.log2(math.e)
# Rows of a wgmma product.
ROWS = 64
# Score of a masked slot. Finite: an all-masked row must not give exp2(-inf + inf).
MASKED = -1e30


class Operands(NamedTuple):
    """Shared memory of one consumer: what its products read beside the ring.

    `k_tile` and `v_tile` are a tile as wgmma reads it, where the ring holds it in
    another form: in 8 bits, or as the cache does, in blocks of fewer than
    `MIN_TILED_UNIT` tokens.
    """

    q: Any
    p: Any
    k_tile: Any
    v_tile: Any


def make_operands(
    tiles: Tiles, head_dim: int, consumers: tuple[int, ...] = ()
) -> Operands:
    """Returns the types of a consumer's operands, for `run_scoped`.

    Args:
        tiles: static choices.
        head_dim: D.
        consumers: axes in front, for several consumers.
    """
    columns = min(head_dim, MAX_COLUMNS)

    def make(*shape: int, like: int | None = None) -> Any:
        return mosaic_ring.swizzled((*consumers, *shape), tiles.dtype, like)

    return Operands(
        q=make(ROWS, head_dim),
        p=make(ROWS, KV_TILE, like=head_dim),
        k_tile=None if tiles.direct else make(KV_TILE, head_dim),
        v_tile=None if tiles.direct else make(KV_TILE, columns),
    )


def matmul(acc, a, b, *, transpose_b: bool = False) -> None:
    """Adds `a @ b` to an accumulator; all three stay where they are."""
    plgpu.wgmma(acc, a, b.transpose((1, 0)) if transpose_b else b)


def _accumulator(shape: tuple[int, int]) -> Any:
    return plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


class Reach(NamedTuple):
    """What a consumer's rows see of a context.

    Attributes:
        low: i32[], what lies before it no row sees.
        length: i32[], what lies from it on no row sees.
        lengths: from numbers of rows, i32[...], to the tokens up to what each row sees.
        shortest: i32[], the least of them, where it pays to tell apart tiles that all
            rows see in full; else None.
        leader: bool[], whether this consumer clears the values that none of several
            consumers sees; the others wait for it.
    """

    low: Any
    length: Any
    lengths: Callable[[Any], Any]
    shortest: Any = None
    leader: Any = True


def attend(
    start,
    count,
    reach: Reach,
    ring: Ring,
    operands_at: Callable[[Any], Operands],
    tiles: Tiles,
    *,
    done=0,
):
    """Attends to tiles `start` to `start + count` of a context.

    Args:
        start: first tile.
        count: of tiles.
        reach: what is visible.
        ring: where the tiles come from.
        operands_at: returns this consumer's operands, with queries there, given a 0
            that the compiler does not know.
        tiles: static choices.
        done: tiles that have gone through the ring before.

    Returns:
        The sums of weighted values, f32[ROWS, columns]; the largest score, in units of
        log2, and the sum of the weights, f32[ROWS]. A row that has seen nothing has a
        largest score of `MASKED`, and sums that mean nothing.
    """
    columns = ring.v.shape[-1]

    def step(i, carry):
        out, top, total = carry
        stage = mosaic_ring.stage_of(done + i, tiles)
        # In 8 bits registers are scarce. With a 0 that the compiler does not know, it
        # works out where the operands lie here; before the loops, all 20 addresses that
        # wgmma wants at head dim 256 would take 40 registers from the products.
        unknown = jnp.minimum(stage, 0) if tiles.quantised is not None else 0
        operands = operands_at(unknown)
        first = (start + i) * KV_TILE
        scores = _in_log2(_multiply_keys(stage, ring, operands, tiles), tiles)

        def mask(scores):
            return jnp.where(_is_visible(first, reach, tiles), scores, MASKED)

        if reach.shortest is None:
            scores = mask(scores)
        else:
            in_full = first + KV_TILE <= reach.shortest
            scores = lax.cond(in_full, lambda scores: scores, mask, scores)
        new_top = jnp.maximum(top, scores.max(axis=1))
        fade = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        if ring.v_scales is not None:
            mosaic_ring.await_ready(ring.v_ready.at[stage])
            scales = ring.v_scales[stage]
            # What no row sees has any scale, and a weight of 0.
            index = lax.broadcasted_iota(jnp.int32, (KV_TILE,), 0)
            scales = jnp.where(_is_within(index, first, reach, tiles), scales, 1.0)
            weights = weights * _across(scales)
        # Rounded before they are summed: so the weights of the result add up to 1.
        rounded = weights.astype(tiles.dtype)
        # Through shared memory: the interpreter has no wgmma on registers.
        operands.p[...] = rounded
        weights = rounded.astype(jnp.float32)
        if ring.v_scales is not None:
            weights = weights * _across(1 / scales)
        total = total * fade + weights.sum(axis=1)

        if ring.v_scales is None:
            mosaic_ring.await_ready(ring.v_ready.at[stage])
        values = ring.v.at[stage]
        if operands.v_tile is not None:
            clear = None
            if tiles.quantised != jnp.int8:  # which has no NaN
                clear = functools.partial(
                    _cleared, first=first, reach=reach, tiles=tiles
                )
            _through_registers(values, operands.v_tile, tiles, clear)
        else:
            clear_values(stage, first, reach, ring, tiles)
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


def _is_visible(first, reach: Reach, tiles: Tiles):
    """Returns what each row sees of the tile from token `first` on, [ROWS, KV_TILE]."""
    row = lax.broadcasted_iota(jnp.int32, (ROWS, KV_TILE), 0)
    column = lax.broadcasted_iota(jnp.int32, (ROWS, KV_TILE), 1)
    left = reach.lengths(row) - first
    visible = column < left
    return visible & (column >= left - tiles.window) if tiles.window else visible


def _cleared(tile, first, reach: Reach, tiles: Tiles):
    """Returns values with 0 where no row sees them: 0 * NaN is NaN."""
    line = lax.broadcasted_iota(jnp.int32, tile.shape, 0)
    seen = _is_within(line, first, reach, tiles)
    return jnp.where(seen, tile, jnp.zeros_like(tile))


def _is_within(index, first, reach: Reach, tiles: Tiles):
    """Returns which slots of the tile from token `first` on any row sees."""
    seen = index < reach.length - first
    return seen & (index >= reach.low - first) if tiles.window else seen


def clear_values(stage, first, reach: Reach, ring: Ring, tiles: Tiles) -> None:
    """Clears the values of a stage that no row sees, once for all consumers.

    Only the last tile of a context and the first of a window have such slots.
    """
    needed = reach.length - first < KV_TILE
    if tiles.window:
        needed |= reach.low > first

    def clear():
        values = ring.v.at[stage]
        values[...] = _cleared(values[...], first, reach, tiles)

    if ring.v_cleared is None:
        pl.when(needed)(clear)
        return

    @pl.when(needed & reach.leader)
    def _():
        clear()
        mosaic_ring.publish()
        mosaic_ring.release(ring.v_cleared.at[stage])

    @pl.when(needed & ~reach.leader)
    def _():
        mosaic_ring.await_cleared(ring.v_cleared.at[stage])


def pass_by(start, count, reach: Reach, ring: Ring, tiles: Tiles, *, done) -> None:
    """Lets tiles go that other consumers attend to; see `attend`."""

    @pl.loop(0, count)
    def _(i):
        stage = mosaic_ring.stage_of(done + i, tiles)
        mosaic_ring.await_ready(ring.k_ready.at[stage])
        mosaic_ring.release(ring.k_free.at[stage])
        mosaic_ring.await_ready(ring.v_ready.at[stage])
        if tiles.direct:
            clear_values(stage, (start + i) * KV_TILE, reach, ring, tiles)
        mosaic_ring.release(ring.v_free.at[stage])


def _multiply_keys(stage, ring: Ring, operands: Operands, tiles: Tiles):
    """Returns the products of the queries with a stage's keys, f32[ROWS, KV_TILE]."""
    mosaic_ring.await_ready(ring.k_ready.at[stage])
    keys = ring.k.at[stage]
    scales = None
    if operands.k_tile is not None:
        _through_registers(keys, operands.k_tile, tiles)
        if ring.k_scales is not None:
            scales = ring.k_scales[stage]
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
    return scores if scales is None else scores * _across(scales)


def _across(columns):
    """Repeats f32[KV_TILE], a number for each column of scores, for each row."""
    return lax.broadcast_in_dim(columns, (ROWS, KV_TILE), [1])


def _through_registers(source, target, tiles: Tiles, change=None) -> None:
    """Brings a tile of the ring into the form that wgmma reads, and may change it."""
    columns = tiles.piece(source.shape[-1])
    for first in range(0, source.shape[-1], columns):
        piece = pl.ds(first, columns)
        loaded = _load(source.at[:, piece], tiles)
        target[:, piece] = loaded if change is None else change(loaded)


def _load(ref, tiles: Tiles):
    """Returns a tile of the ring, laid out over the threads as a product wants it."""
    if tiles.quantised is None:
        return compat.load_for_wgmma(ref) if tiles.hints else ref[...]
    if tiles.hints:
        swizzled = mosaic_ring.can_swizzle(ref.shape[-1], tiles.quantised)
        return compat.load_8_bits(ref, tiles.dtype, swizzled)
    return compat.widen_8_bits(ref[...], tiles.dtype)


def _in_log2(scores, tiles: Tiles):
    """Scales and caps products of queries and keys; the softmax is in powers of 2."""
    if tiles.soft_cap is None:
        return scores * (tiles.scale * LOG2_E)
    # cap * tanh(scale * x / cap). The hardware's own tanh has 11 bits; this has 22.
    powers = jnp.exp2(scores * (2 * tiles.scale * LOG2_E / tiles.soft_cap))
    cap = tiles.soft_cap * LOG2_E
    return cap - (2 * cap) / (powers + 1)
