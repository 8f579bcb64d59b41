import concurrent.futures
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.models.packed import pack_kernels, quantize
from pallas_kernels.cpu import product as products
from pallas_kernels.cpu.target import GROUP, Target, host_target

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
    stored = "float32" if dtype == "int8" else dtype
    return [
        jnp.asarray(rng.normal(size=(inputs, outputs)), stored) for _ in range(layers)
    ]


def pack(plain, dtype, target=HOST):
    return pack_kernels(plain, target, "int8" if dtype == "int8" else None)


def activations(rows, inputs):
    return np.random.default_rng(rows).normal(size=(rows, inputs)).astype(np.float32)


def exact(x, kernel, dtype, target):
    """The product of what rows and weights are rounded to."""
    kernel = np.asarray(kernel, np.float64)
    if dtype == "int8":
        fill = (0, -len(kernel) % GROUP), (0, 0)
        values, scales = quantize(np.pad(kernel, fill))
        scales = np.repeat(scales.astype(np.float64), GROUP, 0)
        kernel = ((values - 128.0) * scales)[: len(kernel)]
    if target.word(dtype) == 2:
        x = x.astype(jnp.bfloat16)
    if target.word(dtype) == 4:
        x = in_int8(x)
    return x.astype(np.float64) @ kernel


def in_int8(x):
    fill = (0, 0), (0, -x.shape[1] % GROUP)
    groups = np.pad(x, fill).reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(-1, keepdims=True)
    values = np.rint(groups * (np.float32(127) / largest))
    values = values * (largest.astype(np.float64) / 127)
    return values.reshape(len(x), -1)[:, : x.shape[1]]


OTHERS = pytest.mark.newest(reason="llvmlite's code, whatever jax calls it")
on_each_target = pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, id=name, marks=[] if name == "host" else OTHERS)
        for name, target in TARGETS.items()
    ],
)


@on_each_target
@pytest.mark.parametrize("dtype", products.DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_product_is_that_of_float64(inputs, outputs, dtype, target):
    plain = kernels(inputs, outputs, dtype)
    packed = pack(plain, dtype, target)
    for rows in ROWS:
        x = activations(rows, inputs)
        for layer, kernel in enumerate(plain):
            expected = exact(x, kernel, dtype, target)
            result = multiply(x, packed, layer, rows, target)
            bound = 3e-7 * inputs**0.5 * (1 + np.abs(expected).max())
            np.testing.assert_allclose(
                result[:, :outputs], expected, rtol=0, atol=bound
            )
            assert not result[:, outputs:].any()


@on_each_target
@pytest.mark.parametrize("dtype", products.DTYPES)
def test_a_row_is_the_same_alone_and_among_others_to_the_bit(dtype, target):
    packed = pack(kernels(701, 96, dtype), dtype, target)
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
    packed = pack(kernels(64, 96, dtype), dtype)
    x = activations(20, 64)
    expected = np.asarray(multiply(x, packed, 0, 20))
    for rows in (0, 1, 7, 20):
        poisoned = x.copy()
        poisoned[rows:] = np.nan
        result = np.asarray(multiply(poisoned, packed, 0, rows))
        np.testing.assert_array_equal(result[:rows], expected[:rows])
        assert not result[rows:].any()


@pytest.mark.parametrize("dtype", products.DTYPES)
def test_what_is_not_a_number_shows_in_its_row_alone(dtype):
    packed = pack(kernels(70, 96, dtype), dtype)
    x = activations(9, 70)
    expected = np.asarray(multiply(x, packed, 0, 9))
    x[3, 11], x[5, 69] = np.nan, np.inf
    result = np.asarray(multiply(x, packed, 0, 9))
    assert not np.isfinite(result[3]).any() and not np.isfinite(result[5]).any()
    others = [row for row in range(9) if row not in (3, 5)]
    np.testing.assert_array_equal(result[others], expected[others])


def test_rows_of_zeros_give_zeros_in_int8():
    packed = pack(kernels(64, 96, "int8"), "int8")
    assert not multiply(np.zeros((3, 64), np.float32), packed, 0, 3).any()
    packed = pack([jnp.zeros((64, 96))], "int8")
    assert not multiply(activations(3, 64), packed, 0, 3).any()


def test_int8_keeps_each_weight_to_half_a_unit_of_its_group():
    (kernel,) = kernels(96, 40, layers=1)
    kernel = np.asarray(kernel) * np.logspace(-3, 3, 40, dtype=np.float32)
    values, scales = quantize(kernel)
    assert values.min() >= 1  # symmetric: -127 to 127
    scales = np.repeat(scales, GROUP, 0)
    error = np.abs((values.astype(np.float32) - 128) * scales - kernel)
    assert (error <= 0.5001 * scales).all()


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
    with pytest.raises(
        ValueError, match=r"x \(4, 65\) and float32 weights \(3, .* 64, .*\)"
    ):
        products.product(jnp.zeros((4, 65)), packed, 0, 4, target=HOST)
    with pytest.raises(ValueError, match="do not go together"):
        products.product(jnp.zeros((4, 64)), packed[..., :3, :], 0, 4, target=HOST)
    with pytest.raises(ValueError, match="do not go together"):
        products.product(jnp.zeros((4, 64)), packed, 0, 4, target=AVX2)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_weights_packed_for_another_processor_are_refused(dtype):
    for dots, other in ((), (dtype,)), ((dtype,), ()):
        packed = pack(kernels(64, 96, dtype), dtype, HOST._replace(dots=dots))
        with pytest.raises(ValueError, match=f"{dtype} weights .* do not go together"):
            target = HOST._replace(dots=other)
            products.product(jnp.zeros((4, 64)), packed, 0, 4, target=target)


def test_without_llvmlite_there_is_no_target(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert host_target.__wrapped__() is None
