"""Numbers of the backends that run here against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Chunk, make_case, oracle
from pythons import newest_but

from pallas_kernels import QUERY_TILE, paged_attention
from pallas_kernels.cpu.target import host_target

WITH_OPTIONS = ("reference", "xla")
BACKENDS = (*WITH_OPTIONS, *(("cpu",) if host_target() else ()))

on_every = functools.partial(
    newest_but, reason="the same program, but for the sizes of its arrays"
)


def run(case, backend):
    function = jax.jit(
        paged_attention,
        static_argnums=3,
        static_argnames=("scale", "backend", "soft_cap", "window"),
    )
    return np.asarray(function(*case.args(), **case.options(), backend=backend))


def check(case, backend, atol=2e-6):
    out = run(case, backend)
    np.testing.assert_allclose(out, oracle(case), atol=atol, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "block_size", on_every([1, 16, 256], [1, 2, 4, 8, 16, 32, 64, 128, 256])
)
def test_every_block_size(backend, block_size):
    case = make_case([257, 65, 64, 1], [Chunk(50, 21)], block_size=block_size)
    check(case, backend)


DECODES = [
    [1],
    [15],
    [16],
    [17],
    [63],
    [64],
    [65],
    [300],
    [0],
    [129, 128, 127, 33, 32, 31, 2, 1],
    [200, 90, 80, 70, 60, 50, 40, 30, 20],  # one more than a group
    list(range(180, 10, -10)),
    list(range(10, 180, 10)),  # correct in any order, if slower
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "decode", on_every([[1], [0], list(range(180, 10, -10))], DECODES), ids=str
)
def test_decode_lengths(backend, decode):
    check(make_case(decode), backend)


PREFILLS = [
    [Chunk(0, 1)],
    [Chunk(0, QUERY_TILE - 1)],
    [Chunk(0, QUERY_TILE)],
    [Chunk(0, QUERY_TILE + 1)],
    [Chunk(63, 2)],
    [Chunk(100, 70)],
    [Chunk(0, 3), Chunk(0, QUERY_TILE), Chunk(129, 5), Chunk(7, 1)],
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "chunks", on_every([PREFILLS[0], PREFILLS[-1]], PREFILLS), ids=str
)
def test_prefill_chunks(backend, chunks):
    check(make_case([], chunks), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_and_prefill_in_one_step(backend):
    chunks = [Chunk(0, 40), Chunk(64, 3), Chunk(31, 17)]
    check(make_case([190, 64, 17, 3, 2], chunks, padding=20, tile_padding=9), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_padding_is_zero(backend):
    case = make_case([], padding=8)
    assert not run(case, backend).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sizes",
    on_every([(9, 3, 64)], [(4, 4, 16), (9, 3, 64), (8, 1, 32), (3, 1, 8), (4, 2, 80)]),
    ids=str,
)
def test_heads(backend, sizes):
    heads, kv_heads, head_dim = sizes
    case = make_case(
        [70, 20],
        [Chunk(10, 18)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_dtype", [jnp.bfloat16, jnp.float32])
def test_bfloat16_cache(backend, q_dtype):
    case = make_case([70, 20], [Chunk(10, 18)], dtype=jnp.bfloat16, q_dtype=q_dtype)
    out = run(case, backend)
    assert out.dtype == q_dtype
    # The sums are in float32; only the result is rounded.
    atol = 2e-6 if q_dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(out.astype(np.float64), oracle(case), atol=atol, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("block_size", on_every([16], [1, 16, 256]))
def test_a_cache_of_8_bits(backend, dtype, block_size):
    case = make_case(
        [257, 64, 1],
        [Chunk(50, 21)],
        block_size=block_size,
        dtype=dtype,
        q_dtype=jnp.float32,
    )
    check(case, backend)


@pytest.mark.parametrize("backend", WITH_OPTIONS)
@pytest.mark.parametrize(
    "sizes", on_every([(8, 1)], [(4, 4), (12, 6), (8, 1)]), ids=str
)
def test_heads_of_a_cache_of_8_bits(backend, sizes):
    heads, kv_heads = sizes
    case = make_case(
        [70, 20],
        [Chunk(10, 18)],
        heads=heads,
        kv_heads=kv_heads,
        dtype=jnp.int8,
        q_dtype=jnp.float32,
        soft_cap=3.0,
        window=15,
    )
    check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend):
    case = make_case([100, 3], [Chunk(20, 5)])
    check(case._replace(q=case.q * 1e3), backend, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_traced_layer(backend):
    case = make_case([70, 20], [Chunk(10, 18)], num_layers=3, layer=2)
    out = jax.jit(
        lambda layer: paged_attention(
            case.q,
            case.k_cache,
            case.v_cache,
            layer,
            case.metadata,
            scale=case.scale,
            backend=backend,
        )
    )(jnp.int32(2))
    np.testing.assert_allclose(np.asarray(out), oracle(case), atol=2e-6, rtol=0)


@pytest.mark.parametrize("backend", WITH_OPTIONS)
@pytest.mark.parametrize("window", on_every([16, 130], [1, 16, 64, 65, 130, 1000]))
def test_a_window_hides_what_lies_before_it(backend, window):
    chunks = [Chunk(100, 40), Chunk(0, 20)]
    check(make_case([257, 130, 64, 1], chunks, window=window), backend)


@pytest.mark.parametrize("backend", WITH_OPTIONS)
def test_padding_among_long_contexts_with_a_window(backend):
    check(make_case([300, 0, 290], window=20), backend)


@pytest.mark.parametrize("backend", WITH_OPTIONS)
@pytest.mark.parametrize("window", [None, 70])
def test_soft_cap(backend, window):
    case = make_case([130, 3], [Chunk(60, 20)], soft_cap=2.0, window=window)
    # Scores of several times the cap, or it would make no difference.
    case = case._replace(q=case.q * 5)
    check(case, backend)
    capless = oracle(case._replace(soft_cap=None))
    assert np.abs(run(case, backend) - capless).max() > 0.1
