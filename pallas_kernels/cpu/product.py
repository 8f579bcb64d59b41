"""Dense products with packed weights, as an operation of a jitted program on CPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.target import Target

_MEMORY_PAGE = 4096 // 4  # in float32 numbers, like the next
_LONGEST_KEPT_APART = 16384
DTYPES = ("float32", "bfloat16")


def product(
    x: jax.Array,
    weights: jax.Array,
    layer: int | jax.Array,
    rows: int | jax.Array,
    *,
    target: Target,
) -> jax.Array:
    """Multiplies the first rows of `x` with one layer's packed weights.

    A row's result is the same to the bit whatever the other rows are.

    Args:
        x: f32[N, in], or bf16.
        weights: dtype[L, J, words, w, p], panels of `w = target.panel` outputs, float32
            or bfloat16, in words of `p = target.word(dtype)` inputs. Where p is above
            1, `x` is rounded to the dtype of the weights. Sums are float32 always.
        layer: i32[], which layer.
        rows: i32[], how many rows to multiply.
        target: the processor: this machine's, or a lesser one.

    Returns:
        f32[N, J * w]; zeros from row `rows` on.

    Raises:
        ValueError: the shapes do not go together.
    """
    _, panels, words, width, word = weights.shape
    expected = target.panel, target.word(str(weights.dtype))
    if (width, word) != expected or -(-x.shape[1] // word) != words:
        raise ValueError(
            f"x {x.shape} and weights {weights.shape} do not go together: weights "
            "[L, J, words, {}, {}] belong to x [N, {}]".format(
                *expected, "words" if expected[1] == 1 else f"{expected[1]} * words"
            )
        )
    _register(target, str(weights.dtype))
    x = x.astype(weights.dtype if word > 1 else jnp.float32)
    x = jnp.pad(x, ((0, 0), (0, words * word - x.shape[1])))
    columns = panels * width
    # Rows whose distance is whole memory pages meet in the same places of the core's
    # cache: a panel more keeps them apart. Longer rows would be copied by their reader.
    meet = columns % _MEMORY_PAGE == 0 and columns <= _LONGEST_KEPT_APART
    distance = columns + width if meet else columns
    call = jax.ffi.ffi_call(
        _name(target, str(weights.dtype)),
        jax.ShapeDtypeStruct((x.shape[0], distance), jnp.float32),
    )
    result = call(x, weights, jnp.int32(layer), jnp.int32(rows))
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
