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
    dot_pairs,
    fma,
    load_vector,
    minimum,
    prefetch,
    splat,
)
from pallas_kernels.cpu.target import Target

# Sums run over so many words at most, then add up: long float32 sums stray.
_MAX_DEPTH = 384
# Few: long reads in order are what memory is best at.
_PORTIONS = 2


def build(module: ir.Module, target: Target, dtype: str, name: str) -> None:
    """Adds the custom call of a product.

    Its operands are x[size, words * word], w dtype[layers, panels, words, panel, word],
    layer i32[] and rows i32[]; its result f32[size, columns] holds the product in its
    first `panels * panel` columns, and zeros from row `rows` on. A word is what
    `target.word(dtype)` says: with one number in it x is f32, with more the dtype of w.

    Args:
        module: the module.
        target: the processor.
        dtype: dtype of the weights.
        name: of the function.
    """
    panel_product = _panel_product(module, target, dtype)
    line = _line_bytes(target, dtype)

    def plan(call: custom_call.Buffers) -> custom_call.Work:
        b = call.b
        words, panels = call.dim(1, 2), call.dim(1, 1)
        panel_bytes = b.mul(words, I64(line))
        layer = b.mul(b.mul(call.scalar(2), panels), panel_bytes)
        rows = minimum(b, call.scalar(3), call.dim(0, 0))
        stride = call.result_dim(1)
        row_bytes = b.mul(stride, I64(4))
        memset = declare(module, "memset", PTR, [PTR, I32, I64])
        rest = b.mul(b.sub(call.dim(0, 0), rows), row_bytes)
        b.call(memset, [at(b, call.out(), b.mul(rows, row_bytes)), I32(0), rest])
        work = b.mul(b.mul(rows, words), b.mul(panels, I64(target.panel)))
        items = b.select(b.icmp_unsigned("==", rows, I64(0)), I64(0), panels)
        weights = at(b, call.data(1), layer)
        shared = call.data(0), weights, call.out(), rows, words, stride
        return custom_call.Work(items, work, _PORTIONS, shared)

    def item(b: ir.IRBuilder, shared, index) -> None:
        x, w, out, rows, words, stride = shared
        weights = at(b, w, b.mul(index, b.mul(words, I64(line))))
        place = at(b, out, b.mul(index, I64(target.panel * 4)))
        b.call(panel_product, [x, weights, place, rows, words, stride])

    custom_call.build(module, name, plan, item)


def _line_bytes(target: Target, dtype: str) -> int:
    """Returns the bytes of a panel's weights for one word of inputs."""
    return target.panel * target.word(dtype) * STORED[dtype][1]


def _panel_product(module: ir.Module, target: Target, dtype: str) -> ir.Function:
    """Adds the product of one panel with any number of rows.

    Returns:
        `void panel(x, w, out, rows, words, stride)`: x[rows, words], w[words, panel],
        out f32[rows, stride] of which `panel` columns are written.
    """
    # Two sums for each row, and room for the weights and a factor.
    max_rows = (target.registers - 4) // 2
    tiles = [_tile(module, target, dtype, rows) for rows in range(1, max_rows + 1)]
    function = define(module, f"panel_{dtype}", VOID, [PTR, PTR, PTR, I64, I64, I64])
    x, w, out, rows, words, stride = function.args
    b = ir.IRBuilder(function.append_basic_block())
    line = _line_bytes(target, dtype)

    # Tiles and depths of about equal size.
    num_tiles = ceil_div(b, rows, I64(max_rows))
    height = ceil_div(b, rows, num_tiles)
    depth = ceil_div(b, words, ceil_div(b, words, I64(_MAX_DEPTH)))
    with counted_loop(b, I64(0), words, depth) as k:
        part = minimum(b, b.sub(words, k), depth)
        weights = at(b, w, b.mul(k, I64(line)))
        first = b.icmp_unsigned("==", k, I64(0))
        part_bytes = b.mul(part, I64(line))
        # Each tile asks for its share of the weights that come next, at an even pace.
        # With few rows memory sets the pace, and the processor alone does better.
        few = b.icmp_unsigned("<=", rows, I64(max_rows // 2 + 1))
        next_weights = b.select(few, weights, at(b, weights, part_bytes))
        share = b.udiv(part_bytes, num_tiles)
        pace = b.select(few, I64(0), b.udiv(I64(line), num_tiles))
        with counted_loop(b, I64(0), rows, height) as row:
            count = minimum(b, b.sub(rows, row), height)
            factors = b.gep(x, [b.add(b.mul(row, words), k)], source_etype=I32)
            place = b.gep(out, [b.mul(row, stride)], source_etype=FLOAT)
            ahead = at(b, next_weights, b.mul(b.udiv(row, height), share))
            arguments = [factors, weights, place, part, words, stride, first]
            arguments += [ahead, pace]
            end = b.append_basic_block()
            choice = b.switch(count, end)
            for n, tile in enumerate(tiles, 1):
                block = b.append_basic_block()
                choice.add_case(I64(n), block)
                with b.goto_block(block):
                    b.call(tile, arguments)
                    b.branch(end)
            b.position_at_end(end)
    b.ret_void()
    return function


def _tile(module: ir.Module, target: Target, dtype: str, rows: int) -> ir.Function:
    """Adds the product of `rows` rows with a panel, over some of the words.

    Returns:
        `void tile(x, w, out, depth, x_stride, out_stride, first, ahead, pace)`; adds to
        what `out` holds unless this is the first part, and asks for the
        memory at `ahead`, `pace` bytes for each word.
    """
    kinds = [PTR, PTR, PTR, I64, I64, I64, I1, PTR, I64]
    function = define(module, f"tile_{dtype}_{rows}", VOID, kinds)
    function.attributes.add("noinline")
    x, w, out, depth, x_stride, out_stride, first, ahead, pace = function.args
    lanes, line = target.lanes, _line_bytes(target, dtype)
    pairs = target.word(dtype) == 2
    vector = ir.VectorType(FLOAT, lanes)
    multiply, number = (dot_pairs, I32) if pairs else (fma, FLOAT)

    def load_words(b: ir.IRBuilder, place):
        if pairs:
            return b.load(place, typ=ir.VectorType(I32, lanes), align=4)
        return load_vector(b, place, lanes, dtype)

    entry = function.append_basic_block()
    b = ir.IRBuilder(entry)
    starts = [
        b.gep(x, [b.mul(x_stride, I64(row))], source_etype=I32) for row in range(rows)
    ]
    with counted_loop(b, I64(0), depth) as k:
        body = b.block
        sums = [[b.phi(vector) for _ in range(2)] for _ in range(rows)]
        place = at(b, w, b.mul(k, I64(line)))
        weights = [load_words(b, at(b, place, half * line // 2)) for half in range(2)]
        following = at(b, ahead, b.mul(k, pace))
        for offset in range(0, line, LINE):
            prefetch(b, at(b, following, offset))
        results = []
        for row, pair in enumerate(sums):
            factor = b.load(b.gep(starts[row], [k], source_etype=I32), typ=number)
            factor = splat(b, factor, lanes)
            for half, total in enumerate(pair):
                results.append(multiply(b, factor, weights[half], total))
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
