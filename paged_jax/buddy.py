"""A buddy allocator on KV blocks: the memory of the contiguous baselines.

The paper's Orca baselines (SOSP'23, section 6.1) reserve one contiguous chunk of KV
cache for each sequence at admission, from a buddy allocator. A chunk of order `o` is
`2**o` consecutive blocks. Its place is naturally aligned, counted from block 1, since
block 0 is the null block: chunks of order `o` start at `1 + i * 2**o`.

Two chunks of one order that make up a chunk of the next order are buddies. A chunk is
taken from the smallest order that has one; if that is larger than what was asked for,
it is halved until it fits, and the upper halves become free. A released chunk merges
with its buddy for as long as the buddy is free.

Each operation costs O(orders): a few gathers and scatters of that many elements, and no
loop. All candidates are known in advance. The halves that a split frees belong to
orders that had no free chunk, and the buddies that a merge removes belong to different
orders, so that no two writes of an operation meet.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from paged_jax.new_arrays import full, on_device

# Indices and the values to write there: i32[K] both.
_Pairs = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BuddyPool:
    """Free and allocated chunks of the blocks `1 .. num_blocks`.

    `O` is the number of orders: chunks have `1, 2, 4, ..., 2**(O - 1)` blocks. The free
    chunks of each order form a circular doubly linked list, last freed first, so that a
    buddy leaves from the middle in O(1) and the others keep their order. Nodes below
    `P` of the lists are blocks: a chunk's node is its first block. Node `P + o` is the
    end mark of the list of order `o`; an empty list is a mark that points at itself.
    Node 0 belongs to no list: masked writes go there, always as 0.

    Attributes:
      next: i32[P + O]. Next node in the list of free chunks: towards older ones.
      previous: i32[P + O]. Previous node in that list.
      chunk: i32[P]. `o + 1` at the first block of a free chunk of order `o`, `-(o + 1)`
        at the first block of an allocated one, 0 elsewhere.
      num_free: i32[]. Blocks in free chunks.
    """

    next: jax.Array
    previous: jax.Array
    chunk: jax.Array
    num_free: jax.Array

    @property
    def num_blocks(self) -> int:
        """Blocks that the pool manages, without the null block."""
        return self.chunk.shape[0] - 1

    @property
    def num_orders(self) -> int:
        """O: how many sizes of chunk there are."""
        return self.next.shape[0] - self.chunk.shape[0]


def order_of(num_blocks: jax.Array | int) -> jax.Array:
    """Returns the order of the smallest chunk that holds `num_blocks` blocks.

    Args:
      num_blocks: i32[...], at least 0; 0 blocks take a chunk of one block.

    Returns:
      i32[...], `ceil(log2(num_blocks))`.
    """
    num_blocks = jnp.maximum(jnp.asarray(num_blocks, jnp.int32), 1)
    return 32 - lax.clz(num_blocks - 1)


def init_buddy(num_blocks: int, max_blocks_per_request: int) -> BuddyPool:
    """Returns a pool with all blocks free.

    The largest chunk holds a full-length request. The pool starts as as many largest
    chunks as fit, and the remainder as chunks of decreasing size: 983 blocks for
    requests of at most 128 are 7 chunks of 128 and 64 + 16 + 4 + 2 + 1. Lower chunks
    are taken first.

    Args:
      num_blocks: blocks to manage, without the null block.
      max_blocks_per_request: blocks of a full-length request; rounded up to a power of
        two.

    Raises:
      ValueError: one of the two is below 1.
    """
    if num_blocks < 1 or max_blocks_per_request < 1:
        raise ValueError(
            f"init_buddy got num_blocks={num_blocks} and max_blocks_per_request="
            f"{max_blocks_per_request}; both must be at least 1: raise the memory "
            "budget or the model length"
        )
    num_orders = (max_blocks_per_request - 1).bit_length() + 1
    p = num_blocks + 1
    following = np.zeros(p + num_orders, np.int32)
    previous = np.zeros(p + num_orders, np.int32)
    chunk = np.zeros(p, np.int32)
    following[p:] = previous[p:] = np.arange(p, p + num_orders)
    start = 1
    while start <= num_blocks:
        order = min((num_blocks - start + 1).bit_length(), num_orders) - 1
        mark, last = p + order, previous[p + order]
        following[last] = previous[mark] = start
        following[start], previous[start] = mark, last
        chunk[start] = order + 1
        start += 1 << order
    return BuddyPool(
        next=on_device(following),
        previous=on_device(previous),
        chunk=on_device(chunk),
        num_free=full((), num_blocks),
    )


def can_allocate(pool: BuddyPool, order: jax.Array | int) -> jax.Array:
    """Returns bool[]: whether a chunk of this order could be taken.

    `allocate` answers the same by its `ok`: a caller that would call both in a row
    needs only that one.
    """
    orders = np.arange(pool.num_orders, dtype=np.int32)
    found = (_newest(pool) <= pool.num_blocks) & (orders >= order)
    return found.any() & jnp.asarray(order >= 0)


def can_allocate_all(pool: BuddyPool, order: jax.Array, count: jax.Array) -> jax.Array:
    """Returns bool[]: whether `count` chunks of this order could be taken.

    Walks along the lists of free chunks, the largest first, until there are enough.
    """
    newest = _newest(pool)

    def goes_on(carry):
        found, level, _ = carry
        return (found < count) & (level >= order)

    def look(carry):
        found, level, node = carry
        is_chunk = node <= pool.num_blocks
        size = jnp.left_shift(jnp.int32(1), jnp.maximum(level - order, 0))
        below = level - ~is_chunk
        return (
            found + jnp.where(is_chunk, size, 0),
            below,
            jnp.where(is_chunk, _get(pool.next, node), newest[jnp.maximum(below, 0)]),
        )

    top = jnp.int32(pool.num_orders - 1)
    start = jnp.int32(0), top, newest[top]
    return jax.lax.while_loop(goes_on, look, start)[0] >= count


def allocate(
    pool: BuddyPool, order: jax.Array | int, valid: jax.Array | bool = True
) -> tuple[BuddyPool, jax.Array, jax.Array]:
    """Takes a chunk of `2**order` consecutive blocks.

    It is the last freed chunk of the smallest order that has one, or the lowest part of
    it. The upper halves that the splits leave become free.

    Args:
      pool: the pool; donate it, so that the writes happen in place.
      order: i32[], log2 of the blocks wanted. An order that the pool does not have is
        refused.
      valid: bool[], False to leave the pool as it is.

    Returns:
      The pool; i32[], the first block of the chunk, 0 if none was taken; bool[],
      whether one was taken.
    """
    order = jnp.asarray(order, jnp.int32)
    orders = np.arange(pool.num_orders, dtype=np.int32)
    marks = pool.num_blocks + 1 + orders

    newest = _newest(pool)
    found = (newest <= pool.num_blocks) & (orders >= order)
    ok = found.any() & (order >= 0) & valid
    level = jnp.argmax(found).astype(jnp.int32)
    start = jnp.where(ok, newest[level], 0)
    mark = jnp.where(ok, pool.num_blocks + 1 + level, 0)
    rest = jnp.where(ok, _get(pool.next, start), 0)

    # The lists from `order` up to `level` are empty: each gets its half as only member.
    split = ok & (orders >= order) & (orders < level)
    upper = jnp.where(split, start + (1 << orders), 0)
    upper_mark = jnp.where(split, marks, 0)
    lists = jnp.concatenate([upper, upper_mark])
    ends = jnp.concatenate([upper_mark, upper])
    pool, (start, ok) = _write(
        pool,
        next=(_join(lists, mark), _join(ends, rest)),
        previous=(_join(lists, rest), _join(ends, mark)),
        chunk=(_join(upper, start), _join(orders + 1, -(order + 1))),
        freed=jnp.where(ok, -(1 << order), 0),
        results=(start, ok),
    )
    return pool, start, ok


def release(
    pool: BuddyPool,
    start: jax.Array | int,
    order: jax.Array | int,
    valid: jax.Array | bool = True,
) -> tuple[BuddyPool, jax.Array]:
    """Gives back a chunk, and merges it with its buddy for as long as that one is free.

    Args:
      pool: the pool; donate it, so that the writes happen in place.
      start: i32[], the first block of the chunk, as `allocate` returned it.
      order: i32[], the order that was asked for.
      valid: bool[], False to leave the pool as it is.

    Returns:
      The pool; bool[], whether the chunk was released. It is False, and the pool
      unchanged, if no chunk of that order is allocated at `start`: a double release, a
      block that is not the first of its chunk, a wrong order.
    """
    start = jnp.asarray(start, jnp.int32)
    order = jnp.asarray(order, jnp.int32)
    orders = np.arange(pool.num_orders, dtype=np.int32)

    inside = (start >= 1) & (start <= pool.num_blocks) & (order >= 0)
    start = jnp.where(inside, start, 0)
    ok = inside & (_get(pool.chunk, start) == -(order + 1)) & valid
    start = jnp.where(ok, start, 0)

    # The buddy at each order, were all lower ones merged.
    buddy = 1 + (((start - 1) >> orders ^ 1) << orders)
    buddy = jnp.where(buddy <= pool.num_blocks, buddy, 0)
    merges = (buddy > 0) & (_get(pool.chunk, buddy) == orders + 1)
    merges &= orders < pool.num_orders - 1
    level = jnp.argmax(~merges & (orders >= order)).astype(jnp.int32)
    merged = jnp.where(ok, 1 + ((start - 1) >> level << level), 0)

    # The buddies leave their lists; the merged chunk becomes the newest of its own.
    leaves = ok & (orders >= order) & (orders < level)
    buddy = jnp.where(leaves, buddy, 0)
    newer = jnp.where(leaves, _get(pool.previous, buddy), 0)
    older = jnp.where(leaves, _get(pool.next, buddy), 0)
    mark = jnp.where(ok, pool.num_blocks + 1 + level, 0)
    second = jnp.where(ok, _get(pool.next, mark), 0)

    # The merged chunk starts at one of the blocks whose chunks end here.
    ended = _join(buddy, start)
    ended = jnp.where(ended == merged, 0, ended)
    pool, (ok,) = _write(
        pool,
        next=(_join(newer, mark, merged), _join(older, merged, second)),
        previous=(_join(older, merged, second), _join(newer, mark, merged)),
        chunk=(_join(ended, merged), _join(jnp.zeros_like(ended), level + 1)),
        freed=jnp.where(ok, 1 << order, 0),
        results=(ok,),
    )
    return pool, ok


def _newest(pool: BuddyPool) -> jax.Array:
    """Returns i32[O], the last freed chunk of each order, or the list's own mark."""
    return pool.next[pool.num_blocks + 1 :]


