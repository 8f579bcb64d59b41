"""The Hopper kernel behind `mosaic_decode`: what one thread block does."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat

LOG2_E = math.log2(math.e)
# Cached tokens in each step of the softmax: the N of the first product, the K of the
# second. A tile may span several blocks.
KV_TILE = 64
# Rows of a wgmma product. The query heads of a KV head fill the first of them.
ROWS = 64
# The least tiles of a split; below, it costs more than it gains.
MIN_SPLIT_TILES = 4
# Rows of the least piece of shared memory that wgmma and the TMA unit both know how to
# read. A smaller unit comes to a plain buffer, and goes through registers to a tile.
MIN_TILED_UNIT = 8
# Columns of the result that one thread block computes, at most: more do not fit in the
# registers. Those that share a wider result each read all keys, mostly from the cache.
MAX_COLUMNS = 128
# Of each thread. A multiprocessor has 65,536; two warpgroups come nowhere near that.
PRODUCER_REGISTERS = 96
CONSUMER_REGISTERS = 240
# Score of a masked slot. Finite: an all-masked row must not give exp2(-inf + inf).
MASKED = -1e30


class Config(NamedTuple):
    """Static choices of one kernel.

    Attributes:
        unit: tokens that one copy brings; a block, or KV_TILE tokens of a larger one.
        per_block: units in a block.
        stages: stages of the ring.
        splits: splits of the context.
        group: query heads on each KV head, padded to a multiple of 8.
        scale: factor on the scores.
        soft_cap: bound that the scores approach, or None.
        window: how many of the last tokens are visible, or None for all.
        dtype: of keys and values.
        contiguous: whether each row's blocks lie side by side, in order, as many as a
            table has room for: then no table is read.
        hints: whether to name layouts that the compiler is slow to find. The
            interpreter of jax 0.11 does not know them.
    """

    unit: int
    per_block: int
    stages: int
    splits: int
    group: int
    scale: float
    soft_cap: float | None
    window: int | None
    dtype: Any
    contiguous: bool
    hints: bool


class Buffers(NamedTuple):
    """Shared memory: queries, the two rings, weights, and the three results.

    `k_tile` and `v_tile` are for blocks of fewer than `MIN_TILED_UNIT` tokens only: a
    tile as wgmma reads it, where the ring holds it as the cache does.
    """

    q: Any
    k: Any
    v: Any
    k_tile: Any
    v_tile: Any
    p: Any
    out: Any
    top: Any
    total: Any


class Barriers(NamedTuple):
    """`*_ready`: the copies into a stage are done. `*_free`: its readers are."""

    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any


def thread_block(
    q_ref,
    k_ref,
    v_ref,
    tables_ref,
    rows_ref,
    lengths_ref,
    first_ref,
    out_ref,
    top_ref,
    total_ref,
    buffers: Buffers,
    barriers: Barriers,
    *,
    config: Config,
) -> None:
    """The kernel: what one thread block does."""
    token, head = lax.axis_index("token"), lax.axis_index("head")
    split, part = lax.axis_index("split"), lax.axis_index("part")
    columns = pl.ds(part * buffers.out.shape[-1], buffers.out.shape[-1])
    warpgroup = lax.axis_index("warpgroup")
    length = lengths_ref[token]
    # The first visible token, and the tile that it is in.
    low = jnp.maximum(length - (config.window or length), 0)
    skipped = lax.div(low, jnp.int32(KV_TILE))
    tiles = lax.div(length + (KV_TILE - 1), jnp.int32(KV_TILE)) - skipped
    share = lax.div(tiles + (config.splits - 1), jnp.int32(config.splits))
    share = jnp.maximum(share, MIN_SPLIT_TILES)
    start = skipped + split * share
    count = jnp.clip(tiles - split * share, 0, share)

    @pl.when(warpgroup == 1)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        row, first = rows_ref[token], first_ref[0]
        last = lax.div(length + (config.unit - 1), jnp.int32(config.unit)) - 1

        def unit_id(index):
            # Past the end the last unit is read again; its scores are masked.
            index = jnp.minimum(index, last)
            block = lax.div(index, jnp.int32(config.per_block))
            inner = lax.rem(index, jnp.int32(config.per_block))
            if config.contiguous:
                block = row * tables_ref.shape[1] + block
            else:
                block = tables_ref[row, block]
            return first + block * config.per_block + inner

        sources = (k_ref.at[:, :, head], v_ref.at[:, :, head, columns])
        _produce(sources, unit_id, start, count, buffers, barriers, config)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        rows = pl.ds(0, config.group)

        @pl.when(count > 0)
        def _():
            plgpu.copy_gmem_to_smem(
                q_ref.at[token, head], buffers.q.at[rows], barriers.q_ready
            )
            plgpu.barrier_wait(barriers.q_ready)

        visible = (low, length)
        out, top, total = _consume(start, count, visible, buffers, barriers, config)
        buffers.out[...] = out
        buffers.top[...] = top
        buffers.total[...] = total
        _publish()
        place = (token, head, split)

        @pl.when(count > 0)
        def _():
            target = out_ref.at[(*place, slice(None), columns)]
            plgpu.copy_smem_to_gmem(buffers.out.at[rows], target)

        @pl.when(part == 0)
        def _():
            plgpu.copy_smem_to_gmem(buffers.top.at[rows], top_ref.at[place])
            plgpu.copy_smem_to_gmem(buffers.total.at[rows], total_ref.at[place])

        plgpu.wait_smem_to_gmem(0)


# The steps that keep the two warpgroups apart have names, so that tests can break one
# and see that the break is noticed.


def _await(barrier) -> None:
    plgpu.barrier_wait(barrier)


def _await_free(barrier) -> None:
    plgpu.barrier_wait(barrier)


def _release(barrier) -> None:
    plgpu.barrier_arrive(barrier)


def _publish() -> None:
    """Makes stores to shared memory visible to wgmma and to the TMA unit."""
    plgpu.commit_smem()


def _accumulator(shape: tuple[int, int]) -> Any:
    return plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def _matmul(acc, a, b, *, transpose_b: bool = False) -> None:
    plgpu.wgmma(acc, a, b.transpose((1, 0)) if transpose_b else b)


def _produce(
    sources, unit_id, start, count, buffers: Buffers, barriers: Barriers, config
) -> None:
    """Copies tiles `start` to `start + count` into the ring, a stage each."""
    copies = KV_TILE // config.unit
    k_source, v_source = sources

    def fill(i, source, ring, ready, free):
        stage = lax.rem(i, jnp.int32(config.stages))

        @pl.when(i >= config.stages)
        def _():
            _await_free(free.at[stage])

        def copy(c):
            target = ring.at[stage]
            if copies > 1:
                target = ring.at[stage, pl.ds(c * config.unit, config.unit)]
            unit = unit_id((start + i) * copies + c)
            plgpu.copy_gmem_to_smem(source.at[unit], target, ready.at[stage])

        if config.unit < MIN_TILED_UNIT:
            pl.loop(0, copies)(copy)
        else:  # wants to know where in a tile each copy goes
            for c in range(copies):
                copy(c)

    @pl.loop(0, count)
    def _(i):
        fill(i, k_source, buffers.k, barriers.k_ready, barriers.k_free)
        fill(i, v_source, buffers.v, barriers.v_ready, barriers.v_free)

    # Sees the last arrivals: a barrier may not go out of scope with some unobserved.
    @pl.loop(jnp.maximum(count - config.stages, 0), count)
    def _(i):
        stage = lax.rem(i, jnp.int32(config.stages))
        _await_free(barriers.k_free.at[stage])
        _await_free(barriers.v_free.at[stage])


def _consume(
    start, count, visible, buffers: Buffers, barriers: Barriers, config: Config
):
    """Attends to tiles `start` to `start + count`, of tokens `visible[0]` to `[1]`.

    Returns:
        The sums of weighted values, f32[ROWS, columns]; the largest score, in units of
        log2, and the sum of the weights, f32[ROWS].
    """
    columns = buffers.out.shape[-1]
    low, length = visible

    def step(i, carry):
        out, top, total = carry
        stage = lax.rem(i, jnp.int32(config.stages))
        first = (start + i) * KV_TILE
        left = length - first  # tokens from this tile to the end
        hidden = low - first  # tokens of this tile that are before the window

        def is_visible(index):
            return (index < left) & (index >= hidden) if config.window else index < left

        _await(barriers.k_ready.at[stage])
        keys = buffers.k.at[stage]
        if buffers.k_tile is not None:
            for first in range(0, buffers.q.shape[-1], columns):
                piece = pl.ds(first, columns)  # at once, it would not fit in registers
                buffers.k_tile[:, piece] = _load(keys.at[:, piece], config)
            _publish()
            # After the fence: before it, not all that was asked of the stage need be
            # there, and the producer would write over it.
            _release(barriers.k_free.at[stage])
            keys = buffers.k_tile

        def multiply_keys(acc):
            _matmul(acc, buffers.q, keys, transpose_b=True)
            return acc[...]

        # `run_scoped` on an accumulator and not `run_state`, and no explicit layouts:
        # so the same code runs in the interpreter.
        scores = pl.run_scoped(multiply_keys, _accumulator((ROWS, KV_TILE)))
        if buffers.k_tile is None:
            _release(barriers.k_free.at[stage])

        column = lax.broadcasted_iota(jnp.int32, (ROWS, KV_TILE), 1)
        scores = jnp.where(is_visible(column), _in_log2(scores, config), MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        fade = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        # Rounded before they are summed: so the weights of the result add up to 1.
        rounded = weights.astype(config.dtype)
        total = total * fade + rounded.astype(jnp.float32).sum(axis=1)
        # Through shared memory: the interpreter has no wgmma on registers.
        buffers.p[...] = rounded

        _await(barriers.v_ready.at[stage])
        values = buffers.v.at[stage]

        def cleared(tile):
            line = lax.broadcasted_iota(jnp.int32, tile.shape, 0)
            return jnp.where(is_visible(line), tile, jnp.zeros_like(tile))

        # 0 * NaN is NaN: what no query may see must be cleared. Only the last tile of a
        # sequence and the first of a window have such slots.
        if buffers.v_tile is not None:
            buffers.v_tile[...] = cleared(_load(values, config))
        else:

            @pl.when(
                (left < KV_TILE) | (hidden > 0) if config.window else left < KV_TILE
            )
            def _():
                values[...] = cleared(values[...])

        _publish()
        if buffers.v_tile is not None:
            _release(barriers.v_free.at[stage])
            values = buffers.v_tile

        def multiply_values(acc):
            _matmul(acc, buffers.p, values)
            return acc[...]

        added = pl.run_scoped(multiply_values, _accumulator((ROWS, columns)))
        out = out * lax.broadcast_in_dim(fade, out.shape, [0]) + added
        if buffers.v_tile is None:
            _release(barriers.v_free.at[stage])
        return out, new_top, total

    init = (
        jnp.full((ROWS, columns), 0, jnp.float32),
        jnp.full((ROWS,), MASKED, jnp.float32),
        jnp.full((ROWS,), 0, jnp.float32),
    )
    return lax.fori_loop(0, count, step, init)


def _load(ref, config: Config):
    """Returns a tile of the ring, laid out over the threads as a product wants it."""
    return compat.load_for_wgmma(ref) if config.hints else ref[...]


def _in_log2(scores, config: Config):
    """Scales and caps products of queries and keys; the softmax is in powers of 2."""
    if config.soft_cap is None:
        return scores * (config.scale * LOG2_E)
    # cap * tanh(scale * x / cap). The hardware's own tanh has 11 bits; this has 22.
    powers = jnp.exp2(scores * (2 * config.scale * LOG2_E / config.soft_cap))
    cap = config.soft_cap * LOG2_E
    return cap - (2 * cap) / (powers + 1)
