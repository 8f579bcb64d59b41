"""The Hopper kernel behind `mosaic_mixed`: what one thread block does."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_ring
from pallas_kernels.mosaic_plan import ROW_UNIT, Pieces
from pallas_kernels.mosaic_ring import Ring, Tiles
from pallas_kernels.mosaic_softmax import ROWS, Operands, Reach, attend, pass_by
from pallas_kernels.mosaic_tuning import (
    MIXED_CONSUMER_REGISTERS,
    MIXED_PRODUCER_REGISTERS,
)


class Config(NamedTuple):
    """Static choices of one kernel.

    Attributes:
        tiles: how a context is read.
        workers: thread blocks; each takes every `workers`-th piece of work.
        consumers: warpgroups that share the stages, each for 64 rows of its own.
        heads: query heads on each KV head: the rows of one token.
    """

    tiles: Tiles
    workers: int
    consumers: int
    heads: int


class Results(NamedTuple):
    """Where results go.

    Attributes:
        whole: dtype[K, rows, D], of items that are not cut, where their queries are.
        out: f32[K, parts, rows, D], sums of weighted values, of a part of an item.
        top: f32[K, parts, rows], largest scores, in units of log2.
        total: f32[K, parts, rows], sums of the weights.
    """

    whole: Any
    out: Any
    top: Any
    total: Any


class Buffers(NamedTuple):
    """Shared memory: the ring, and for each consumer its operands and results.

    Results that have the dtype and the width of queries leave from where these were.
    """

    ring: Ring
    operands: Operands
    q_ready: Any
    out: Any
    top: Any
    total: Any


class Piece(NamedTuple):
    """A piece on one KV head: see `Pieces`, and which columns of its result."""

    unit: Any
    tokens: Any
    row: Any
    length: Any
    start: Any
    count: Any
    part: Any
    head: Any
    side: Any

    @property
    def is_run(self):
        """Whether the piece is of prefill tokens."""
        return self.tokens > 0

    @property
    def end(self):
        """Tokens up to what the last token of the piece's item sees."""
        return self.length + jnp.maximum(self.tokens - 1, 0)


def thread_block(
    q_ref,
    cache_refs,
    tables_ref,
    first_ref,
    pieces: Pieces,
    results: Results,
    buffers: Buffers,
    *,
    config: Config,
) -> None:
    """The kernel: what one thread block does."""
    worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    columns = buffers.out.shape[-1]
    sides = q_ref.shape[-1] // columns
    each = q_ref.shape[0] * sides
    work = pieces.number[0] * each
    turns = lax.div(work - worker + (config.workers - 1), jnp.int32(config.workers))

    def piece_of(turn) -> Piece:
        index = worker + turn * config.workers
        i, inner = lax.div(index, jnp.int32(each)), lax.rem(index, jnp.int32(each))
        head, side = lax.div(inner, jnp.int32(sides)), lax.rem(inner, jnp.int32(sides))
        values = [ref[i] for ref in pieces[:-1]]
        return Piece(*values, head=head, side=side)

    @pl.when(warpgroup == config.consumers)
    def _():
        registers = MIXED_PRODUCER_REGISTERS[config.consumers]
        plgpu.set_max_registers(registers, action="decrease")

        def read(turn, done):
            piece = piece_of(turn)
            unit_id = mosaic_ring.unit_finder(
                tables_ref, piece.row, piece.end, first_ref[0], config.tiles
            )
            cut = pl.ds(piece.side * columns, columns)
            mosaic_ring.produce(
                mosaic_ring.of_head(cache_refs, piece.head, cut),
                unit_id,
                piece.start,
                piece.count,
                buffers.ring,
                config.tiles,
                done,
            )
            return done + piece.count

        done = lax.fori_loop(0, turns, read, jnp.int32(0))
        mosaic_ring.drain(done, buffers.ring, config.tiles)

    @pl.when(warpgroup < config.consumers)
    def _():
        registers = MIXED_CONSUMER_REGISTERS[config.consumers]
        plgpu.set_max_registers(registers, action="increase")

        def compute(turn, done):
            # Read again where it is needed: it would take registers from the products.
            piece = functools.partial(piece_of, turn)
            _compute(piece, done, warpgroup, q_ref, results, buffers, config)
            return done + piece().count

        lax.fori_loop(0, turns, compute, jnp.int32(0))
        await_stores()


