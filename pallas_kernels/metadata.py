"""What a step tells the attention kernels about its tokens."""

from typing import NamedTuple

import jax


class AttentionMetadata(NamedTuple):
    """Where each query token of a step finds its keys and values.

    The `N` tokens of a step are packed without gaps: first the decode tokens, one for
    each decoding sequence, longest context first; then the prefill chunks, each a run
    of consecutive positions of one sequence; then padding. Token `i` attends to the
    first `lengths[i]` tokens of the sequence in row `rows[i]`, its own included. `rows`
    and `lengths` alone define the result; the other fields let a backend read the cache
    of a chunk once instead of once per token, and skip padding. The order of the decode
    tokens only makes for speed.

    Attributes:
        block_tables: i32[S, T]. Physical block of each logical block of each sequence
            row. Entries past the end name block 0, the null block.
        rows: i32[N]. Sequence row of each token; 0 for padding.
        lengths: i32[N]. Tokens visible to each query, its position + 1; 0 for padding.
        num_decode: i32[]. Number of leading decode tokens.
        num_tokens: i32[]. Number of tokens that are not padding.
        tile_start: i32[C]. First token of each query tile: at most `QUERY_TILE`
            consecutive prefill tokens of one sequence. Tiles come in increasing order
            and cover the prefill tokens without gaps.
        tile_len: i32[C]. Tokens in each tile; 0 for tiles that are not used.
        num_tiles: i32[]. Number of tiles in use; they come first. C is 0 where a step
            can hold no prefill.
    """

    block_tables: jax.Array
    rows: jax.Array
    lengths: jax.Array
    num_decode: jax.Array
    num_tokens: jax.Array
    tile_start: jax.Array
    tile_len: jax.Array
    num_tiles: jax.Array


# Query tokens that share one pass over their sequence's keys and values. With 4 query
# heads on each KV head, 16 fill the 64 rows of a Hopper matrix product. On the CPU,
# tiles of 32 were 20% faster for chunks of 64 and more, 60% slower for chunks of 16.
QUERY_TILE = 16
