"""Prefixes that decode tokens read together: which, and what comes out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Chunk, make_case, oracle, share
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import find_cascade, paged_attention, xla_tiles
from pallas_kernels.cascade import PREFIX_TILE, pass_members

find = functools.partial(jax.jit, static_argnames=("block_size", "group"))(find_cascade)


def cascade_of(case: Case):
    block_size, kv_heads = case.k_cache.shape[2:4]
    group = case.q.shape[1] // kv_heads
    return find(case.metadata, block_size=block_size, group=group)


def passes_of(case: Case) -> list[tuple[int, list[int]]]:
    """Returns the length and the tokens of each pass, once all else fits to them."""
    found = jax.tree.map(np.asarray, cascade_of(case))
    metadata, block_size = case.metadata, case.k_cache.shape[2]
    places = found.starts.shape[0]
    lengths, rows = np.asarray(metadata.lengths), np.asarray(metadata.rows)
    tables, decode = np.asarray(metadata.block_tables), int(metadata.num_decode)
    result, starts = [], np.zeros(places, int)
    for number, length in enumerate(found.lengths):
        members = [t for t in found.tokens[number] if t < places]
        assert (length > 0) == (number < found.num_passes) == bool(members)
        if not members:
            continue
        assert length % PREFIX_TILE == length % block_size == 0
        prefix = tables[found.rows[number], : length // block_size]
        for member, token in enumerate(found.tokens[number]):
            if token == places:
                continue
            assert token < decode and starts[token] == 0
            assert found.place[token] == number * found.tokens.shape[1] + member
            # The block of the token itself is being written.
            assert length // block_size <= (lengths[token] - 1) // block_size
            np.testing.assert_array_equal(tables[rows[token], : len(prefix)], prefix)
            starts[token] = length
        result.append((int(length), [int(t) for t in members]))
    np.testing.assert_array_equal(found.starts, starts)
    assert not found.place[starts == 0].any()
    return result


def case_of(lengths, groups, **options) -> Case:
    """A step with shared prefixes: (rows, tokens), the outer ones before the inner."""
    options = dict(heads=8, kv_heads=2, head_dim=8, padding=1) | options
    case = make_case(lengths, **options)
    for rows, tokens in groups:
        case = share(case, rows, tokens)
    return case


# ------------------------------------------------------------------ which


@pytest.mark.parametrize(
    "lengths,groups,expected",
    [
        ([300, 290, 280], [], []),
        # 2 tokens save 4 tiles of the 3 that a pass costs, and 3 tiles save nothing.
        ([300, 290], [([0, 1], 256)], [(256, [0, 1])]),
        ([300, 290], [([0, 1], 192)], []),
        ([300] * 4, [([1, 2, 3], 192)], [(192, [1, 2, 3])]),
        # Blocks of 16: a prefix ends with a tile, and before the block being written.
        ([300, 290], [([0, 1], 288)], [(256, [0, 1])]),
        ([272, 256], [([0, 1], 240)], []),
        ([257, 257], [([0, 1], 256)], [(256, [0, 1])]),
        # All of it shared, though no token's last block may be: nothing is its own.
        ([256, 256], [([0, 1], 256)], []),
        ([257] * 9, [(range(9), 256)], [(256, list(range(9)))]),
        # Two groups; tokens of one need not lie side by side.
        (
            [400] * 5,
            [([0, 2], 320), ([1, 3], 384)],
            [(320, [0, 2]), (384, [1, 3])],
        ),
        # A prefix of all, and a longer one of some. A token takes what saves it most.
        (
            [700] * 6,
            [([0, 1, 2, 3, 4, 5], 128), ([3, 4], 640)],
            [(128, [0, 1, 2, 5]), (640, [3, 4])],
        ),
        ([700] * 3, [([0, 1, 2], 576), ([1, 2], 640)], [(576, [0, 1, 2])]),
        # Those left behind are too few for what they have in common.
        ([900] * 4, [([0, 1, 2, 3], 192), ([2, 3], 832)], [(832, [2, 3])]),
        # 16 tokens of 4 heads a pass.
        (
            [200] * 18,
            [(list(range(18)), 128)],
            [(128, list(range(16))), (128, [16, 17])],
        ),
    ],
)
def test_prefixes_that_save_tiles_are_found(lengths, groups, expected):
    assert passes_of(case_of(lengths, groups)) == expected


def test_larger_blocks_are_shared_whole():
    case = case_of([700, 690], [([0, 1], 512)], block_size=256)
    assert passes_of(case) == [(512, [0, 1])]
    case = case_of([500, 490], [([0, 1], 256)], block_size=256)
    assert passes_of(case) == [(256, [0, 1])]


def test_prompts_and_padding_share_nothing():
    case = case_of([300], [], chunks=[Chunk(290, 20)], padding=5)
    assert passes_of(share(case, [0, 1], 256)) == []


def test_rows_of_a_pass_hold_the_query_heads_of_its_tokens():
    assert [pass_members(group) for group in (1, 3, 4, 24, 48, 64)] == [
        64, 21, 16, 2, 1, 1,
    ]  # fmt: skip
    case = case_of([300] * 3, [([0, 1, 2], 256)], heads=48)  # passes of 2
    assert passes_of(case) == []
    case = case_of([900] * 3, [([0, 1, 2], 896)], heads=48)
    assert passes_of(case) == [(896, [0, 1]), (896, [2])]
    case = case_of([900] * 3, [([0, 1, 2], 896)], heads=66)
    assert passes_of(case) == []


def test_tokens_without_a_prefix_cost_no_tile():
    case = case_of([300, 290, 40], [([0, 1], 256)])
    found = cascade_of(case)
    assert int(found.starts[2]) == 0 and int(found.num_passes) == 1
    assert int(cascade_of(case_of([300, 290], [])).num_passes) == 0


@st.composite
def shared_steps(draw):
    """Lengths, and prefixes of nested or separate sets of rows."""
    lengths = draw(st.lists(st.integers(1, 420), min_size=12, max_size=12))
    groups, rows = [], draw(st.permutations(range(12)))
    for some in (rows[:7], rows[2:5], rows[7:]):
        some = some[: draw(st.integers(2, len(some)))]
        limit = min(lengths[row] for row in some) // 16 * 16
        groups.append((some, draw(st.integers(0, limit // 16)) * 16))
    return lengths, groups


@settings(max_examples=40)
@given(step=shared_steps(), seed=st.integers(0, 2**16))
def test_any_step_is_the_same_as_without(step, seed):
    lengths, groups = step
    needed = sum(-(-length // 16) for length in lengths)
    case = case_of(
        lengths, groups, seed=seed, table_width=27, spare_blocks=330 - needed
    )
    passes_of(case)
    check(case, "xla")


# ------------------------------------------------------------------ what


@functools.partial(
    jax.jit,
    static_argnums=3,
    static_argnames=("scale", "soft_cap", "window", "backend"),
)
def attend(q, k_cache, v_cache, layer, metadata, *, backend, **options):
    group = q.shape[1] // k_cache.shape[3]
    cascade = find_cascade(metadata, block_size=k_cache.shape[2], group=group)
    args = (q, k_cache, v_cache, layer, metadata)
    return paged_attention(*args, cascade=cascade, backend=backend, **options)


def check(case: Case, backend: str, atol: float = 3e-6) -> None:
    options = case.options()
    out = np.asarray(attend(*case.args(), **options, backend=backend))
    np.testing.assert_allclose(out, oracle(case), atol=atol, rtol=0)


RAGGED = ([700, 650, 641, 300, 290, 280, 129, 20, 1, 0], [(range(6), 192)])


@pytest.mark.parametrize(
    "block_size,dtype",
    [
        (1, jnp.float32),
        (16, jnp.float32),
        (256, jnp.float32),
        (1, jnp.int8),
        (256, jnp.float8_e4m3fn),
    ],
)
def test_block_sizes_and_dtypes(block_size, dtype):
    shared = 640 if block_size < 256 else 512
    groups = [(range(3), shared), (range(6), 256)]
    options = dict(block_size=block_size, dtype=dtype, q_dtype=jnp.float32)
    check(case_of(RAGGED[0], groups, **options), "xla")


@pytest.mark.parametrize("heads,kv_heads", [(2, 2), (9, 3), (96, 2)])
def test_groups_of_heads(heads, kv_heads):
    case = case_of([700, 660, 650], [(range(3), 640)], heads=heads, kv_heads=kv_heads)
    assert passes_of(case) or heads == 96
    check(case, "xla")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_the_reference_is_what_it_is_without(dtype):
    options = dict(dtype=dtype, q_dtype=jnp.float32)
    check(case_of([257] * 3, [(range(3), 256)], **options), "reference")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_prefixes_beside_prompts_with_a_soft_cap_and_a_narrow_cache(dtype):
    options = dict(soft_cap=2.0, dtype=dtype, q_dtype=jnp.float32)
    chunks = [Chunk(70, 30), Chunk(0, 9)]
    case = case_of(*RAGGED, chunks=chunks, **options)
    assert passes_of(case) == [(192, [0, 1, 2, 3, 4, 5])]
    check(case._replace(q=case.q * 5), "xla")


def test_what_takes_no_cascade_says_so():
    case = case_of([300, 290], [([0, 1], 256)])
    cascade = cascade_of(case)
    options = dict(scale=case.scale, cascade=cascade)
    with pytest.raises(ValueError, match="takes no window, got 4.*use cascade=None"):
        paged_attention(*case.args(), **options, backend="xla", window=4)
    with pytest.raises(ValueError, match='cpu attention.*no cascade; use backend="xl'):
        paged_attention(*case.args(), **options, backend="cpu")
    other = cascade_of(case_of([300] * 3, []))
    with pytest.raises(ValueError, match="of these tokens, with 3 places, got 4"):
        paged_attention(*case.args(), scale=1.0, cascade=other, backend="xla")


def test_pieces_of_both_passes_are_the_same():
    assert PREFIX_TILE == xla_tiles.KV_TILE
