"""The Hopper decode kernel on shared prefixes: numbers, races, tiles, lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Chunk, make_case, make_metadata, oracle, share

from pallas_kernels import compat, find_cascade, paged_attention

if not compat.has_mosaic():
    pytest.skip("the pallas backend needs jax >= 0.11", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cascade as plan
from pallas_kernels import mosaic_ring, mosaic_softmax, mosaic_tuning
from pallas_kernels.mosaic_decode import paged_attention_mosaic
from pallas_kernels.mosaic_decode_kernel import tiles_of_split

ERRORS = {jnp.dtype(jnp.bfloat16): 4e-3, jnp.dtype(jnp.float16): 1e-3}


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    compat.reset_interpreter()


def small_case(lengths, groups, **options) -> Case:
    """A step with shared prefixes: (rows, tokens) of each."""
    shape = dict(heads=2, kv_heads=1, head_dim=64, dtype=jnp.bfloat16, padding=0)
    case = make_case(lengths, q_dtype=jnp.float32, **{**shape, **options})
    for rows, tokens in groups:
        case = share(case, rows, tokens)
    return case


def cascade_of(case: Case):
    block_size, kv_heads = case.k_cache.shape[2:4]
    group = case.q.shape[1] // kv_heads
    return find_cascade(case.metadata, block_size=block_size, group=group)


def run(case: Case, cascade, **options):
    attend = functools.partial(paged_attention_mosaic, **case.options(), **options)
    # A new function each time, so that nothing is traced before a planted bug.
    function = jax.jit(lambda *args, cascade: attend(*args, cascade=cascade))
    return np.asarray(function(*case.args(), cascade=cascade))


def check(case: Case, passes: int, **options) -> None:
    cascade = cascade_of(case)
    assert int(cascade.num_passes) == passes
    atol = ERRORS.get(case.k_cache.dtype, 4e-3)
    out = run(case, cascade, **options)
    np.testing.assert_allclose(out, oracle(case), atol=atol, rtol=0)


def test_constants_are_those_of_the_kernel():
    assert plan.PREFIX_TILE == mosaic_ring.KV_TILE
    assert plan.QUERY_ROWS == mosaic_softmax.ROWS
    assert plan.PASS_TILES == mosaic_tuning.ONCE_TILES


def test_two_prefixes_whose_tokens_do_not_lie_side_by_side():
    lengths = [340, 290, 330, 5, 270, 0]
    check(small_case(lengths, [([0, 2], 320), ([1, 4], 256)]), 2, splits=1)


def test_a_token_without_a_prefix_has_the_same_bits():
    """Though the others' scores are thousands of times as large."""
    case = small_case([270, 66, 260], [([0, 2], 256)])
    case = case._replace(q=(case.q * 1e3).at[1].multiply(1e-3))
    cascade = cascade_of(case)
    out, plain = (run(case, x, splits=1) for x in (cascade, None))
    np.testing.assert_array_equal(out[1], plain[1])


def test_a_prefix_of_two_passes_in_two_splits():
    """Passes of two tokens with 24 query heads each; the last one has one token."""
    case = small_case([600, 590, 580], [(range(3), 576)], heads=24)
    check(case, 2, splits=2)


