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


def init_pool(config: StepConfig) -> BlockPool:
    """Returns a pool with every block free."""
    return init_block_pool(config.num_blocks)


def num_free(pool: BlockPool) -> jax.Array:
    """Returns the number of free blocks, i32[]."""
    return pool.num_free


def shared_tokens(
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


def fits(
    config: StepConfig,
    pool: BlockPool,
    sequences: Sequences,
    requests: Requests,
    slot: jax.Array,
    headroom: jax.Array,
) -> jax.Array:
    """Whether the blocks of all known tokens can be granted; see `MemoryManager`."""
    shared = shared_tokens(config, sequences, requests, slot)
    need = blocks_to_start(config, requests, slot)
    need -= shared // config.block_size  # a shared block that is written costs a copy
    return need + headroom <= pool.num_free


def grant(
    config: StepConfig,
    pool: BlockPool,
    sequences: Sequences,
    requests: Requests,
    slot: jax.Array,
    row: jax.Array,
) -> tuple[BlockPool, Sequences]:
    """Grants the blocks of all known tokens (see `groups`); see `MemoryManager`."""
    shared = shared_tokens(config, sequences, requests, slot)
    need = blocks_for(first_tokens(config, requests, slot), config.block_size)
    if not config.sharing:
        return grant_row(pool, sequences, row, need, shared, jnp.bool_(True))
    return grant_row(
        pool,
        sequences,
        row,
        need,
        shared,
        jnp.bool_(True),
        shared_row=jnp.maximum(requests.prefix_row[slot], 0),
        num_shared=blocks_for(shared, config.block_size),
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
    """Blocks of its own that the request takes at its full length, i32[]."""
    shared = shared_tokens(config, sequences, requests, slot)
    full = peak_of_group(config, requests, slot)
    return full - shared // config.block_size
