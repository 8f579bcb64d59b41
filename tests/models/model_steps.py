"""Runs the model over sequences in paged steps, as the engine does, but in the open."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.batch import TokenBatch
from paged_jax.kv_cache import KVCache, init_kv_cache
from paged_jax.models.config import ModelConfig
from paged_jax.models.llama import forward
from pallas_kernels import QUERY_TILE, AttentionMetadata

run = functools.partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=3)(forward)


def poisoned_cache(config: ModelConfig, num_blocks: int, block_size: int) -> KVCache:
    """A cache of NaN: a read of a slot that was not written shows."""
    cache = init_kv_cache(
        config.num_layers,
        num_blocks,
        block_size,
        config.num_kv_heads,
        config.head_dim,
        jnp.dtype(config.dtype),
    )
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)


def pack(
    sequences: list[np.ndarray],
    done: list[int],
    counts: list[int],
    tables: np.ndarray,
    block_size: int,
    size: int,
) -> TokenBatch:
    """Packs `counts[s]` tokens of each sequence after its `done[s]`, then padding.

    `sample_index` names all tokens, in the order of the sequences.
    """
    live = [s for s in range(len(counts)) if counts[s]]
    decodes = [s for s in live if counts[s] == 1 and done[s]]
    decodes.sort(key=lambda s: -done[s])
    chunks = [s for s in live if s not in decodes]
    rows = np.repeat(decodes + chunks, [counts[s] for s in decodes + chunks])
    positions = np.concatenate(
        [np.arange(done[s], done[s] + counts[s]) for s in decodes + chunks]
    )
    tokens = np.array([sequences[s][p] for s, p in zip(rows, positions, strict=True)])
    slots = tables[rows, positions // block_size] * block_size
    slots += positions % block_size
    tiles, start = [], len(decodes)
    for s in chunks:
        for first in range(0, counts[s], QUERY_TILE):
            tiles.append((start + first, min(QUERY_TILE, counts[s] - first)))
        start += counts[s]

    def i32(values, length=size):
        array = np.zeros(length, np.int32)
        array[: len(values)] = values
        return jnp.asarray(array)

    most_tiles = size // QUERY_TILE + len(sequences)
    return TokenBatch(
        tokens=i32(tokens),
        positions=i32(positions),
        slots=i32(slots),
        attention=AttentionMetadata(
            block_tables=jnp.asarray(tables, jnp.int32),
            rows=i32(rows),
            lengths=i32(positions + 1),
            num_decode=jnp.int32(len(decodes)),
            num_tokens=jnp.int32(len(rows)),
            tile_start=i32([t[0] for t in tiles], most_tiles),
            tile_len=i32([t[1] for t in tiles], most_tiles),
            num_tiles=jnp.int32(len(tiles)),
        ),
        sample_index=i32(np.argsort(rows, kind="stable")),
        num_samples=jnp.int32(len(rows)),
    )


def run_plan(
    config: ModelConfig,
    params,
    sequences: list[np.ndarray],
    plan: list[list[int]],
    *,
    block_size: int = 4,
    backend: str = "xla",
    size: int | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Returns f32[len, V] for each sequence: the logits after each of its tokens.

    Args:
        config: the model.
        params: its weights.
        sequences: token ids of each sequence.
        plan: for each step, how many tokens of each sequence it runs.
        block_size: of the cache, whose blocks are dealt out in random order.
        backend: of the attention.
        size: N of every step; by default the largest step's tokens, and 3 of padding.
        seed: of the order of the blocks.
    """
    widths = [-(-len(s) // block_size) for s in sequences]
    order = np.random.default_rng(seed).permutation(sum(widths)) + 1
    tables = np.zeros((len(sequences), max(widths)), np.int64)
    for s, width in enumerate(widths):
        tables[s, :width], order = order[:width], order[width:]
    cache = poisoned_cache(config, sum(widths), block_size)
    size = size or max(map(sum, plan)) + 3
    done = [0] * len(sequences)
    logits: list[list[np.ndarray]] = [[] for _ in sequences]
    for counts in plan:
        batch = pack(sequences, done, counts, tables, block_size, size)
        rows, cache = run(config, params, batch, cache, backend)
        rows = np.asarray(rows)
        for s, count in enumerate(counts):
            logits[s].append(rows[:count])
            rows = rows[count:]
            done[s] += count
    assert done == [len(s) for s in sequences], "the plan must run every token"
    return [np.concatenate(parts) for parts in logits]
