"""Block tables under reference counting: the memory operations of PagedAttention.

Each function is pure: `(pool, sequences, ...) -> (pool, sequences, ..., status)`. A
call that cannot be carried out returns a status that says why, and the state unchanged;
it never raises and never stops halfway, so that all of them work under `jit`, in loops
and with traced rows. Rules and names follow sections 4.2 to 4.4 of the PagedAttention
paper (Kwon et al., SOSP 2023).
"""

import dataclasses
import enum
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.block_pool import BlockPool, drop, hold, take
from paged_jax.compat import read_first
from paged_jax.sequences import Sequences, SequenceStatus, blocks_for, on_host


class Status(enum.IntEnum):
    """How an operation on the block tables ended."""

    OK = 0
    OUT_OF_BLOCKS = 1  # the pool has too few free blocks
    TABLE_OVERFLOW = 2  # more tokens than a block table has room for
    NOT_LIVE = 3  # the row named holds no sequence, or one in the wrong place (swap)
    ROW_IN_USE = 4  # the row named as a new sequence's place is taken
    OUT_OF_RANGE = 5  # the row has no such logical block, or no such row exists


def first_failure(*checks: tuple[jax.Array, Status]) -> jax.Array:
    """Returns the status of the first check that fails, i32[]."""
    status = jnp.int32(Status.OK)
    for passed, failure in reversed(checks):
        status = jnp.where(passed, status, failure)
    return status


def _all_live(sequences: Sequences) -> jax.Array:
    """Returns bool[S]: rows with a sequence whose blocks are on the device."""
    return (sequences.status != SequenceStatus.EMPTY) & ~on_host(sequences)


def _live(sequences: Sequences, row: jax.Array) -> jax.Array:
    return _in_range(sequences, row) & _all_live(sequences)[row]


def _vacant(sequences: Sequences, row: jax.Array) -> jax.Array:
    return sequences.status[row] == SequenceStatus.EMPTY


def _in_range(sequences: Sequences, row: jax.Array) -> jax.Array:
    return (row >= 0) & (row < sequences.num_rows)


@functools.partial(jax.jit, static_argnames="block_size")
def allocate(
    pool: BlockPool,
    sequences: Sequences,
    row: jax.Array,
    num_tokens: jax.Array,
    *,
    block_size: int,
) -> tuple[BlockPool, Sequences, jax.Array]:
    """Starts a sequence of `num_tokens` tokens in an empty row (section 4.3).

    Args:
      pool: the block pool.
      sequences: the sequence rows.
      row: i32[], an EMPTY row.
      num_tokens: i32[], 1 or more.
      block_size: tokens in a block.

    Returns:
      The pool with ceil(num_tokens / block_size) blocks granted, the row that names
      them, and a `Status` i32[].
    """
    row, num_tokens = jnp.int32(row), jnp.int32(num_tokens)
    need = blocks_for(num_tokens, block_size)
    status = first_failure(
        (_in_range(sequences, row) & (num_tokens > 0), Status.OUT_OF_RANGE),
        (_vacant(sequences, row), Status.ROW_IN_USE),
        (need <= sequences.table_width, Status.TABLE_OVERFLOW),
        (need <= pool.num_available, Status.OUT_OF_BLOCKS),
    )
    ok = status == Status.OK
    pool, sequences = grant_row(pool, sequences, row, need, num_tokens, ok)
    return pool, sequences, status


def grant_row(
    pool: BlockPool,
    sequences: Sequences,
    row: jax.Array,
    need: jax.Array,
    length: jax.Array,
    ok: jax.Array,
    shared_blocks: jax.Array | None = None,
    num_shared: jax.Array | int = 0,
) -> tuple[BlockPool, Sequences]:
    """Fills an empty row with shared blocks and new ones; the caller has checked them.

    Args:
      pool: the block pool.
      sequences: the sequence rows.
      row: i32[], the row to fill.
      need: i32[], blocks that the row will name.
      length: i32[], tokens that the row will hold.
      ok: bool[]; if false, nothing changes.
      shared_blocks: i32[T], blocks to share, from the start of the row; or None.
      num_shared: i32[], how many of them.

    Returns:
      The pool and the sequences; the row is RUNNING.
    """
    column = jnp.arange(sequences.table_width, dtype=jnp.int32)
    shared = ok & (column < num_shared)
    if shared_blocks is not None:
        pool = hold(pool, shared_blocks, shared)  # before any of them is evicted
    pool, blocks = take(pool, ok & (column >= num_shared) & (column < need))
    if shared_blocks is not None:
        blocks = jnp.where(shared, shared_blocks, blocks)
    at = jnp.where(ok, row, 0)  # a write that keeps what it finds is no change

    def put(values, value):
        return values.at[at].set(jnp.where(ok, value, values[at]))

    return pool, dataclasses.replace(
        sequences,
        block_table=put(sequences.block_table, blocks),
        num_blocks=put(sequences.num_blocks, need),
        length=put(sequences.length, length),
        status=put(sequences.status, SequenceStatus.RUNNING),
    )


