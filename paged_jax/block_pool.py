"""The pool of physical blocks: a free list and reference counts in fixed arrays.

Allocation is a slice of a stack and release is a scatter, so that the work of every
function follows the blocks that it touches and never the size of the pool.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """Which physical blocks are free, and how many table entries name each other one.

    Block 0, the null block, is never free and never granted: the tails of block tables
    name it and masked writes land in it. The last place of the stack is never part of
    the free list, which holds P - 1 blocks at most: masked pushes put the null block
    there.

    Attributes:
      free_stack: i32[P]. The first `num_free` entries are the free blocks; the next
        block to be granted is the last of them.
      num_free: i32[]. Number of free blocks.
      ref_count: i32[P]. Number of block-table entries that name each block.
    """

    free_stack: jax.Array
    num_free: jax.Array
    ref_count: jax.Array

    @property
    def num_blocks(self) -> int:
        """Usable blocks: all but the null block."""
        return self.free_stack.shape[0] - 1


def init_block_pool(num_blocks: int) -> BlockPool:
    """Returns a pool of `num_blocks` free blocks; blocks are granted from 1 upwards."""
    stack = jnp.arange(num_blocks, -1, -1, dtype=jnp.int32)  # ends with the null block
    return BlockPool(
        free_stack=stack,
        num_free=jnp.int32(num_blocks),
        ref_count=jnp.zeros(num_blocks + 1, jnp.int32),
    )


def take(pool: BlockPool, wanted: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Grants one block, with a reference count of 1, to each place that wants one.

    Args:
      pool: the pool; holds at least as many free blocks as are wanted.
      wanted: bool[W].

    Returns:
      The pool, and i32[W]: the blocks granted, 0 where none was wanted.
    """
    rank = jnp.cumsum(wanted.astype(jnp.int32))
    blocks = jnp.where(wanted, pool.free_stack[pool.num_free - rank], 0)
    ref_count = pool.ref_count.at[blocks].set(wanted.astype(jnp.int32))
    pool = dataclasses.replace(
        pool, num_free=pool.num_free - rank[-1], ref_count=ref_count
    )
    return pool, blocks


def hold(pool: BlockPool, blocks: jax.Array, valid: jax.Array) -> BlockPool:
    """Adds one reference to each valid block; `blocks` i32[W], `valid` bool[W]."""
    count = valid.astype(jnp.int32)
    ref_count = pool.ref_count.at[jnp.where(valid, blocks, 0)].add(count)
    return dataclasses.replace(pool, ref_count=ref_count)


def drop(pool: BlockPool, blocks: jax.Array, valid: jax.Array) -> BlockPool:
    """Takes one reference from each valid block, and frees those that reach 0.

    Args:
      pool: the pool.
      blocks: i32[W]. No block twice among the valid ones: rows that share blocks are
        released one after the other.
      valid: bool[W].

    Returns:
      The pool. Freed blocks go on top of the stack, the last one first to be reused.
    """
    blocks = jnp.where(valid, blocks, 0)
    # Read in one go, then write: so the cache misses of a large pool overlap.
    references = pool.ref_count[blocks] - valid.astype(jnp.int32)
    ref_count = pool.ref_count.at[blocks].set(references)
    freed = valid & (references == 0)
    rank = jnp.cumsum(freed.astype(jnp.int32))
    place = jnp.where(freed, pool.num_free + rank - 1, pool.num_blocks)
    return BlockPool(
        free_stack=pool.free_stack.at[place].set(jnp.where(freed, blocks, 0)),
        num_free=pool.num_free + rank[-1],
        ref_count=ref_count,
    )
