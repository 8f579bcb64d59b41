"""What the cpu backend promises, and its code for lesser processors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Chunk, make_case, oracle

from pallas_kernels.cpu.attention import obstacle, paged_attention_cpu
from pallas_kernels.cpu.target import Target, host_target

HOST = host_target()
# A processor without AVX-512: its code runs on those that have it, too.
AVX2 = Target("haswell", "", lanes=8, registers=16)

if HOST is None:
    pytest.skip("no AVX2 here, or no llvmlite", allow_module_level=True)


def attend(case, metadata=None, target=None):
    scales = dict(k_scales=case.k_scales, v_scales=case.v_scales)
    function = functools.partial(
        paged_attention_cpu, scale=case.scale, target=target, **scales
    )
    q, k_cache, v_cache, layer, given = case.args()
    return np.asarray(jax.jit(function)(q, k_cache, v_cache, layer, metadata or given))


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn]
)
@pytest.mark.parametrize("head_dim", [4, 8, 64, 80, 256])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(HOST, id="host"),
        pytest.param(
            AVX2,
            id="avx2",
            marks=pytest.mark.newest(reason="llvmlite's code, whatever jax calls it"),
        ),
    ],
)
def test_every_target_head_dim_and_dtype(target, head_dim, dtype):
    case = make_case(
        [70, 17, 1],
        [Chunk(10, 18)],
        head_dim=head_dim,
        dtype=dtype,
        q_dtype=jnp.float32,
    )
    out = attend(case, target=target)
    np.testing.assert_allclose(out, oracle(case), atol=3e-6, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1), (7, 1), (12, 2)])
def test_any_number_of_query_heads_on_a_kv_head(heads, kv_heads):
    case = make_case(
        [70, 16], [Chunk(3, 5)], heads=heads, kv_heads=kv_heads, head_dim=64
    )
    np.testing.assert_allclose(attend(case), oracle(case), atol=3e-6, rtol=0)


def test_a_token_is_the_same_alone_and_among_others_to_the_bit():
    case = make_case([90, 33, 16, 1], [Chunk(20, 9)], head_dim=64, padding=0)
    together = attend(case)
    given = case.metadata
    for token in range(together.shape[0]):
        alone = given._replace(
            rows=given.rows.at[0].set(given.rows[token]),
            lengths=given.lengths.at[0].set(given.lengths[token]),
            num_tokens=jnp.int32(1),
        )
        out = attend(case._replace(q=case.q.at[0].set(case.q[token])), alone)
        np.testing.assert_array_equal(out[0], together[token])
        assert not out[1:].any()


def test_obstacles_are_named():
    assert obstacle(64, "float32") is None
    assert "head dims that 4 divides, not 6" in str(obstacle(6, "float32"))
    assert obstacle(64, "int8") is None
    assert "not float64" in str(obstacle(64, "float64"))
    case = make_case([5], head_dim=6)
    with pytest.raises(ValueError, match="cpu attention backend takes head dims"):
        attend(case)