@pytest.mark.parametrize(
    "head_dim,block_size,dtype,soft_cap",
    [
        (64, 4, jnp.bfloat16, 2.0),
        (256, 64, jnp.float16, None),
        (64, 16, jnp.int8, None),
    ],
)
def test_shapes(head_dim, block_size, dtype, soft_cap):
    case = small_case(
        [258, 257],
        [([0, 1], 256)],
        heads=3,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        soft_cap=soft_cap,
    )
    check(case, 1, splits=1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_prefixes_beside_prompts_through_the_api(dtype):
    options = dict(chunks=[Chunk(20, 3)], padding=1, dtype=dtype)
    case = small_case([270, 260], [([0, 1], 256)], **options)
    function = functools.partial(paged_attention, **case.options(), backend="pallas")
    out = jax.jit(function)(*case.args(), cascade=cascade_of(case))
    np.testing.assert_allclose(np.asarray(out), oracle(case), atol=4e-3, rtol=0)


def test_a_prefix_that_is_counted_twice_is_noticed():
    case = small_case([270, 260], [([0, 1], 256)])
    cascade = cascade_of(case)
    twice = cascade._replace(starts=jnp.where(cascade.starts > 0, 64, 0))
    error = np.abs(run(case, twice, splits=1) - oracle(case)).max()
    assert error > 10 * ERRORS[case.k_cache.dtype]


def test_contiguous_rows_have_no_cascade():
    case = small_case([10], [])
    with pytest.raises(ValueError, match="contiguous rows share no blocks"):
        run(case, cascade_of(case), contiguous=True)


# ------------------------------------------------------------------ tiles


def tiles_read(lengths, starts, splits: int) -> int:
    """Returns the tiles of keys that all thread blocks of one KV head copy."""
    lengths, starts = jnp.asarray(lengths), jnp.asarray(starts)
    split = jnp.arange(splits)[:, None]
    _, count = tiles_of_split(lengths, starts // mosaic_ring.KV_TILE, split, splits)
    return int(count.sum())


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "count,shared,own,plain,with_cascade",
    [
        (8, 1024, 64, 8 * 17, 16 + 8),
        # Passes of 16 tokens with 4 query heads each.
        (64, 4096, 256, 64 * 68, 4 * 64 + 64 * 4),
        (8, 0, 1000, 8 * 16, 8 * 16),
    ],
)
def test_tiles_that_are_read_fall(count, shared, own, plain, with_cascade, splits):
    length, blocks = shared + own, shared // 16
    tables = np.arange(count * -(-length // 16), dtype=np.int32).reshape(count, -1)
    tables[:, :blocks] = tables[0, :blocks]
    metadata = make_metadata(tables, [length] * count, [])
    cascade = find_cascade(metadata, block_size=16, group=4)
    lengths = metadata.lengths
    assert tiles_read(lengths, jnp.zeros_like(lengths), splits) == plain
    passes = tiles_read(cascade.lengths, jnp.zeros_like(cascade.lengths), splits)
    assert passes + tiles_read(lengths, cascade.starts, splits) == with_cascade


# ------------------------------------------------------------------ races


def followed(monkeypatch):
    """Lets the detector see wgmma's reads (see `test_mosaic_races`)."""
    matmul = mosaic_softmax.matmul

    def matmul_with_reads(acc, a, b, **kwargs):
        matmul(acc, a, b, **kwargs)
        _ = a[...], b[...]
        plgpu.commit_smem()

    monkeypatch.setattr(mosaic_softmax, "matmul", matmul_with_reads)


def run_with_races_followed():
    """Runs a pass of 4 tiles through 2 stages, and two tokens after it."""
    interpret = compat.interpret_params(True, detect_races=True)
    case = small_case([258, 257], [([0, 1], 256)])
    out = run(case, cascade_of(case), splits=1, stages=2, interpret=interpret)
    assert not compat.races_found(), "data race"
    np.testing.assert_allclose(out, oracle(case), atol=4e-3, rtol=0)


def test_no_race(monkeypatch):
    followed(monkeypatch)
    run_with_races_followed()


@pytest.mark.parametrize("step", ["await_ready", "await_free"])
def test_a_missing_step_is_noticed(monkeypatch, capfd, step):
    followed(monkeypatch)
    monkeypatch.setattr(mosaic_ring, step, lambda *barrier: None)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as error:
        run_with_races_followed()
    printed = capfd.readouterr()
    assert "race" in f"{error.value}{printed.out}{printed.err}".lower()


# ------------------------------------------------------------------ lowering


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,block_size,dtype",
    [
        (32, 8, 128, 2, jnp.float16),
        (8, 4, 256, 64, jnp.bfloat16),
        (64, 1, 64, 16, jnp.bfloat16),
        (9, 3, 64, 16, jnp.int8),
    ],
)
def test_lowers_for_cuda(heads, kv_heads, head_dim, block_size, dtype):
    shape = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    case = small_case([70, 40], [], block_size=block_size, dtype=dtype, **shape)

    def attend(*args):
        cascade = find_cascade(args[-1], block_size=block_size, group=heads // kv_heads)
        options = dict(**case.options(), cascade=cascade, interpret=False)
        return paged_attention(*args, backend="pallas", **options)

    lowered = jax.jit(attend).trace(*case.args()).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("mosaic_gpu") >= 2
    # The cache goes into the kernels as it is: only reshaped, never sliced or gathered.
    cache = "x".join(map(str, case.k_cache.shape))
    for line in text.splitlines():
        if f"tensor<{cache}x" in line:
            assert "func.func" in line or "stablehlo.reshape" in line, line
