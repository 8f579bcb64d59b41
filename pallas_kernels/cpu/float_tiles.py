"""LLVM IR of tiles that multiply floating-point numbers.

Weights of two bytes or one are widened to float32 as they are loaded, or pairs of
bfloat16 weights are multiplied with pairs of bfloat16 inputs.
"""

from llvmlite import ir

from pallas_kernels.cpu.emit import (
    FLOAT,
    I8,
    I32,
    I64,
    STORED,
    at,
    constant,
    dot_pairs,
    fma,
    load_vector,
    splat,
)
from pallas_kernels.cpu.target import GROUP, Target
from pallas_kernels.cpu.tiles import Operands, Tiles, ask_ahead, tile

# Sums run over so many words at most, then add up: long float32 sums stray.
_MAX_DEPTH = 384
_X_BYTES = 4


def make(module: ir.Module, target: Target, dtype: str) -> Tiles:
    """Adds the tiles of a product: a step is one word.

    Args:
        module: the module.
        target: the processor.
        dtype: dtype of the weights.
    """
    lanes, word = target.lanes, target.word(dtype)
    size = 1 if dtype == "int8" else STORED[dtype][1]
    line = target.panel * word * size
    pairs = dtype == "bfloat16" and word == 2
    multiply, number = (dot_pairs, I32) if pairs else (fma, FLOAT)

    def weights(b: ir.IRBuilder, tile: Operands, k) -> list:
        place = at(b, tile.w, b.mul(k, I64(line)))
        places = [at(b, place, half * line // 2) for half in range(2)]
        if pairs:
            kind = ir.VectorType(I32, lanes)
            return [b.load(place, typ=kind, align=4) for place in places]
        if dtype == "int8":
            group = b.udiv(b.add(tile.first, k), I64(GROUP))
            scales = at(b, tile.scales, b.mul(group, I64(4 * target.panel)))
            return [
                b.fmul(
                    _load_int8(b, place, lanes),
                    load_vector(b, at(b, scales, half * lanes * 4), lanes),
                )
                for half, place in enumerate(places)
            ]
        return [load_vector(b, place, lanes, dtype) for place in places]

    def step(b: ir.IRBuilder, tile: Operands, k, sums) -> list:
        halves = weights(b, tile, k)
        ask_ahead(b, tile, b.mul(k, tile.pace), line)
        x = at(b, tile.x, b.mul(b.add(tile.first, k), I64(_X_BYTES)))
        results = []
        for row, pair in enumerate(sums):
            place = at(b, x, b.mul(tile.x_stride, I64(row)))
            factor = splat(b, b.load(place, typ=number), lanes)
            results.append(
                [
                    multiply(b, factor, half, total)
                    for half, total in zip(halves, pair, strict=True)
                ]
            )
        return results

    # Two sums for each row, and room for the weights and a factor.
    max_rows = (target.registers - 4) // 2
    functions = [
        tile(module, target, f"tile_{rows}", rows, step)
        for rows in range(1, max_rows + 1)
    ]
    few_rows = max_rows // 2 + 1
    return Tiles(functions, 1, line, _X_BYTES, _MAX_DEPTH, few_rows)


def _load_int8(b: ir.IRBuilder, place, lanes: int):
    """Returns so many weights, stored with 128 added, as float32."""
    value = b.load(place, typ=ir.VectorType(I8, lanes), align=1)
    wide = ir.VectorType(I32, lanes)
    value = b.sub(b.zext(value, wide), constant(wide, 128))
    return b.sitofp(value, ir.VectorType(FLOAT, lanes))