def _compute(
    read_piece: Callable[[], Piece],
    done,
    warpgroup,
    q_ref,
    results: Results,
    buffers: Buffers,
    config: Config,
) -> None:
    """Computes a piece's rows of one consumer, after `done` tiles in the ring."""
    piece = read_piece()
    warpgroup = _again(warpgroup, piece)

    def operands_at(zero) -> Operands:
        index = warpgroup + zero
        return Operands(*(x if x is None else x.at[index] for x in buffers.operands))

    tiles, heads = config.tiles, jnp.int32(config.heads)
    before = warpgroup * ROWS  # rows of the consumers before this one
    # What the item's first token sees from on; the others start later.
    low = jnp.maximum(piece.length - (tiles.window or piece.length), 0)

    def lengths(row):
        # Past the item's tokens come rows that nobody looks at.
        return piece.length + lax.div(row + before, heads)

    reach = Reach(
        low,
        piece.end,
        lengths,
        # With a window, tiles that all rows see in full are few.
        shortest=None if tiles.window else piece.length,
        leader=warpgroup == 0,
    )
    rows = _num_rows(piece, warpgroup, config)

    @pl.when(rows > 0)
    def _():
        _copy_queries(piece, warpgroup, q_ref, operands_at(0).q, buffers, config)
        out, top, total = attend(
            piece.start,
            piece.count,
            reach,
            buffers.ring,
            operands_at,
            tiles,
            done=done,
        )
        again = read_piece()
        state = out, top, total
        _store(again, _again(warpgroup, again), state, results, buffers, config)

    if config.consumers > 1:

        @pl.when(rows == 0)
        def _():
            pass_by(piece.start, piece.count, reach, buffers.ring, tiles, done=done)


def _again(index, piece: Piece):
    """Returns an index that the compiler does not know before it has read the piece.

    It computes addresses from it where they are used: before the loop over pieces they
    would take registers from the products.
    """
    return index + jnp.minimum(piece.count, 0)


def _num_rows(piece: Piece, warpgroup, config: Config):
    """Returns how many of its rows a consumer needs, i32[]."""
    rows = jnp.maximum(piece.tokens, 1) * config.heads
    return jnp.clip(rows - warpgroup * ROWS, 0, ROWS)


def _copy_queries(piece: Piece, warpgroup, q_ref, target, buffers, config) -> None:
    """Brings this consumer's queries."""
    await_stores()  # of the piece before, which may leave from where queries go
    first = piece.unit + warpgroup * (ROWS // ROW_UNIT)
    ready = buffers.q_ready.at[warpgroup]

    def copy(num_rows: int) -> None:
        rows = pl.ds(first * ROW_UNIT, num_rows)
        to = target if num_rows == ROWS else target.at[pl.ds(0, num_rows)]
        plgpu.copy_gmem_to_smem(q_ref.at[piece.head, rows], to, ready)

    @pl.when(piece.is_run)
    def _():
        copy(ROWS)

    @pl.when(~piece.is_run)
    def _():
        copy(-(-config.heads // ROW_UNIT) * ROW_UNIT)

    mosaic_ring.await_ready(ready)


def _store(
    piece: Piece,
    warpgroup,
    state,
    results: Results,
    buffers: Buffers,
    config: Config,
) -> None:
    """Stores the results of this consumer's rows, in whole units."""
    out, top, total = state
    units = _num_rows(piece, warpgroup, config) + (ROW_UNIT - 1)
    units = lax.div(units, jnp.int32(ROW_UNIT))
    columns = pl.ds(piece.side * out.shape[-1], out.shape[-1])
    first = warpgroup * (ROWS // ROW_UNIT)
    sums = buffers.out.at[warpgroup]

    def rows(unit):
        return pl.ds(unit * ROW_UNIT, ROW_UNIT)

    @pl.when(piece.part < 0)
    def _():
        queries = buffers.operands.q.at[warpgroup]
        source = sums if results.whole.dtype == sums.dtype else queries
        scaled = out * lax.broadcast_in_dim(1 / total, out.shape, [0])
        source[...] = scaled.astype(source.dtype)
        mosaic_ring.publish()

        @pl.loop(0, units)
        def _(unit):
            target = rows(piece.unit + first + unit)
            plgpu.copy_smem_to_gmem(
                source.at[rows(unit)], results.whole.at[piece.head, target, columns]
            )

    @pl.when(piece.part >= 0)
    def _():
        tops, totals = buffers.top.at[warpgroup], buffers.total.at[warpgroup]
        sums[...] = out
        tops[...] = top
        totals[...] = total
        mosaic_ring.publish()

        @pl.loop(0, units)
        def _(unit):
            target = (piece.head, piece.part, rows(first + unit))
            plgpu.copy_smem_to_gmem(
                sums.at[rows(unit)], results.out.at[(*target, columns)]
            )

            @pl.when(piece.side == 0)
            def _():
                plgpu.copy_smem_to_gmem(tops.at[rows(unit)], results.top.at[target])
                plgpu.copy_smem_to_gmem(totals.at[rows(unit)], results.total.at[target])


def await_stores() -> None:
    """Waits until the buffers that results leave from may be written again."""
    plgpu.wait_smem_to_gmem(0)
