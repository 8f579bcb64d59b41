"""What the tiles of a product are: a few rows times a part of a panel."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from pallas_kernels.cpu.emit import (
    FLOAT,
    I64,
    LINE,
    PTR,
    VOID,
    at,
    constant,
    counted_loop,
    define,
    load_vector,
    prefetch,
)
from pallas_kernels.cpu.target import Target


class Tiles(NamedTuple):
    """Tiles of 1, 2, ... rows, which go through a panel in steps of some words.

    Attributes:
        functions: for each number of rows from 1 up, `void tile(x, w, scales, out,
            first, depth, steps, x_stride, out_stride, ahead, pace)`: multiplies the
            words of `depth` steps from `first` on, and adds to `out` unless that is 0.
            `w` is at that step, the rest at the start of the panel or of the rows. Each
            step asks for the memory at `ahead`, and then `pace` bytes on.
        words: words of a step.
        line: bytes of a panel's weights for a step.
        x_bytes: bytes of a row for a step.
        max_depth: most steps that one sum runs over.
        few_rows: rows up to which memory sets the pace.
    """

    functions: Sequence[ir.Function]
    words: int
    line: int
    x_bytes: int
    max_depth: int
    few_rows: int


class Operands(NamedTuple):
    """The arguments of a tile's function, as `Tiles` describes them."""

    x: Any
    w: Any
    scales: Any
    out: Any
    first: Any
    depth: Any
    steps: Any
    x_stride: Any
    out_stride: Any
    ahead: Any
    pace: Any


# Builds a step: (builder, operands, index of the step in this part, its sums f32 for
# each row and half of the panel) -> the sums after it.
StepFn = Callable[[ir.IRBuilder, Operands, Any, list[list[Any]]], list[list[Any]]]


def tile(
    module: ir.Module, target: Target, name: str, rows: int, step: StepFn
) -> ir.Function:
    """Adds the function of a tile.

    Args:
        module: the module.
        target: the processor.
        name: of the function.
        rows: how many rows it multiplies.
        step: builds a step of its loop.
    """
    function = define(module, name, VOID, [PTR] * 4 + [I64] * 5 + [PTR, I64])
    function.attributes.add("noinline")
    operands = Operands(*function.args)
    vector = ir.VectorType(FLOAT, target.lanes)
    entry = function.append_basic_block()
    b = ir.IRBuilder(entry)
    with counted_loop(b, I64(0), operands.depth) as k:
        sums = [[b.phi(vector) for _ in range(2)] for _ in range(rows)]
        results = step(b, operands, k, sums)
        for pair, after in zip(sums, results, strict=True):
            for total, result in zip(pair, after, strict=True):
                total.add_incoming(constant(vector, 0.0), entry)
                total.add_incoming(result, b.block)
    begins = b.icmp_unsigned("==", operands.first, I64(0))
    for row, pair in enumerate(results):
        for half, result in enumerate(pair):
            place = at(b, operands.out, b.mul(operands.out_stride, I64(row)))
            place = at(b, place, half * target.lanes * 4)
            total = b.fadd(result, load_vector(b, place, target.lanes))
            b.store(b.select(begins, result, total), place, align=4)
    b.ret_void()
    return function


def ask_ahead(b: ir.IRBuilder, operands: Operands, offset, size: int) -> None:
    """Asks for so many bytes of memory, `offset` past what is next."""
    place = at(b, operands.ahead, offset)
    for line in range(0, size, LINE):
        prefetch(b, at(b, place, line))
