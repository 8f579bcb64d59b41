"""The work of a mixed step on Hopper: a list of pieces, made on the device.

An *item* is a decode token, or a run of prefill tokens of one sequence that share the
reads of their context. An item with a longer context than its share is cut into several
*pieces*. The list has no gaps: what a step does not use costs nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.metadata import AttentionMetadata
from pallas_kernels.mosaic_ring import KV_TILE

# The least tiles of a piece, unless its item has no more: below, merging costs more
# than is gained.
MIN_PIECE_TILES = 4
# Rows come in units: queries and results of an item start at a multiple, as the TMA
# unit wants them.
ROW_UNIT = 8
# Past any row.
NOWHERE = 1 << 30


class Shape(NamedTuple):
    """Static sizes of a plan.

    Attributes:
        heads: query heads on each KV head: rows of a token.
        run_tokens: most tokens in a run.
        decodes: most decode items.
        runs: most runs.
        shares: into how many pieces, on one KV head, an even cut of all work goes.
        whole_runs: whether runs are never cut.
    """

    heads: int
    run_tokens: int
    decodes: int
    runs: int
    shares: int
    whole_runs: bool

    @property
    def items(self) -> int:
        """Most items."""
        return self.decodes + self.runs

    @property
    def parts(self) -> int:
        """Most pieces of items that are cut.

        Such an item has more than a share, so less than twice as many pieces as shares.
        """
        return 2 * self.shares


class Pieces(NamedTuple):
    """What is to be computed, in the order in which it starts.

    Attributes:
        unit: i32[E], first row of the item's queries, and of its result, in units.
        tokens: i32[E], tokens of a run; 0 for a decode item.
        row: i32[E], its sequence.
        length: i32[E], context of its first token.
        start: i32[E], first tile of the piece.
        count: i32[E], its tiles.
        part: i32[E], where the result goes if the item is cut; -1 if it is whole.
        number: i32[1], how many pieces there are.
    """

    unit: jax.Array
    tokens: jax.Array
    row: jax.Array
    length: jax.Array
    start: jax.Array
    count: jax.Array
    part: jax.Array
    number: jax.Array


class Plan(NamedTuple):
    """A step's pieces, and how their results come together.

    Attributes:
        pieces: the work.
        rows: i32[N], first row of each token's queries and result; `NOWHERE` for
            padding.
        cut: i32[N], number of each token's item among those that are cut; -1 if it is
            whole.
        inner: i32[N], first row of each token within its item.
        owner: i32[parts], number of each part's item among those that are cut; `shares`
            if there is none.
        live: i32[parts], rows of each part.
    """

    pieces: Pieces
    rows: jax.Array
    cut: jax.Array
    inner: jax.Array
    owner: jax.Array
    live: jax.Array


class _Items(NamedTuple):
    """Items in the order in which they start: i32[items] each; 0 tokens: a decode."""

    first: jax.Array
    tokens: jax.Array
    exists: jax.Array


def make_plan(metadata: AttentionMetadata, window: int | None, shape: Shape) -> Plan:
    """Lists the pieces of a step: prefill first, the end of a prompt before its start.

    A piece has at most an even share of all tiles: so there are at most `shares` items
    that are cut.
    """
    items, item_of, offset = _items(metadata, shape)
    length = jnp.where(items.exists, metadata.lengths[items.first], 0)
    low = jnp.maximum(length - window, 0) if window else jnp.zeros_like(length)
    start = low // KV_TILE
    end = length + jnp.maximum(items.tokens - 1, 0)
    tiles = jnp.where(length > 0, -(-end // KV_TILE) - start, 0)
    rows = jnp.where(items.exists, jnp.maximum(items.tokens, 1) * shape.heads, 0)

    share = jnp.maximum(-(-tiles.sum() // shape.shares), MIN_PIECE_TILES)
    if shape.whole_runs:
        share = jnp.where(items.tokens > 0, jnp.maximum(tiles, 1), share)
    pieces = -(-tiles // share)
    each = -(-tiles // jnp.maximum(pieces, 1))  # pieces of an item are alike
    pieces = -(-tiles // jnp.maximum(each, 1))
    is_cut = pieces > 1

    stop, units = jnp.cumsum(pieces), -(-rows // ROW_UNIT)
    unit = jnp.cumsum(units) - units
    first_part = jnp.cumsum(jnp.where(is_cut, pieces, 0)) - pieces
    rank = jnp.cumsum(is_cut) - 1

    index = jnp.arange(shape.items + shape.parts, dtype=jnp.int32)
    of = _owner(stop, index)
    inner = index - (stop - pieces)[of]
    part = jnp.where(is_cut[of] & (index < stop[-1]), first_part[of] + inner, -1)
    at = jnp.where(part < 0, shape.parts, part)
    token_rows = unit[item_of] * ROW_UNIT + offset * shape.heads
    is_token = jnp.arange(offset.shape[0]) < metadata.num_tokens
    return Plan(
        pieces=Pieces(
            unit=unit[of],
            tokens=items.tokens[of],
            row=metadata.rows[items.first[of]],
            length=length[of],
            start=start[of] + inner * each[of],
            count=jnp.minimum(each[of], tiles[of] - inner * each[of]),
            part=part,
            number=stop[-1:],
        ),
        rows=jnp.where(is_token, token_rows, NOWHERE),
        cut=jnp.where(is_cut, rank, -1)[item_of],
        inner=offset * shape.heads,
        owner=jnp.full(shape.parts, shape.shares)
        .at[at]
        .set(rank[of].astype(jnp.int32), mode="drop"),
        live=jnp.zeros(shape.parts, jnp.int32).at[at].set(rows[of], mode="drop"),
    )


def _items(
    metadata: AttentionMetadata, shape: Shape
) -> tuple[_Items, jax.Array, jax.Array]:
    """Cuts the prefill chunks into runs, and puts them before the decode tokens.

    Returns:
        The items; i32[N], the item of each token, and its place there.
    """
    token = jnp.arange(metadata.rows.shape[0], dtype=jnp.int32)
    is_decode = token < metadata.num_decode
    prefill = ~is_decode & (token < metadata.num_tokens)
    starts = metadata.rows != jnp.roll(metadata.rows, 1)
    starts |= token == metadata.num_decode
    chunk = lax.cummax(jnp.where(starts, token, 0))
    offset = jnp.where(prefill, (token - chunk) % shape.run_tokens, 0)
    stop = jnp.cumsum(prefill & (offset == 0), dtype=jnp.int32)
    run = jnp.arange(shape.runs + 1, dtype=jnp.int32)
    # A run starts where `stop` goes past its number; those past the last, at the end.
    first = jnp.where(run < stop[-1], _owner(stop, run), metadata.num_tokens)
    tokens = first[1:] - first[:-1]
    first = jnp.minimum(first[:-1], token.shape[0] - 1)

    decode = token[: shape.decodes]
    items = _Items(
        first=jnp.concatenate([first[::-1], decode]),
        tokens=jnp.concatenate([tokens[::-1], jnp.zeros_like(decode)]),
        exists=jnp.concatenate([tokens[::-1] > 0, is_decode[: shape.decodes]]),
    )
    # Padding names some item or other.
    item_of = jnp.where(is_decode, shape.runs + token, shape.runs - stop)
    return items, jnp.clip(item_of, 0, shape.items - 1), offset


def _owner(stop: jax.Array, place: jax.Array) -> jax.Array:
    """Returns for each place the first entry whose running sum is beyond it."""
    index = jnp.searchsorted(stop, place, side="right", method="compare_all")
    return jnp.minimum(index, stop.shape[0] - 1).astype(jnp.int32)
