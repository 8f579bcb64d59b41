"""An XLA custom call whose work is divided among XLA's own threads.

XLA calls `handler(frame)` with the addresses of operands and results (the C interface
of its FFI, `xla/ffi/api/c_api.h` in the jaxlib package). Items of work are handed out
by a counter, to the calling thread and to tasks on XLA's thread pool. The caller waits
for items that a task has begun, never for a task to begin, so that a pool without a
free thread only means less help. What the tasks share is freed by the last to leave.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import llvmlite.binding as llvm
from llvmlite import ir

from pallas_kernels.cpu.emit import (
    I32,
    I64,
    NULL,
    PTR,
    VOID,
    at,
    counted_loop,
    declare,
    define,
    get,
    maximum,
    minimum,
    on_stack,
    put,
)
from pallas_kernels.cpu.target import Target

# Byte offsets in the structures of the interface, the same in all of its version 0.
_FRAME_EXTENSION, _FRAME_API, _FRAME_CONTEXT = 8, 16, 24
_FRAME_OPERANDS, _FRAME_RESULTS = 72, 112
_BUFFER_DATA, _BUFFER_DIMS = 24, 40
_API_SCHEDULE, _API_NUM_THREADS = 136, 144
_EXTENSION_METADATA = 24
_METADATA_MAJOR, _METADATA_MINOR, _METADATA_TRAITS = 24, 28, 32
_CALL = ir.FunctionType(PTR, [PTR]).as_pointer()
# The oldest version with the thread pool.
_MINOR_VERSION = 1

# Multiplications below which other threads are not worth waking.
_WORTH_A_THREAD = 100_000

# Shared: three counters on cache lines of their own, then what is only read.
_HOLDERS, _NEXT, _DONE, _ITEMS, _LARGE, _PORTION, _WORDS = (
    0,
    64,
    128,
    192,
    200,
    208,
    216,
)


class Buffers(NamedTuple):
    """The operands and the results of a call, while its code is built.

    Attributes:
        b: the builder.
        operands: address of the array of operands.
        results: address of the array of results.
    """

    b: ir.IRBuilder
    operands: Any
    results: Any

    def data(self, index: int):
        """Returns the address of an operand's elements."""
        return get(
            self.b, get(self.b, self.operands, 8 * index, PTR), _BUFFER_DATA, PTR
        )

    def dim(self, index: int, axis: int):
        """Returns the size of an operand's axis, an i64."""
        operand = get(self.b, self.operands, 8 * index, PTR)
        return get(self.b, get(self.b, operand, _BUFFER_DIMS, PTR), 8 * axis, I64)

    def scalar(self, index: int):
        """Returns the value of an operand i32[], as an i64."""
        return self.b.sext(get(self.b, self.data(index), 0, I32), I64)

    def result_dim(self, axis: int):
        """Returns the size of an axis of the first result, an i64."""
        result = get(self.b, self.results, 0, PTR)
        return get(self.b, get(self.b, result, _BUFFER_DIMS, PTR), 8 * axis, I64)

    def out(self, index: int = 0):
        """Returns the address of a result's elements."""
        return get(self.b, get(self.b, self.results, 8 * index, PTR), _BUFFER_DATA, PTR)


class Work(NamedTuple):
    """What a call has to do.

    Attributes:
        items: i64, how many items; may be 0.
        cost: i64, multiplications in all, about.
        portions: how many large portions each thread takes; 0 for none.
        words: i64 and pointers that each item needs.
    """

    items: Any
    cost: Any
    portions: int
    words: Sequence[Any]


PlanFn = Callable[[Buffers], Work]
ItemFn = Callable[[ir.IRBuilder, Sequence[Any], Any], None]


def build(module: ir.Module, name: str, plan: PlanFn, item: ItemFn) -> None:
    """Adds a custom call to a module.

    Args:
        module: the module.
        name: of the function `handler(frame) -> error`.
        plan: builds what comes first, in the calling thread.
        item: builds what is done for one item: (builder, words, index).
    """
    share = define(module, f"{name}_share", VOID, [PTR])
    task = _task(module, f"{name}_task", share)
    function = ir.Function(module, ir.FunctionType(PTR, [PTR]), name)
    (frame,) = function.args
    b = ir.IRBuilder(function.append_basic_block())
    _answer_metadata(b, frame)

    operands, results = (
        get(b, frame, place, PTR) for place in (_FRAME_OPERANDS, _FRAME_RESULTS)
    )
    work = plan(Buffers(b, operands, results))
    with b.if_then(b.icmp_unsigned("==", work.items, I64(0)), likely=False):
        b.ret(NULL)

    api, context = get(b, frame, _FRAME_API, PTR), get(b, frame, _FRAME_CONTEXT, PTR)
    useful = maximum(b, I64(1), b.udiv(work.cost, I64(_WORTH_A_THREAD)))
    threads = minimum(b, minimum(b, _num_threads(b, api, context), useful), work.items)
    large = b.mul(threads, I64(work.portions))
    portion = I64(0)
    if work.portions:
        portion = b.udiv(b.mul(work.items, I64(3)), b.mul(large, I64(4)))
        large = b.select(b.icmp_unsigned("==", portion, I64(0)), I64(0), large)

    malloc = declare(module, "malloc", PTR, [I64])
    shared = b.call(malloc, [I64(_WORDS + 8 * len(work.words))])
    for place, value in (
        (_HOLDERS, threads),
        (_NEXT, I64(0)),
        (_DONE, I64(0)),
        (_ITEMS, work.items),
        (_LARGE, large),
        (_PORTION, portion),
        *((_WORDS + 8 * i, word) for i, word in enumerate(work.words)),
    ):
        put(b, shared, place, value)
    args = on_stack(b, 5)
    for i, value in enumerate((I64(40), NULL, context, task, shared)):
        put(b, args, 8 * i, value)
    with b.if_then(b.icmp_unsigned(">", threads, I64(1))):
        with counted_loop(b, I64(1), threads):
            b.call(get(b, api, _API_SCHEDULE, _CALL), [args])
    b.call(share, [shared])

    # What is left is in the hands of threads that have begun: let them run.
    sched_yield = declare(module, "sched_yield", I32, [])
    wait, again, over = (b.append_basic_block() for _ in range(3))
    b.branch(wait)
    b.position_at_end(wait)
    done = b.load_atomic(at(b, shared, _DONE), "acquire", 8, typ=I64)
    b.cbranch(b.icmp_unsigned("<", done, work.items), again, over)
    b.position_at_end(again)
    b.call(sched_yield, [])
    b.branch(wait)
    b.position_at_end(over)
    _leave(b, shared)
    b.ret(NULL)
    _build_share(share, [word.type for word in work.words], item)


