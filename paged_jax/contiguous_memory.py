"""Contiguous memory: one run of blocks for a request's whole life, as before paging.

The run is a chunk of a buddy allocator, reserved at admission. It is written into the
block table like any other blocks, so that only the manager differs from paged memory.
"""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax import buddy
from paged_jax.config import StepConfig
from paged_jax.groups import waiting_members
from paged_jax.requests import Requests
from paged_jax.sequences import Sequences, SequenceStatus, blocks_for
from paged_jax.shared_blocks import SharedBlocks, no_shared_blocks


def init_pool(config: StepConfig) -> buddy.BuddyPool:
    """Returns a pool with every chunk free."""
    return buddy.init_buddy(config.num_blocks, config.table_width)


def num_free(pool: buddy.BuddyPool) -> jax.Array:
    """Returns the number of free blocks, i32[]."""
    return pool.num_free


def _order(config: StepConfig, requests: Requests, slot: jax.Array) -> jax.Array:
    return buddy.order_of(blocks_for(requests.reserved_len[slot], config.block_size))


def find_shared(
    config: StepConfig,
    pool: buddy.BuddyPool,
    sequences: Sequences,
    requests: Requests,
    slot: jax.Array,
) -> SharedBlocks:
    """Nothing is shared."""
    del config, pool, sequences, requests, slot
    return no_shared_blocks(0)


def fits(
    config: StepConfig,
    pool: buddy.BuddyPool,
    requests: Requests,
    slot: jax.Array,
    shared: SharedBlocks,
    headroom: jax.Array,
) -> jax.Array:
    """Whether a chunk is free that is large enough; the watermark does not apply.

    Of a group, whether there is one for each member.
    """
    del shared, headroom
    order = _order(config, requests, slot)
    if not config.groups:
        return buddy.can_allocate(pool, order)
    members = jnp.sum(waiting_members(requests, slot), dtype=jnp.int32)
    return buddy.can_allocate_all(pool, order, members)


def grant(
    config: StepConfig,
    pool: buddy.BuddyPool,
    sequences: Sequences,
    requests: Requests,
    slot: jax.Array,
    row: jax.Array,
    shared: SharedBlocks,
) -> tuple[buddy.BuddyPool, Sequences]:
    """Grants the chunk; see `MemoryManager`."""
    del shared
    order = _order(config, requests, slot)
    pool, start, _ = buddy.allocate(pool, order)
    column = jnp.arange(sequences.table_width, dtype=jnp.int32)
    size = jnp.left_shift(jnp.int32(1), order)
    blocks = jnp.where(column < size, start + column, 0)
    return pool, dataclasses.replace(
        sequences,
        block_table=sequences.block_table.at[row].set(blocks),
        num_blocks=sequences.num_blocks.at[row].set(size),
        length=sequences.length.at[row].set(0),
        status=sequences.status.at[row].set(SequenceStatus.RUNNING),
    )


def release(
    config: StepConfig, pool: buddy.BuddyPool, sequences: Sequences, row: jax.Array
) -> tuple[buddy.BuddyPool, Sequences]:
    """Gives the chunk back; see `MemoryManager`."""
    del config
    order = buddy.order_of(sequences.num_blocks[row])
    pool, _ = buddy.release(pool, sequences.block_table[row, 0], order)
    return pool, dataclasses.replace(
        sequences,
        block_table=sequences.block_table.at[row].set(0),
        num_blocks=sequences.num_blocks.at[row].set(0),
        length=sequences.length.at[row].set(0),
        status=sequences.status.at[row].set(SequenceStatus.EMPTY),
    )


def peak_blocks(
    config: StepConfig, sequences: Sequences, requests: Requests, slot: jax.Array
) -> jax.Array:
    """No more than the chunk, which is granted whole: nothing to keep back, i32[]."""
    del config, sequences, requests, slot
    return jnp.int32(0)
