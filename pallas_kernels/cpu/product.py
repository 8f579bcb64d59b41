"""Dense products with packed weights, as an operation of a jitted program on CPU."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.target import GROUP, Target

_MEMORY_PAGE = 4096 // 4  # in float32 numbers, like the next
_LONGEST_KEPT_APART = 16384
DTYPES = ("float32", "bfloat16", "int8")


class Int8Weights(NamedTuple):
    """Packed weights in int8, with a scale for each group of inputs of an output.

    Attributes:
        values: u8[L, J, words, w, p], of which 128 stands for 0.
        scales: f32[L, J, words * p / GROUP, w].
    """

    values: jax.Array
    scales: jax.Array


def product(
    x: jax.Array,
    weights: jax.Array | Int8Weights,
    layer: int | jax.Array,
    rows: int | jax.Array,
    *,
    target: Target,
) -> jax.Array:
    """Multiplies the first rows of `x` with one layer's packed weights.

    A row's result is the same to the bit whatever the other rows are.

    Args:
        x: f32[N, in], or bf16. Where the processor has dot products of the weights'
            dtype (`target.dots`), the rows are rounded to it: to bfloat16, or to int8
            with a scale for each group of `GROUP` numbers.
        weights: f32 or bf16[L, J, words, w, p], or int8: panels of `w = target.panel`
            outputs, in words of `p = target.word(dtype)` inputs.
        layer: i32[], which layer.
        rows: i32[], how many rows to multiply.
        target: the processor: this machine's, or a lesser one.

    Returns:
        f32[N, J * w], summed in float32; zeros from row `rows` on.

    Raises:
        ValueError: the shapes do not go together.
    """
    values, *scales = weights if isinstance(weights, Int8Weights) else (weights,)
    dtype = "int8" if scales else str(values.dtype)
    _, panels, words, width, word = values.shape
    inputs = words * word
    step = GROUP if scales else word
    expected = target.panel, target.word(dtype)
    if (width, word) != expected or -(-x.shape[1] // step) * step != inputs:
        raise ValueError(
            f"x {x.shape} and {dtype} weights {values.shape} do not go together: "
            "weights [L, J, words, {}, {}] belong to x [N, {} * words]".format(
                *expected, expected[1]
            )
        )
    _register(target, dtype)
    x = x.astype(jnp.bfloat16 if dtype == "bfloat16" and word > 1 else jnp.float32)
    x = jnp.pad(x, ((0, 0), (0, inputs - x.shape[1])))
    columns = panels * width
    # Rows whose distance is whole memory pages meet in the same places of the core's
    # cache: a panel more keeps them apart. Longer rows would be copied by their reader.
    meet = columns % _MEMORY_PAGE == 0 and columns <= _LONGEST_KEPT_APART
    distance = columns + width if meet else columns
    results = [jax.ShapeDtypeStruct((len(x), distance), jnp.float32)]
    if scales and word > 1:
        rounded = inputs + inputs // GROUP * 8
        results.append(jax.ShapeDtypeStruct((len(x), rounded), jnp.uint8))
    call = jax.ffi.ffi_call(_name(target, dtype), results)
    result, *_ = call(x, values, *scales, jnp.int32(layer), jnp.int32(rows))
    return result[:, :columns]


def _name(target: Target, dtype: str) -> str:
    kind = "_".join([dtype, *target.dots])
    return f"paged_jax_product_{target.cpu}_{target.lanes}_{kind}"


@functools.cache
def _register(target: Target, dtype: str) -> Any:
    # llvmlite is only needed where its code runs.
    from llvmlite import ir

    from pallas_kernels.cpu import custom_call, product_ir

    module = ir.Module()
    product_ir.build(module, target, dtype, "product")
    return custom_call.register(module, target, {"product": _name(target, dtype)})
