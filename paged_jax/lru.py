"""A list of blocks in the order of their last use, in fixed arrays."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.new_arrays import zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LruList:
    """A doubly linked list of distinct blocks: nothing is ever searched for in it.

    Block 0, the null block, is on no list. A link to it says that there is no
    neighbour, and its own links stay 0: masked writes land there.

    Attributes:
      next: i32[P]. The block used next after each one; 0 for the last and for blocks
        that are not on the list.
      previous: i32[P]. The other direction.
      first: i32[]. The block whose last use is longest ago; 0 if the list is empty.
      last: i32[]. The block used last.
      count: i32[]. Blocks on the list.
    """

    next: jax.Array
    previous: jax.Array
    first: jax.Array
    last: jax.Array
    count: jax.Array


def init_lru(num_blocks: int) -> LruList:
    """Returns an empty list for blocks 1 to `num_blocks`."""
    links = num_blocks + 1
    return LruList(zeros(links), zeros(links), zeros(()), zeros(()), zeros(()))


def push(lru: LruList, blocks: jax.Array, valid: jax.Array) -> LruList:
    """Puts the valid blocks at the end of the list, in their order.

    Args:
      lru: the list.
      blocks: i32[W]. The valid ones are distinct and not on the list.
      valid: bool[W].

    Returns:
      The list. The last valid block is the one used last.
    """
    width = blocks.shape[0]
    rank = jnp.cumsum(valid.astype(jnp.int32))
    total = rank[-1]
    place = jnp.where(valid, rank - 1, width)
    node = jnp.zeros(width + 1, jnp.int32).at[place].set(jnp.where(valid, blocks, 0))
    none = jnp.zeros(1, jnp.int32)
    after = jnp.concatenate([node[1:], none])
    before = jnp.concatenate([lru.last[None], node[:-1]])
    in_use = jnp.arange(width + 1) < total
    joins = (total > 0) & (lru.last > 0)
    joint = jnp.where(joins, lru.last, 0)
    return LruList(
        next=lru.next.at[node]
        .set(jnp.where(in_use, after, 0))
        .at[joint]
        .set(jnp.where(joins, node[0], 0)),
        previous=lru.previous.at[node].set(jnp.where(in_use, before, 0)),
        first=jnp.where(lru.count > 0, lru.first, node[0]),
        last=jnp.where(total > 0, node[total - 1], lru.last),
        count=lru.count + total,
    )


def unlink(lru: LruList, block: jax.Array, ok: jax.Array) -> LruList:
    """Takes a block off the list, from wherever it stands, if `ok`.

    Args:
      lru: the list.
      block: i32[], on the list if `ok`.
      ok: bool[].

    Returns:
      The list.
    """
    block = jnp.where(ok, block, 0)
    # All reads of the links before the first write: XLA would else keep a copy of them.
    lru, before, after = jax.lax.optimization_barrier(
        (lru, lru.previous[block], lru.next[block])
    )
    return LruList(
        next=lru.next.at[before].set(jnp.where(before > 0, after, 0)).at[block].set(0),
        previous=lru.previous.at[after]
        .set(jnp.where(after > 0, before, 0))
        .at[block]
        .set(0),
        first=jnp.where(ok & (before == 0), after, lru.first),
        last=jnp.where(ok & (after == 0), before, lru.last),
        count=lru.count - ok.astype(jnp.int32),
    )
