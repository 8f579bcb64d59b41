"""Pack: the tokens of a step, decodes and prefill chunks, without gaps."""

import jax
import jax.numpy as jnp

from paged_jax.batch import TokenBatch
from paged_jax.config import StepConfig
from paged_jax.scheduler import Plan
from paged_jax.state import SchedulerState
from pallas_kernels.metadata import QUERY_TILE, AttentionMetadata


def pack(
    config: StepConfig, state: SchedulerState, plan: Plan, num_tokens: int
) -> tuple[TokenBatch, jax.Array]:
    """Lays out the planned tokens for a step of `num_tokens` (see `AttentionMetadata`).

    Args:
      config: static settings.
      state: scheduler's state, the step's blocks granted.
      plan: the plan; its chunks sum to `num_tokens` at most.
      num_tokens: N, the bucket.

    Returns:
      The batch, with N tokens and M = min(N, S) places for sampling; and i32[S], the
      place of each row that samples (`Plan.samples`), 0 for the others. Rows that
      sample from the same token have the same place.
    """
    sequences, requests = state.sequences, state.requests
    num_rows, chunk = sequences.num_rows, plan.chunk
    end = sequences.length + chunk

    # Decodes first, longest context first; then the prompts; then the idle rows.
    group = jnp.where(chunk == 1, 0, jnp.where(chunk > 1, 1, 2))
    order = jnp.argsort(
        group * (config.max_model_len + 1) - jnp.where(chunk > 0, end, 0)
    )
    order = order.astype(jnp.int32)
    chunk_of = chunk[order]
    stop_at = jnp.cumsum(chunk_of)
    start_at = stop_at - chunk_of
    total = stop_at[-1]

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    valid = token < total
    index = _owner(stop_at, num_tokens)
    rows = jnp.where(valid, order[index], 0)
    positions = jnp.where(valid, sequences.length[rows] + token - start_at[index], 0)
    tokens = requests.tokens[sequences.request[rows], positions]
    block = sequences.block_table[rows, positions // config.block_size]
    slots = block * config.block_size + positions % config.block_size

    tiles = jnp.where(chunk_of > 1, -(-chunk_of // QUERY_TILE), 0)
    tile_stop = jnp.cumsum(tiles)
    max_tiles = max(1, min(num_tokens // 2, num_tokens // QUERY_TILE + num_rows))
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    tile_index = _owner(tile_stop, max_tiles)
    offset = (tile - tile_stop[tile_index] + tiles[tile_index]) * QUERY_TILE
    in_use = tile < tile_stop[-1]
    tile_len = jnp.minimum(chunk_of[tile_index] - offset, QUERY_TILE)

    sampling = plan.samples
    if config.forks:
        sampling &= ~plan.forks
    sampling = sampling[order]
    rank = jnp.cumsum(sampling.astype(jnp.int32)) - 1
    places = min(num_tokens, num_rows)
    at = jnp.where(sampling, jnp.minimum(rank, places), places)
    last_token = jnp.zeros(places + 1, jnp.int32).at[at].set(stop_at - 1)[:places]

    batch = TokenBatch(
        tokens=jnp.where(valid, tokens, 0),
        positions=positions,
        slots=jnp.where(valid, slots, 0),
        attention=AttentionMetadata(
            block_tables=sequences.block_table,
            rows=rows,
            lengths=jnp.where(valid, positions + 1, 0),
            num_decode=jnp.sum(chunk == 1, dtype=jnp.int32),
            num_tokens=total,
            tile_start=jnp.where(in_use, start_at[tile_index] + offset, 0),
            tile_len=jnp.where(in_use, tile_len, 0),
            num_tiles=tile_stop[-1],
        ),
        sample_index=last_token,
        num_samples=jnp.sum(sampling, dtype=jnp.int32),
    )
    place = jnp.zeros(num_rows, jnp.int32).at[order].set(jnp.where(sampling, rank, 0))
    return batch, place[plan.source] if config.forks else place


def _owner(stop_at: jax.Array, size: int) -> jax.Array:
    """Returns for each of `size` places the first entry whose running sum is beyond."""
    place = jnp.arange(size, dtype=jnp.int32)
    index = jnp.searchsorted(stop_at, place, side="right", method="compare_all")
    return jnp.minimum(index, stop_at.shape[0] - 1).astype(jnp.int32)
