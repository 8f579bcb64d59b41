"""The processor that code is made for."""

import functools
import importlib.util
from typing import NamedTuple


class Target(NamedTuple):
    """A processor.

    Attributes:
        cpu: LLVM's name of it.
        features: LLVM's list of its features.
        lanes: float32 numbers in a vector register.
        registers: vector registers.
    """

    cpu: str
    features: str
    lanes: int
    registers: int

    @property
    def panel(self) -> int:
        """Outputs in a panel of packed weights: two vectors."""
        return 2 * self.lanes


@functools.cache
def host_target() -> Target | None:
    """Returns this machine's processor; None if there is no code for it.

    There is for x86 with AVX-512, or with AVX2, FMA and F16C, where llvmlite is
    installed.
    """
    if importlib.util.find_spec("llvmlite") is None:
        return None
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    cpu = llvm.get_host_cpu_name()
    if features.get("avx512f"):
        # Some processors are tuned for halves of a vector, which takes twice the
        # registers that a tile counts on.
        return Target(cpu, features.flatten() + ",-prefer-256-bit", 16, 32)
    if all(features.get(name) for name in ("avx2", "fma", "f16c")):
        return Target(cpu, features.flatten(), 8, 16)
    return None
