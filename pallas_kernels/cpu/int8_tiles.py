"""LLVM IR of tiles that multiply rows and weights in int8 (AVX512-VNNI).

Both have a scale for each group of inputs. The instruction multiplies four unsigned
numbers with four signed ones and adds them to an int32, exactly: weights are stored
with 128 added, and what that adds to the sum of a group, 128 times the sum of its
inputs, is subtracted by starting from it. Each group's sum is scaled, and added in
float32.
"""

import functools
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.emit import (
    FLOAT,
    I8,
    I32,
    I64,
    PTR,
    VOID,
    at,
    constant,
    counted_loop,
    declare,
    define,
    dot_quads,
    fma,
    get,
    load_vector,
    maximum,
    put,
    reduce,
    splat,
)
from pallas_kernels.cpu.target import GROUP, Target
from pallas_kernels.cpu.tiles import Operands, Tiles, ask_ahead, tile

_WORDS = GROUP // 4
# A row in int8: its groups, then the scale of each, f32, then what its sums start
# from, i32.
X_BYTES = GROUP + 4 + 4
# Steps whose weights stay in the core's first cache.
_MAX_DEPTH = 48
_ROWS = 6
_FEW_ROWS = 4


def make(module: ir.Module, target: Target) -> Tiles:
    """Adds the tiles of a product: a step is a group.

    Args:
        module: the module.
        target: the processor.
    """
    lanes = target.lanes
    word_bytes = 4 * target.panel
    line = _WORDS * word_bytes

    def step(b: ir.IRBuilder, tile: Operands, k, sums) -> list:
        rows, kind = len(sums), ir.VectorType(I32, lanes)
        group = b.add(tile.first, k)
        starts = [at(b, tile.x, b.mul(tile.x_stride, I64(row))) for row in range(rows)]
        groups = [at(b, start, b.mul(group, I64(GROUP))) for start in starts]
        of_scale = b.add(b.mul(tile.steps, I64(GROUP)), b.mul(group, I64(4)))
        of_start = b.add(of_scale, b.mul(tile.steps, I64(4)))
        starts_from = [
            splat(b, get(b, start, of_start, I32), lanes) for start in starts
        ]
        weights = at(b, tile.w, b.mul(k, I64(line)))
        ahead = b.mul(k, tile.pace)
        pace = b.udiv(tile.pace, I64(_WORDS))
        # A loop, since unrolled the code is put in an order that takes more registers
        # than there are.
        before = b.block
        with counted_loop(b, I64(0), I64(_WORDS)) as word:
            whole: list[list[Any]] = [[b.phi(kind) for _ in range(2)] for _ in starts]
            place = at(b, weights, b.mul(word, I64(word_bytes)))
            halves = [
                b.load(at(b, place, half * lanes * 4), typ=kind, align=4)
                for half in range(2)
            ]
            ask_ahead(b, tile, b.add(ahead, b.mul(pace, word)), word_bytes)
            for row, pair in enumerate(whole):
                x = get(b, groups[row], b.mul(word, I64(4)), I32)
                x = splat(b, x, lanes)
                for half, value in enumerate(pair):
                    value.add_incoming(starts_from[row], before)
                    pair[half] = dot_quads(b, halves[half], x, value)
                    value.add_incoming(pair[half], b.block)
        scales = at(b, tile.scales, b.mul(group, I64(word_bytes)))
        scales = [
            load_vector(b, at(b, scales, half * lanes * 4), lanes) for half in (0, 1)
        ]
        results = []
        for row in range(rows):
            factor = splat(b, get(b, starts[row], of_scale, FLOAT), lanes)
            results.append(
                [
                    fma(
                        b,
                        b.sitofp(whole[row][half], ir.VectorType(FLOAT, lanes)),
                        b.fmul(factor, scales[half]),
                        sums[row][half],
                    )
                    for half in range(2)
                ]
            )
        return results

    functions = [
        tile(module, target, f"tile_{rows}", rows, step) for rows in range(1, _ROWS + 1)
    ]
    return Tiles(functions, _WORDS, line, X_BYTES, _MAX_DEPTH, _FEW_ROWS)


def quantize(module: ir.Module, target: Target) -> ir.Function:
    """Adds the rounding of rows to int8.

    Returns:
        `void quantize(x, out, rows, groups)`: x f32[rows, groups * GROUP], out as the
        tiles read it.
    """
    lanes = target.lanes
    function = define(module, "quantize", VOID, [PTR, PTR, I64, I64])
    x, out, rows, groups = function.args
    b = ir.IRBuilder(function.append_basic_block())
    vector, whole = ir.VectorType(FLOAT, lanes), ir.VectorType(I32, lanes)
    even = declare(module, f"llvm.roundeven.v{lanes}f32", vector, [vector])
    with b.if_then(b.icmp_unsigned("==", rows, I64(0)), likely=False):
        b.ret_void()
    with counted_loop(b, I64(0), rows) as row:
        source = at(b, x, b.mul(row, b.mul(groups, I64(4 * GROUP))))
        place = at(b, out, b.mul(row, b.mul(groups, I64(X_BYTES))))
        scales = at(b, place, b.mul(groups, I64(GROUP)))
        starts = at(b, scales, b.mul(groups, I64(4)))
        with counted_loop(b, I64(0), groups) as group:
            numbers = at(b, source, b.mul(group, I64(4 * GROUP)))
            parts = [
                load_vector(b, at(b, numbers, 4 * part), lanes)
                for part in range(0, GROUP, lanes)
            ]
            # The largest, by the bits of the sizes: NaN is above all of them.
            sizes = constant(whole, 0)
            for part in parts:
                size = b.and_(b.bitcast(part, whole), constant(whole, 0x7FFFFFFF))
                sizes = maximum(b, size, sizes)
            size = b.bitcast(reduce(b, functools.partial(maximum, b), sizes), FLOAT)
            put(b, scales, b.mul(group, I64(4)), b.fmul(size, FLOAT(1 / 127)))
            some = b.fcmp_unordered(">", size, FLOAT(0.0))
            factor = b.select(some, b.fdiv(FLOAT(127.0), size), FLOAT(0.0))
            factor = splat(b, factor, lanes)
            sums = constant(whole, 0)
            narrowed = at(b, place, b.mul(group, I64(GROUP)))
            for part, number in enumerate(parts):
                rounded = b.call(even, [b.fmul(number, factor)])
                rounded = b.fptosi(rounded, whole)
                sums = b.add(sums, rounded)
                narrow = b.trunc(rounded, ir.VectorType(I8, lanes))
                b.store(narrow, at(b, narrowed, part * lanes), align=1)
            start = b.mul(reduce(b, b.add, sums), I32(-128))
            put(b, starts, b.mul(group, I64(4)), start)
    b.ret_void()
    return function
