"""What a waiting request can share with others, and what the prefix cache has of it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.block_pool import BlockPool
from paged_jax.config import StepConfig
from paged_jax.groups import first_tokens
from paged_jax.prefix_cache import PrefixCache, find_run, tokens_of_block
from paged_jax.requests import Requests
from paged_jax.sequences import Sequences, SequenceStatus


class SharedBlocks(NamedTuple):
    """Blocks that a request can share when it is admitted.

    Attributes:
      blocks: i32[T]. They go to the start of its table; those past `num_tokens` are not
        meant. T is 0 if nothing is ever shared.
      num_tokens: i32[]. Tokens whose keys and values they hold.
      num_idle: i32[]. How many of the blocks nobody uses, so that sharing them leaves
        fewer to be granted.
      in_progress: bool[]. Whether a running sequence in prefill is about to compute the
        block that comes next.
    """

    blocks: jax.Array
    num_tokens: jax.Array
    num_idle: jax.Array
    in_progress: jax.Array


def no_shared_blocks(table_width: int) -> SharedBlocks:
    """Returns nothing, as arrays."""
    zero = jnp.int32(0)
    blocks = jnp.zeros(table_width, jnp.int32)
    return SharedBlocks(blocks, zero, zero, jnp.bool_(False))


def find_cached(
    config: StepConfig,
    pool: BlockPool,
    sequences: Sequences,
    requests: Requests,
    slot: jax.Array,
) -> SharedBlocks:
    """Looks a request's known tokens up in the prefix cache.

    The block of the last token is not looked for, cached or not: that token has to be
    computed, and a cached block is never written. For a group it is the prompt that is
    looked up, and its last token that is computed.

    Args:
      config: static settings.
      pool: the block pool, with a prefix cache.
      sequences: the sequence rows.
      requests: the requests.
      slot: i32[], which request; the null request has nothing to look for.

    Returns:
      The longest run of cached blocks.
    """
    cache = pool.prefix_cache
    assert isinstance(cache, PrefixCache)
    size, width = config.block_size, config.table_width
    limit = (first_tokens(config, requests, slot) - 1) // size
    blocks, count = find_run(cache, requests.tokens, slot, limit, width)
    found = jnp.arange(width) < count

    # Who is about to compute the next block: a sequence in prefill (one that decodes
    # may go on like this text for long) with the same blocks before it and the same
    # tokens for it, which it knows and has not computed.
    end = (count + 1) * size
    running = sequences.status == SequenceStatus.RUNNING
    known = requests.length[sequences.request]
    near = running & (known - sequences.length > 1)
    near &= (sequences.length < end) & (end <= known)
    before = jnp.maximum(count - 1, 0)
    near &= (count == 0) | (sequences.block_table[:, before] == blocks[before])
    mine = tokens_of_block(requests.tokens, slot, count, cache.width)
    theirs = jax.vmap(tokens_of_block, (None, 0, None, None))(
        requests.tokens, sequences.request, count, cache.width
    )
    near &= jnp.all(theirs == mine, axis=1)
    return SharedBlocks(
        blocks=blocks,
        num_tokens=count * size,
        num_idle=jnp.sum(found & (pool.ref_count[blocks] == 0), dtype=jnp.int32),
        in_progress=(count < limit) & jnp.any(near),
    )


def count_hits(pool: BlockPool, num_tokens: jax.Array) -> BlockPool:
    """Counts tokens that an admitted sequence need not compute, for the log."""
    cache = pool.prefix_cache
    if not isinstance(cache, PrefixCache):
        return pool
    cache = dataclasses.replace(cache, hit_tokens=cache.hit_tokens + num_tokens)
    return dataclasses.replace(pool, prefix_cache=cache)


def read_counts(pool: Any) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """Reads what the prefix cache has counted, for the log, and starts anew.

    Returns:
      The pool; i32[], tokens found; i32[], idle blocks; i32[], blocks evicted. All 0
      without a prefix cache.
    """
    zero = jnp.int32(0)
    if not isinstance(pool, BlockPool) or not isinstance(
        pool.prefix_cache, PrefixCache
    ):
        return pool, zero, zero, zero
    cache = pool.prefix_cache
    anew = dataclasses.replace(cache, hit_tokens=zero, evicted=zero)
    pool = dataclasses.replace(pool, prefix_cache=anew)
    return pool, cache.hit_tokens, cache.idle.count, cache.evicted
