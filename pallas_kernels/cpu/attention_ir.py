"""LLVM IR of paged attention.

Each token of a step is an item of work: all its heads, over tiles of as many cached
tokens as a vector has lanes, with the online softmax. Slots are read whole, so that a
block streams from memory in order. Nothing depends on the tokens beside it: a token's
result is the same to the bit in any batch.
"""

import functools
import math
from typing import Any

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
    get,
    load_vector,
    minimum,
    on_stack,
    prefetch,
    put,
    reduce,
    splat,
)
from pallas_kernels.cpu.target import Target
from pallas_kernels.quantised_kv import is_quantised

# One token at a time: contexts differ in length.
_PORTIONS = 0

# exp(r) for |r| <= log(2) / 2, from the highest power down to the second: the
# polynomial of the Cephes library's expf.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2)
_EXP += (1.6666665459e-1, 5.0000001201e-1)
# log(2) in two parts, the first with few digits, so that a multiple of it is exact.
_LOG2_HIGH, _LOG2_LOW = 0.693359375, -2.12194440e-4
_MASKED = -1e30


def build(
    module: ir.Module,
    target: Target,
    head_dim: int,
    dtype: str,
    together: int,
    name: str,
) -> None:
    """Adds the custom call of paged attention.

    Its operands are q f32[N, H, D], scaled; k and v dtype[L, P, B, K, D]; layer i32[];
    block_tables i32[S, T]; rows, lengths i32[N]; num_tokens i32[]; and, where keys and
    values have 8 bits, their scales f32[L, P, K, B]. Its result f32[N, H, D] is zero
    for the tokens from `num_tokens` on.

    Args:
        module: the module.
        target: the processor.
        head_dim: D, a multiple of the lanes.
        dtype: dtype of the cache.
        together: query heads of a KV head that are computed side by side.
        name: of the function.
    """
    size = STORED[dtype][1]
    scaled = is_quantised(dtype)
    attend = _attend(module, target, head_dim, dtype, together)

    def plan(call: custom_call.Buffers) -> custom_call.Work:
        b = call.b
        num_tokens = minimum(b, call.scalar(7), call.dim(0, 0))
        heads, kv_heads = call.dim(0, 1), call.dim(1, 3)
        block_size = call.dim(1, 2)
        slots = b.mul(b.mul(call.scalar(3), call.dim(1, 1)), block_size)
        layer = b.mul(slots, b.mul(kv_heads, I64(head_dim * size)))
        token_bytes = b.mul(heads, I64(head_dim * 4))
        memset = declare(module, "memset", PTR, [PTR, I32, I64])
        rest = b.mul(b.sub(call.dim(0, 0), num_tokens), token_bytes)
        place = at(b, call.out(), b.mul(num_tokens, token_bytes))
        b.call(memset, [place, I32(0), rest])
        total = on_stack(b, 1)
        put(b, total, 0, I64(0))
        with counted_loop(b, I64(0), call.dim(0, 0)) as token:
            length = _entry(b, call.data(6), token)
            put(b, total, 0, b.add(get(b, total, 0, I64), length))
        cost = b.mul(get(b, total, 0, I64), b.mul(heads, I64(2 * head_dim)))
        scales = ()
        if scaled:
            first = b.mul(slots, b.mul(kv_heads, I64(4)))
            scales = (at(b, call.data(8), first), at(b, call.data(9), first))
        words = (
            call.data(0),
            at(b, call.data(1), layer),
            at(b, call.data(2), layer),
            call.out(),
            call.data(4),
            call.data(5),
            call.data(6),
            heads,
            kv_heads,
            block_size,
            call.dim(4, 1),
            *scales,
        )
        return custom_call.Work(num_tokens, cost, _PORTIONS, words)

    def item(b: ir.IRBuilder, words, token) -> None:
        q, k, v, out, tables, rows, lengths, heads, kv_heads, block_size, *rest = words
        width, *scales = rest
        in_q = b.mul(b.mul(token, heads), I64(head_dim * 4))
        table = at(b, tables, b.mul(b.mul(_entry(b, rows, token), width), I64(4)))
        sizes = heads, kv_heads, block_size
        length = _entry(b, lengths, token)
        places = [at(b, q, in_q), k, v, at(b, out, in_q)]
        b.call(attend, [*places, table, length, *sizes, *scales])

    custom_call.build(module, name, plan, item)


def _entry(b: ir.IRBuilder, array, index):
    """Returns an entry of an i32 array, as an i64."""
    return b.sext(get(b, array, b.mul(index, I64(4)), I32), I64)


