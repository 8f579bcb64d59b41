"""Paged memory: any free block, granted when it is needed (paper, section 4.3)."""

import jax
import jax.numpy as jnp

from paged_jax.block_pool import BlockPool, init_block_pool
from paged_jax.block_tables import grant_row, release_row
from paged_jax.config import StepConfig
from paged_jax.groups import blocks_to_start, first_tokens
from paged_jax.groups import peak_blocks as peak_of_group
from paged_jax.requests import Requests
from paged_jax.sequences import Sequences, blocks_for
from paged_jax.shared_blocks import (
    SharedBlocks,
    count_hits,
    find_cached,
    no_shared_blocks,
)


def init_pool(config: StepConfig) -> BlockPool:
    """Returns a pool with every block free."""
    cached = config.block_size if config.prefix_caching else 0
    return init_block_pool(config.num_blocks, cached)


def num_free(pool: BlockPool) -> jax.Array:
    """Returns the number of blocks that can be granted, idle ones included, i32[]."""
    return pool.num_available


def held_tokens(
    config: StepConfig, sequences: Sequences, requests: Requests, slot: jax.Array
) -> jax.Array:
    """Returns how many tokens of a request's prompt a held prefix already has, i32[].

    The last token of the prompt is always computed, since its logits are wanted.
    """
    if not config.sharing:
        return jnp.int32(0)
    row = requests.prefix_row[slot]
    held = sequences.length[jnp.maximum(row, 0)]
    return jnp.where(row >= 0, jnp.minimum(held, requests.length[slot] - 1), 0)


def find_shared(
    config: StepConfig,
    pool: BlockPool,
    sequences: Sequences,
    requests: Requests,
    slot: jax.Array,
) -> SharedBlocks:
    """Finds what a request can share: a held prefix, or what is cached if it is more.

    Of a held prefix the partly filled last block is shared as well.
    """
    shared = no_shared_blocks(config.table_width if config.sharing else 0)
    if config.sharing:
        tokens = held_tokens(config, sequences, requests, slot)
        row = jnp.maximum(requests.prefix_row[slot], 0)
        shared = shared._replace(blocks=sequences.block_table[row], num_tokens=tokens)
    if config.prefix_caching:
        cached = find_cached(config, pool, sequences, requests, slot)
        more = cached.num_tokens >= shared.num_tokens
        if config.sharing:
            cached = cached._replace(
                blocks=jnp.where(more, cached.blocks, shared.blocks),
                num_tokens=jnp.where(more, cached.num_tokens, shared.num_tokens),
                num_idle=jnp.where(more, cached.num_idle, 0),
            )
        shared = cached
    return shared


def fits(
    config: StepConfig,
    pool: BlockPool,
    requests: Requests,
    slot: jax.Array,
    shared: SharedBlocks,
    headroom: jax.Array,
) -> jax.Array:
    """Whether the blocks of all known tokens can be granted; see `MemoryManager`."""
    need = blocks_to_start(config, requests, slot)
    # A shared block that is written costs a copy.
    need -= shared.num_tokens // config.block_size
    return need + shared.num_idle + headroom <= pool.num_available


def grant(
    config: StepConfig,
    pool: BlockPool,
    sequences: Sequences,
    requests: Requests,
    slot: jax.Array,
    row: jax.Array,
    shared: SharedBlocks,
) -> tuple[BlockPool, Sequences]:
    """Grants the blocks of all known tokens (see `groups`); see `MemoryManager`."""
    need = blocks_for(first_tokens(config, requests, slot), config.block_size)
    shares = config.sharing or config.prefix_caching
    return grant_row(
        count_hits(pool, shared.num_tokens),
        sequences,
        row,
        need,
        shared.num_tokens,
        jnp.bool_(True),
        num_shared=blocks_for(shared.num_tokens, config.block_size),
        shared_blocks=shared.blocks if shares else None,
    )


def release(
    config: StepConfig, pool: BlockPool, sequences: Sequences, row: jax.Array
) -> tuple[BlockPool, Sequences]:
    """Drops a row's blocks; see `MemoryManager`."""
    del config
    return release_row(pool, sequences, row, jnp.bool_(True))


def peak_blocks(
    config: StepConfig, sequences: Sequences, requests: Requests, slot: jax.Array
) -> jax.Array:
    """Blocks of its own that the request takes at its full length, i32[].

    What it may find in the prefix cache counts as its own: it may be idle.
    """
    shared = held_tokens(config, sequences, requests, slot)
    full = peak_of_group(config, requests, slot)
    return full - shared // config.block_size
