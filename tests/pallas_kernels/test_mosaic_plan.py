"""The list of work of a mixed step: every token's context once, in bounded pieces."""

import jax
import numpy as np
import pytest
from attention_cases import Chunk, make_metadata

from pallas_kernels import compat

if not compat.has_mosaic():
    pytest.skip("the pallas backend needs jax >= 0.11", allow_module_level=True)

from pallas_kernels.mosaic_mixed import plan_shape
from pallas_kernels.mosaic_plan import MIN_PIECE_TILES, NOWHERE, ROW_UNIT, make_plan
from pallas_kernels.mosaic_ring import KV_TILE

ROWS = 128


def plan_of(metadata, heads, workers, window=None):
    shape = plan_shape(metadata, heads, ROWS // 64, workers)
    plan = jax.jit(make_plan, static_argnums=(1, 2))(metadata, window, shape)
    return jax.tree.map(np.asarray, plan), shape


def spans(plan):
    """Returns the live pieces by their item's first row: (start, count, part)s."""
    pieces, found = plan.pieces, {}
    for i in range(pieces.number[0]):
        piece = (pieces.start[i], pieces.count[i], pieces.part[i])
        found.setdefault(int(pieces.unit[i]) * ROW_UNIT, []).append(piece)
    return found


def check(decode, chunks, heads=4, workers=16, window=None):
    tables = np.zeros((len(decode) + len(chunks) + 2, 8))
    metadata = make_metadata(tables, decode, chunks, padding=5, tile_padding=3)
    plan, shape = plan_of(metadata, heads, workers, window)
    lengths = np.asarray(metadata.lengths)
    num_tokens = int(metadata.num_tokens)
    assert (plan.rows[num_tokens:] == NOWHERE).all()
    # Tokens of an item have rows in a row, and items share no unit of rows.
    first_rows = plan.rows[:num_tokens] - plan.inner[:num_tokens]
    assert (first_rows % ROW_UNIT == 0).all()
    taken = [row + i for row in plan.rows[:num_tokens] for i in range(heads)]
    assert len(set(taken)) == len(taken)
    found = spans(plan)
    total, parts = 0, []
    for first in sorted(set(first_rows)):
        tokens = np.flatnonzero(first_rows == first)
        assert len(tokens) == 1 or (tokens >= len(decode)).all()
        assert len(tokens) * heads <= ROWS
        assert (np.diff(tokens) == 1).all() and (np.diff(lengths[tokens]) == 1).all()
        pieces = sorted(found.pop(first, []))
        end = -(-lengths[tokens].max() // KV_TILE)
        low = max(lengths[tokens].min() - (window or 10**9), 0) // KV_TILE
        covered = [t for start, count, _ in pieces for t in range(start, start + count)]
        assert covered == list(range(low, end))
        total += len(covered)
        cut = len(pieces) > 1
        assert all((part >= 0) == cut for _, _, part in pieces)
        parts += [part for _, _, part in pieces if cut]
        assert ((plan.cut[tokens] >= 0) == cut).all()
        for _, _, part in pieces if cut else []:
            assert plan.owner[part] == plan.cut[tokens[0]]
            assert plan.live[part] == len(tokens) * heads
    assert not found
    assert sorted(parts) == list(range(len(parts))) and len(parts) <= shape.parts
    assert (plan.owner[len(parts) :] == shape.shares).all()
    share = max(-(-total // shape.shares), MIN_PIECE_TILES)
    for i in range(plan.pieces.number[0]):
        if not (shape.whole_runs and plan.pieces.tokens[i]):
            assert plan.pieces.count[i] <= share
    return plan


@pytest.mark.parametrize("heads", [1, 3, 4, 48, 64])
@pytest.mark.parametrize("window", [None, 100])
def test_every_context_is_covered_once(heads, window):
    check(
        [3000, 64, 1], [Chunk(0, 40), Chunk(63, 2), Chunk(700, 130)], heads, 16, window
    )


@pytest.mark.parametrize(
    "decode,chunks",
    [
        ([], []),
        ([0], []),
        ([5, 0, 0], [Chunk(0, 1)]),
        ([], [Chunk(0, 1), Chunk(0, 1), Chunk(5, 1)]),
        ([70000], []),
        ([500] * 40, []),
        ([], [Chunk(9000, 33)]),
    ],
)
@pytest.mark.parametrize("workers", [1, 16])
def test_steps_of_all_kinds(decode, chunks, workers):
    check(decode, chunks, workers=workers)


def test_a_long_context_is_shared_by_all_workers():
    plan = check([70000], [])
    assert plan.pieces.number[0] == 16


def test_short_contexts_are_not_cut():
    plan = check([MIN_PIECE_TILES * KV_TILE] * 3, [])
    assert plan.pieces.number[0] == 3


def test_the_end_of_a_prompt_starts_first():
    plan = check([10], [Chunk(0, 200)], heads=1, workers=1)
    assert list(plan.pieces.length[:3]) == [129, 1, 10]
