"""The Hopper decode kernel: numbers in the interpreter, and lowering without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Chunk, make_case, oracle

from pallas_kernels import compat, limits, paged_attention

needs_mosaic = pytest.mark.skipif(
    not compat.has_mosaic(), reason="the pallas backend needs jax >= 0.11"
)
if compat.has_mosaic():
    from pallas_kernels.mosaic_decode import paged_attention_mosaic


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    if compat.has_mosaic():
        compat.reset_interpreter()


# Of what the kernel computes from inputs of that dtype at unit scale: the weights go
# through the second product in 16 bits.
ERRORS = {jnp.dtype(jnp.bfloat16): 4e-3, jnp.dtype(jnp.float16): 1e-3}


def check(case: Case, **kwargs) -> None:
    attend = functools.partial(paged_attention_mosaic, **case.options(), **kwargs)
    out = np.asarray(jax.jit(attend)(*case.args()))
    assert out.dtype == case.q.dtype
    atol = ERRORS.get(case.k_cache.dtype, ERRORS[jnp.dtype(jnp.bfloat16)])
    np.testing.assert_allclose(out, oracle(case), atol=atol, rtol=0)


# Queries and results in float32, so that rounding the results does not count.
INT8, E4M3 = jnp.int8, jnp.float8_e4m3fn
small_case = functools.partial(
    make_case,
    heads=2,
    kv_heads=1,
    head_dim=64,
    dtype=jnp.bfloat16,
    q_dtype=jnp.float32,
    padding=0,
)


@needs_mosaic
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 32, 64, 128, 256])
def test_block_sizes_on_ragged_lengths(block_size):
    check(small_case([66, 1], block_size=block_size), splits=1, stages=2)


@needs_mosaic
@pytest.mark.parametrize("length", [0, 15, 16, 63, 128])
def test_ends_of_blocks_and_tiles(length):
    check(small_case([length]), splits=1, stages=1)


@needs_mosaic
@pytest.mark.parametrize("stages", [1, 2])
def test_a_context_longer_than_the_ring(stages):
    check(small_case([220]), splits=1, stages=stages)


@needs_mosaic
def test_splits_merge_to_the_same_result():
    # Two of the four splits have tiles: a split takes 4 tiles of 64 at least.
    check(small_case([300, 20]), splits=4)


@needs_mosaic
@pytest.mark.parametrize("heads,kv_heads", [(9, 3), (64, 1)])
def test_groups_of_heads(heads, kv_heads):
    check(small_case([20], heads=heads, kv_heads=kv_heads), splits=1, stages=1)


@needs_mosaic
@pytest.mark.parametrize(
    "head_dim,block_size,dtype",
    [
        (80, 16, jnp.bfloat16),
        (80, 2, jnp.float16),
        (96, 1, jnp.float16),
        (96, 8, jnp.float16),
        (128, 16, jnp.float16),
        (128, 2, jnp.bfloat16),
        (256, 16, jnp.bfloat16),
        (256, 4, jnp.float16),
    ],
)
def test_head_dims(head_dim, block_size, dtype):
    case = small_case([70], head_dim=head_dim, block_size=block_size, dtype=dtype)
    check(case, splits=1)


@needs_mosaic
@pytest.mark.parametrize(
    "window,block_size,splits", [(1, 16, 1), (64, 16, 1), (70, 2, 1), (260, 32, 2)]
)
def test_a_window_hides_what_lies_before_it(window, block_size, splits):
    # In the last case the second of two splits starts past the window's first tile.
    lengths = [330] if splits > 1 else [130, 20]
    check(small_case(lengths, window=window, block_size=block_size), splits=splits)


@needs_mosaic
@pytest.mark.parametrize(
    "dtype,block_size,head_dim",
    [
        (INT8, 8, 64),
        (E4M3, 16, 64),
        (INT8, 64, 80),
        (E4M3, 256, 96),
        (E4M3, 16, 128),
        (INT8, 128, 256),
    ],
)
def test_8_bits(dtype, block_size, head_dim):
    lengths = [150, 1] if block_size == 256 else [70, 1]
    case = small_case(lengths, dtype=dtype, block_size=block_size, head_dim=head_dim)
    check(case, splits=1, stages=2)


@needs_mosaic
@pytest.mark.parametrize("dtype", [INT8, E4M3])
def test_8_bits_with_all_options_and_splits(dtype):
    case = small_case([330], dtype=dtype, heads=6, kv_heads=2, window=300, soft_cap=5.0)
    check(case, splits=2)


@needs_mosaic
def test_scales_of_any_magnitude():
    """Each key and value has one of its own, and the weights are rounded with it."""
    case = small_case([100], dtype=INT8)
    spread = np.exp(np.random.default_rng(0).normal(size=case.k_scales.shape) * 2)
    scales = case.v_scales * jnp.asarray(spread, jnp.float32)
    case = case._replace(v_scales=scales)
    attend = functools.partial(paged_attention_mosaic, **case.options(), splits=1)
    out, expected = np.asarray(jax.jit(attend)(*case.args())), oracle(case)
    np.testing.assert_allclose(out, expected, atol=4e-3 * np.abs(expected).max())


@needs_mosaic
def test_soft_cap():
    case = small_case([90], soft_cap=2.0)
    case = case._replace(q=case.q * 4)  # scores of twice the cap and more
    check(case, splits=1)
    assert np.abs(oracle(case) - oracle(case._replace(soft_cap=None))).max() > 0.1


@needs_mosaic
def test_without_a_table_rows_lie_side_by_side():
    case = small_case([70, 20], spare_rows=0, table_width=5)
    rows, width = case.metadata.block_tables.shape
    in_order = np.arange(rows * width).reshape(rows, width)
    # Each row's blocks go to the places that the arithmetic names.
    tables = np.asarray(case.metadata.block_tables)
    ordered = case._replace(
        k_cache=case.k_cache[:, tables.reshape(-1)],
        v_cache=case.v_cache[:, tables.reshape(-1)],
        metadata=case.metadata._replace(block_tables=jnp.asarray(in_order, jnp.int32)),
    )
    expected = oracle(ordered)
    np.testing.assert_array_equal(expected, oracle(case))
    nowhere = jnp.full((rows, width), 10**6, jnp.int32)
    blind = ordered._replace(metadata=ordered.metadata._replace(block_tables=nowhere))
    attend = functools.partial(
        paged_attention_mosaic, scale=case.scale, splits=1, contiguous=True
    )
    out = np.asarray(jax.jit(attend)(*blind.args()))
    np.testing.assert_allclose(out, expected, atol=4e-3, rtol=0)


@needs_mosaic
def test_decode_and_prefill_through_the_api():
    case = small_case([70, 3], [Chunk(60, 6)], padding=1, window=66, soft_cap=30.0)
    attend = functools.partial(paged_attention, **case.options(), backend="pallas")
    out = np.asarray(jax.jit(attend)(*case.args()))
    np.testing.assert_allclose(out, oracle(case), atol=4e-3)


@needs_mosaic
@pytest.mark.parametrize(
    "changes,message",
    [
        (
            dict(dtype=jnp.float32),
            "takes a 16-bit KV cache, bfloat16 or float16, or a quantised one, int8 or "
            "float8_e4m3fn, got float32; convert the cache, or use",
        ),
        (dict(dtype=INT8, block_size=4), "blocks of 8 tokens or more, got 4; use"),
        (dict(head_dim=72), r"head dims \(64, 80, 96, 128, 256\), got 72"),
        (dict(heads=65), "up to 64 query heads on each KV head, got 65"),
    ],
)
def test_what_the_kernel_does_not_take_is_named(changes, message):
    case = small_case([10], **changes)
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.args(), **case.options(), backend="pallas")


@needs_mosaic
def test_a_group_fills_the_rows_of_a_product():
    from pallas_kernels.mosaic_softmax import ROWS

    assert limits.MAX_GROUP == ROWS


class FakeGPU:
    compute_capability = "8.0"


@needs_mosaic
def test_another_gpu_than_hopper_is_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGPU])
    case = small_case([10])
    message = (
        'NVIDIA Hopper GPUs, of compute capability 9.0, got 8.0; use backend="xla"'
    )
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.args(), scale=case.scale, backend="pallas")


@pytest.mark.skipif(compat.has_mosaic(), reason="this jax has the pallas backend")
def test_an_old_jax_is_told_to_use_xla():
    case = small_case([10])
    with pytest.raises(ValueError, match=r'needs jax >= 0.11.*use backend="xla"'):
        paged_attention(*case.args(), scale=case.scale, backend="pallas")


@needs_mosaic
@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,dtype,block_size",
    [
        # Two block sizes of each shape; `experiments.aot` compiles all of them.
        (9, 3, 64, jnp.bfloat16, 2),
        (9, 3, 64, jnp.bfloat16, 64),
        (32, 8, 128, jnp.float16, 8),
        (32, 8, 128, jnp.float16, 256),
        (8, 4, 256, jnp.bfloat16, 2),
        (8, 4, 256, jnp.bfloat16, 64),
        (9, 3, 64, INT8, 8),
        (9, 3, 64, INT8, 64),
        (32, 8, 128, E4M3, 64),
        (32, 8, 128, E4M3, 256),
        (8, 4, 256, INT8, 8),
        (8, 4, 256, INT8, 256),
    ],
)
def test_lowers_for_cuda(heads, kv_heads, head_dim, dtype, block_size):
    case = small_case(
        [40],
        dtype=dtype,
        block_size=block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    attend = functools.partial(
        paged_attention, **case.options(), backend="pallas", interpret=False
    )
    text = (
        jax.jit(attend)
        .trace(*case.args())
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "mosaic_gpu" in text
    # The cache goes into the kernel as it is: only reshaped, or read as another type,
    # never sliced or gathered.
    cache = "x".join(map(str, case.k_cache.shape))
    uses = [line for line in text.splitlines() if f"tensor<{cache}x" in line]
    as_it_is = ("func.func", "stablehlo.reshape", "stablehlo.bitcast_convert")
    for line in uses:
        assert any(what in line for what in as_it_is), line
