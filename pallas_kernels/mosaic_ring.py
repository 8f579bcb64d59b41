"""How a Hopper kernel reads a context: a producer fills a ring of shared memory.

The producer warpgroup walks a block table and has the TMA unit copy tiles of `KV_TILE`
keys and values into the stages of a ring; consumers wait for a stage and release it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.quantised_kv import as_numbers

# Cached tokens in each step of the softmax: the N of the first product, the K of the
# second. A tile may span several blocks.
KV_TILE = 64
# Rows of the least piece of shared memory that wgmma and the TMA unit both know how to
# read. A smaller unit comes to a plain buffer, and goes through registers to a tile.
MIN_TILED_UNIT = 8
# Columns of the result that one thread block computes, at most: more do not fit in the
# registers. Those that share a wider result each read all keys, mostly from the cache.
MAX_COLUMNS = 128


class Tiles(NamedTuple):
    """Static choices: how a context is read, and what is made of its scores.

    Attributes:
        unit: tokens of a block that lie side by side in the ring; a block, or KV_TILE
            tokens of a larger one.
        per_block: units in a block.
        stages: stages of the ring.
        scale: factor on the scores.
        soft_cap: bound that the scores approach, or None.
        window: how many of the last tokens are visible, or None for all.
        dtype: what is multiplied: of keys and values, or what those of 8 bits become.
        quantised: int8 or float8_e4m3fn, of keys and values in 8 bits; None of others.
        contiguous: whether each row's blocks lie side by side, in order, as many as a
            table has room for: then no table is read.
        hints: whether to name layouts that the compiler is slow to find. The
            interpreter of jax 0.11 does not know them.
    """

    unit: int
    per_block: int
    stages: int
    scale: float
    soft_cap: float | None
    window: int | None
    dtype: Any
    contiguous: bool
    hints: bool
    quantised: Any = None

    @property
    def direct(self) -> bool:
        """Whether wgmma reads the ring; else a tile that went through registers."""
        return self.unit >= MIN_TILED_UNIT and self.quantised is None

    def per_copy(self, columns: int) -> int:
        """Returns how many tokens one copy brings: a unit, or one of its tokens.

        The TMA unit wants tiles of an array 128 bytes apart, as units of few short rows
        would not lie. A single row has no gaps, and for such 16 bytes will do.
        """
        nbytes = self.unit * columns * jnp.dtype(self.quantised or self.dtype).itemsize
        return self.unit if nbytes % 128 == 0 else 1

    def piece(self, columns: int) -> int:
        """Returns how many columns of a tile go through registers at once.

        More than 128 do not fit beside the sums; in 8 bits, not even those. Of 128 of
        e4m3 all the same: the compiler makes do with fewer registers than for halves.
        """
        whole = self.quantised == jnp.float8_e4m3fn and columns == 128
        if self.quantised is not None and columns % 64 == 0 and not whole:
            return 64
        return min(columns, MAX_COLUMNS)


class Ring(NamedTuple):
    """Stages of keys [stages, KV_TILE, D] and values [stages, KV_TILE, columns].

    `*_scales`: of those in 8 bits, f32[stages, KV_TILE]; else None. `*_ready`: the
    copies into a stage are done. `*_free`: its readers are. `v_cleared`: one of several
    readers has cleared what none may see; None where each reader clears for itself.
    """

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    v_cleared: Any


def make_ring(tiles: Tiles, head_dim: int, readers: int = 1) -> Ring:
    """Returns the types of a ring, for `run_scoped`.

    Args:
        tiles: static choices.
        head_dim: D.
        readers: consumer warpgroups, which must all release a stage.
    """
    columns = min(head_dim, MAX_COLUMNS)

    def stages(columns: int) -> Any:
        shape = (tiles.stages, KV_TILE, columns)
        dtype = tiles.quantised or tiles.dtype
        if tiles.unit >= MIN_TILED_UNIT and can_swizzle(columns, dtype):
            return swizzled(shape, dtype, like=tiles.piece(columns))
        return _plain(shape, dtype)

    def barrier(arrivals: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=tiles.stages)

    copies, scales = KV_TILE // tiles.per_copy(columns), None
    if tiles.quantised is not None:
        copies *= 2
        scales = plgpu.SMEM((tiles.stages, KV_TILE), jnp.float32)
    return Ring(
        k=stages(head_dim),
        v=stages(columns),
        k_scales=scales,
        v_scales=scales,
        k_ready=barrier(copies),
        v_ready=barrier(copies),
        k_free=barrier(readers),
        v_free=barrier(readers),
        v_cleared=barrier(1) if readers > 1 and tiles.direct else None,
    )


def swizzled(shape: tuple[int, ...], dtype: Any, like: int | None = None) -> Any:
    """Returns shared memory in the form that the TMA unit and wgmma share.

    Args:
        shape: of the buffer.
        dtype: of the buffer.
        like: swizzle as for rows of so many elements; both operands of a product must
            have the same. By default those of the buffer.
    """
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle((like or shape[-1]) * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))  # pyright: ignore[reportAbstractUsage]
    transform = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, transform))


def can_swizzle(columns: int, dtype: Any) -> bool:
    """Whether rows of so many elements can be swizzled: those of 80 bytes cannot."""
    return columns * jnp.dtype(dtype).itemsize % 32 == 0


def _plain(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory that is laid out as the cache is."""
    row = (1, min(shape[-1], MAX_COLUMNS))
    tiling = plgpu.TilingTransform(row)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling,))


# The steps that keep the warpgroups apart have names, so that tests can break one and
# see that the break is noticed.


def await_ready(barrier) -> None:
    """Waits for copies."""
    plgpu.barrier_wait(barrier)