@functools.partial(jax.jit, static_argnames="block_size")
def fork(
    pool: BlockPool,
    sequences: Sequences,
    source: jax.Array,
    target: jax.Array,
    *,
    block_size: int,
) -> tuple[BlockPool, Sequences, jax.Array]:
    """Makes `target` a sequence that shares every block of `source` (section 4.4).

    No block is taken and none is copied: the table is copied and the reference counts
    go up. The partly filled last block is shared too, until one of the two writes to
    it. Blocks that `source` was granted ahead of its length are not shared.

    Args:
      pool: the block pool.
      sequences: the sequence rows.
      source: i32[], a row that holds a sequence.
      target: i32[], an EMPTY row.
      block_size: tokens in a block.

    Returns:
      The pool, the sequences, and a `Status` i32[].
    """
    source = jnp.int32(source)
    length = sequences.length[source]
    return share_prefix(pool, sequences, source, target, length, block_size=block_size)


@functools.partial(jax.jit, static_argnames="block_size")
def share_prefix(
    pool: BlockPool,
    sequences: Sequences,
    source: jax.Array,
    target: jax.Array,
    num_tokens: jax.Array,
    *,
    block_size: int,
) -> tuple[BlockPool, Sequences, jax.Array]:
    """Makes `target` a sequence that shares the first `num_tokens` tokens of `source`.

    Args:
      pool: the block pool.
      sequences: the sequence rows.
      source: i32[], a row that holds a sequence of at least `num_tokens` tokens.
      target: i32[], an EMPTY row.
      num_tokens: i32[], 1 or more; no multiple of the block size is asked for. Where
        full blocks are cached it must not end inside of one: `target` would write to
        that block once it has it alone, and cached blocks are never written.
      block_size: tokens in a block.

    Returns:
      The pool with one more reference to each shared block, the sequences, and a
      `Status` i32[].
    """
    source, target = jnp.int32(source), jnp.int32(target)
    num_tokens = jnp.int32(num_tokens)
    status = first_failure(
        (_in_range(sequences, target), Status.OUT_OF_RANGE),
        (_live(sequences, source), Status.NOT_LIVE),
        (_vacant(sequences, target), Status.ROW_IN_USE),
        (
            (num_tokens > 0) & (num_tokens <= sequences.length[source]),
            Status.OUT_OF_RANGE,
        ),
    )
    count = blocks_for(num_tokens, block_size)
    pool, sequences = grant_row(
        pool,
        sequences,
        target,
        count,
        num_tokens,
        status == Status.OK,
        shared_blocks=sequences.block_table[source],
        num_shared=count,
    )
    return pool, sequences, status


class BlockCopies(NamedTuple):
    """The copies that a step's copy-on-write asks for, to be made before its writes.

    Attributes:
      source: i32[S]. Blocks to copy; the first `count` are valid, the rest are 0.
      target: i32[S]. Where each one goes.
      count: i32[].
    """

    source: jax.Array
    target: jax.Array
    count: jax.Array