def _answer_metadata(b: ir.IRBuilder, frame) -> None:
    """Answers XLA, which asks once for the version of the interface."""
    extension = get(b, frame, _FRAME_EXTENSION, PTR)
    with b.if_then(b.icmp_unsigned("!=", extension, NULL), likely=False):
        metadata = get(b, extension, _EXTENSION_METADATA, PTR)
        put(b, metadata, _METADATA_MAJOR, I32(0))
        put(b, metadata, _METADATA_MINOR, I32(_MINOR_VERSION))
        put(b, metadata, _METADATA_TRAITS, I32(0))
        b.ret(NULL)


def _build_share(share: ir.Function, kinds: list, item: ItemFn) -> None:
    """Builds `void share(shared)`: takes portions of the items until none is left."""
    (shared,) = share.args
    b = ir.IRBuilder(share.append_basic_block())
    items, large, portion = (
        get(b, shared, place, I64) for place in (_ITEMS, _LARGE, _PORTION)
    )
    words = [get(b, shared, _WORDS + 8 * i, kind) for i, kind in enumerate(kinds)]
    claim, take, end = (b.append_basic_block() for _ in range(3))
    b.branch(claim)
    b.position_at_end(claim)
    # First the large portions, then single items, so that no thread waits long.
    turn = b.atomic_rmw("add", at(b, shared, _NEXT), I64(1), "monotonic")
    is_large = b.icmp_unsigned("<", turn, large)
    single = b.add(b.mul(large, portion), b.sub(turn, large))
    first = b.select(is_large, b.mul(turn, portion), single)
    b.cbranch(b.icmp_unsigned("<", first, items), take, end)
    b.position_at_end(take)
    stop = b.add(first, b.select(is_large, portion, I64(1)))
    with counted_loop(b, first, stop) as index:
        item(b, words, index)
    b.atomic_rmw("add", at(b, shared, _DONE), b.sub(stop, first), "release")
    b.branch(claim)
    b.position_at_end(end)
    b.ret_void()


def _task(module: ir.Module, name: str, share: ir.Function) -> ir.Function:
    """Adds `void task(shared)`: what a thread of the pool does."""
    function = define(module, name, VOID, [PTR])
    b = ir.IRBuilder(function.append_basic_block())
    b.call(share, function.args)
    _leave(b, function.args[0])
    b.ret_void()
    return function


def _leave(b: ir.IRBuilder, shared) -> None:
    """Frees what is shared if nobody else holds it."""
    free = declare(b.module, "free", VOID, [PTR])
    before = b.atomic_rmw("sub", at(b, shared, _HOLDERS), I64(1), "acq_rel")
    with b.if_then(b.icmp_unsigned("==", before, I64(1))):
        b.call(free, [shared])


def _num_threads(b: ir.IRBuilder, api, context):
    """Returns the size of XLA's thread pool, 1 if there is none."""
    count, args = on_stack(b, 1), on_stack(b, 4)
    b.store(I64(1), count)
    for i, value in enumerate((I64(32), NULL, context, count)):
        put(b, args, 8 * i, value)
    b.call(get(b, api, _API_NUM_THREADS, _CALL), [args])
    return b.load(count, typ=I64)


def register(module: ir.Module, target: Target, names: dict[str, str]) -> Any:
    """Compiles a module and makes its custom calls known to XLA.

    Args:
        module: the module.
        target: the processor.
        names: XLA's name of each function of the module that is a custom call.

    Returns:
        What holds the code; keep it as long as the process lives.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    code = llvm.create_mcjit_compiler(
        llvm.parse_assembly(str(module)),
        llvm.Target.from_default_triple().create_target_machine(
            cpu=target.cpu, features=target.features, opt=2
        ),
    )
    code.finalize_object()
    for function, name in names.items():
        address = code.get_function_address(function)
        handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return code