def await_cleared(barrier) -> None:
    """Waits for the consumer that clears values."""
    plgpu.barrier_wait(barrier)


def await_free(barrier) -> None:
    """Waits for readers."""
    plgpu.barrier_wait(barrier)


def release(barrier) -> None:
    """Says that this warpgroup has read a stage."""
    plgpu.barrier_arrive(barrier)


def publish() -> None:
    """Makes stores to shared memory visible to wgmma and to the TMA unit."""
    plgpu.commit_smem()


def stage_of(i, tiles: Tiles):
    """Returns the stage of the `i`-th tile that goes through the ring."""
    return lax.rem(i, jnp.int32(tiles.stages))


def unit_finder(tables_ref, row, length, first, tiles: Tiles):
    """Returns a function from a unit's index in a context to its place in the cache.

    Args:
        tables_ref: i32[S, T], block tables.
        row: sequence.
        length: of the context, in tokens.
        first: first unit of the layer.
        tiles: static choices.
    """
    last = lax.div(length + (tiles.unit - 1), jnp.int32(tiles.unit)) - 1

    def find(index):
        # Past the end the last unit is read again; its scores are masked.
        index = jnp.minimum(index, last)
        block = lax.div(index, jnp.int32(tiles.per_block))
        inner = lax.rem(index, jnp.int32(tiles.per_block))
        if tiles.contiguous:
            block = row * tables_ref.shape[1] + block
        else:
            block = tables_ref[row, block]
        return first + block * tiles.per_block + inner

    return find


def as_units(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
    unit: int,
) -> tuple[jax.Array, ...]:
    """Returns a cache as kernels read it: the units of all layers.

    The layer goes into the units' numbers: the cache is passed whole and not copied.

    Args:
        k_cache: [L, P, B, K, D].
        v_cache: [L, P, B, K, D].
        k_scales: f32[L, P, K, B], of keys in 8 bits, or None.
        v_scales: f32[L, P, K, B], of values in 8 bits, or None.
        unit: tokens that one copy brings.

    Returns:
        Keys and values [U, unit, K, D] and, of those in 8 bits, their scales
        f32[U / per_block, K, per_block, unit].
    """
    block_size, kv_heads, head_dim = k_cache.shape[2:]
    units = [
        as_numbers(cache).reshape(-1, unit, kv_heads, head_dim)
        for cache in (k_cache, v_cache)
    ]
    by_unit = (-1, kv_heads, block_size // unit, unit)
    return *units, *(x.reshape(by_unit) for x in (k_scales, v_scales) if x is not None)


def of_head(cache_refs, head, columns) -> tuple[Any, ...]:
    """Returns the sources of `produce` for one head, of values some columns."""
    k_ref, v_ref, *scales = cache_refs
    keys, values = k_ref.at[:, :, head], v_ref.at[:, :, head, columns]
    return keys, values, *(ref.at[:, head] for ref in scales)


def produce(sources, unit_id, start, count, ring: Ring, tiles: Tiles, done=0) -> None:
    """Copies tiles `start` to `start + count` of a context into the ring, a stage each.

    Args:
        sources: keys and values of one head, [U, unit, D] and [U, unit, columns], and,
            of those in 8 bits, their scales f32[U / per_block, per_block, unit].
        unit_id: from `unit_finder`.
        start: first tile.
        count: of tiles.
        ring: where to.
        tiles: static choices.
        done: tiles that have gone through the ring before.
    """
    units = KV_TILE // tiles.unit
    k_source, v_source, *scales = sources
    k_scales, v_scales = scales or (None, None)

    def fill(i, source, scales, stages, scale_stages, ready, free):
        stage = stage_of(done + i, tiles)
        tokens = tiles.per_copy(stages.shape[-1])
        copies = KV_TILE // tokens

        @pl.when(done + i >= tiles.stages)
        def _():
            await_free(free.at[stage])

        def copy(c):
            target = stages.at[stage]
            if copies > 1:
                target = stages.at[stage, pl.ds(c * tokens, tokens)]
            if tokens == 1:
                index = (start + i) * units + lax.div(c, jnp.int32(tiles.unit))
                token = pl.ds(lax.rem(c, jnp.int32(tiles.unit)), 1)
                row = source.at[unit_id(index), token]
                compat.copy_contiguous(row, target, ready.at[stage])
                return
            unit = unit_id((start + i) * units + c)
            plgpu.copy_gmem_to_smem(source.at[unit], target, ready.at[stage])
            if scales is not None:
                block = lax.div(unit, jnp.int32(tiles.per_block))
                inner = lax.rem(unit, jnp.int32(tiles.per_block))
                target = scale_stages.at[stage, pl.ds(c * tiles.unit, tiles.unit)]
                source_of = scales.at[block, inner]
                compat.copy_contiguous(source_of, target, ready.at[stage])

        if tiles.unit < MIN_TILED_UNIT:
            pl.loop(0, copies)(copy)
        else:  # wants to know where in a tile each copy goes
            for c in range(copies):
                copy(c)

    @pl.loop(0, count)
    def _(i):
        fill(i, k_source, k_scales, ring.k, ring.k_scales, ring.k_ready, ring.k_free)
        fill(i, v_source, v_scales, ring.v, ring.v_scales, ring.v_ready, ring.v_free)


def drain(done, ring: Ring, tiles: Tiles) -> None:
    """Sees the last releases, after `done` tiles in all.

    A barrier may not go out of scope with arrivals that nobody has seen.
    """

    @pl.loop(jnp.maximum(done - tiles.stages, 0), done)
    def _(i):
        stage = stage_of(i, tiles)
        await_free(ring.k_free.at[stage])
        await_free(ring.v_free.at[stage])
