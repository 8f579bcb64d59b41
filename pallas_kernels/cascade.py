"""Which decode tokens read the start of their contexts together.

Sequences that share their first blocks (a common prefix, the samples of one prompt,
the beams of one search) have the same blocks at the start of their tables. A step that
reads those once for all of them, and the rest of each context by itself, is a *cascade*
of two passes, whose softmaxes are merged.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.metadata import AttentionMetadata

# Query rows of one pass over a prefix: those of a Hopper matrix product.
QUERY_ROWS = 64
# Prefixes are shared in whole tiles of so many tokens: what both passes read anyway.
PREFIX_TILE = 64
# What a pass over a prefix costs beside its tiles, as tiles: a thread block waits for
# its first copies, and stores partial results (`mosaic_decode.ONCE_TILES`).
PASS_TILES = 3


class Cascade(NamedTuple):
    """The prefixes that a step's decode tokens share, and who shares them.

    A *pass* reads a prefix once, for up to M tokens; a prefix with more of them takes
    several. The D places for decode tokens are the first of the step.

    Attributes:
        tokens: i32[G, M]. The tokens of each pass; D where there is none.
        rows: i32[G]. A sequence row whose table has the prefix at its start.
        lengths: i32[G]. Tokens of the prefix, whole blocks and whole tiles; 0 for
            passes that are not used.
        num_passes: i32[]. Number of passes in use; they come first.
        place: i32[D]. Where each token is in `tokens`: `pass * M + member`; 0 for
            tokens in no pass.
        starts: i32[D]. Tokens of each token's context that a pass reads for it; 0 for
            tokens in no pass.
    """

    tokens: jax.Array
    rows: jax.Array
    lengths: jax.Array
    num_passes: jax.Array
    place: jax.Array
    starts: jax.Array


def pass_members(group: int) -> int:
    """Returns M, the tokens of a pass, for `group` query heads on each KV head."""
    return max(1, QUERY_ROWS // group)


def find_cascade(
    metadata: AttentionMetadata, *, block_size: int, group: int
) -> Cascade:
    """Finds the prefixes that are worth reading together, on the device.

    Two tokens share a prefix if their tables agree in all its blocks, and if it ends
    before the block that either of them is written to. Of the prefixes that a token
    shares with others, it takes the one that saves it most: of a prefix of `t` tiles
    with `n` tokens in `p` passes, each token saves `((n - p) * t - p * PASS_TILES) / n`
    tiles, and a prefix that saves nothing is not shared. Some of the `n` may find a
    longer prefix with others that saves them more: those that stay share theirs if it
    still saves something.

    Args:
        metadata: of the step.
        block_size: B.
        group: query heads on each KV head.

    Returns:
        The cascade, with D = min(N, S) places, one for each row that may decode.
    """
    num_places = min(metadata.rows.shape[0], metadata.block_tables.shape[0])
    members = pass_members(group)
    shared = _shared_tiles(metadata, block_size, num_places)
    tiles = _choose_tiles(shared, members)
    token = jnp.arange(num_places, dtype=jnp.int32)

    def together(tiles: jax.Array) -> jax.Array:
        """Whether two tokens chose the same prefix, bool[D, D]."""
        same = (shared >= tiles[:, None]) & (tiles[:, None] == tiles)
        return same & (tiles > 0)

    count = jnp.sum(together(tiles), axis=1, dtype=jnp.int32)
    tiles = jnp.where(_saved(tiles, count, members) > 0, tiles, 0)
    same = together(tiles)
    count = jnp.sum(same, axis=1, dtype=jnp.int32)
    rank = jnp.sum(same & (token < token[:, None]), axis=1, dtype=jnp.int32)

    # Passes in the order of their prefixes' first tokens.
    first = (count > 0) & (rank == 0)
    passes = jnp.where(first, -(-count // members), 0)
    before = jnp.cumsum(passes) - passes
    leader = jnp.argmax(same, axis=1)
    place = (before[leader] + rank // members) * members + rank % members
    used = count > 0
    num_passes = most_passes(num_places, members)
    at = jnp.where(used, place, num_passes * members)
    tokens = jnp.full(num_passes * members, num_places, jnp.int32)
    tokens = tokens.at[at].set(token, mode="drop").reshape(num_passes, members)
    one = jnp.minimum(tokens[:, 0], num_places - 1)
    starts = tiles * PREFIX_TILE
    in_use = tokens[:, 0] < num_places
    return Cascade(
        tokens=tokens,
        rows=jnp.where(in_use, metadata.rows[one], 0),
        lengths=jnp.where(in_use, starts[one], 0),
        num_passes=jnp.sum(passes, dtype=jnp.int32),
        place=jnp.where(used, place, 0),
        starts=starts,
    )


def most_passes(num_places: int, members: int) -> int:
    """Returns G, the most passes that the tokens of a step can come to.

    Each prefix has 2 tokens or more, and with passes of 2 three tokens take two.
    """
    most = num_places * 2 // 3 if members == 2 else num_places // 2
    return max(1, most)


def _shared_tiles(
    metadata: AttentionMetadata, block_size: int, num_places: int
) -> jax.Array:
    """Returns i32[D, D], the tiles that each two decode tokens could share.

    Tiles of PREFIX_TILE tokens; with larger blocks, as many as are in whole blocks. On
    the diagonal is what a token could share with any other.
    """
    rows, lengths = metadata.rows[:num_places], metadata.lengths[:num_places]
    tables = metadata.block_tables[rows]
    width = tables.shape[1]
    differ = tables[:, None] != tables
    same = jnp.min(jnp.where(differ, jnp.arange(width), width), axis=2)
    # Whole blocks before the token's own, which is being written.
    live = jnp.arange(num_places) < metadata.num_decode
    whole = jnp.where(live, jnp.maximum(lengths - 1, 0) // block_size, 0)
    same = jnp.minimum(same, jnp.minimum(whole[:, None], whole))
    blocks = max(1, PREFIX_TILE // block_size)
    return (same // blocks * (blocks * block_size // PREFIX_TILE)).astype(jnp.int32)


def _choose_tiles(shared: jax.Array, members: int) -> jax.Array:
    """Returns i32[D], the tiles of the prefix that saves each token most; 0 for none.

    A token's prefixes are the different numbers in its line of `shared`, and the tokens
    of one are those with that number or more.
    """
    tiles = -jnp.sort(-shared, axis=1)
    num_places = tiles.shape[1]
    # Where each run of equal numbers ends is how many have that number or more.
    last = jnp.concatenate(
        [tiles[:, :-1] != tiles[:, 1:], jnp.ones((num_places, 1), bool)], axis=1
    )
    end = jnp.where(last, jnp.arange(1, num_places + 1, dtype=jnp.int32), num_places)
    count = lax.cummin(end, axis=1, reverse=True)
    saved = _saved(tiles, count, members) / count
    best = jnp.argmax(saved, axis=1)[:, None]
    chosen = jnp.take_along_axis(tiles, best, axis=1)
    worth = jnp.take_along_axis(saved, best, axis=1) > 0
    return jnp.where(worth, chosen, 0)[:, 0]


def _saved(tiles: jax.Array, count: jax.Array, members: int) -> jax.Array:
    """Returns the tiles that `count` tokens save when they share `tiles`."""
    passes = -(-count // members)
    return (count - passes) * tiles - passes * PASS_TILES
