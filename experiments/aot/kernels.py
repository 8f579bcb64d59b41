"""The kernels as they are shipped, each in all its configurations."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.aot.compile import Compiled, Figures, compile_for, new_kernels
from experiments.aot.targets import Target
from pallas_kernels import (
    AttentionMetadata,
    copy_blocks_mosaic,
    find_cascade,
    gather_blocks_mosaic,
    limits,
    quantised_kv,
    scatter_blocks_mosaic,
    write_kv_mosaic,
)
from pallas_kernels.mosaic_decode import paged_attention_mosaic
from pallas_kernels.mosaic_mixed import paged_attention_mixed
from pallas_kernels.mosaic_tuning import (
    choose_consumers,
    choose_decode_stages,
    choose_mixed_stages,
    choose_piece,
    stage_bytes,
)

# Query and KV heads of real models, by head dim: SmolLM2, Phi-2, Phi-3, Llama 3, Gemma.
HEADS = {64: (9, 3), 80: (32, 32), 96: (32, 32), 128: (32, 8), 256: (8, 4)}
BLOCK_SIZES = tuple(1 << i for i in range(9))
DTYPES = (*limits.KV_DTYPES, *quantised_kv.STORED)
# Every head dim and dtype, blocks on each of the producer's routes, and the options.
COVERING = (
    "B=16 K=3 D=64 bfloat16",
    "D=64 B=16 bfloat16",
    "D=64 B=256 float16",
    "D=64 B=16 bfloat16 window cap",
    "D=80 B=2 bfloat16",
    "D=96 B=8 float16",
    "D=128 B=1 bfloat16",
    "D=128 B=16 bfloat16 window cap",
    "D=256 B=2 bfloat16",
    "D=256 B=16 bfloat16 window cap",
    "D=64 B=16 int8",
    "D=128 B=16 float8_e4m3fn window cap",
    "D=256 B=64 int8",
    "B=16 K=3 D=64 int8",
    "D=64 B=16 bfloat16 cascade",
    "D=128 B=1 bfloat16 cascade",
    "D=128 B=16 int8 cascade",
    "D=256 B=256 float16 cascade",
    "D=128 B=16 bfloat16 contiguous",
)
# Of the mixed kernel: one and two consumers, runs that are cut and whole ones.
MIXED_COVERING = (
    "D=64 B=16 bfloat16",
    "D=80 B=2 float16",
    "D=128 B=1 bfloat16",
    "D=128 B=16 float16 window cap",
    "D=256 B=2 bfloat16",
    "D=256 B=16 bfloat16",
    "D=256 B=16 int8 window cap",
    "D=128 B=16 float8_e4m3fn",
)


class Case(NamedTuple):
    """A kernel in one configuration.

    Attributes:
        name: of the kernel.
        config: of the configuration.
        function: what to compile.
        args: shapes of its arguments.
        in_flight: bytes that a thread block has asked for and not got, at most.
        attends: whether it must multiply on tensor cores and keep the memory busy.
        donate: which arguments are donated: those it changes in place.
        covering: whether it belongs to the few cases that cover what differs.
        num_kernels: how many kernels it is compiled to, which no other case has.
    """

    name: str
    config: str
    function: Callable
    args: tuple[Any, ...]
    in_flight: int
    attends: bool
    donate: tuple[int, ...] = ()
    covering: bool = False
    num_kernels: int = 1


class Result(NamedTuple):
    """A case, compiled for a target, and its kernels."""

    case: Case
    target: Target
    compiled: Compiled
    kernels: tuple[Figures, ...]

    @property
    def figures(self) -> Figures:
        """The figures of the case's kernel; of several, the worst of each figure."""
        kernels, expected = self.kernels, self.case.num_kernels
        if len(kernels) != expected:
            raise ValueError(
                f"{self.case.name} {self.case.config} compiled to {len(kernels)} new "
                f"kernels; it must be {expected}"
            )
        most = Figures(*map(max, *kernels)) if expected > 1 else kernels[0]
        return most._replace(hgmma=min(kernel.hgmma for kernel in kernels))

    @property
    def loads_in_flight(self) -> int:
        """Bytes on their way to a multiprocessor, at most."""
        return self.case.in_flight * self.figures.blocks_per_multiprocessor

    @property
    def donated_bytes(self) -> int:
        """Bytes of what the case changes in place."""
        args = [self.case.args[i] for i in self.case.donate]
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args))

    def row(self) -> dict[str, Any]:
        """Returns the result as the report's JSON has it."""
        figures = self.figures
        return {
            "name": self.case.name,
            "config": self.case.config,
            "target": self.target.name,
            "registers": figures.registers,
            "spill_bytes": figures.spill_bytes,
            "stack_bytes": figures.stack_bytes,
            "smem_bytes": figures.smem_bytes,
            "hgmma": figures.hgmma,
            "tma_loads": figures.tma_loads,
            "local_memory": figures.local_memory,
            "loads_in_flight": self.loads_in_flight,
            "loads_needed": self.target.loads_needed if self.case.attends else None,
            "donated_bytes": self.donated_bytes,
            "aliased_bytes": self.compiled.aliased_bytes,
            "temporary_bytes": self.compiled.temporary_bytes,
        }


