"""Times the xla attention backend on this machine's CPU, against what memory allows.

    python scripts/bench_attention.py [--quick]

Prints, for steps of SmolLM2-135M's shape (9 query heads, 3 KV heads, head dim 64,
float32, blocks of 16), the time of one layer, and as ratios, which hold from machine
to machine better than times:

- bytes: the time over that of reading the step's keys and values once, at the speed of
  a large sum;
- table: the same step with a block table 16 times wider, over the step;
- pad: the same step in a bucket of twice as many tokens, over the step.

Layers alternate over a cache larger than the processor's own, so that keys and values
come from memory, as they do between the weights of a model.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import QUERY_TILE, AttentionMetadata, paged_attention

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 12, 9, 3, 64, 16
TABLE_WIDTH = 64


class Step(NamedTuple):
    """Lengths of the decode tokens' contexts, and (cached, new) tokens of chunks."""

    name: str
    decode: list[int]
    chunks: list[tuple[int, int]]


def ragged(count: int, longest: int) -> list[int]:
    """Returns `count` contexts of 20 to `longest` tokens, longest first."""
    lengths = np.random.default_rng(0).integers(20, longest + 1, count)
    return sorted(lengths.tolist(), reverse=True)


STEPS = [
    Step("1 decode, context 1024", [1024], []),
    Step("4 decodes, to 400", [400, 300, 100, 60], []),
    Step("32 decodes, 20 to 192", ragged(32, 192), []),
    Step("32 decodes, 20 to 1024", ragged(32, 1024), []),
    Step("64 decodes, 20 to 400", ragged(64, 400), []),
    Step("chunk of 128 after 0", [], [(0, 128)]),
    Step("chunk of 128 after 512", [], [(512, 128)]),
    Step("16 decodes, chunk of 64", ragged(16, 400), [(100, 64)]),
]


def best_time(function: Callable, *args, repeats: int) -> float:
    """Returns the least wall time in seconds; other programs only ever add to it."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def metadata_of(step: Step, width: int, tokens: int) -> tuple[AttentionMetadata, int]:
    """Returns the step's metadata over shuffled blocks, and the blocks it needs."""
    totals = [*step.decode, *(cached + new for cached, new in step.chunks)]
    needed = [-(-total // BLOCK) for total in totals]
    blocks = 1 + np.random.default_rng(1).permutation(sum(needed))
    tables = np.zeros((len(totals), width), np.int32)
    for row, count in enumerate(needed):
        tables[row, :count], blocks = blocks[:count], blocks[count:]
    rows, lengths, starts, sizes = list(range(len(step.decode))), [*step.decode], [], []
    for row, (cached, new) in enumerate(step.chunks, start=len(step.decode)):
        for first in range(0, new, QUERY_TILE):
            starts.append(len(rows) + first)
            sizes.append(min(QUERY_TILE, new - first))
        rows += [row] * new
        lengths += range(cached + 1, cached + new + 1)
    padding = [0] * (tokens - len(rows))

    def i32(values):
        return jnp.asarray(np.array(values, np.int32))

    return AttentionMetadata(
        block_tables=i32(tables),
        rows=i32(rows + padding),
        lengths=i32(lengths + padding),
        num_decode=i32(len(step.decode)),
        num_tokens=i32(len(rows)),
        tile_start=i32(starts),
        tile_len=i32(sizes),
        num_tiles=i32(len(starts)),
    ), sum(needed)


@jax.jit
def all_layers(q, k_cache, v_cache, metadata):
    """Attends in every layer, each to the result of the one before."""

    def layer(index, x):
        attended = paged_attention(
            x, k_cache, v_cache, index, metadata, scale=HEAD_DIM**-0.5, backend="xla"
        )
        return q + 0.1 * attended

    return jax.lax.fori_loop(0, LAYERS, layer, q)


def time_step(step: Step, repeats: int, width: int = TABLE_WIDTH, pad: int = 1):
    """Returns seconds for one layer, and the bytes of keys and values it must read."""
    live = len(step.decode) + sum(new for _, new in step.chunks)
    metadata, num_blocks = metadata_of(step, width, live * pad)
    key = jax.random.key(0)
    shape = (LAYERS, num_blocks + 1, BLOCK, KV_HEADS, HEAD_DIM)
    k_cache = jax.random.normal(key, shape)
    q = jax.random.normal(key, (live * pad, HEADS, HEAD_DIM))
    seconds = best_time(all_layers, q, k_cache, k_cache + 1, metadata, repeats=repeats)
    tokens = sum(step.decode) + sum(cached + new for cached, new in step.chunks)
    return seconds / LAYERS, tokens * 2 * KV_HEADS * HEAD_DIM * 4


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Times the xla attention backend.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 5 if parser.parse_args().quick else 30

    big = jnp.ones(2**26, jnp.float32)
    bandwidth = big.nbytes / best_time(jax.jit(jnp.sum), big, repeats=repeats)
    print(f"jax {jax.__version__}, read speed {bandwidth / 1e9:.1f} GB/s")
    print(f"{'step':26s}{'us a layer':>11s}{'bytes':>8s}{'table':>8s}{'pad':>8s}")
    for step in STEPS:
        seconds, nbytes = time_step(step, repeats)
        wide, _ = time_step(step, repeats, width=16 * TABLE_WIDTH)
        padded, _ = time_step(step, repeats, pad=2)
        print(
            f"{step.name:26s}{seconds * 1e6:11.0f}{seconds * bandwidth / nbytes:8.1f}"
            f"{wide / seconds:8.2f}{padded / seconds:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
