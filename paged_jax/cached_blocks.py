"""Full blocks become part of the prefix cache, each chain of tokens once."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.block_pool import BlockPool, drop, hold
from paged_jax.prefix_cache import (
    PrefixCache,
    chain_key,
    find,
    insert,
    tokens_of_block,
)
from paged_jax.state import SchedulerState


def cache_block(
    pool: BlockPool,
    block: jax.Array,
    parent: jax.Array,
    tokens: jax.Array,
    ok: jax.Array,
) -> tuple[BlockPool, jax.Array]:
    """Caches a full block that a table names, or finds the one that is cached already.

    Args:
      pool: the block pool, with a prefix cache.
      block: i32[], the block.
      parent: i32[], the cached block before it in the table; 0 if it is the first.
      tokens: i32[W], its tokens, or the name of the block.
      ok: bool[]; if false, nothing changes.

    Returns:
      The pool, and i32[]: the block that the table is to name. That is another one if
      an equal block is cached: then the reference moves there.
    """
    cache = pool.prefix_cache
    assert isinstance(cache, PrefixCache)
    key = chain_key(cache.key[parent], tokens)
    place = find(cache, key, parent, tokens)
    # All reads before the first write: XLA would else keep a copy of what is written.
    cache, key, place, found = jax.lax.optimization_barrier(
        (cache, key, place, cache.table[place])
    )
    cache = insert(cache, place, block, key, parent, tokens, found, ok & (found == 0))
    moves = ok & (found != 0) & (found != block)
    pool = dataclasses.replace(pool, prefix_cache=cache)

    def move(carry):
        pool, always = carry
        pool = hold(pool, found[None], always[None])
        return drop(pool, block[None], always[None]), jnp.bool_(False)

    # One turn or none: equal blocks are rare, and a branch would copy the pool.
    pool, _ = jax.lax.while_loop(lambda carry: carry[1], move, (pool, moves))
    return pool, jnp.where(moves, found, block)


def cache_full_blocks(state: SchedulerState, start: jax.Array) -> SchedulerState:
    """Caches the blocks that sequences have filled.

    Where two sequences have filled equal blocks, all of them name one from now on: so
    the full blocks of every table are cached, each the parent of the next.

    Args:
      state: scheduler's state.
      start: i32[S], tokens of each row whose full blocks are cached already.

    Returns:
      The state. The work follows the blocks that were filled; without a prefix cache,
      nothing is compiled.
    """
    if not isinstance(state.pool, BlockPool) or not state.pool.prefix_cache:
        return state
    requests, sequences = state.requests, state.sequences
    cache = state.pool.prefix_cache
    size, width = cache.block_size, cache.width
    stop = sequences.length // size

    def goes_on(carry):
        return jnp.any(carry[2] < stop)

    def cache_next(carry):
        pool, table, done = carry
        row = jnp.argmax(done < stop)
        logical = done[row]
        block = table[row, logical]
        before = table[row, jnp.maximum(logical - 1, 0)]
        parent = jnp.where(logical > 0, before, 0)
        own = tokens_of_block(requests.tokens, sequences.request[row], logical, width)
        pool, block = cache_block(pool, block, parent, own, jnp.bool_(True))
        return pool, table.at[row, logical].set(block), done.at[row].add(1)

    pool, table, _ = jax.lax.while_loop(
        goes_on, cache_next, (state.pool, sequences.block_table, start // size)
    )
    return dataclasses.replace(
        state,
        pool=pool,
        sequences=dataclasses.replace(sequences, block_table=table),
    )
