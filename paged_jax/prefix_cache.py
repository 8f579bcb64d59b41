"""The prefix cache: full blocks, found again by the tokens that they hold.

A full block is known by its chain: its own tokens and all that come before them. The
key of a block is a hash of its tokens and of the key of the block before it, its
parent. A hash table leads from keys to blocks; on a hit the block's own tokens and its
parent are compared as well, so that a collision of keys costs a probe and is never
taken for a hit.

What makes the comparison exact: each chain is cached once, a cached block's parent is
cached too, and a cached block is never written. `cached_blocks.py` and `block_pool.py`
see to that.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.lru import LruList, init_lru
from paged_jax.new_arrays import full, zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixCache:
    """Which full blocks can be found by their tokens, and which of them are idle.

    The hash table is open-addressed with linear probing, and at most half full. An
    entry is deleted by moving later ones of its run back over the gap (`remove`), so
    that there are no tombstones and nothing is ever rebuilt.

    Attributes:
      table: i32[H]. Block of each entry, 0 for none; H is a power of two.
      key: u32[P, 2]. Key of each cached block; those of the null block, the parent of
        first blocks, stay 0.
      parent: i32[P]. The cached block before each one; 0 for the first block of a
        chain, -1 for blocks that are not cached.
      tokens: i32[P, W]. Tokens of each cached block, and W is B. Or what stands for
        them: a name that a recorded trace gives the block, and W is 1.
      idle: cached blocks that no table names, least recently used first.
      hit_tokens: i32[]. Tokens of admitted sequences that were found, since the log was
        last written.
      evicted: i32[]. Blocks that were evicted since then.
      block_size: B, tokens in a block.
    """

    table: jax.Array
    key: jax.Array
    parent: jax.Array
    tokens: jax.Array
    idle: LruList
    hit_tokens: jax.Array
    evicted: jax.Array
    block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def width(self) -> int:
        """W, numbers that a block is compared by."""
        return self.tokens.shape[1]


def init_prefix_cache(
    num_blocks: int, block_size: int, width: int | None = None
) -> PrefixCache:
    """Returns a cache with nothing in it.

    Args:
      num_blocks: usable blocks.
      block_size: B, tokens in a block.
      width: W, numbers that a block is known by; None: B, its tokens.
    """
    width = block_size if width is None else width
    size = num_blocks + 1
    entries = 1 << (2 * num_blocks - 1).bit_length()
    return PrefixCache(
        table=zeros(entries),
        key=zeros((size, 2), np.uint32),
        parent=full(size, -1),
        tokens=zeros((size, width)),
        idle=init_lru(num_blocks),
        hit_tokens=zeros(()),
        evicted=zeros(()),
        block_size=block_size,
    )


def _mix(x: jax.Array) -> jax.Array:
    """Returns u32 values with all bits spread; one to one.

    The constants are those of C. Wellons' search for multiply-xorshift hashes.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def chain_key(parent_key: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the key of a block: a hash of its tokens and of what comes before.

    Args:
      parent_key: u32[2], key of the block before; zeros for the first block.
      tokens: i32[W], the block's tokens, or its name.

    Returns:
      u32[2].
    """
    place = jnp.arange(tokens.shape[0], dtype=jnp.uint32)[:, None]
    lane = jnp.array([0x9E3779B9, 0xD1B54A35], jnp.uint32)
    mixed = _mix(tokens.astype(jnp.uint32)[:, None] ^ _mix((place + 1) * lane))
    # A lane of the parent's key enters both lanes: equal keys need two collisions.
    own = jnp.sum(mixed, axis=0, dtype=jnp.uint32)
    return _mix(_mix(parent_key + lane) + 3 * parent_key[::-1] + own)


def find(
    cache: PrefixCache, key: jax.Array, parent: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Looks for a block; keys, parents and tokens are compared.

    Args:
      cache: the cache.
      key: u32[2], the block's key.
      parent: i32[], the cached block before it, 0 if it is a first block.
      tokens: i32[W], its tokens, or the name of the block.

    Returns:
      i32[], the place in `table` of the block, or the empty place where it would go.
    """
    last = cache.table.shape[0] - 1

    def other(place: jax.Array) -> jax.Array:
        block = cache.table[place]
        same = jnp.all(cache.key[block] == key) & (cache.parent[block] == parent)
        return (block != 0) & ~(same & jnp.all(cache.tokens[block] == tokens))

    return jax.lax.while_loop(other, lambda place: (place + 1) & last, _home(key, last))


