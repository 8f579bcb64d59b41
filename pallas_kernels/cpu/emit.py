"""Small pieces of LLVM IR that the kernels are put together from."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT, PTR, VOID = ir.FloatType(), ir.PointerType(), ir.VoidType()
NULL = PTR(None)

LINE = 64  # bytes of a cache line

# How elements of these dtypes are stored, and their bytes.
STORED = {
    "float32": (FLOAT, 4),
    "bfloat16": (I16, 2),
    "float16": (ir.HalfType(), 2),
    "int8": (I8, 1),
    "float8_e4m3fn": (I8, 1),
}


def declare(module: ir.Module, name: str, result, arguments: list) -> ir.Function:
    """Returns a function that is defined elsewhere, declared once in a module."""
    if name in module.globals:
        return module.globals[name]
    return ir.Function(module, ir.FunctionType(result, arguments), name)


def define(module: ir.Module, name: str, result, arguments: list) -> ir.Function:
    """Returns a new function that is called from its own module only."""
    function = ir.Function(module, ir.FunctionType(result, arguments), name)
    function.linkage = "internal"
    return function


def at(b: ir.IRBuilder, base, offset):
    """Returns the address so many bytes, an int or an i64, past another."""
    return b.gep(
        base, [I64(offset) if isinstance(offset, int) else offset], source_etype=I8
    )


def get(b: ir.IRBuilder, base, offset, kind):
    """Loads what lies so many bytes past an address."""
    return b.load(at(b, base, offset), typ=kind)


def put(b: ir.IRBuilder, base, offset, value) -> None:
    """Stores a value so many bytes past an address."""
    b.store(value, at(b, base, offset))


def on_stack(b: ir.IRBuilder, words):
    """Returns the address of so many 8-byte words, an int or an i64, on the stack."""
    return b.alloca(PTR, words)


def prefetch(b: ir.IRBuilder, place) -> None:
    """Asks for a cache line ahead of its use, for the core's second-level cache."""
    kinds = [PTR, I32, I32, I32]
    ask = declare(b.module, "llvm.prefetch.p0", VOID, kinds)
    b.call(ask, [place, I32(0), I32(2), I32(1)])


def minimum(b: ir.IRBuilder, x, y):
    """Returns the smaller of two unsigned integers."""
    return b.select(b.icmp_unsigned("<", x, y), x, y)


def maximum(b: ir.IRBuilder, x, y):
    """Returns the larger of two unsigned integers."""
    return b.select(b.icmp_unsigned("<", x, y), y, x)


def ceil_div(b: ir.IRBuilder, n, d):
    """Returns n / d, rounded up, of i64."""
    return b.udiv(b.add(n, b.sub(d, I64(1))), d)


@contextlib.contextmanager
def counted_loop(b: ir.IRBuilder, start, stop, step=None) -> Iterator[ir.Value]:
    """Builds the body of a loop of one turn or more; yields its index, an i64.

    The step is 1 unless one is given.
    """
    before, body = b.block, b.append_basic_block()
    b.branch(body)
    b.position_at_end(body)
    index = b.phi(I64)
    index.add_incoming(start, before)
    yield index
    following = b.add(index, I64(1) if step is None else step)
    index.add_incoming(following, b.block)
    end = b.append_basic_block()
    b.cbranch(b.icmp_unsigned("<", following, stop), body, end)
    b.position_at_end(end)


def constant(vector: ir.VectorType, value) -> ir.Constant:
    """Returns a vector of one value."""
    return ir.Constant(vector, [vector.element(value)] * vector.count)


def splat(b: ir.IRBuilder, value, lanes: int):
    """Returns a vector of one value."""
    vector = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    mask = ir.Constant(ir.VectorType(I32, lanes), [I32(0)] * lanes)
    return b.shuffle_vector(one, one, mask)


def load_vector(b: ir.IRBuilder, place, lanes: int, dtype: str = "float32"):
    """Returns so many elements of a dtype as float32."""
    element, size = STORED[dtype]
    value = b.load(place, typ=ir.VectorType(element, lanes), align=size)
    vector = ir.VectorType(FLOAT, lanes)
    if dtype == "bfloat16":
        wide = ir.VectorType(I32, lanes)
        return b.bitcast(b.shl(b.zext(value, wide), constant(wide, 16)), vector)
    if dtype == "float16":
        return b.fpext(value, vector)
    if dtype == "int8":
        return b.sitofp(value, vector)
    if dtype == "float8_e4m3fn":
        return _widen_e4m3(b, value)
    return value


def _widen_e4m3(b: ir.IRBuilder, bits):
    """Returns numbers of e4m3 as float32, by way of float16: all but NaN."""
    lanes = bits.type.count
    wide, half = ir.VectorType(I16, lanes), ir.VectorType(ir.HalfType(), lanes)
    # The sign stays at the left as the number is widened.
    shifted = b.shl(b.sext(bits, wide), constant(wide, 7))
    shifted = b.and_(shifted, constant(wide, 0xBF80 - (1 << 16)))
    # Its exponents are 8 below those of a float16.
    kind = ir.VectorType(FLOAT, lanes)
    value = b.fpext(b.bitcast(shifted, half), kind)
    return b.fmul(value, constant(kind, 256.0))


def fma(b: ir.IRBuilder, x, y, z):
    """Returns x * y + z of vectors, rounded once."""
    kind = z.type
    return b.call(
        declare(b.module, f"llvm.fma.v{kind.count}f32", kind, [kind] * 3), [x, y, z]
    )


def dot_pairs(b: ir.IRBuilder, x, y, z):
    """Returns z + x * y, where each lane of x and y is two bfloat16 numbers."""
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * z.type.count}"
    kinds = [z.type, x.type, y.type]
    return b.call(declare(b.module, name, z.type, kinds), [z, x, y])


def dot_quads(b: ir.IRBuilder, x, y, z):
    """Returns z + x * y, int32: a lane of x is four uint8, one of y four int8."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * z.type.count}"
    kinds = [z.type, x.type, y.type]
    return b.call(declare(b.module, name, z.type, kinds), [z, x, y])


def reduce(b: ir.IRBuilder, combine: Callable[[Any, Any], Any], x):
    """Returns a vector's lanes combined to one number, half with half."""
    lanes = x.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (
            ir.Constant(
                ir.VectorType(I32, lanes), [I32(side + i) for i in range(lanes)]
            )
            for side in (0, lanes)
        )
        x = combine(b.shuffle_vector(x, x, low), b.shuffle_vector(x, x, high))
    return b.extract_element(x, I32(0))