def _attend(
    module: ir.Module, target: Target, head_dim: int, dtype: str, together: int
) -> ir.Function:
    """Adds the attention of one token.

    Returns:
        `void attend(q, k, v, out, table, length, heads, kv_heads, block_size)`: q and
        out f32[H, D], k and v the layer's first slot, table the sequence's. Where these
        have 8 bits, the layer's first scales of k and of v are two more arguments.
    """
    lanes = target.lanes
    vector = ir.VectorType(FLOAT, lanes)
    kinds = [PTR] * 5 + [I64] * 4 + [PTR] * (2 * is_quantised(dtype))
    function = define(module, f"attend_{head_dim}_{dtype}", VOID, kinds)
    q, k, v, out, table, length, heads, kv_heads, block_size, *scales = function.args
    size = STORED[dtype][1]
    b = ir.IRBuilder(function.append_basic_block())
    cttz = declare(module, "llvm.cttz.i64", I64, [I64, I1])
    shift = b.call(cttz, [block_size, I1(1)])  # the logarithm of a power of two
    last_in_block = b.sub(block_size, I64(1))
    top, total = on_stack(b, heads), on_stack(b, heads)
    group = b.udiv(heads, kv_heads)
    slot_bytes = b.mul(kv_heads, I64(head_dim * size))
    offsets, ahead = on_stack(b, lanes), on_stack(b, lanes)
    scale_offsets = on_stack(b, lanes) if scales else None
    weights = on_stack(b, lanes * together)
    lines = ceil_div(b, slot_bytes, I64(LINE))
    share_of_head = b.mul(ceil_div(b, lines, heads), I64(LINE))
    zeros = constant(vector, 0.0)

    with counted_loop(b, I64(0), heads) as head:
        put(b, top, b.mul(head, I64(8)), FLOAT(_MASKED))
        put(b, total, b.mul(head, I64(8)), FLOAT(0.0))
        _store_row(b, _row(b, out, head, head_dim), [zeros] * (head_dim // lanes))
    with b.if_then(b.icmp_signed("<=", length, I64(0)), likely=False):
        b.ret_void()

    last = b.sub(length, I64(1))
    with counted_loop(b, I64(0), length, I64(lanes)) as start:
        for place, first in ((offsets, start), (ahead, b.add(start, I64(lanes)))):
            for lane in range(lanes):
                # Past the end, the last token again: its score is masked below.
                position = minimum(b, b.add(first, I64(lane)), last)
                block = _entry(b, table, b.lshr(position, shift))
                slot = b.add(b.shl(block, shift), b.and_(position, last_in_block))
                put(b, place, 8 * lane, b.mul(slot, slot_bytes))
                if scales and place is offsets:
                    scale = b.shl(b.mul(block, kv_heads), shift)
                    scale = b.add(scale, b.and_(position, last_in_block))
                    put(b, scale_offsets, 8 * lane, b.shl(scale, I64(2)))
        live = b.icmp_unsigned(
            "<",
            ir.Constant(ir.VectorType(I64, lanes), [I64(i) for i in range(lanes)]),
            splat(b, b.sub(length, start), lanes),
        )
        with counted_loop(b, I64(0), heads, I64(together)) as head:
            fetched = b.mul(head, share_of_head)
            with b.if_then(b.icmp_unsigned("<", fetched, slot_bytes)):
                stop = b.add(fetched, b.mul(share_of_head, I64(together)))
                stop = minimum(b, stop, slot_bytes)
                with counted_loop(b, fetched, stop, I64(LINE)) as line:
                    for lane in range(lanes):
                        place = b.add(get(b, ahead, 8 * lane, I64), line)
                        prefetch(b, at(b, k, place))
                        prefetch(b, at(b, v, place))
            members = [b.add(head, I64(member)) for member in range(together)]
            in_slot = b.mul(b.udiv(head, group), I64(head_dim * size))
            keys, values = at(b, k, in_slot), at(b, v, in_slot)
            queries = [_row(b, q, member, head_dim) for member in members]
            fades = []
            scores = _scores(b, lanes, head_dim, dtype, queries, keys, offsets)
            if scales:
                in_block = b.shl(b.shl(b.udiv(head, group), shift), I64(2))
                k_scales, v_scales = (
                    _gather(b, lanes, at(b, each, in_block), scale_offsets)
                    for each in scales
                )
                scores = [b.fmul(score, k_scales) for score in scores]
            for index, (member, score) in enumerate(zip(members, scores, strict=True)):
                score = b.select(live, score, constant(vector, _MASKED))
                of_head = b.mul(member, I64(8))
                before = get(b, top, of_head, FLOAT)
                highest = reduce(b, functools.partial(_larger, b), score)
                highest = _larger(b, highest, before)
                put(b, top, of_head, highest)
                highest = splat(b, highest, lanes)
                share = b.select(live, _exp(b, b.fsub(score, highest)), zeros)
                fade = _exp(b, b.fsub(splat(b, before, lanes), highest))
                old = get(b, total, of_head, FLOAT)
                old = b.fmul(old, b.extract_element(fade, I32(0)))
                put(b, total, of_head, b.fadd(old, reduce(b, b.fadd, share)))
                if scales:
                    share = b.fmul(share, v_scales)
                b.store(share, at(b, weights, 4 * lanes * index), align=4)
                fades.append(fade)
            places = [_row(b, out, member, head_dim) for member in members]
            _mix(b, lanes, head_dim, dtype, places, fades, weights, values, offsets)

    with counted_loop(b, I64(0), heads) as head:
        factor = b.fdiv(FLOAT(1.0), get(b, total, b.mul(head, I64(8)), FLOAT))
        place = _row(b, out, head, head_dim)
        values = [
            b.fmul(value, splat(b, factor, lanes))
            for value in _load_row(b, place, lanes, head_dim, "float32")
        ]
        _store_row(b, place, values)
    b.ret_void()
    return function


def _gather(b: ir.IRBuilder, lanes: int, base, offsets):
    """Returns a vector of floats that lie at offsets from a place."""
    gathered = constant(ir.VectorType(FLOAT, lanes), 0.0)
    for lane in range(lanes):
        value = get(b, base, get(b, offsets, 8 * lane, I64), FLOAT)
        gathered = b.insert_element(gathered, value, I32(lane))
    return gathered


def _row(b: ir.IRBuilder, base, head, head_dim: int):
    return at(b, base, b.mul(head, I64(4 * head_dim)))


def _load_row(b: ir.IRBuilder, place, lanes: int, head_dim: int, dtype: str) -> list:
    """Returns the vectors of a row dtype[D] as float32."""
    size = STORED[dtype][1]
    return [
        load_vector(b, at(b, place, part * size), lanes, dtype)
        for part in range(0, head_dim, lanes)
    ]


def _store_row(b: ir.IRBuilder, place, vectors: list) -> None:
    for index, vector in enumerate(vectors):
        b.store(vector, at(b, place, 4 * vector.type.count * index), align=4)


def _scores(
    b: ir.IRBuilder, lanes: int, head_dim: int, dtype: str, places: list, k, offsets
) -> list:
    """Returns the products of queries with the keys of a tile, one in each lane.

    Args:
        b: the builder.
        lanes: tokens of a tile.
        head_dim: D.
        dtype: of the keys.
        places: of the queries f32[D]; there is a result for each.
        k: where the keys' head begins.
        offsets: of the tile's tokens, from there.
    """
    queries = [_load_row(b, place, lanes, head_dim, "float32") for place in places]

    def unsummed(lane: int) -> list:
        key = at(b, k, get(b, offsets, 8 * lane, I64))
        keys = _load_row(b, key, lanes, head_dim, dtype)
        totals = [b.fmul(query[0], keys[0]) for query in queries]
        for part in range(1, len(keys)):
            totals = [
                fma(b, query[part], keys[part], total)
                for query, total in zip(queries, totals, strict=True)
            ]
        return totals

    def summed(first: int, count: int) -> list:
        """Returns the sums of some tokens, each spread over lanes / count lanes."""
        if count == 1:
            return unsummed(first)
        half = count // 2
        width = lanes // half
        masks = []
        for side in range(2):
            picked = [
                vector * lanes + token * width + side * (width // 2) + lane
                for vector in range(2)
                for token in range(half)
                for lane in range(width // 2)
            ]
            kind = ir.VectorType(I32, lanes)
            masks.append(ir.Constant(kind, [I32(i) for i in picked]))
        low, high = masks
        return [
            b.fadd(b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high))
            for x, y in zip(
                summed(first, half), summed(first + half, half), strict=True
            )
        ]

    return summed(0, lanes)


def _mix(
    b: ir.IRBuilder,
    lanes: int,
    head_dim: int,
    dtype: str,
    places: list,
    fades: list,
    weights,
    v,
    offsets,
) -> None:
    """Fades what is at each place, f32[D], and adds a tile's values by its weights."""
    sums: list[list[Any]] = [
        [b.fmul(old, fade) for old in _load_row(b, place, lanes, head_dim, "float32")]
        for place, fade in zip(places, fades, strict=True)
    ]
    for lane in range(lanes):
        value = at(b, v, get(b, offsets, 8 * lane, I64))
        values = _load_row(b, value, lanes, head_dim, dtype)
        for index, old in enumerate(sums):
            weight = get(b, weights, 4 * (lanes * index + lane), FLOAT)
            weight = splat(b, weight, lanes)
            sums[index] = [fma(b, weight, x, y) for x, y in zip(values, old)]
    for place, total in zip(places, sums, strict=True):
        _store_row(b, place, total)


def _exp(b: ir.IRBuilder, x):
    """Returns exp(x) of a vector of numbers up to 0, to 2 units in the last place."""
    vector, lanes = x.type, x.type.count
    least = constant(vector, -87.0)
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    whole = b.fmul(x, constant(vector, math.log2(math.e)))
    whole = b.call(
        declare(b.module, f"llvm.roundeven.v{lanes}f32", vector, [vector]), [whole]
    )
    rest = fma(b, whole, constant(vector, -_LOG2_HIGH), x)
    rest = fma(b, whole, constant(vector, -_LOG2_LOW), rest)
    value = constant(vector, _EXP[0])
    for factor in _EXP[1:]:
        value = fma(b, value, rest, constant(vector, factor))
    one = constant(vector, 1.0)
    value = fma(b, value, b.fmul(rest, rest), b.fadd(rest, one))
    whole_number = ir.VectorType(I32, lanes)
    power = b.add(b.fptosi(whole, whole_number), constant(whole_number, 127))
    power = b.shl(power, constant(whole_number, 23))
    return b.fmul(value, b.bitcast(power, vector))


def _larger(b: ir.IRBuilder, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)
