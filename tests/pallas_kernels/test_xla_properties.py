"""What the xla backend promises beyond its numbers, on random and on fixed steps."""

import functools

import jax
import numpy as np
import pytest
from attention_cases import Case, Chunk, make_case, make_metadata, oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import QUERY_TILE, paged_attention

NUM_TOKENS, NUM_TILES, NUM_ROWS, NUM_BLOCKS, WIDTH = 48, 12, 12, 200, 40


@functools.partial(jax.jit, static_argnums=3, static_argnames="scale")
def attend(*args, scale):
    return paged_attention(*args, scale=scale, backend="xla")


@st.composite
def steps(draw):
    decode = draw(st.lists(st.integers(0, 150), max_size=8))
    chunks = draw(
        st.lists(
            st.builds(Chunk, st.integers(0, 140), st.integers(1, 20)), max_size=4
        ).filter(lambda chunks: sum(chunk.tokens for chunk in chunks) <= 40)
    )
    return sorted(decode, reverse=True), chunks


def of_fixed_shape(decode, chunks, block_size, seed) -> Case:
    """A case whose arrays have the same shapes whatever the step holds."""
    tokens = len(decode) + sum(chunk.tokens for chunk in chunks)
    tiles = sum(-(-chunk.tokens // QUERY_TILE) for chunk in chunks)
    totals = [*decode, *(chunk.cached + chunk.tokens for chunk in chunks)]
    used = sum(-(-total // block_size) for total in totals)
    return make_case(
        decode,
        chunks,
        block_size=block_size,
        padding=NUM_TOKENS - tokens,
        tile_padding=NUM_TILES - tiles,
        spare_rows=NUM_ROWS - len(totals),
        spare_blocks=(NUM_BLOCKS * 16) // block_size - used,
        table_width=WIDTH * 16 // block_size,
        seed=seed,
    )


@pytest.mark.parametrize("block_size", [2, 16, 128])
def test_any_step_equals_the_oracle(block_size):
    @settings(max_examples=40)
    @given(step=steps(), seed=st.integers(0, 2**16))
    def check(step, seed):
        case = of_fixed_shape(*step, block_size, seed)
        out = attend(*case.args(), scale=case.scale)
        np.testing.assert_allclose(np.asarray(out), oracle(case), atol=3e-6, rtol=0)

    traces = attend._cache_size()
    check()
    assert attend._cache_size() <= traces + 1  # one program for all steps of a shape


@pytest.mark.parametrize("heads,kv_heads", [(9, 3), (8, 8)])
def test_a_token_does_not_depend_on_its_neighbours(heads, kv_heads):
    """To the bit: alone with padding, or beside longer, shorter and prefilled ones."""
    decode, chunks = [150, 130, 60, 59, 20, 7, 1, 1, 1, 1], [Chunk(30, 18), Chunk(5, 9)]
    case = make_case(
        decode, chunks, heads=heads, kv_heads=kv_heads, head_dim=64, padding=4
    )
    full = np.asarray(attend(*case.args(), scale=case.scale))
    meta, tables = case.metadata, np.asarray(case.metadata.block_tables)
    num_tokens, num_tiles = meta.rows.shape[0], meta.tile_start.shape[0]

    for kept in range(len(decode)):
        alone = make_metadata(tables, [decode[kept]], [], num_tokens - 1, num_tiles)
        alone = alone._replace(rows=alone.rows.at[0].set(kept))
        q = case.q.at[0].set(case.q[kept])
        args = (q, case.k_cache, case.v_cache, case.layer, alone)
        out = np.asarray(attend(*args, scale=case.scale))
        np.testing.assert_array_equal(out[0], full[kept])
        assert not out[1:].any()

    start = len(decode)
    for row, chunk in enumerate(chunks, start=len(decode)):
        padding = num_tokens - chunk.tokens
        tiles = -(-chunk.tokens // QUERY_TILE)
        alone = make_metadata(tables, [], [chunk], padding, num_tiles - tiles)
        alone = alone._replace(rows=alone.rows.at[: chunk.tokens].set(row))
        mine = slice(start, start + chunk.tokens)
        q = case.q.at[: chunk.tokens].set(case.q[mine])
        args = (q, case.k_cache, case.v_cache, case.layer, alone)
        out = np.asarray(attend(*args, scale=case.scale))
        np.testing.assert_array_equal(out[: chunk.tokens], full[mine])
        start += chunk.tokens


def test_the_blocks_places_do_not_matter():
    """Another pool, another order of blocks, a wider table: the same bits."""
    step = ([150, 60, 17], [Chunk(30, 18)])
    one = make_case(*step, seed=3)
    two = make_case(*step, seed=3, spare_blocks=50, table_width=64)
    rng = np.random.default_rng(0)
    order = np.concatenate([[0], 1 + rng.permutation(two.k_cache.shape[1] - 1)])
    place = np.argsort(order)
    two = two._replace(
        k_cache=two.k_cache[:, order],
        v_cache=two.v_cache[:, order],
        metadata=two.metadata._replace(
            block_tables=place[np.asarray(two.metadata.block_tables)].astype(np.int32)
        ),
    )
    # The same seed draws other contents for another pool: take them from the first.
    for token in range(len(np.asarray(one.metadata.rows))):
        length = int(one.metadata.lengths[token])
        row = int(one.metadata.rows[token])
        for position in range(length):
            block, offset = divmod(position, 16)
            source = (one.layer, int(one.metadata.block_tables[row, block]), offset)
            target = (two.layer, int(two.metadata.block_tables[row, block]), offset)
            two = two._replace(
                k_cache=two.k_cache.at[target].set(one.k_cache[source]),
                v_cache=two.v_cache.at[target].set(one.v_cache[source]),
            )
    two = two._replace(q=one.q)
    np.testing.assert_array_equal(
        np.asarray(attend(*one.args(), scale=one.scale)),
        np.asarray(attend(*two.args(), scale=two.scale)),
    )
