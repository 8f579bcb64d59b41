"""LLVM IR of a dense product with packed weights.

The weights are packed in panels, two vectors wide, so that a panel is read from memory
once, in order, whatever the number of rows. A tile multiplies as many rows with one
panel as the registers hold sums for. A row's result does not depend on the rows beside
it, to the bit: each sum runs over the same terms in the same order.
"""

from llvmlite import ir

from pallas_kernels.cpu import custom_call
from pallas_kernels.cpu.emit import (
    FLOAT,
    I1,
    I32,
    I64,
    LINE,
    PTR,
    STORED,
    VOID,
    at,
    ceil_div,
    constant,
    counted_loop,
    declare,
    define,
    fma,
    load_vector,
    minimum,
    prefetch,
    splat,
)
from pallas_kernels.cpu.target import Target

# Sums run over so many inputs at most, then add up: long float32 sums stray.
_MAX_DEPTH = 384
# Few: long reads in order are what memory is best at.
_PORTIONS = 2


def build(module: ir.Module, target: Target, dtype: str, name: str) -> None:
    """Adds the custom call of a product.

    Its operands are x f32[size, inputs], w dtype[layers, panels, inputs, panel], layer
    i32[] and rows i32[]; its result f32[size, panels * panel] is zero from row `rows`
    on.

    Args:
        module: the module.
        target: the processor.
        dtype: dtype of the weights.
        name: of the function.
    """
    panel_product = _panel_product(module, target, dtype)
    size = STORED[dtype][1]

    def plan(call: custom_call.Buffers) -> custom_call.Work:
        b = call.b
        inputs, panels = call.dim(0, 1), call.dim(1, 1)
        panel_bytes = b.mul(inputs, I64(target.panel * size))
        layer = b.mul(b.mul(call.scalar(2), panels), panel_bytes)
        rows = minimum(b, call.scalar(3), call.dim(0, 0))
        row_bytes = b.mul(panels, I64(target.panel * 4))
        memset = declare(module, "memset", PTR, [PTR, I32, I64])
        rest = b.mul(b.sub(call.dim(0, 0), rows), row_bytes)
        b.call(memset, [at(b, call.out(), b.mul(rows, row_bytes)), I32(0), rest])
        work = b.mul(b.mul(rows, inputs), b.mul(panels, I64(target.panel)))
        items = b.select(b.icmp_unsigned("==", rows, I64(0)), I64(0), panels)
        weights = at(b, call.data(1), layer)
        words = call.data(0), weights, call.out(), rows, inputs, panels
        return custom_call.Work(items, work, _PORTIONS, words)

    def item(b: ir.IRBuilder, words, index) -> None:
        x, w, out, rows, inputs, panels = words
        weights = at(b, w, b.mul(index, b.mul(inputs, I64(target.panel * size))))
        place = at(b, out, b.mul(index, I64(target.panel * 4)))
        stride = b.mul(panels, I64(target.panel))
        b.call(panel_product, [x, weights, place, rows, inputs, stride])

    custom_call.build(module, name, plan, item)


def _panel_product(module: ir.Module, target: Target, dtype: str) -> ir.Function:
    """Adds the product of one panel with any number of rows.

    Returns:
        `void panel(x, w, out, rows, inputs, stride)`: x f32[rows, inputs], w
        dtype[inputs, panel], out f32[rows, stride] of which `panel` columns are
        written.
    """
    # Two sums for each row, and room for the weights and a factor.
    max_rows = (target.registers - 4) // 2
    tiles = [_tile(module, target, dtype, rows) for rows in range(1, max_rows + 1)]
    function = define(module, f"panel_{dtype}", VOID, [PTR, PTR, PTR, I64, I64, I64])
    x, w, out, rows, inputs, stride = function.args
    b = ir.IRBuilder(function.append_basic_block())
    size = STORED[dtype][1]

    # Tiles and depths of about equal size.
    height = ceil_div(b, rows, ceil_div(b, rows, I64(max_rows)))
    depth = ceil_div(b, inputs, ceil_div(b, inputs, I64(_MAX_DEPTH)))
    with counted_loop(b, I64(0), inputs, depth) as k:
        part = minimum(b, b.sub(inputs, k), depth)
        weights = at(b, w, b.mul(k, I64(target.panel * size)))
        first = b.icmp_unsigned("==", k, I64(0))
        part_bytes = b.mul(part, I64(target.panel * size))
        with counted_loop(b, I64(0), rows, height) as row:
            count = minimum(b, b.sub(rows, row), height)
            factors = b.gep(x, [b.add(b.mul(row, inputs), k)], source_etype=FLOAT)
            place = b.gep(out, [b.mul(row, stride)], source_etype=FLOAT)
            # The last of several tiles has its weights near, and fetches the next.
            last = b.icmp_unsigned(">=", b.add(row, height), rows)
            several = b.icmp_unsigned("<", height, rows)
            ahead = b.select(b.and_(last, several), part_bytes, I64(0))
            end = b.append_basic_block()
            choice = b.switch(count, end)
            for n, tile in enumerate(tiles, 1):
                block = b.append_basic_block()
                choice.add_case(I64(n), block)
                with b.goto_block(block):
                    b.call(
                        tile,
                        [factors, weights, place, part, inputs, stride, first, ahead],
                    )
                    b.branch(end)
            b.position_at_end(end)
    b.ret_void()
    return function


def _tile(module: ir.Module, target: Target, dtype: str, rows: int) -> ir.Function:
    """Adds the product of `rows` rows with a panel, over some of the inputs.

    Returns:
        `void tile(x, w, out, depth, x_stride, out_stride, first, ahead)`; adds to what
        `out` holds unless this is the first part of the inputs, and asks for the
        weights `ahead` bytes beyond those it uses.
    """
    kinds = [PTR, PTR, PTR, I64, I64, I64, I1, I64]
    function = define(module, f"tile_{dtype}_{rows}", VOID, kinds)
    function.attributes.add("noinline")
    x, w, out, depth, x_stride, out_stride, first, ahead = function.args
    lanes, size = target.lanes, STORED[dtype][1]
    vector = ir.VectorType(FLOAT, lanes)

    entry = function.append_basic_block()
    b = ir.IRBuilder(entry)
    starts = [
        b.gep(x, [b.mul(x_stride, I64(row))], source_etype=FLOAT) for row in range(rows)
    ]
    with counted_loop(b, I64(0), depth) as k:
        body = b.block
        sums = [[b.phi(vector) for _ in range(2)] for _ in range(rows)]
        place = at(b, w, b.mul(k, I64(target.panel * size)))
        weights = [
            load_vector(b, at(b, place, half * lanes * size), lanes, dtype)
            for half in range(2)
        ]
        for line in range(0, target.panel * size, LINE):
            prefetch(b, at(b, at(b, place, ahead), line))
        results = []
        for row, pair in enumerate(sums):
            factor = b.load(b.gep(starts[row], [k], source_etype=FLOAT), typ=FLOAT)
            factor = splat(b, factor, lanes)
            for half, total in enumerate(pair):
                results.append(fma(b, factor, weights[half], total))
                total.add_incoming(constant(vector, 0.0), entry)
                total.add_incoming(results[-1], body)
    for index, result in enumerate(results):
        row, half = divmod(index, 2)
        offset = b.add(b.mul(out_stride, I64(row)), I64(half * lanes))
        place = b.gep(out, [offset], source_etype=FLOAT)
        total = b.fadd(result, b.load(place, typ=vector, align=4))
        b.store(b.select(first, result, total), place, align=4)
    b.ret_void()
    return function