def write_needs(
    pool: BlockPool,
    sequences: Sequences,
    num_new: jax.Array,
    block_size: int,
    may_share: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Says which rows need a block before they can write their next tokens.

    A row needs one if its new tokens pass the end of its last block, or if the block
    that its first new token goes to is shared. Of the rows that write to one block with
    as many references as writers, the last writes in place (section 4.4, figure 8).

    Args:
      pool: the block pool.
      sequences: the sequence rows.
      num_new: i32[S], tokens that each row is about to write; 0 for none. They may pass
        the row's last block by one block at most, and only their first one may fall
        into a shared block: what follows the length of a row is its own.
      block_size: tokens in a block.
      may_share: False if no two rows ever share a block; leaves out the second test.

    Returns:
      bool[S], rows that grow by one block; bool[S], rows that copy a block on write.
    """
    writing = num_new > 0
    growing = writing & (
        blocks_for(sequences.length + num_new, block_size) > sequences.num_blocks
    )
    if not may_share:
        return growing, jnp.zeros_like(growing)
    logical = sequences.length // block_size
    rows = jnp.arange(sequences.num_rows)
    inside = writing & (logical < sequences.num_blocks)
    block = sequences.block_table[rows, jnp.where(inside, logical, 0)]
    references = pool.ref_count[block]

    shared = inside & (references > 1)

    def decide_first(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Decides for all rows that write to the block of the first one left."""
        copying, left = carry
        first = jnp.argmax(left)
        writers = shared & (block == block[first])
        last = jnp.max(jnp.where(writers, rows, 0))
        in_place = references[first] == jnp.sum(writers)
        copying |= writers & ~(in_place & (rows == last))
        return copying, left & ~writers

    # A loop over the shared blocks that are written: none in most steps, few in others.
    copying, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]), decide_first, (jnp.zeros_like(inside), shared)
    )
    return growing, copying


def grant_writes(
    pool: BlockPool,
    sequences: Sequences,
    growing: jax.Array,
    copying: jax.Array,
    block_size: int,
    may_share: bool = True,
) -> tuple[BlockPool, Sequences, BlockCopies]:
    """Grants the blocks that `write_needs` asked for; the pool holds enough.

    Args:
      pool: the block pool.
      sequences: the sequence rows.
      growing: bool[S], rows that get one more block. No row both grows and copies in a
        step of one token; a chunk may (its first block shared, its last one missing)
        and is then served in two calls.
      copying: bool[S], rows whose next block to write is replaced by a copy.
      block_size: tokens in a block.
      may_share: False if no two rows ever share a block.

    Returns:
      The pool and the sequences with tables repointed, and the copies to make.
    """
    logical = sequences.length // block_size
    column = jnp.where(growing, sequences.num_blocks, logical)
    return _grant_entries(pool, sequences, growing, copying, column, may_share)


def _grant_entries(
    pool: BlockPool,
    sequences: Sequences,
    growing: jax.Array,
    copying: jax.Array,
    column: jax.Array,
    may_share: bool,
) -> tuple[BlockPool, Sequences, BlockCopies]:
    """Puts a new block into entry `column` i32[S] of each table that gets one."""
    num_rows = sequences.num_rows
    rows = jnp.arange(num_rows)
    wanted = growing | copying
    pool, granted = take(pool, wanted)
    column = jnp.where(wanted, column, 0)
    old = sequences.block_table[rows, column]
    table = sequences.block_table.at[rows, column].set(jnp.where(wanted, granted, old))
    sequences = dataclasses.replace(
        sequences,
        block_table=table,
        num_blocks=sequences.num_blocks + growing.astype(jnp.int32),
    )
    if not may_share:
        return pool, sequences, no_copies(num_rows)

    def repoint(ref_count: jax.Array) -> tuple[jax.Array, BlockCopies]:
        source = jnp.where(copying, old, 0)
        target = jnp.where(copying, granted, 0)
        ref_count = ref_count.at[source].add(-copying.astype(jnp.int32))
        rank = jnp.cumsum(copying.astype(jnp.int32))
        # The other rows write zeros to the last place, which only a copy in every row
        # would need.
        place = jnp.where(copying, rank - 1, num_rows - 1)
        empty = jnp.zeros(num_rows, jnp.int32)
        return ref_count, BlockCopies(
            empty.at[place].set(source), empty.at[place].set(target), rank[-1]
        )

    ref_count, copies = jax.lax.cond(
        jnp.any(copying),
        repoint,
        lambda ref_count: (ref_count, no_copies(num_rows)),
        pool.ref_count,
    )
    return dataclasses.replace(pool, ref_count=ref_count), sequences, copies


def no_copies(num_rows: int) -> BlockCopies:
    """Returns an empty list of copies with room for `num_rows`."""
    zeros = jnp.zeros(num_rows, jnp.int32)
    return BlockCopies(zeros, zeros, jnp.int32(0))