def compile_case(case: Case, targets: Sequence[Target], dump: Path) -> list[Result]:
    """Compiles a case for each target, in a process that has not compiled it before.

    A kernel is compiled for Hopper, not for one of its GPUs: where the next target asks
    for the very same kernel, JAX has it, and it counts for that target, too.
    """
    results: list[Result] = []
    for target in targets:
        compiled = compile_for(target, dump, case.function, case.args, case.donate)
        kernels = new_kernels(dump)
        if results and not kernels:
            kernels = results[0].kernels
        results.append(Result(case, target, compiled, kernels))
    return results


def cases() -> Iterator[Case]:
    """Yields all kernels in all configurations."""
    yield from attention_cases(decode_case)
    yield from attention_cases(mixed_case)
    yield from cascade_cases()
    yield from contiguous_cases()
    yield from block_cases()


def attention_cases(make: Callable[..., Case]) -> Iterator[Case]:
    """Yields an attention kernel for every head dim, block size and dtype.

    For each head dim and dtype once also with a window and a soft cap.
    """
    for head_dim, dtype in itertools.product(limits.HEAD_DIMS, DTYPES):
        for block_size in _allowed(BLOCK_SIZES, dtype):
            yield make(head_dim, block_size, dtype)
        yield make(head_dim, 16, dtype, window=1024, soft_cap=50.0)


def cascade_cases() -> Iterator[Case]:
    """Yields decode with shared prefixes for every head dim and dtype.

    Both of its kernels, with blocks on each of the producer's routes.
    """
    for head_dim, dtype in itertools.product(limits.HEAD_DIMS, DTYPES):
        for block_size in _allowed((1, 16, 256), dtype):
            yield decode_case(head_dim, block_size, dtype, cascade=True)


def contiguous_cases() -> Iterator[Case]:
    """Yields decode without block tables, as it is timed beside decode with them."""
    for head_dim, block_size in ((64, 16), (128, 16), (128, 64)):
        yield decode_case(head_dim, block_size, jnp.bfloat16, contiguous=True)


def _allowed(block_sizes: Sequence[int], dtype: Any) -> list[int]:
    """Returns the block sizes that the attention kernels take with a dtype."""
    least = limits.LEAST_QUANTISED_BLOCK if quantised_kv.is_quantised(dtype) else 1
    return [size for size in block_sizes if size >= least]


def decode_case(
    head_dim: int,
    block_size: int,
    dtype: Any,
    window: int | None = None,
    soft_cap: float | None = None,
    cascade: bool = False,
    contiguous: bool = False,
) -> Case:
    """Returns the decode kernel in one configuration."""
    config = f"D={head_dim} B={block_size} {jnp.dtype(dtype).name}"
    if window or soft_cap:
        config += " window cap"
    if cascade:
        config += " cascade"
    if contiguous:
        config += " contiguous"
    heads, kv_heads = HEADS[head_dim]
    stages = choose_decode_stages(head_dim, block_size, dtype)

    kernel, make_cascade = paged_attention_mosaic, None
    if contiguous:
        kernel = functools.partial(kernel, contiguous=True)
    if cascade:
        group = heads // kv_heads
        make_cascade = functools.partial(
            find_cascade, block_size=block_size, group=group
        )

    return Case(
        name="decode",
        config=config,
        function=_attention(kernel, head_dim, window, soft_cap, make_cascade),
        # A number of its own, so that a cascade has no kernel of another case.
        args=_attention_args(
            head_dim, block_size, dtype, tokens=12 if cascade else 8, tiles=0
        ),
        in_flight=stages * stage_bytes(head_dim, dtype),
        attends=True,
        covering=config in COVERING,
        num_kernels=2 if cascade else 1,
    )


