"""Beams and their block tables: fork and free by repointing (paper, section 4.4)."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax import lru
from paged_jax.block_pool import BlockPool, push_free
from paged_jax.prefix_cache import PrefixCache
from paged_jax.sequences import Sequences


def repoint(
    pool: BlockPool,
    sequences: Sequences,
    rows: jax.Array,
    parents: jax.Array,
    valid: jax.Array,
) -> tuple[BlockPool, Sequences]:
    """Makes each beam the continuation of its parent (paper, figure 9).

    Each row takes over its parent's table as it was, the partly filled last block
    included; nothing is copied until that block is written. A block gains a reference
    for each child of a row that names it and loses one for the row itself: the counts
    move by the difference of the old tables and the new ones, in one scatter. Blocks of
    beams that nobody continues are freed, once each.

    Args:
      pool: the block pool.
      sequences: the sequence rows.
      rows: i32[k], the rows of the beams, those that end included. The valid ones are
        distinct, and a block that two of them name has the same place in both tables.
      parents: i32[k], which of the valid `rows` each one continues from now on.
      valid: bool[k]; the others are left as they are.

    Returns:
      The pool and the sequences. Freed blocks go on top of the stack; cached ones
      become idle instead, later blocks of the tables as those used earlier, so that a
      block is evicted before the one that it follows. Lengths and numbers of blocks are
      the parents'; requests and statuses stay.
    """
    # A row that is not valid repeats what is written for one that is.
    valid_one = jnp.where(valid, jnp.arange(rows.shape[0]), jnp.argmax(valid))
    rows = rows[valid_one]
    parents = jnp.where(jnp.any(valid), parents[valid_one], rows)
    column = jnp.arange(sequences.table_width, dtype=jnp.int32)
    old = sequences.block_table[rows]
    named = valid[:, None] & (column < sequences.num_blocks[rows][:, None])
    children = jnp.sum(valid & (parents == rows[:, None]), axis=1, dtype=jnp.int32)

    blocks = jnp.where(named, old, 0)
    change = jnp.where(named, (children - 1)[:, None], 0)
    ref_count = pool.ref_count.at[blocks].add(change)
    dead = named & (children == 0)[:, None] & (ref_count[blocks] == 0)
    pool = dataclasses.replace(pool, ref_count=ref_count)
    pool = _give_back(pool, blocks, dead & ~_seen_above(blocks, dead))

    def inherit(values: jax.Array) -> jax.Array:
        return values.at[rows].set(values[parents])

    return pool, dataclasses.replace(
        sequences,
        block_table=inherit(sequences.block_table),
        num_blocks=inherit(sequences.num_blocks),
        length=inherit(sequences.length),
    )


def _seen_above(blocks: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns bool[k, T]: whether a valid row above has the same block in the column.

    Args:
      blocks: i32[k, T].
      valid: bool[k, T].
    """
    place = jnp.arange(blocks.shape[0])
    above = (place[None, :] < place[:, None])[:, :, None]
    same = blocks[:, None] == blocks[None, :]
    return jnp.any(same & above & valid[None, :], axis=1)


def _give_back(pool: BlockPool, blocks: jax.Array, valid: jax.Array) -> BlockPool:
    """Frees the valid blocks of i32[k, T], distinct and without references."""
    # The end of every table first.
    blocks, valid = blocks.T[::-1].ravel(), valid.T[::-1].ravel()
    cache = pool.prefix_cache
    if isinstance(cache, PrefixCache):
        idle = valid & (cache.parent[blocks] >= 0)
        valid &= ~idle
        pool, blocks, idle, valid = jax.lax.optimization_barrier(
            (pool, blocks, idle, valid)
        )
        cache = pool.prefix_cache
        assert isinstance(cache, PrefixCache)
        cache = dataclasses.replace(cache, idle=lru.push(cache.idle, blocks, idle))
        pool = dataclasses.replace(pool, prefix_cache=cache)
    return push_free(pool, blocks, valid)
