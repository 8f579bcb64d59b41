"""The Hopper kernel behind `mosaic_decode`: what one thread block does."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_ring
from pallas_kernels.mosaic_ring import KV_TILE, Ring, Tiles
from pallas_kernels.mosaic_softmax import Operands, Reach, attend
from pallas_kernels.mosaic_tuning import (
    DECODE_PRODUCER_REGISTERS,
    MIN_SPLIT_TILES,
    decode_consumer_registers,
)


class Config(NamedTuple):
    """Static choices of one kernel.

    Attributes:
        tiles: how a context is read.
        splits: splits of the context.
        group: query heads on each KV head, padded to a multiple of 8. They fill the
            first of a product's rows.
    """

    tiles: Tiles
    splits: int
    group: int


class Buffers(NamedTuple):
    """Shared memory: the ring, the consumer's operands, and the three results."""

    ring: Ring
    operands: Operands
    q_ready: Any
    out: Any
    top: Any
    total: Any


def tiles_of_split(length, skipped, split, splits: int):
    """Returns which tiles of a context a split reads: the first, and how many.

    Args:
        length: i32[...], tokens of the context.
        skipped: i32[...], tiles at its start that are not read.
        split: i32[...], which split.
        splits: how many there are.
    """
    tiles = lax.div(length + (KV_TILE - 1), jnp.int32(KV_TILE)) - skipped
    share = lax.div(tiles + (splits - 1), jnp.int32(splits))
    share = jnp.maximum(share, MIN_SPLIT_TILES)
    return skipped + split * share, jnp.clip(tiles - split * share, 0, share)


def thread_block(
    q_ref,
    cache_refs,
    tables_ref,
    rows_ref,
    lengths_ref,
    starts_ref,
    first_ref,
    out_ref,
    top_ref,
    total_ref,
    buffers: Buffers,
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
    low = jnp.maximum(length - (config.tiles.window or length), 0)
    # Tiles of a shared prefix are read by the pass over it (see `cascade`), whole.
    skipped = lax.div(jnp.maximum(low, starts_ref[token]), jnp.int32(KV_TILE))
    start, count = tiles_of_split(length, skipped, split, config.splits)

    @pl.when(warpgroup == 1)
    def _():
        plgpu.set_max_registers(DECODE_PRODUCER_REGISTERS, action="decrease")
        unit_id = mosaic_ring.unit_finder(
            tables_ref, rows_ref[token], length, first_ref[0], config.tiles
        )
        sources = mosaic_ring.of_head(cache_refs, head, columns)
        mosaic_ring.produce(sources, unit_id, start, count, buffers.ring, config.tiles)
        mosaic_ring.drain(count, buffers.ring, config.tiles)

    @pl.when(warpgroup == 0)
    def _():
        registers = decode_consumer_registers(
            config.tiles.quantised or config.tiles.dtype
        )
        plgpu.set_max_registers(registers, action="increase")
        rows = pl.ds(0, config.group)

        @pl.when(count > 0)
        def _():
            plgpu.copy_gmem_to_smem(
                q_ref.at[token, head], buffers.operands.q.at[rows], buffers.q_ready
            )
            plgpu.barrier_wait(buffers.q_ready)

        reach = Reach(low=low, length=length, lengths=lambda rows: length)
        out, top, total = attend(
            start,
            count,
            reach,
            buffers.ring,
            lambda zero: buffers.operands,
            config.tiles,
        )
        buffers.out[...] = out
        buffers.top[...] = top
        buffers.total[...] = total
        mosaic_ring.publish()
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