def _home(key: jax.Array, last: int) -> jax.Array:
    """Returns where a key's run starts, in a table whose last place is `last`."""
    return (key[..., 0] & jnp.uint32(last)).astype(jnp.int32)


def insert(
    cache: PrefixCache,
    place: jax.Array,
    block: jax.Array,
    key: jax.Array,
    parent: jax.Array,
    tokens: jax.Array,
    found: jax.Array,
    ok: jax.Array,
) -> PrefixCache:
    """Puts a block into the empty place that `find` returned, if `ok`.

    Args:
      cache: the cache.
      place: i32[], see `find`.
      block: i32[], a block that is not cached; it is not idle.
      key: u32[2], its key.
      parent: i32[], the cached block before it, 0 if it is a first block.
      tokens: i32[W], its tokens, or the name of the block.
      found: i32[], what is in that place, which stays if not `ok`.
      ok: bool[].

    Returns:
      The cache.
    """
    at = jnp.where(ok, block, 0)
    return dataclasses.replace(
        cache,
        table=cache.table.at[place].set(jnp.where(ok, block, found)),
        key=cache.key.at[at].set(jnp.where(ok, key, 0)),
        parent=cache.parent.at[at].set(jnp.where(ok, parent, -1)),
        tokens=cache.tokens.at[at].set(jnp.where(ok, tokens, 0)),
    )


def remove(cache: PrefixCache, block: jax.Array) -> PrefixCache:
    """Forgets a cached block; it is the caller's to take it off the list of idle ones.

    Args:
      cache: the cache.
      block: i32[], a cached block that is no cached block's parent.

    Returns:
      The cache. Entries that stood behind the block's in its run are moved up wherever
      a probe would else stop at the gap before it found them.
    """
    last = cache.table.shape[0] - 1
    gap = jax.lax.while_loop(
        lambda place: cache.table[place] != block,
        lambda place: (place + 1) & last,
        _home(cache.key[block], last),
    )

    def in_run(carry):
        table, _, place = carry
        return table[place] != 0

    def move_up(carry):
        table, gap, place = carry
        # Both reads before the write: XLA would else keep a copy of the table.
        table, other, old = jax.lax.optimization_barrier(
            (table, table[place], table[gap])
        )
        from_home = (place - _home(cache.key[other], last)) & last
        moves = from_home >= ((place - gap) & last)
        table = table.at[gap].set(jnp.where(moves, other, old))
        return table, jnp.where(moves, place, gap), (place + 1) & last

    table, gap, _ = jax.lax.while_loop(
        in_run, move_up, (cache.table, gap, (gap + 1) & last)
    )
    return dataclasses.replace(
        cache, table=table.at[gap].set(0), parent=cache.parent.at[block].set(-1)
    )


def find_run(
    cache: PrefixCache, tokens: jax.Array, row: jax.Array, limit: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the longest cached run of full blocks at the start of a text.

    Args:
      cache: the cache.
      tokens: i32[R, M], texts, W numbers for each block.
      row: i32[], which text.
      limit: i32[], most blocks to find; the text has as many whole ones.
      width: T, at least `limit`.

    Returns:
      i32[T], the blocks, 0 past the run; i32[], how many there are. The work follows
      the blocks found.
    """

    def goes_on(carry):
        _, count, more, _ = carry
        return more & (count < limit)

    def look(carry):
        blocks, count, _, parent = carry
        own = tokens_of_block(tokens, row, count, cache.width)
        key = chain_key(cache.key[parent], own)
        block = cache.table[find(cache, key, parent, own)]
        found = block != 0
        return blocks.at[count].set(block), count + found, found, block

    zero = jnp.int32(0)
    start = jnp.zeros(width, jnp.int32), zero, jnp.bool_(True), zero
    blocks, count, _, _ = jax.lax.while_loop(goes_on, look, start)
    return blocks, count


def tokens_of_block(
    tokens: jax.Array, row: jax.Array, logical: jax.Array, width: int
) -> jax.Array:
    """Returns the numbers of a whole block of text `row` of i32[R, M], i32[W]."""
    place = logical * width + jnp.arange(width, dtype=jnp.int32)
    return tokens[row, jnp.minimum(place, tokens.shape[1] - 1)]
