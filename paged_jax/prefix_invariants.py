"""What is always true of the prefix cache: for tests and debugging."""

import jax
import jax.numpy as jnp

from paged_jax.block_pool import BlockPool
from paged_jax.prefix_cache import PrefixCache, chain_key, find

MEANING = {
    "cached_blocks_found": "each cached block is found by its key, parent and tokens",
    "entries_are_cached": "the hash table has one entry for each cached block",
    "keys_match": "a cached block's key is the hash of its chain",
    "parents_cached": "the block before a cached one is cached",
    "parents_used": "the block before a cached one has as many references or more",
    "idle_list_whole": "the list of idle blocks, read either way, is the cached blocks "
    "without a reference",
    "parents_idle_longer": "the block before an idle one stands behind it in the list",
}


def check_prefix_cache(pool: BlockPool) -> dict[str, jax.Array]:
    """Checks the prefix cache against the pool that it belongs to.

    Args:
      pool: the block pool.

    Returns:
      Name of each invariant -> bool[], whether it holds; none without a prefix cache.
    """
    cache = pool.prefix_cache
    if not isinstance(cache, PrefixCache):
        return {}
    block = jnp.arange(pool.num_blocks + 1)
    cached = cache.parent >= 0
    parent = jnp.maximum(cache.parent, 0)
    places = jax.lax.map(  # checkify takes no loop under a vmap
        lambda identity: find(cache, *identity),
        (cache.key, cache.parent, cache.tokens),
    )
    keys = jax.vmap(chain_key)(cache.key[parent], cache.tokens)
    follows = cached & (parent > 0)

    links = cache.idle
    idle = cached & (pool.ref_count == 0)
    forward = jnp.where(links.next > 0, links.previous[links.next], links.last)
    backward = jnp.where(links.previous > 0, links.next[links.previous], links.first)

    def visit(i, carry):
        at, seen = carry
        return links.next[at], seen.at[at].set(i + 1)

    end, seen = jax.lax.fori_loop(
        0, links.count, visit, (links.first, jnp.zeros_like(block))
    )
    return {
        "cached_blocks_found": ~cached[0]
        & jnp.all(~cached | (cache.table[places] == block)),
        "entries_are_cached": jnp.sum(cache.table != 0) == jnp.sum(cached),
        "keys_match": jnp.all(~cached | jnp.all(keys == cache.key, axis=1))
        & jnp.all(cache.key[0] == 0),
        "parents_cached": jnp.all(~follows | cached[parent]),
        "parents_used": jnp.all(
            ~follows | (pool.ref_count[parent] >= pool.ref_count[block])
        ),
        "idle_list_whole": (jnp.sum(idle) == links.count)
        & (end == 0)
        & jnp.all((seen > 0) == idle)
        & jnp.all(~idle | ((forward == block) & (backward == block)))
        & jnp.all(idle | ((links.next == 0) & (links.previous == 0))),
        "parents_idle_longer": jnp.all(
            ~(follows & idle & idle[parent]) | (seen[parent] > seen[block])
        ),
    }
