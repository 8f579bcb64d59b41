"""What `paged_attention` refuses, and how it says so."""

import jax.numpy as jnp
import pytest
from attention_cases import Case, Chunk, make_case

from pallas_kernels import BACKENDS, paged_attention


def attend(case: Case, backend: str = "xla"):
    return paged_attention(*case.args(), scale=case.scale, backend=backend)


def test_unknown_backend():
    with pytest.raises(ValueError, match="'triton'.*reference.*xla.*pallas"):
        attend(make_case([3]), "triton")


BAD = {
    "q must be .N, H, D., got the shape": lambda c: c._replace(q=c.q[0]),
    "k_cache must be .L, P, B, K, D., all layers": lambda c: c._replace(
        k_cache=c.k_cache[0], v_cache=c.v_cache[0]
    ),
    "k_cache and v_cache must agree": lambda c: c._replace(v_cache=c.v_cache[:, 1:]),
    "k_cache and v_cache must agree, got float32.*bfloat16": lambda c: c._replace(
        v_cache=c.v_cache.astype(jnp.bfloat16)
    ),
    "k_cache must hold floats of 16 bits.*, int8, or.*uint8, got int32": lambda c: (
        c._replace(
            k_cache=c.k_cache.astype(jnp.int32), v_cache=c.v_cache.astype(jnp.int32)
        )
    ),
    "k_cache must hold floats of 16 bits.*got float8_e4m3fn": lambda c: c._replace(
        k_cache=c.k_cache.astype(jnp.float8_e4m3fn),
        v_cache=c.v_cache.astype(jnp.float8_e4m3fn),
    ),
    "q must hold floats, got int32": lambda c: c._replace(q=c.q.astype(jnp.int32)),
    "q has head dim 8 but the cache has 16": lambda c: c._replace(q=c.q[..., :8]),
    "5 query heads cannot share 2 KV heads": lambda c: c._replace(q=c.q[:, :5]),
    "Block size 12 is not allowed; use a power of two from 1 to 256": lambda c: (
        c._replace(k_cache=c.k_cache[:, :, :12], v_cache=c.v_cache[:, :, :12])
    ),
    "Layer 2 is not in the cache; it has layers 0 to 1": lambda c: c._replace(layer=2),
    "Layer -1 is not in the cache": lambda c: c._replace(layer=-1),
}


SCALES = jnp.ones((2, 5, 2, 16), jnp.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("message", BAD)
def test_arguments_that_do_not_fit(message, backend):
    with pytest.raises(ValueError, match=message):
        attend(BAD[message](make_case([3], [Chunk(2, 2)])), backend)


@pytest.mark.parametrize(
    "message,changes",
    [
        ("metadata.rows must have the shape", dict(rows=jnp.zeros(3, jnp.int32))),
        ("metadata.tile_len must have the shape", dict(tile_len=jnp.zeros(9, int))),
        ("metadata.num_decode must have the shape", dict(num_decode=jnp.zeros(1, int))),
        ("block_tables must be .S, T.", dict(block_tables=jnp.zeros(4, jnp.int32))),
        ("lengths must hold integers, got float32", dict(lengths=jnp.zeros(8))),
    ],
)
def test_metadata_that_does_not_fit(message, changes):
    case = make_case([3], [Chunk(2, 4)])
    assert case.metadata.rows.shape == (8,)
    with pytest.raises(ValueError, match=message):
        attend(case._replace(metadata=case.metadata._replace(**changes)))


@pytest.mark.parametrize(
    "dtype,scales,message",
    [
        (jnp.float32, dict(k_scales=SCALES), "of float32 has no scales, got k_scales."),
        (jnp.int8, {}, "A cache of int8 needs k_scales and v_scales, got neither."),
        (jnp.uint8, dict(v_scales=SCALES), "cache of uint8 needs .*, got v_scales."),
        (
            jnp.int8,
            dict(k_scales=SCALES, v_scales=SCALES.swapaxes(2, 3)),
            r"v_scales must be float32\(2, 5, 2, 16\), \[L, P, K, B\], got float32",
        ),
        (
            jnp.int8,
            dict(k_scales=SCALES.astype(jnp.bfloat16), v_scales=SCALES),
            r"k_scales must be float32\(2, 5, 2, 16\), .*, got bfloat16",
        ),
    ],
)
def test_scales_that_do_not_fit(dtype, scales, message):
    case = make_case([3])
    assert case.k_cache.shape == (2, 5, 16, 2, 16)
    q, k, v, *rest = case.args()
    args = (q, k.astype(dtype), v.astype(dtype), *rest)
    with pytest.raises(ValueError, match=message):
        paged_attention(*args, scale=case.scale, backend="xla", **scales)


def test_a_block_of_512_tokens_is_too_large():
    case = make_case([3], block_size=512)
    with pytest.raises(ValueError, match="Block size 512 is not allowed"):
        attend(case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "message,option",
    [
        ("window must be 1 or more tokens, got 0", dict(window=0)),
        ("soft_cap must be above 0 and finite, got -2", dict(soft_cap=-2.0)),
        ("soft_cap must be above 0 and finite, got inf", dict(soft_cap=float("inf"))),
    ],
)
def test_scores_that_make_no_sense(backend, message, option):
    case = make_case([3])
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.args(), scale=case.scale, backend=backend, **option)


def test_the_cpu_backend_names_what_it_does_not_take():
    case = make_case([3])
    with pytest.raises(ValueError, match="neither soft_cap nor window.*use backend"):
        paged_attention(*case.args(), scale=case.scale, backend="cpu", window=4)