@functools.partial(jax.jit, static_argnames="block_size")
def append(
    pool: BlockPool,
    sequences: Sequences,
    appending: jax.Array,
    *,
    block_size: int,
) -> tuple[BlockPool, Sequences, BlockCopies, jax.Array]:
    """Makes room for one more token in each of the given rows (section 4.3).

    Args:
      pool: the block pool.
      sequences: the sequence rows.
      appending: bool[S], rows that append a token.
      block_size: tokens in a block.

    Returns:
      The pool, the sequences with their lengths counted up, the blocks to copy before
      the tokens are written, and a `Status` i32[]. All rows append, or none does.
    """
    live = _all_live(sequences)
    full = sequences.length >= sequences.table_width * block_size
    num_new = appending.astype(jnp.int32)
    growing, copying = write_needs(pool, sequences, num_new, block_size)
    need = jnp.sum(growing | copying)
    status = first_failure(
        (~jnp.any(appending & ~live), Status.NOT_LIVE),
        (~jnp.any(appending & full), Status.TABLE_OVERFLOW),
        (need <= pool.num_available, Status.OUT_OF_BLOCKS),
    )
    ok = status == Status.OK
    pool, sequences, copies = grant_writes(
        pool, sequences, growing & ok, copying & ok, block_size
    )
    length = sequences.length + jnp.where(ok, num_new, 0)
    return pool, dataclasses.replace(sequences, length=length), copies, status


@jax.jit
def copy_on_write(
    pool: BlockPool, sequences: Sequences, row: jax.Array, logical: jax.Array
) -> tuple[BlockPool, Sequences, BlockCopies, jax.Array]:
    """Makes one block of a row its own, so that it can be written (section 4.4).

    A block with one reference is left as it is. Else a new block takes its place in the
    row's table, its content is to be copied, and the old one loses a reference.

    Args:
      pool: the block pool.
      sequences: the sequence rows.
      row: i32[], a row that holds a sequence.
      logical: i32[], which of its blocks.

    Returns:
      The pool, the sequences, the copy to make (if any), and a `Status` i32[].
    """
    row, logical = jnp.int32(row), jnp.int32(logical)
    block = sequences.block_table[row, logical]
    shared = pool.ref_count[block] > 1
    status = first_failure(
        (_live(sequences, row), Status.NOT_LIVE),
        (
            (logical >= 0) & (logical < sequences.num_blocks[row]),
            Status.OUT_OF_RANGE,
        ),
        (~shared | (pool.num_available > 0), Status.OUT_OF_BLOCKS),
    )

    def copy(pool, sequences):
        copying = jnp.arange(sequences.num_rows) == row
        column = jnp.full(sequences.num_rows, logical)
        return _grant_entries(
            pool, sequences, jnp.zeros_like(copying), copying, column, may_share=True
        )

    def keep(pool, sequences):
        return pool, sequences, no_copies(sequences.num_rows)

    copying = shared & (status == Status.OK)
    return *jax.lax.cond(copying, copy, keep, pool, sequences), status


@jax.jit
def release(
    pool: BlockPool, sequences: Sequences, row: jax.Array
) -> tuple[BlockPool, Sequences, jax.Array]:
    """Ends a sequence: its row is emptied, blocks that nobody else names are freed.

    Args:
      pool: the block pool.
      sequences: the sequence rows.
      row: i32[], a row that holds a sequence.

    Returns:
      The pool, the sequences, and a `Status` i32[]: NOT_LIVE for a second release.
    """
    row = jnp.int32(row)
    status = first_failure((_live(sequences, row), Status.NOT_LIVE))
    pool, sequences = release_row(pool, sequences, row, status == Status.OK)
    return pool, sequences, status


def release_row(
    pool: BlockPool, sequences: Sequences, row: jax.Array, ok: jax.Array
) -> tuple[BlockPool, Sequences]:
    """Drops every block of a row and empties it if `ok`; the caller has checked it."""
    row = jnp.where(ok, row, 0)
    column = jnp.arange(sequences.table_width, dtype=jnp.int32)
    # Read before anything is written: XLA would else copy the tables.
    sequences, blocks = read_first((sequences, sequences.block_table[row]))
    pool = drop(pool, blocks, ok & (column < sequences.num_blocks[row]))

    def clear(values):
        return values.at[row].set(jnp.where(ok, 0, values[row]))

    return pool, dataclasses.replace(
        sequences,
        block_table=clear(sequences.block_table),
        num_blocks=clear(sequences.num_blocks),
        length=clear(sequences.length),
        status=clear(sequences.status),
    )