def _get(array: jax.Array, index: jax.Array) -> jax.Array:
    return array.at[index].get(mode="promise_in_bounds")


def _join(array: ArrayLike, *scalars: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.asarray(array), jnp.stack(scalars)])


def _write(
    pool: BuddyPool,
    *,
    next: _Pairs,
    previous: _Pairs,
    chunk: _Pairs,
    freed: jax.Array,
    results: tuple[jax.Array, ...],
) -> tuple[BuddyPool, tuple[jax.Array, ...]]:
    """Writes into the arrays of the pool, in place.

    The barrier makes every read of the old arrays happen before the first write.
    Without it XLA computes a read where its result is used, maybe after a write, and
    keeps a copy of the array for it.

    Args:
      pool: the pool before the operation.
      next: writes into `pool.next`, each an index and a value. Index 0: no write.
      previous: writes into `pool.previous`, likewise.
      chunk: writes into `pool.chunk`, likewise.
      freed: i32[], blocks that become free.
      results: what the operation returns, all read from `pool`.

    Returns:
      The pool after the operation; `results`.
    """
    pool, pairs, freed, results = lax.optimization_barrier(
        (pool, (next, previous, chunk), freed, results)
    )
    arrays = (pool.next, pool.previous, pool.chunk)
    arrays = [
        array.at[index].set(jnp.where(index == 0, 0, value), mode="promise_in_bounds")
        for array, (index, value) in zip(arrays, pairs, strict=True)
    ]
    return BuddyPool(*arrays, num_free=pool.num_free + freed), results
