"""Swap: sequences give their blocks to others, and keep their content on the host.

A swapped-out sequence keeps its row, whose table names blocks of the host pool until
it is swapped in again (paper, section 4.5). Sequences that are swapped in one call keep
what they share: a block that several of them name is moved once, and is counted on the
host as it was on the device. No keys or values are touched here: the moves to make are
written down, for `kv_cache.move_blocks`.

Rows that share a block do so at the same place of their tables: forks copy tables, and
a prefix is shared from its start. So what a table names already is looked for in one
column.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from paged_jax.block_pool import BlockPool, drop, hold, init_block_pool, take
from paged_jax.block_tables import Status, first_failure
from paged_jax.new_arrays import zeros
from paged_jax.sequences import Sequences, SequenceStatus, blocks_for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMoves:
    """Blocks to move from one pool to the other, in this order.

    Attributes:
      source: i32[Hp + 1]. Blocks to read; the first `count` are valid, and never the
        last place.
      target: i32[Hp + 1]. Blocks of the other pool to write.
      count: i32[].
    """

    source: jax.Array
    target: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SwapSpace:
    """The host's blocks, and what is to be moved to them and back.

    Attributes:
      pool: the Hp blocks of the host; block 0 is another null block.
      ins: moves from the host to the device, to be made first.
      outs: moves from the device to the host, to be made after them.
    """

    pool: BlockPool
    ins: BlockMoves
    outs: BlockMoves


def init_swap_space(num_blocks: int) -> SwapSpace:
    """Returns `num_blocks` free blocks of the host, and no moves."""

    def no_moves() -> BlockMoves:
        return BlockMoves(zeros(num_blocks + 1), zeros(num_blocks + 1), zeros(()))

    return SwapSpace(init_block_pool(num_blocks), no_moves(), no_moves())


def forget_moves(space: SwapSpace) -> SwapSpace:
    """Starts two new lists of moves; the old ones have been made."""
    zero = jnp.int32(0)
    return dataclasses.replace(
        space,
        ins=dataclasses.replace(space.ins, count=zero),
        outs=dataclasses.replace(space.outs, count=zero),
    )


def count_distinct(
    table: jax.Array, num_blocks: jax.Array, rows: jax.Array
) -> jax.Array:
    """Counts the blocks that some rows name, shared ones once.

    Args:
      table: i32[S, T], block tables.
      num_blocks: i32[S], how many entries of each row count.
      rows: bool[S], which rows.

    Returns:
      i32[]. The work follows the number of rows.
    """
    column = jnp.arange(table.shape[1], dtype=jnp.int32)

    def count_first(carry):
        total, left = carry
        row = jnp.argmax(left)
        named = column < num_blocks[row]
        before = (rows & ~left)[:, None] & (column < num_blocks[:, None])
        again = jnp.any(before & (table == table[row]), axis=0)
        return total + jnp.sum(named & ~again, dtype=jnp.int32), left.at[row].set(False)

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]), count_first, (jnp.int32(0), rows)
    )[0]


def blocks_to_swap_out(
    sequences: Sequences, rows: jax.Array, block_size: int
) -> jax.Array:
    """Returns how many blocks of the host the rows bool[S] take, i32[]."""
    count = blocks_for(sequences.length, block_size)
    return count_distinct(sequences.block_table, count, rows)


def blocks_to_swap_in(
    sequences: Sequences, rows: jax.Array, need: jax.Array
) -> jax.Array:
    """Returns how many blocks of the device `swap_in` takes, i32[]."""
    has = sequences.num_blocks
    ahead = jnp.where(rows, jnp.maximum(need - has, 0), 0)
    moved = count_distinct(sequences.block_table, has, rows)
    return moved + jnp.sum(ahead, dtype=jnp.int32)


def move_out(
    pool: BlockPool,
    space: SwapSpace,
    sequences: Sequences,
    rows: jax.Array,
    block_size: int,
) -> tuple[BlockPool, SwapSpace, Sequences]:
    """Swaps rows out; the caller has checked that they are RUNNING and fit.

    Arguments and results are those of `swap_out`. The device's blocks are released as
    if the sequences had ended: those that others name stay theirs.
    """
    column = jnp.arange(sequences.table_width, dtype=jnp.int32)
    before = sequences.block_table

    def move_first(carry):
        pool, space, sequences, left = carry
        row = jnp.argmax(left).astype(jnp.int32)
        count = blocks_for(sequences.length[row], block_size)
        named = column < count
        blocks = before[row]
        # What a row before this one has moved; it names that block of the host.
        same = (rows & ~left)[:, None] & (before == blocks) & named
        moved = jnp.max(jnp.where(same, sequences.block_table, 0), axis=0)
        new = named & (moved == 0)
        host, granted = take(space.pool, new)
        host = hold(host, moved, moved > 0)
        pool = drop(pool, blocks, column < sequences.num_blocks[row])
        space = dataclasses.replace(
            space, pool=host, outs=_add(space.outs, blocks, granted, new)
        )
        table = jnp.where(new, granted, moved)
        sequences = _put(sequences, row, table, count, SequenceStatus.SWAPPED)
        return pool, space, sequences, left.at[row].set(False)

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[3]), move_first, (pool, space, sequences, rows)
    )[:3]


def move_in(
    pool: BlockPool,
    space: SwapSpace,
    sequences: Sequences,
    rows: jax.Array,
    need: jax.Array,
    shared_blocks: jax.Array | None = None,
    num_shared: jax.Array | int = 0,
) -> tuple[BlockPool, SwapSpace, Sequences]:
    """Swaps rows in; the caller has checked that they are SWAPPED and fit.

    Other arguments and the results are those of `swap_in`.

    Args:
      pool: the block pool.
      space: the host's blocks.
      sequences: the sequence rows.
      rows: bool[S], which rows.
      need: i32[S], blocks that each one is to name.
      shared_blocks: i32[T], blocks of the device to name again instead of moving what
        was moved out of them, or None.
      num_shared: i32[], how many of them, from the start of each row.
    """
    column = jnp.arange(sequences.table_width, dtype=jnp.int32)
    before = sequences.block_table

    def move_first(carry):
        pool, space, sequences, left = carry
        row = jnp.argmax(left).astype(jnp.int32)
        count = jnp.maximum(need[row], sequences.num_blocks[row])
        named = column < sequences.num_blocks[row]
        blocks = before[row]
        same = (rows & ~left)[:, None] & (before == blocks) & named
        moved = jnp.max(jnp.where(same, sequences.block_table, 0), axis=0)
        if shared_blocks is not None:
            moved = jnp.where(column < num_shared, shared_blocks, moved)
        pool = hold(pool, moved, moved > 0)
        pool, granted = take(pool, (column < count) & (moved == 0))
        space = dataclasses.replace(
            space,
            pool=drop(space.pool, blocks, named),
            ins=_add(space.ins, blocks, granted, named & (moved == 0)),
        )
        table = jnp.where(moved > 0, moved, granted)
        sequences = _put(sequences, row, table, count, SequenceStatus.RUNNING)
        return pool, space, sequences, left.at[row].set(False)

    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[3]), move_first, (pool, space, sequences, rows)
    )[:3]


def _put(
    sequences: Sequences,
    row: jax.Array,
    table: jax.Array,
    num_blocks: jax.Array,
    status: SequenceStatus,
) -> Sequences:
    """Gives a row another table and another status; its tokens are the same."""
    return dataclasses.replace(
        sequences,
        block_table=sequences.block_table.at[row].set(table),
        num_blocks=sequences.num_blocks.at[row].set(num_blocks),
        status=sequences.status.at[row].set(status),
    )


def _add(
    moves: BlockMoves, source: jax.Array, target: jax.Array, valid: jax.Array
) -> BlockMoves:
    """Adds the valid ones of moves i32[W] to a list that has room for them."""
    rank = jnp.cumsum(valid.astype(jnp.int32))
    place = jnp.where(valid, moves.count + rank - 1, moves.source.shape[0] - 1)
    return BlockMoves(
        moves.source.at[place].set(source),
        moves.target.at[place].set(target),
        moves.count + rank[-1],
    )


@functools.partial(jax.jit, static_argnames="block_size")
def swap_out(
    pool: BlockPool,
    space: SwapSpace,
    sequences: Sequences,
    rows: jax.Array,
    *,
    block_size: int,
) -> tuple[BlockPool, SwapSpace, Sequences, jax.Array]:
    """Gives up the device's blocks of some sequences for blocks of the host.

    Blocks that were granted ahead of a row's length are given up for nothing.

    Args:
      pool: the block pool.
      space: the host's blocks. Its list of moves has room for one step: start it anew
        with `forget_moves` when they are made.
      sequences: the sequence rows.
      rows: bool[S], RUNNING rows, swapped together: all of them, or none.
      block_size: tokens in a block.

    Returns:
      The pool, the host's blocks with the moves to make, the rows, SWAPPED, and a
      `Status` i32[]: NOT_LIVE for rows that are not RUNNING, OUT_OF_BLOCKS if the host
      has too few.
    """
    running = sequences.status == SequenceStatus.RUNNING
    need = blocks_to_swap_out(sequences, rows & running, block_size)
    status = first_failure(
        (jnp.all(~rows | running), Status.NOT_LIVE),
        (need <= space.pool.num_free, Status.OUT_OF_BLOCKS),
    )
    rows &= status == Status.OK
    return *move_out(pool, space, sequences, rows, block_size), status


@jax.jit
def swap_in(
    pool: BlockPool,
    space: SwapSpace,
    sequences: Sequences,
    rows: jax.Array,
    need: jax.Array,
) -> tuple[BlockPool, SwapSpace, Sequences, jax.Array]:
    """Brings swapped-out sequences back to the device.

    Args:
      pool: the block pool.
      space: the host's blocks; as for `swap_out`.
      sequences: the sequence rows.
      rows: bool[S], SWAPPED rows, swapped together: all of them, or none.
      need: i32[S], blocks that each row is to name then, for tokens to come; less than
        it has asks for no more than those.

    Returns:
      The pool, the host's blocks with the moves to make, the rows, RUNNING, and a
      `Status` i32[]: NOT_LIVE for rows that are not SWAPPED, TABLE_OVERFLOW for more
      blocks than a table has room for, OUT_OF_BLOCKS if the pool has too few.
    """
    swapped = sequences.status == SequenceStatus.SWAPPED
    mine = rows & swapped
    total = blocks_to_swap_in(sequences, mine, need)
    status = first_failure(
        (jnp.all(~rows | swapped), Status.NOT_LIVE),
        (jnp.all(~mine | (need <= sequences.table_width)), Status.TABLE_OVERFLOW),
        (total <= pool.num_available, Status.OUT_OF_BLOCKS),
    )
    rows &= status == Status.OK
    return *move_in(pool, space, sequences, rows, need), status


def release_host_rows(
    space: SwapSpace, sequences: Sequences, rows: jax.Array, null_request: int
) -> tuple[SwapSpace, Sequences]:
    """Empties rows bool[S] and gives their blocks of the host back."""
    column = jnp.arange(sequences.table_width, dtype=jnp.int32)

    def release_first(carry):
        host, sequences, left = carry
        row = jnp.argmax(left).astype(jnp.int32)
        named = column < sequences.num_blocks[row]
        host = drop(host, sequences.block_table[row], named)
        sequences = _put(
            sequences,
            row,
            jnp.zeros_like(column),
            jnp.int32(0),
            SequenceStatus.EMPTY,
        )
        sequences = dataclasses.replace(
            sequences,
            length=sequences.length.at[row].set(0),
            request=sequences.request.at[row].set(null_request),
        )
        return host, sequences, left.at[row].set(False)

    host, sequences, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]), release_first, (space.pool, sequences, rows)
    )
    return dataclasses.replace(space, pool=host), sequences
