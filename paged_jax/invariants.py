"""What is always true of the block pool and the block tables: for tests and debugging.

The checks look at the whole pool, so they belong to no step that is to be fast.
"""

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from paged_jax import prefix_invariants
from paged_jax.block_pool import BlockPool
from paged_jax.sequences import Sequences, SequenceStatus

_MEANING = {
    "blocks_accounted": "each block but the null block is free, referenced or idle",
    "ref_counts_match": "a block's ref_count is the number of table entries naming it",
    "free_blocks_distinct": "the free list names real blocks, none of them twice",
    "free_blocks_unreferenced": "no block of the free list is referenced",
    "tables_well_formed": "a row names real blocks, none twice, then the null block",
    "empty_rows_hold_nothing": "a row without a sequence has no blocks and no tokens",
    **prefix_invariants.MEANING,
}


def check_blocks(pool: BlockPool, sequences: Sequences) -> dict[str, jax.Array]:
    """Checks the block pool against the block tables.

    Args:
      pool: the block pool.
      sequences: the sequence rows; all references to blocks are in their tables.

    Returns:
      Name of each invariant -> bool[], whether it holds.
    """
    num_blocks, num_free, available = (
        pool.num_blocks,
        pool.num_free,
        pool.num_available,
    )
    table = sequences.block_table
    named = jnp.arange(sequences.table_width) < sequences.num_blocks[:, None]
    real = (table >= 1) & (table <= num_blocks)
    entries = jnp.where(named, table, 0).ravel()
    names = (
        jnp.zeros_like(pool.ref_count).at[entries].add(named.ravel().astype(jnp.int32))
    )

    free = jnp.arange(num_blocks) < num_free
    stack = pool.free_stack[:num_blocks]
    times = jnp.zeros_like(pool.ref_count).at[jnp.where(free, stack, 0)].add(1)

    column = jnp.sort(jnp.where(named, table, -1), axis=1)  # equal neighbours: twice
    twice = (column[:, 1:] == column[:, :-1]) & (column[:, 1:] >= 0)
    occupied = sequences.status != SequenceStatus.EMPTY
    nothing = (sequences.num_blocks == 0) & (sequences.length == 0)
    return {
        "blocks_accounted": available + jnp.sum(pool.ref_count > 0) == num_blocks,
        "ref_counts_match": jnp.all(pool.ref_count == names),
        "free_blocks_distinct": (num_free >= 0)
        & jnp.all(~free | ((stack >= 1) & (stack <= num_blocks)))
        & jnp.all(times[1:] <= 1),
        "free_blocks_unreferenced": jnp.all(~free | (pool.ref_count[stack] == 0)),
        "tables_well_formed": jnp.all(jnp.where(named, real, table == 0))
        & ~jnp.any(twice),
        "empty_rows_hold_nothing": jnp.all(occupied | nothing),
        **prefix_invariants.check_prefix_cache(pool),
    }


def writes_are_private(pool: BlockPool, slots: jax.Array, block_size: int) -> jax.Array:
    """Checks that no slot which is about to be written lies in a shared block.

    Args:
      pool: the block pool.
      slots: i32[N], slots to write; those of the null block, 0, are padding.
      block_size: tokens in a block.

    Returns:
      bool[].
    """
    block = slots // block_size
    return jnp.all((block == 0) | (pool.ref_count[block] == 1))


def assert_blocks(pool: BlockPool, sequences: Sequences) -> None:
    """Raises, under `checkify.checkify`, if an invariant of `check_blocks` is broken.

    Args:
      pool: the block pool.
      sequences: the sequence rows.

    Raises:
      checkify.JaxRuntimeError: from `err.throw()`, with the invariant and the counts.
    """
    for name, holds in check_blocks(pool, sequences).items():
        checkify.check(
            holds,
            f"{name}: it must hold that {_MEANING[name]}; "
            "got num_free {num_free}, {referenced} referenced blocks, "
            "{entries} table entries, ref_counts that sum to {references}",
            num_free=pool.num_free,
            referenced=jnp.sum(pool.ref_count > 0),
            entries=jnp.sum(sequences.num_blocks),
            references=jnp.sum(pool.ref_count),
        )
