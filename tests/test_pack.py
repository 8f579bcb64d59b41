"""A step's tokens, laid out, against plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheduling import small_config

from paged_jax.block_tables import no_copies
from paged_jax.memory_managers import MANAGERS
from paged_jax.pack import pack
from paged_jax.scheduler import Plan
from paged_jax.submit import init_scheduler
from pallas_kernels.metadata import QUERY_TILE

CONFIG = small_config(
    max_model_len=128, max_seqs=7, num_blocks=256, token_budget=96, max_requests=9
).step_config()
ROWS, WIDTH, SIZE = CONFIG.num_rows, CONFIG.table_width, CONFIG.block_size
TOKENS = np.arange(10 * 128).reshape(10, 128)  # of request i: from 128 * i on


@functools.partial(jax.jit, static_argnums=5)
def packed(state, length, request, chunk, samples, num_tokens):
    sequences = dataclasses.replace(
        state.sequences,
        length=length,
        request=request,
        block_table=1 + jnp.arange(ROWS * WIDTH).reshape(ROWS, WIDTH),
    )
    requests = dataclasses.replace(state.requests, tokens=jnp.asarray(TOKENS))
    state = dataclasses.replace(state, sequences=sequences, requests=requests)
    zero = jnp.int32(0)
    rows = jnp.arange(ROWS)
    plan = Plan(chunk, samples, rows < 0, rows, no_copies(ROWS), zero, zero, zero, zero)
    return pack(CONFIG, state, plan, num_tokens)


def run(length, request, chunk, samples, num_tokens):
    state = init_scheduler(CONFIG, MANAGERS["paged"], False)
    i32 = functools.partial(jnp.array, dtype=jnp.int32)
    return jax.tree.map(
        np.asarray,
        packed(
            state, i32(length), i32(request), i32(chunk), jnp.array(samples), num_tokens
        ),
    )


def draw(rng, num_tokens):
    """Draws rows of decodes, prompts and idle ones that fit."""
    chunk = np.zeros(ROWS, int)
    left = num_tokens
    for row in rng.permutation(ROWS):
        kind = rng.integers(4)
        size = (0, 1, 1, rng.integers(2, 60))[kind]
        chunk[row] = size if size <= left else 0
        left -= chunk[row]
    length = np.array([rng.integers(0, 128 - c + 1) for c in chunk])
    samples = (rng.random(ROWS) < 0.6) & (chunk > 0)
    return length, rng.permutation(9)[:ROWS], chunk, samples


@pytest.mark.parametrize("num_tokens", [8, 96])
def test_any_plan_equals_the_rules(num_tokens):
    rng = np.random.default_rng(num_tokens)
    for _ in range(150):
        length, request, chunk, samples = draw(rng, num_tokens)
        batch, place = run(length, request, chunk, samples, num_tokens)
        check(batch, place, length, request, chunk, samples, num_tokens)


def check(batch, place, length, request, chunk, samples, num_tokens):
    attention, total = batch.attention, chunk.sum()
    assert attention.num_tokens == total
    assert attention.num_decode == (chunk == 1).sum()
    # Every token is there once, with what belongs to it.
    where = {}
    for i in range(total):
        row, position = attention.rows[i], batch.positions[i]
        assert (row, position) not in where
        where[row, position] = i
        assert batch.tokens[i] == TOKENS[request[row], position]
        block = 1 + row * WIDTH + position // SIZE
        assert batch.slots[i] == block * SIZE + position % SIZE
        assert attention.lengths[i] == position + 1
    expected = {
        (row, length[row] + i) for row in range(ROWS) for i in range(chunk[row])
    }
    assert set(where) == expected
    # The rest is padding, which writes to the null block and sees nothing.
    for array in (batch.tokens, batch.positions, batch.slots, attention.rows):
        assert array.shape == (num_tokens,) and not array[total:].any()
    assert not attention.lengths[total:].any()
    # Decodes come first, the longest context first; then runs of prompts.
    decodes = attention.lengths[: attention.num_decode]
    assert (chunk[attention.rows[: attention.num_decode]] == 1).all()
    assert (np.diff(decodes) <= 0).all()
    prompts = attention.rows[attention.num_decode : total]
    assert (np.diff(prompts) != 0).sum() == max((chunk > 1).sum() - 1, 0)
    check_tiles(attention, chunk)
    # Each row that samples has its last token sampled, at a place of its own.
    assert batch.sample_index.shape == (min(num_tokens, ROWS),)
    for row in range(ROWS):
        if samples[row]:
            last = where[row, length[row] + chunk[row] - 1]
            assert batch.sample_index[place[row]] == last
        else:
            assert place[row] == 0
    used = sorted(place[samples])
    assert used == list(range(samples.sum()))
    assert not batch.sample_index[samples.sum() :].any()


def check_tiles(attention, chunk):
    tiles = attention.num_tiles
    assert not attention.tile_len[tiles:].any()
    assert not attention.tile_start[tiles:].any()
    assert tiles == sum(-(-c // QUERY_TILE) for c in chunk if c > 1)
    covered = int(attention.num_decode)
    for start, size in zip(attention.tile_start[:tiles], attention.tile_len[:tiles]):
        assert start == covered and 1 <= size <= QUERY_TILE
        assert len(set(attention.rows[start : start + size])) == 1
        covered += size
    assert covered == chunk.sum()


def test_the_most_tiles_that_there_can_be():
    # 7 prompts: whole tiles and one token more each, as far as the budget goes.
    chunk = np.array([2, 2, 2, 17, 17, 17, 39])
    assert chunk.sum() == 96
    arguments = (np.zeros(7, int), np.arange(7), chunk, np.ones(7, bool), 96)
    check(*run(*arguments), *arguments)


def test_an_empty_plan():
    arguments = (np.full(7, 5), np.arange(7), np.zeros(7, int), np.zeros(7, bool), 8)
    batch, place = run(*arguments)
    check(batch, place, *arguments)
    assert not batch.attention.num_tiles and not place.any()


def test_a_row_at_its_full_length():
    arguments = (np.full(7, 127), np.arange(7), np.ones(7, int), np.ones(7, bool), 8)
    check(*run(*arguments), *arguments)
