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


def check(case: Case, **kwargs) -> None:
    attend = functools.partial(paged_attention_mosaic, scale=case.scale, **kwargs)
    out = np.asarray(jax.jit(attend)(*case.args()))
    assert out.dtype == case.q.dtype
    # The weights go through the second product in 16 bits.
    np.testing.assert_allclose(
        out.astype(np.float64), oracle(case), atol=1e-2, rtol=1e-2
    )


bfloat16_case = functools.partial(
    make_case, heads=8, kv_heads=2, head_dim=64, dtype=jnp.bfloat16, padding=1
)


@needs_mosaic
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_block_sizes_on_ragged_lengths(block_size):
    check(bfloat16_case([130, 64, 17, 1], block_size=block_size), splits=1, stages=2)


@needs_mosaic
@pytest.mark.parametrize("length", [0, 15, 16, 63, 65, 128])
def test_ends_of_blocks_and_tiles(length):
    check(bfloat16_case([length]), splits=1, stages=2)


@needs_mosaic
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_context_longer_than_the_ring(stages):
    check(bfloat16_case([300], heads=2, kv_heads=1), splits=1, stages=stages)


@needs_mosaic
def test_splits_merge_to_the_same_result():
    # Two of the four splits have tiles: a split takes 4 tiles of 64 at least.
    check(bfloat16_case([400, 20], heads=2, kv_heads=1), splits=4, stages=2)


@needs_mosaic
@pytest.mark.parametrize(
    "heads,kv_heads,head_dim", [(9, 3, 64), (3, 3, 64), (12, 1, 128), (64, 1, 64)]
)
def test_groups_and_head_dims(heads, kv_heads, head_dim):
    case = bfloat16_case([70], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    check(case, stages=2)


@needs_mosaic
def test_float16_cache_with_float32_queries():
    check(bfloat16_case([70], dtype=jnp.float16, q_dtype=jnp.float32), stages=2)


@needs_mosaic
def test_decode_and_prefill_through_the_api():
    case = bfloat16_case([70, 3], [Chunk(60, 6)], heads=2, kv_heads=1)
    attend = functools.partial(paged_attention, scale=case.scale, backend="pallas")
    out = np.asarray(jax.jit(attend)(*case.args()))
    np.testing.assert_allclose(out.astype(np.float64), oracle(case), atol=1e-2)


@needs_mosaic
@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(dtype=jnp.float32), "16-bit KV cache, bfloat16 or float16, got float32"),
        (dict(head_dim=80), r"head dims \(64, 128\), got 80"),
        (dict(block_size=4), "block sizes from 8 to 256, got 4"),
        (dict(heads=130), "up to 64 query heads on each KV head, got 65"),
    ],
)
def test_what_the_kernel_does_not_take_is_named(changes, message):
    case = bfloat16_case([10], **changes)
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.args(), scale=case.scale, backend="pallas")


@needs_mosaic
def test_a_group_fills_the_rows_of_a_product():
    from pallas_kernels.mosaic_decode_kernel import ROWS

    assert limits.MAX_GROUP == ROWS


class FakeGPU:
    compute_capability = "8.0"


@needs_mosaic
def test_another_gpu_than_hopper_is_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGPU])
    case = bfloat16_case([10])
    message = (
        'NVIDIA Hopper GPUs, of compute capability 9.0, got 8.0; use backend="xla"'
    )
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.args(), scale=case.scale, backend="pallas")


@pytest.mark.skipif(compat.has_mosaic(), reason="this jax has the pallas backend")
def test_an_old_jax_is_told_to_use_xla():
    case = bfloat16_case([10])
    with pytest.raises(ValueError, match=r'needs jax >= 0.11.*use backend="xla"'):
        paged_attention(*case.args(), scale=case.scale, backend="pallas")


@needs_mosaic
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(9, 3, 64), (32, 8, 128)])
def test_lowers_for_cuda(dtype, block_size, heads, kv_heads, head_dim):
    case = bfloat16_case(
        [40],
        dtype=dtype,
        block_size=block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    attend = functools.partial(
        paged_attention, scale=case.scale, backend="pallas", interpret=False
    )
    text = (
        jax.jit(attend)
        .trace(*case.args())
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "mosaic_gpu" in text
    # The cache goes into the kernel as it is: only reshaped, never sliced or gathered.
    cache = "x".join(map(str, case.k_cache.shape))
    uses = [line for line in text.splitlines() if f"tensor<{cache}x" in line]
    for line in uses:
        assert "func.func" in line or "stablehlo.reshape" in line, line
