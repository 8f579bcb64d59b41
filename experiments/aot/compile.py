"""Compiles a function for a GPU that is not here, and reads what the compiler says."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from experiments.aot.targets import (
    BLOCKS_PER_CORE,
    REGISTERS,
    RESERVED_SMEM,
    SMEM_PER_CORE,
    THREADS_PER_CORE,
    Target,
)
from pallas_kernels import compat


class Figures(NamedTuple):
    """What NVIDIA's compiler made of one kernel.

    Attributes:
        threads: in a thread block.
        registers: of each thread; the most, where warpgroups differ.
        stack_bytes: of each thread.
        spill_bytes: stored and loaded, since registers did not suffice.
        smem_bytes: of shared memory.
        hgmma: tensor-core instructions on whole warpgroups.
        tma_loads: instructions that copy to shared memory.
        local_memory: instructions that read or write thread-local memory.
    """

    threads: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    smem_bytes: int
    hgmma: int
    tma_loads: int
    local_memory: int

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Thread blocks that fit on a multiprocessor at once."""
        by_registers = REGISTERS // (self.threads * self.registers)
        by_memory = SMEM_PER_CORE // (self.smem_bytes + RESERVED_SMEM)
        by_threads = THREADS_PER_CORE // self.threads
        return max(1, min(by_registers, by_memory, by_threads, BLOCKS_PER_CORE))


class Compiled(NamedTuple):
    """A compiled program.

    Attributes:
        argument_bytes: of the arguments in device memory.
        aliased_bytes: of the arguments, what the results take over.
        temporary_bytes: of what lives in between.
        host_bytes: of the arguments in the host's memory.
        host_aliased_bytes: of those, what the results take over.
        host_temporary_bytes: of what lives there in between.
        text: the optimised program.
    """

    argument_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    host_bytes: int
    host_aliased_bytes: int
    host_temporary_bytes: int
    text: str


def compile_for(
    target: Target,
    dump: Path,
    function: Callable,
    args: Sequence[Any],
    donate: Sequence[int] = (),
    static: Sequence[int] = (),
) -> Compiled:
    """Compiles `function` for a target.

    Args:
        target: the GPU.
        dump: what `environment.enter` returned.
        function: what to compile.
        args: its arguments: trees of arrays or of their shapes. They are in device
            memory, unless `on_host` says otherwise.
        donate: which arguments are donated.
        static: which arguments are static.

    Returns:
        The compiler's figures.
    """
    for file in dump.iterdir():
        file.unlink()
    sharding = SingleDeviceSharding(_device(target))

    def place(x: Any) -> jax.ShapeDtypeStruct:
        placed = isinstance(x, jax.ShapeDtypeStruct) and x.sharding
        where = x.sharding if placed else sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    args = [x if i in static else jax.tree.map(place, x) for i, x in enumerate(args)]
    jitted = jax.jit(function, donate_argnums=donate, static_argnums=static)
    with compat.for_gpu():
        lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    return Compiled(
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.host_argument_size_in_bytes,
        memory.host_alias_size_in_bytes,
        memory.host_temp_size_in_bytes,
        compiled.as_text() or "",
    )


def on_host(tree: Any) -> Any:
    """Returns the shapes of arrays that are in the host's pinned memory.

    The mesh is abstract: stand-ins for devices do not say what memory there is.
    """
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
    )


@functools.cache
def _device(target: Target) -> Any:
    """Returns a stand-in for the target, which only compiles: always the same one."""
    from jax._src import xla_bridge

    xla_bridge._discover_and_register_pjrt_plugins()
    topology: Any = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology="1x1x1",
        target_config=target.config(),
    )
    return topology.devices[0]


def new_kernels(dump: Path) -> tuple[Figures, ...]:
    """Returns what the last `compile_for` made of its Mosaic GPU kernels.

    It is nothing if this process has compiled all of them before.

    Raises:
        ValueError: it has compiled some of them before.
    """

    # JAX says what it needs of kernels that are there already, too, and so numbers them
    # otherwise than ptxas's reports.
    def found(suffix: str) -> list[Path]:
        def place(file: Path) -> tuple[str, int]:
            kernel, number = file.name.removesuffix(suffix).rsplit("_", 1)
            return kernel, int(number)

        return sorted(dump.glob(f"*{suffix}"), key=place)

    reports, resources = found(".ptxas"), found(".resources.txt")
    if reports and len(reports) != len(resources):
        raise ValueError(f"{len(reports)} of {len(resources)} kernels are new: which?")
    return tuple(map(_read, reports, resources))


def _read(report: Path, resources: Path) -> Figures:
    """Reads ptxas's report on a kernel, and the other files beside it."""
    text = report.read_text()
    code = report.with_suffix(".sass_ctrl").read_text()

    def number(pattern: str, text: str) -> int:
        return sum(map(int, re.findall(pattern, text)))

    def count(instructions: str) -> int:
        return len(re.findall(rf"\b(?:{instructions})\b", code))

    return Figures(
        threads=number(r"\.maxntid (\d+)", report.with_suffix(".ptx").read_text()),
        registers=number(r"Used (\d+) registers", text),
        stack_bytes=number(r"(\d+) bytes stack frame", text),
        spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)", text),
        smem_bytes=number(r"smem_scratch_bytes=(\d+)", resources.read_text()),
        hgmma=count("HGMMA"),
        tma_loads=count("UTMALDG|UBLKCP"),
        local_memory=count("LDL|STL"),
    )
