"""The Hopper kernel behind `mosaic_decode`: what one thread block does."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Cached tokens in each step of the softmax: the N of the first product, the K of the
# second. A tile may span several blocks.
KV_TILE = 64
# Rows of a wgmma product. The query heads of a KV head fill the first of them.
ROWS = 64
# The least tiles of a split; below, it costs more than it gains.
MIN_SPLIT_TILES = 4
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
        scale: factor on the scores, in units of log2.
        dtype: of keys and values.
    """

    unit: int
    per_block: int
    stages: int
    splits: int
    group: int
    scale: float
    dtype: Any


class Buffers(NamedTuple):
    """Shared memory: queries, the two rings, weights, and the three results."""

    q: Any
    k: Any
    v: Any
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
    split = lax.axis_index("split")
    warpgroup = lax.axis_index("warpgroup")
    length = lengths_ref[token]
    tiles = lax.div(length + (KV_TILE - 1), jnp.int32(KV_TILE))
    share = lax.div(tiles + (config.splits - 1), jnp.int32(config.splits))
    share = jnp.maximum(share, MIN_SPLIT_TILES)
    start = split * share
    count = jnp.clip(tiles - start, 0, share)

    @pl.when(warpgroup == 1)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        row, first = rows_ref[token], first_ref[0]
        last = lax.div(length + (config.unit - 1), jnp.int32(config.unit)) - 1

        def unit_id(index):
            # Past the end the last unit is read again; its scores are masked.
            index = jnp.minimum(index, last)
            block = lax.div(index, jnp.int32(config.per_block))
            inner = lax.rem(index, jnp.int32(config.per_block))
            return first + tables_ref[row, block] * config.per_block + inner

        sources = (k_ref.at[:, :, head], v_ref.at[:, :, head])
        _produce(sources, unit_id, start, count, buffers, barriers, config)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(0, config.group)

        @pl.when(count > 0)
        def _():
            plgpu.copy_gmem_to_smem(
                q_ref.at[token, head], buffers.q.at[rows], barriers.q_ready
            )
            plgpu.barrier_wait(barriers.q_ready)

        out, top, total = _consume(start, count, length, buffers, barriers, config)
        buffers.out[...] = out
        buffers.top[...] = top
        buffers.total[...] = total
        _publish()
        place = (token, head, split)

        @pl.when(count > 0)
        def _():
            plgpu.copy_smem_to_gmem(buffers.out.at[rows], out_ref.at[place])

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

        for c in range(copies):
            target = ring.at[stage]
            if copies > 1:
                target = ring.at[stage, pl.ds(c * config.unit, config.unit)]
            unit = unit_id((start + i) * copies + c)
            plgpu.copy_gmem_to_smem(source.at[unit], target, ready.at[stage])

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
    start, count, length, buffers: Buffers, barriers: Barriers, config: Config
):
    """Returns the weighted sum, largest score and sum of weights of the tiles."""
    head_dim = buffers.q.shape[-1]

    def step(i, carry):
        out, top, total = carry
        stage = lax.rem(i, jnp.int32(config.stages))
        keys, values = buffers.k.at[stage], buffers.v.at[stage]
        left = length - (start + i) * KV_TILE  # tokens from this tile to the end

        def multiply_keys(acc):
            _matmul(acc, buffers.q, keys, transpose_b=True)
            return acc[...]

        _await(barriers.k_ready.at[stage])
        # `run_scoped` on an accumulator and not `run_state`, and no explicit layouts:
        # so the same code runs in the interpreter.
        scores = pl.run_scoped(multiply_keys, _accumulator((ROWS, KV_TILE)))
        _release(barriers.k_free.at[stage])

        column = lax.broadcasted_iota(jnp.int32, (ROWS, KV_TILE), 1)
        scores = jnp.where(column < left, scores * config.scale, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        fade = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        total = total * fade + weights.sum(axis=1)
        # Through shared memory: the interpreter has no wgmma on registers.
        buffers.p[...] = weights.astype(config.dtype)

        _await(barriers.v_ready.at[stage])

        # 0 * NaN is NaN: what lies past the end of the sequence must be cleared. Only
        # its last tile has such slots.
        @pl.when(left < KV_TILE)
        def _():
            line = lax.broadcasted_iota(jnp.int32, (KV_TILE, head_dim), 0)
            tile = values[...]
            values[...] = jnp.where(line < left, tile, jnp.zeros_like(tile))

        _publish()

        def multiply_values(acc):
            _matmul(acc, buffers.p, values)
            return acc[...]

        added = pl.run_scoped(multiply_values, _accumulator((ROWS, head_dim)))
        _release(barriers.v_free.at[stage])
        out = out * lax.broadcast_in_dim(fade, out.shape, [0]) + added
        return out, new_top, total

    init = (
        jnp.full((ROWS, head_dim), 0, jnp.float32),
        jnp.full((ROWS,), MASKED, jnp.float32),
        jnp.full((ROWS,), 0, jnp.float32),
    )
    return lax.fori_loop(0, count, step, init)
