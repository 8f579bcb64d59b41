"""The pool of physical blocks: a free list and reference counts in fixed arrays.

Allocation is a slice of a stack and release is a scatter, so that the work of every
function follows the blocks that it touches and never the size of the pool.

With a prefix cache, cached blocks that nobody names any more stay where they are,
idle, until a block is wanted and none is free: then the one whose last use is longest
ago is evicted.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import lru
from paged_jax.new_arrays import full, on_device, zeros
from paged_jax.prefix_cache import PrefixCache, init_prefix_cache, remove


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
      prefix_cache: what full blocks hold, and which are idle; () if nothing is cached.
    """

    free_stack: jax.Array
    num_free: jax.Array
    ref_count: jax.Array
    prefix_cache: PrefixCache | tuple[()] = ()

    @property
    def num_available(self) -> jax.Array:
        """Blocks that can be granted, free ones and idle ones, i32[]."""
        if isinstance(self.prefix_cache, PrefixCache):
            return self.num_free + self.prefix_cache.idle.count
        return self.num_free

    @property
    def num_blocks(self) -> int:
        """Usable blocks: all but the null block."""
        return self.free_stack.shape[0] - 1


def init_block_pool(num_blocks: int, cached_block_size: int = 0) -> BlockPool:
    """Returns a pool of `num_blocks` free blocks; blocks are granted from 1 upwards.

    Args:
      num_blocks: usable blocks.
      cached_block_size: B, tokens in a block, to cache full ones; 0 for no cache.
    """
    stack = np.arange(num_blocks, -1, -1, dtype=np.int32)  # ends with the null block
    return BlockPool(
        free_stack=on_device(stack),
        num_free=full((), num_blocks),
        ref_count=zeros(num_blocks + 1),
        prefix_cache=init_prefix_cache(num_blocks, cached_block_size)
        if cached_block_size
        else (),
    )


def take(pool: BlockPool, wanted: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Grants one block, with a reference count of 1, to each place that wants one.

    Args:
      pool: the pool; at least as many blocks are available as are wanted.
      wanted: bool[W].

    Returns:
      The pool, and i32[W]: the blocks granted, 0 where none was wanted.
    """
    rank = jnp.cumsum(wanted.astype(jnp.int32))
    pool = evict(pool, rank[-1] - pool.num_free)
    blocks = jnp.where(wanted, pool.free_stack[pool.num_free - rank], 0)
    ref_count = pool.ref_count.at[blocks].set(wanted.astype(jnp.int32))
    pool = dataclasses.replace(
        pool, num_free=pool.num_free - rank[-1], ref_count=ref_count
    )
    return pool, blocks


def evict(pool: BlockPool, count: jax.Array) -> BlockPool:
    """Frees `count` i32[] idle blocks, least recently used first; none if below 1."""
    cache = pool.prefix_cache
    if not isinstance(cache, PrefixCache):
        return pool

    def evict_first(_, carry):
        cache, stack, num_free = carry
        block = cache.idle.first
        cache = dataclasses.replace(
            remove(cache, block),
            idle=lru.unlink(cache.idle, block, jnp.bool_(True)),
        )
        return cache, stack.at[num_free].set(block), num_free + 1

    cache, stack, num_free = jax.lax.fori_loop(
        0, count, evict_first, (cache, pool.free_stack, pool.num_free)
    )
    evicted = cache.evicted + jnp.maximum(count, 0)
    return dataclasses.replace(
        pool,
        free_stack=stack,
        num_free=num_free,
        prefix_cache=dataclasses.replace(cache, evicted=evicted),
    )


def hold(pool: BlockPool, blocks: jax.Array, valid: jax.Array) -> BlockPool:
    """Adds one reference to each valid block.

    Args:
      pool: the pool.
      blocks: i32[W]. None is free; of those that are idle, none comes twice.
      valid: bool[W].

    Returns:
      The pool. Blocks that were idle are in use.
    """
    count = valid.astype(jnp.int32)
    blocks = jnp.where(valid, blocks, 0)
    pool = _wake(pool, blocks, valid)
    ref_count = pool.ref_count.at[blocks].add(count)
    return dataclasses.replace(pool, ref_count=ref_count)


def _wake(pool: BlockPool, blocks: jax.Array, valid: jax.Array) -> BlockPool:
    """Takes those of the valid blocks that are idle off the list."""
    cache = pool.prefix_cache
    if not isinstance(cache, PrefixCache):
        return pool
    # The counts are read before they change: XLA would else keep a copy of them.
    ref_count, idle = jax.lax.optimization_barrier(
        (pool.ref_count, valid & (pool.ref_count[blocks] == 0))
    )

    def wake_one(carry):
        links, left = carry
        place = jnp.argmax(left)
        links = lru.unlink(links, blocks[place], jnp.bool_(True))
        return links, left.at[place].set(False)

    links, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]), wake_one, (cache.idle, idle)
    )
    return dataclasses.replace(
        pool,
        ref_count=ref_count,
        prefix_cache=dataclasses.replace(cache, idle=links),
    )


def drop(pool: BlockPool, blocks: jax.Array, valid: jax.Array) -> BlockPool:
    """Takes one reference from each valid block, and frees those that reach 0.

    Args:
      pool: the pool.
      blocks: i32[W]. No block twice among the valid ones: rows that share blocks are
        released one after the other.
      valid: bool[W].

    Returns:
      The pool. Freed blocks go on top of the stack, the last one first to be reused.
      Cached ones become idle instead, the first of them as the one used last: so a
      block is evicted before the one that it follows.
    """
    blocks = jnp.where(valid, blocks, 0)
    # Read in one go, then write: so the cache misses of a large pool overlap.
    references = pool.ref_count[blocks] - valid.astype(jnp.int32)
    idle = jnp.zeros_like(valid)
    if isinstance(pool.prefix_cache, PrefixCache):
        idle = valid & (references == 0) & (pool.prefix_cache.parent[blocks] >= 0)
        pool, references, idle = jax.lax.optimization_barrier((pool, references, idle))
    ref_count = pool.ref_count.at[blocks].set(references)
    freed = valid & (references == 0) & ~idle
    cache = pool.prefix_cache
    if isinstance(cache, PrefixCache):
        links = lru.push(cache.idle, blocks[::-1], idle[::-1])
        cache = dataclasses.replace(cache, idle=links)
    pool = dataclasses.replace(pool, ref_count=ref_count, prefix_cache=cache)
    return push_free(pool, blocks, freed)


def push_free(pool: BlockPool, blocks: jax.Array, valid: jax.Array) -> BlockPool:
    """Puts the valid ones of blocks i32[W] on top of the stack, in their order.

    They are distinct, without references, and not cached.
    """
    rank = jnp.cumsum(valid.astype(jnp.int32))
    place = jnp.where(valid, pool.num_free + rank - 1, pool.num_blocks)
    return dataclasses.replace(
        pool,
        free_stack=pool.free_stack.at[place].set(jnp.where(valid, blocks, 0)),
        num_free=pool.num_free + rank[-1],
    )
