"""What differs between the supported versions of jax, for the kernels.

Imports nothing of Pallas at the top: the other backends work without it.
"""

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import Any

import jax

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
# From here on, Pallas has the Mosaic GPU names that the kernels use, and an interpreter
# that runs them.
MOSAIC_JAX_VERSION = (0, 11)


def has_mosaic() -> bool:
    """Whether this jax can run the `pallas` backend."""
    return JAX_VERSION >= MOSAIC_JAX_VERSION


def require_mosaic() -> None:
    """Raises where this jax is too old for the `pallas` backend.

    Raises:
        ValueError: jax is older than 0.11.
    """
    if not has_mosaic():
        raise ValueError(
            "The pallas attention backend needs jax >= 0.11, this is jax "
            f'{jax.__version__}; use backend="xla".'
        )


_FOR_GPU = contextvars.ContextVar("for_gpu", default=False)


@contextlib.contextmanager
def for_gpu() -> Iterator[None]:
    """What is traced inside is for a GPU, whether or not there is one here."""
    token = _FOR_GPU.set(True)
    try:
        yield
    finally:
        _FOR_GPU.reset(token)


def makes_for_gpu() -> bool:
    """Whether what is traced is for a GPU: there is one, or it is inside `for_gpu`."""
    return jax.default_backend() == "gpu" or _FOR_GPU.get()


def multiprocessors() -> int:
    """Returns how many multiprocessors a GPU has; those of an H200 without one."""
    if jax.default_backend() != "gpu":
        return 132
    return int(jax.local_devices()[0].core_count)


def compiler_params(**kwargs: Any) -> Any:
    """Returns Mosaic GPU compiler parameters, with the lowering semantics spelled out.

    The default has changed between versions.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **kwargs
    )


def load_for_wgmma(ref: Any) -> Any:
    """Loads from plain shared memory, into the layout in which wgmma's operands go out.

    Said in full, since a search for it would take minutes. Its accesses meet in the
    same banks, which is what `optimized` would refuse.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def copy_contiguous(source: Any, target: Any, barrier: Any) -> None:
    """Copies what has no gaps to shared memory: all of it is there to be copied.

    Without that promise the TMA unit takes it for a tile of an array, and wants its
    place in shared memory to be a multiple of 128 bytes. With it, 16 will do.
    """
    from jax.experimental.mosaic.gpu.launch_context import OOBFillMode
    from jax.experimental.pallas import mosaic_gpu as plgpu

    plgpu.copy_gmem_to_smem(
        source, target, barrier, oob_mode=OOBFillMode.PROMISE_IN_BOUNDS
    )


def load_8_bits(ref: Any, dtype: Any, swizzled: bool) -> Any:
    """Loads numbers of 8 bits from shared memory as `dtype`, for wgmma's operands.

    They come 4 at a time, in a layout of its own, and change places with those of
    neighbours once they have 16 bits.

    Args:
        ref: where from.
        dtype: of 16 bits.
        swizzled: whether its rows are swizzled, so that no two accesses meet in a bank.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    loaded = plgpu.load(ref, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=swizzled)
    return plgpu.layout_cast(widen_8_bits(loaded, dtype), plgpu.Layout.WGMMA)


def widen_8_bits(x: Any, dtype: Any) -> Any:
    """Converts int8 or float8_e4m3fn to 16 bits, inside a kernel."""
    if jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
        x = x.astype(jax.numpy.float16)  # NVIDIA's assembler knows no other way
    return x.astype(dtype)


def interpret_params(interpret: bool | None, **kwargs: Any) -> Any:
    """Returns what `plgpu.kernel` takes as `interpret`.

    Args:
        interpret: whether to interpret on the CPU; None asks for it where jax has no
            GPU, except inside `for_gpu`.
        **kwargs: fields of `plgpu.InterpretGPUParams`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret is None:
        interpret = not makes_for_gpu()
    return plgpu.InterpretGPUParams(**kwargs) if interpret else False


def interpreter_threads() -> int:
    """Returns how many threads XLA's CPU client has: NPROC, or the number of cores.

    The interpreter holds one of them for a kernel, and one for each warpgroup that has
    to wait at a barrier: with too few, one that is waited for may never start.
    """
    return int(os.environ.get("NPROC") or os.cpu_count() or 1)


def races_found() -> bool:
    """Whether the interpreter has seen a data race since its last reset."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.get_races().races_found)


def reset_interpreter() -> None:
    """Clears the interpreter's state, which an error inside a kernel leaves behind."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()
