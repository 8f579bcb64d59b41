import concurrent.futures
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.models.packed import pack_kernels
from pallas_kernels.cpu import product as products
from pallas_kernels.cpu.target import Target, host_target

HOST = host_target()
# A processor without AVX-512: its code runs on those that have it, too. And this one
# without what some with AVX-512 have.
AVX2 = Target("haswell", "", lanes=8, registers=16)
TARGETS = {"host": HOST, "avx2": AVX2}
if HOST is not None and HOST.dots:
    TARGETS["plain"] = HOST._replace(dots=())
# Inputs below, at and beyond what one sum runs over; outputs of whole panels and not.
SHAPES = ((1, 1), (7, 5), (64, 33), (385, 96), (1536, 64))
ROWS = (1, 2, 13, 14, 15, 29, 64)

if HOST is None:
    pytest.skip("no AVX2 here, or no llvmlite: XLA multiplies", allow_module_level=True)


@functools.partial(jax.jit, static_argnames="target")
def multiply(x, weights, layer, rows, target=HOST):
    return products.product(x, weights, layer, rows, target=target)


def kernels(inputs, outputs, dtype="float32", layers=3):
    rng = np.random.default_rng(inputs)
    return [
        jnp.asarray(rng.normal(size=(inputs, outputs)), dtype) for _ in range(layers)
    ]


def activations(rows, inputs):
    return np.random.default_rng(rows).normal(size=(rows, inputs)).astype(np.float32)


on_each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())


@on_each_target
@pytest.mark.parametrize("dtype", products.DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_product_is_that_of_float64(inputs, outputs, dtype, target):
    plain = kernels(inputs, outputs, dtype)
    packed = pack_kernels(plain, target)
    for rows in ROWS:
        x = activations(rows, inputs)
        if target.word(dtype) > 1:
            x = x.astype(plain[0].dtype).astype(np.float32)
        for layer, kernel in enumerate(plain):
            exact = x.astype(np.float64) @ np.asarray(kernel, np.float64)
            result = multiply(x, packed, layer, rows, target)
            bound = 3e-7 * inputs**0.5 * (1 + np.abs(exact).max())
            np.testing.assert_allclose(result[:, :outputs], exact, rtol=0, atol=bound)
            assert not result[:, outputs:].any()


@on_each_target
@pytest.mark.parametrize("dtype", products.DTYPES)
def test_a_row_is_the_same_alone_and_among_others_to_the_bit(dtype, target):
    packed = pack_kernels(kernels(701, 96, dtype), target)
    x = activations(64, 701)
    together = np.asarray(multiply(x, packed, 1, 64, target))
    for row in (0, 5, 13, 63):
        alone = multiply(x[row : row + 1], packed, 1, 1, target)
        np.testing.assert_array_equal(together[row], alone[0])
    for rows in (1, 12, 29):
        some = multiply(x, packed, 1, rows, target)
        np.testing.assert_array_equal(together[:rows], some[:rows])


@pytest.mark.parametrize("dtype", products.DTYPES)
def test_rows_beyond_the_live_ones_are_zero_whatever_they_hold(dtype):
    packed = pack_kernels(kernels(64, 96, dtype), HOST)
    x = activations(20, 64)
    expected = np.asarray(multiply(x, packed, 0, 20))
    for rows in (0, 1, 7, 20):
        poisoned = x.copy()
        poisoned[rows:] = np.nan
        result = np.asarray(multiply(poisoned, packed, 0, rows))
        np.testing.assert_array_equal(result[:rows], expected[:rows])
        assert not result[rows:].any()


def test_a_loop_over_layers_copies_no_weights():
    layers = 8
    packed = pack_kernels(kernels(128, 128, layers=layers), HOST)

    def through_all(x, weights):
        def layer(index, x):
            return products.product(x, weights, index, 4, target=HOST) / 16

        return jax.lax.fori_loop(0, layers, layer, x)

    x = jnp.asarray(activations(4, 128))
    compiled = jax.jit(through_all).lower(x, packed).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < packed.nbytes / 50
    expected = np.asarray(x)
    for kernel in kernels(128, 128, layers=layers):
        expected = expected @ np.asarray(kernel) / 16
    np.testing.assert_allclose(compiled(x, packed), expected, atol=1e-5)


def test_programs_that_run_at_once_share_the_threads():
    packed = pack_kernels(kernels(576, 1536), HOST)
    x = activations(16, 576)
    expected = np.asarray(multiply(x, packed, 0, 16))

    def many(_):
        return [np.asarray(multiply(x, packed, 0, 16)) for _ in range(50)]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for results in pool.map(many, range(6)):
            for result in results:
                np.testing.assert_array_equal(result, expected)


def test_operands_that_do_not_go_together_are_named():
    packed = pack_kernels(kernels(64, 96), HOST)
    with pytest.raises(ValueError, match=r"x \(4, 65\) and weights \(3, .* 64, .*\)"):
        products.product(jnp.zeros((4, 65)), packed, 0, 4, target=HOST)
    with pytest.raises(ValueError, match="do not go together"):
        products.product(jnp.zeros((4, 64)), packed[..., :3, :], 0, 4, target=HOST)
    with pytest.raises(ValueError, match="do not go together"):
        products.product(jnp.zeros((4, 64)), packed, 0, 4, target=AVX2)


@pytest.mark.skipif(
    HOST is None or "bfloat16" not in HOST.dots, reason="no AVX512-BF16 here"
)
def test_bfloat16_weights_for_a_processor_without_its_products_are_refused():
    plain = HOST._replace(dots=())
    packed = pack_kernels(kernels(64, 96, "bfloat16"), plain)
    with pytest.raises(ValueError, match=r"\[L, J, words, 32, 2\] belong to x \[N, 2"):
        products.product(jnp.zeros((4, 64)), packed, 0, 4, target=HOST)


def test_without_llvmlite_there_is_no_target(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert host_target.__wrapped__() is None
