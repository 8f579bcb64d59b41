"""Sequences and their block tables: the logical side of the paged memory.

The operations on the tables (`allocate`, `append`, `fork`, `share_prefix`,
`copy_on_write`, `release`) live in `block_tables.py`.
"""

import dataclasses
import enum

import jax

from paged_jax.new_arrays import full, zeros


class SequenceStatus(enum.IntEnum):
    """What a sequence row holds."""

    EMPTY = 0  # nothing: the row is free
    RUNNING = 1  # a sequence that takes part in the steps
    FINISHED = 2  # a sequence that has ended and still has its blocks
    HELD = 3  # a prefix that is kept for others to share
    UNFORKED = 4  # no blocks yet: another row computes the prompt of the two
    SWAPPED = 5  # a sequence that takes no part: its table names blocks of the host
    DROPPED = 6  # a sequence that has ended while it was SWAPPED, and has those still


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """The sequences that have blocks, one in a row.

    Attributes:
      block_table: i32[S, T]. Physical block of each logical block; 0 past `num_blocks`.
        Rows that are SWAPPED or DROPPED name blocks of the host pool.
      num_blocks: i32[S]. Blocks granted to each row.
      length: i32[S]. Tokens of each row whose keys and values are in the cache, or on
        the host.
      request: i32[S]. The request each row belongs to; R, the null request, if EMPTY.
      status: i32[S]. A `SequenceStatus`.
    """

    block_table: jax.Array
    num_blocks: jax.Array
    length: jax.Array
    request: jax.Array
    status: jax.Array

    @property
    def num_rows(self) -> int:
        """S, the number of sequence rows."""
        return self.block_table.shape[0]

    @property
    def table_width(self) -> int:
        """T, the most blocks that a row can have."""
        return self.block_table.shape[1]


def on_host(sequences: Sequences) -> jax.Array:
    """Returns bool[S]: rows whose tables name blocks of the host pool."""
    return sequences.status >= SequenceStatus.SWAPPED


def init_sequences(num_rows: int, table_width: int, null_request: int = 0) -> Sequences:
    """Returns `num_rows` empty rows with room for `table_width` blocks each."""
    return Sequences(
        block_table=zeros((num_rows, table_width)),
        num_blocks=zeros(num_rows),
        length=zeros(num_rows),
        request=full(num_rows, null_request),
        status=zeros(num_rows),
    )


def blocks_for(num_tokens: jax.Array, block_size: int) -> jax.Array:
    """Returns the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)  # this form cannot overflow


def slots_of(
    sequences: Sequences, rows: jax.Array, positions: jax.Array, block_size: int
) -> jax.Array:
    """Translates positions in sequences to slots of the cache, through block tables.

    Args:
      sequences: the sequence rows.
      rows: i32[N], the row of each token.
      positions: i32[N], its position in that row; the row has a block for it.
      block_size: tokens in a block.

    Returns:
      i32[N], `block * block_size + offset` of each token.
    """
    block = sequences.block_table[rows, positions // block_size]
    return block * block_size + positions % block_size
