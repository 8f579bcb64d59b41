"""The Hopper kernel of mixed steps: interpreted numbers, and lowering with no GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Chunk, make_case, oracle

from pallas_kernels import compat, limits, paged_attention

if not compat.has_mosaic():
    pytest.skip("the pallas backend needs jax >= 0.11", allow_module_level=True)

from pallas_kernels import mosaic_mixed, mosaic_step
from pallas_kernels.mosaic_mixed import paged_attention_mixed
from pallas_kernels.mosaic_softmax import ROWS


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    compat.reset_interpreter()


# Of what the kernel computes from inputs of that dtype at unit scale: the weights go
# through the second product in 16 bits.
ERRORS = {jnp.dtype(jnp.bfloat16): 4e-3, jnp.dtype(jnp.float16): 1e-3}


def check(case: Case, atol: float | None = None, **kwargs) -> None:
    attend = functools.partial(paged_attention_mixed, **case.options(), **kwargs)
    out = np.asarray(jax.jit(attend)(*case.args()))
    assert out.dtype == case.q.dtype
    atol = atol or ERRORS.get(case.k_cache.dtype, ERRORS[jnp.dtype(jnp.bfloat16)])
    np.testing.assert_allclose(out.astype(np.float64), oracle(case), atol=atol, rtol=0)


# Queries and results in float32, so that rounding the results does not count.
small_case = functools.partial(
    make_case,
    heads=4,
    kv_heads=1,
    head_dim=64,
    dtype=jnp.bfloat16,
    q_dtype=jnp.float32,
    padding=2,
)
# Chunks that start and end beside ends of blocks, tiles and runs (32 tokens).
CHUNKS = [Chunk(0, 1), Chunk(63, 2), Chunk(47, 33), Chunk(15, 31)]


@pytest.mark.parametrize("block_size", [1, 4, 8, 64, 256])
def test_block_sizes_on_ragged_steps(block_size):
    check(small_case([66, 0, 1], [Chunk(60, 9)], block_size=block_size))


def test_chunks_that_start_anywhere():
    check(small_case([64], CHUNKS))


def test_a_chunk_of_many_tiles_behind_a_context():
    check(small_case([], [Chunk(90, 100)]))


def test_results_in_16_bits_leave_from_where_the_queries_were():
    # Rounding the result costs more than all the rest.
    check(small_case([40], [Chunk(30, 40)], q_dtype=None), atol=1.6e-2)


def test_long_contexts_are_cut_and_merged():
    # 8 workers: both the decode and the chunk are cut in several parts.
    check(small_case([1000, 20], [Chunk(900, 20)]), workers=8)


def test_one_consumer():
    check(small_case([40], [Chunk(30, 40)]), consumers=1)


@pytest.mark.parametrize("heads,kv_heads", [(9, 3), (64, 1), (2, 2)])
def test_groups_of_heads(heads, kv_heads):
    # Of 3, 64 and 1: 42, 2 and 128 tokens in a run.
    chunk = Chunk(60, 4 if heads == 64 else 44)
    check(small_case([20], [chunk], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(
    "head_dim,block_size,dtype",
    [
        (80, 16, jnp.bfloat16),
        (96, 8, jnp.float16),
        (128, 2, jnp.bfloat16),
        (128, 16, jnp.float16),
        (256, 16, jnp.bfloat16),
    ],
)
def test_head_dims(head_dim, block_size, dtype):
    case = small_case([9], [Chunk(60, 5)], head_dim=head_dim, block_size=block_size)
    check(
        case._replace(
            **{
                name: getattr(case, name).astype(dtype)
                for name in ("k_cache", "v_cache")
            }
        )
    )


@pytest.mark.parametrize(
    "dtype,options",
    [
        (jnp.int8, dict(window=70)),
        (jnp.float8_e4m3fn, dict(soft_cap=5.0)),
        (jnp.int8, dict(block_size=64, head_dim=256)),
    ],
)
def test_8_bits(dtype, options):
    check(small_case([66, 0, 1], [Chunk(60, 40)], dtype=dtype, **options))


@pytest.mark.parametrize("window,block_size", [(1, 16), (70, 4), (70, 16)])
def test_a_window_hides_what_lies_before_it(window, block_size):
    chunks = [Chunk(130, 40), Chunk(0, 20)]
    check(small_case([150], chunks, window=window, block_size=block_size))


def test_soft_cap():
    case = small_case([90], [Chunk(50, 20)], soft_cap=2.0)
    case = case._replace(q=case.q * 4)  # scores of twice the cap and more
    check(case)
    assert np.abs(oracle(case) - oracle(case._replace(soft_cap=None))).max() > 0.1


def test_a_step_of_padding_is_zero():
    check(small_case([], padding=8))


def test_a_step_with_room_for_prefill_is_one_launch_of_this_kernel(monkeypatch):
    case = small_case([70], [Chunk(60, 6)], window=66, soft_cap=30.0)
    asked = []

    def spy(*args, **kwargs):
        asked.append(kwargs)
        return paged_attention_mixed(*args, **kwargs)

    monkeypatch.setattr(mosaic_step, "paged_attention_mixed", spy)
    attend = functools.partial(paged_attention, **case.options(), backend="pallas")
    jaxpr = jax.make_jaxpr(attend, static_argnums=3)(*case.args())
    assert len(asked) == 1
    assert count_launches(jaxpr.jaxpr) == 1


def count_launches(jaxpr) -> int:
    """Counts kernels in a program, by either name that Pallas has for a launch."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("mpmd_map", "core_map"):
            count += 1
            continue
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                count += count_launches(inner)
    return count


def test_a_group_fills_the_rows_of_a_product():
    assert limits.MAX_GROUP == ROWS


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
        (32, 8, 128, jnp.float8_e4m3fn, 8),
        (32, 8, 128, jnp.float8_e4m3fn, 256),
    ],
)
def test_lowers_for_cuda(heads, kv_heads, head_dim, dtype, block_size):
    case = small_case(
        [40],
        [Chunk(0, 20)],
        dtype=dtype,
        block_size=block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    attend = functools.partial(
        paged_attention, **case.options(), backend="pallas", interpret=False
    )
    lowered = jax.jit(attend).trace(*case.args()).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@mosaic_gpu") == 1
    # The cache goes into the kernel as it is: only reshaped, or read as another type,
    # never sliced or gathered.
    cache = "x".join(map(str, case.k_cache.shape))
    uses = [line for line in text.splitlines() if f"tensor<{cache}x" in line]
    as_it_is = ("func.func", "stablehlo.reshape", "stablehlo.bitcast_convert")
    for line in uses:
        assert any(what in line for what in as_it_is), line


@pytest.mark.parametrize("threads, consumers", [("2", 1), ("3", 1), ("4", 2)])
def test_the_interpreter_has_as_many_warpgroups_as_threads(
    monkeypatch, threads, consumers
):
    seen = []
    monkeypatch.setenv("NPROC", threads)
    monkeypatch.setattr(
        mosaic_mixed,
        "plan_shape",
        lambda metadata, heads, count, workers: seen.append(count) or 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        check(small_case([1], []))
    assert seen == [consumers]