def mixed_case(
    head_dim: int,
    block_size: int,
    dtype: Any,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Case:
    """Returns the mixed kernel in one configuration.

    Those in float16 have room for so few tokens that runs of prefill tokens are cut.
    """
    config = f"D={head_dim} B={block_size} {jnp.dtype(dtype).name}"
    if window or soft_cap:
        config += " window cap"
    tokens = 64 if dtype == jnp.float16 else 8192
    consumers = choose_consumers(head_dim, block_size, dtype)
    stages = choose_mixed_stages(head_dim, block_size, consumers, dtype)

    return Case(
        name="mixed",
        config=config,
        function=_attention(paged_attention_mixed, head_dim, window, soft_cap),
        args=_attention_args(head_dim, block_size, dtype, tokens, tiles=tokens // 16),
        in_flight=stages * stage_bytes(head_dim, dtype),
        attends=True,
        covering=config in MIXED_COVERING,
    )


def _attention(
    kernel: Callable[..., jax.Array],
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
    make_cascade: Callable[..., Any] | None = None,
) -> Callable[..., jax.Array]:
    """Returns what attends with a kernel, in the second of two layers."""

    def attend(q, k_cache, v_cache, metadata, k_scales=None, v_scales=None):
        options: dict[str, Any] = {}
        if make_cascade is not None:
            options["cascade"] = make_cascade(metadata)
        return kernel(
            q,
            k_cache,
            v_cache,
            1,
            metadata,
            scale=head_dim**-0.5,
            window=window,
            soft_cap=soft_cap,
            k_scales=k_scales,
            v_scales=v_scales,
            **options,
        )

    return attend


def _attention_args(
    head_dim: int, block_size: int, dtype: Any, tokens: int, tiles: int
) -> tuple[Any, ...]:
    """Returns q, keys, values, metadata and, in 8 bits, scales of a step, as shapes."""
    heads, kv_heads = HEADS[head_dim]
    rows, width, layers, num_blocks = 8, 4096 // block_size, 2, 512
    i32: Any = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    metadata = AttentionMetadata(
        block_tables=i32((rows, width)),
        rows=i32((tokens,)),
        lengths=i32((tokens,)),
        num_decode=i32(()),
        num_tokens=i32(()),
        tile_start=i32((tiles,)),
        tile_len=i32((tiles,)),
        num_tiles=i32(()),
    )
    keys, values, *scales = _cache(
        layers, num_blocks, block_size, kv_heads, head_dim, dtype
    )
    q_dtype = quantised_kv.multiplied_dtype(dtype)
    q = jax.ShapeDtypeStruct((tokens, heads, head_dim), q_dtype)
    return q, keys, values, metadata, *scales


def _cache(
    layers: int,
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: Any,
) -> list[Any]:
    """Returns the shapes of a cache's arrays: keys, values and, in 8 bits, scales."""
    shape = (layers, num_blocks, block_size, kv_heads, head_dim)
    arrays = [jax.ShapeDtypeStruct(shape, quantised_kv.stored_dtype(dtype))] * 2
    if quantised_kv.is_quantised(dtype):
        scales = quantised_kv.scale_shape(shape)
        arrays += [jax.ShapeDtypeStruct(scales, jnp.float32)] * 2
    return arrays


def block_cases() -> Iterator[Case]:
    """Yields the kernels that write to the cache, which they must do in place."""
    # e4m3 moves as int8 does: they come to one and the same kernel.
    for dtype in (*limits.KV_DTYPES, jnp.int8):
        for head_dim, (_, kv_heads) in HEADS.items():
            for block_size in (1, 8, 16, 64, 256):
                # Scales of one slot are too few for the TMA unit.
                if block_size > 1 or not quantised_kv.is_quantised(dtype):
                    yield from _block_cases(block_size, kv_heads, head_dim, dtype)


def _block_cases(
    block_size: int, kv_heads: int, head_dim: int, dtype: Any
) -> Iterator[Case]:
    layers, tokens, pairs = 2, 32, 16
    # A number of its own: blocks of as many bytes would else come to one kernel.
    num_blocks = head_dim
    i32: Any = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    sizes = block_size, kv_heads, head_dim, dtype
    cache, some = (_cache(layers, count, *sizes) for count in (num_blocks, pairs))
    new = [
        jax.ShapeDtypeStruct((tokens, *shape), x.dtype)
        for x, shape in zip(cache, [(kv_heads, head_dim)] * 2 + [(kv_heads,)] * 2)
    ]
    ids, one = i32((pairs,)), i32(())
    slot_bytes = kv_heads * head_dim * cache[0].dtype.itemsize
    block = sum(x.size * x.dtype.itemsize for x in cache) // (layers * num_blocks)
    piece = block * choose_piece(block_size, slot_bytes) // block_size
    config = f"B={block_size} K={kv_heads} D={head_dim} {jnp.dtype(dtype).name}"
    for name, function, args, in_flight in (
        # Of a token no scales go through shared memory.
        ("write", write_kv_mosaic, (cache, new, one, i32((tokens,))), 2 * slot_bytes),
        ("copy", copy_blocks_mosaic, (cache, ids, ids, one), piece),
        ("gather", gather_blocks_mosaic, (cache, ids, one), piece),
        ("scatter", scatter_blocks_mosaic, (cache, some, ids, one), piece),
    ):
        yield Case(
            name,
            config,
            function,
            args,
            in_flight,
            attends=False,
            donate=() if name == "gather" else (0,),
            covering=config in COVERING,
        )
