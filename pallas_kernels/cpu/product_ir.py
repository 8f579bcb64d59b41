"""LLVM IR of a dense product with packed weights.

The weights are packed in panels, two vectors wide, so that a panel is read from memory
once, in order, whatever the number of rows. A tile multiplies as many rows with one
panel as the registers hold sums for. A row's result does not depend on the rows beside
it, to the bit: each sum runs over the same terms in the same order.
"""

from typing import Any

from llvmlite import ir

from pallas_kernels.cpu import custom_call, float_tiles, int8_tiles
from pallas_kernels.cpu.emit import (
    I32,
    I64,
    PTR,
    VOID,
    at,
    ceil_div,
    counted_loop,
    declare,
    define,
    minimum,
)
from pallas_kernels.cpu.target import Target
from pallas_kernels.cpu.tiles import Tiles

# Few: long reads in order are what memory is best at.
_PORTIONS = 2


def build(module: ir.Module, target: Target, dtype: str, name: str) -> None:
    """Adds the custom call of a product.

    Its operands are x[size, inputs], w dtype[layers, panels, words, panel, word], for
    int8 also scales f32[layers, panels, groups, panel], layer i32[] and rows i32[]. Its
    result f32[size, columns] holds the product in its first `panels * panel` columns,
    and zeros from row `rows` on. For int8 dot products there is a second result, room
    for the rows in int8.

    Args:
        module: the module.
        target: the processor.
        dtype: dtype of the weights.
        name: of the function.
    """
    quantized = dtype == "int8"
    rounds = quantized and dtype in target.dots
    if rounds:
        tiles = int8_tiles.make(module, target)
        quantize = int8_tiles.quantize(module, target)
    else:
        tiles = float_tiles.make(module, target, dtype)
    panel_product = _panel_product(module, target, tiles)

    def plan(call: custom_call.Buffers) -> custom_call.Work:
        b = call.b
        panels = call.dim(1, 1)
        steps = b.udiv(call.dim(1, 2), I64(tiles.words))
        layer, rows = call.scalar(2 + quantized), call.scalar(3 + quantized)
        first = b.mul(layer, panels)
        weights = at(b, call.data(1), b.mul(first, b.mul(steps, I64(tiles.line))))
        scales, scale_bytes = weights, I64(0)  # not looked at
        if quantized:
            scale_bytes = b.mul(call.dim(2, 2), I64(4 * target.panel))
            scales = at(b, call.data(2), b.mul(first, scale_bytes))
        rows = minimum(b, rows, call.dim(0, 0))
        stride = b.mul(call.result_dim(1), I64(4))
        memset = declare(module, "memset", PTR, [PTR, I32, I64])
        rest = b.mul(b.sub(call.dim(0, 0), rows), stride)
        b.call(memset, [at(b, call.out(), b.mul(rows, stride)), I32(0), rest])
        x, x_stride = call.data(0), b.mul(steps, I64(tiles.x_bytes))
        if rounds:
            x = call.out(1)
            b.call(quantize, [call.data(0), x, rows, steps])
        work = b.mul(b.mul(rows, steps), b.mul(panels, I64(tiles.words * target.panel)))
        items = b.select(b.icmp_unsigned("==", rows, I64(0)), I64(0), panels)
        shared = x, weights, scales, call.out(), rows, steps, x_stride, stride
        return custom_call.Work(items, work, _PORTIONS, (*shared, scale_bytes))

    def item(b: ir.IRBuilder, shared, index) -> None:
        x, w, scales, out, rows, steps, x_stride, stride, scale_bytes = shared
        w = at(b, w, b.mul(index, b.mul(steps, I64(tiles.line))))
        scales = at(b, scales, b.mul(index, scale_bytes))
        out = at(b, out, b.mul(index, I64(target.panel * 4)))
        b.call(panel_product, [x, w, scales, out, rows, steps, x_stride, stride])

    custom_call.build(module, name, plan, item)


def _panel_product(module: ir.Module, target: Target, tiles: Tiles) -> ir.Function:
    """Adds the product of one panel with any number of rows.

    Returns:
        `void panel(x, w, scales, out, rows, steps, x_stride, stride)`: x[rows, steps],
        w[steps, panel], out f32[rows, stride] of which `panel` columns are written;
        strides in bytes.
    """
    max_rows = len(tiles.functions)
    function = define(module, "panel", VOID, [PTR] * 4 + [I64] * 4)
    x, w, scales, out, rows, steps, x_stride, stride = function.args
    b = ir.IRBuilder(function.append_basic_block())

    # Tiles and depths of about equal size.
    num_tiles = ceil_div(b, rows, I64(max_rows))
    height = ceil_div(b, rows, num_tiles)
    depth = ceil_div(b, steps, ceil_div(b, steps, I64(tiles.max_depth)))
    with counted_loop(b, I64(0), steps, depth) as k:
        part = minimum(b, b.sub(steps, k), depth)
        weights = at(b, w, b.mul(k, I64(tiles.line)))
        part_bytes = b.mul(part, I64(tiles.line))
        # Each tile asks for its share of the weights that come next, at an even pace.
        # With few rows memory sets the pace, and the processor alone does better.
        few = b.icmp_unsigned("<=", rows, I64(tiles.few_rows))
        next_weights = b.select(few, weights, at(b, weights, part_bytes))
        share = b.udiv(part_bytes, num_tiles)
        pace = b.select(few, I64(0), b.udiv(I64(tiles.line), num_tiles))
        with counted_loop(b, I64(0), rows, height) as row:
            count = minimum(b, b.sub(rows, row), height)
            ahead = at(b, next_weights, b.mul(b.udiv(row, height), share))
            arguments: list[Any] = [at(b, x, b.mul(row, x_stride)), weights, scales]
            arguments += [at(b, out, b.mul(row, stride)), k, part, steps, x_stride]
            arguments += [stride, ahead, pace]
            end = b.append_basic_block()
            choice = b.switch(count, end)
            for n, tile in enumerate(tiles.functions, 1):
                block = b.append_basic_block()
                choice.add_case(I64(n), block)
                with b.goto_block(block):
                    b.call(tile, arguments)
                    b.branch(end)
            b.position_at_end(end)
    b.ret_void()
    return function
