"""The processor that code is made for."""

import functools
import importlib.util
from typing import NamedTuple

# Inputs that share a scale in int8 weights.
GROUP = 32
_WORD_BYTES = 4
_SIZES = {"bfloat16": 2, "int8": 1}
# LLVM's names of the features that have such instructions.
_DOTS = {"bfloat16": "avx512bf16", "int8": "avx512vnni"}


class Target(NamedTuple):
    """A processor.

    Attributes:
        cpu: LLVM's name of it.
        features: LLVM's list of its features.
        lanes: float32 numbers in a vector register.
        registers: vector registers.
        dots: dtypes with an instruction that adds the products of a word's numbers to
            each lane, two of bfloat16 or four of int8 (AVX512-BF16, AVX512-VNNI).
    """

    cpu: str
    features: str
    lanes: int
    registers: int
    dots: tuple[str, ...] = ()

    @property
    def panel(self) -> int:
        """Outputs in a panel of packed weights: two vectors."""
        return 2 * self.lanes

    def word(self, dtype: str) -> int:
        """Returns how many inputs of a dtype are multiplied at a time.

        Those of an output lie side by side in packed weights.
        """
        return _WORD_BYTES // _SIZES[dtype] if dtype in self.dots else 1


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
        dots = tuple(dtype for dtype, name in _DOTS.items() if features.get(name))
        return Target(cpu, features.flatten() + ",-prefer-256-bit", 16, 32, dots)
    if all(features.get(name) for name in ("avx2", "fma", "f16c")):
        return Target(cpu, features.flatten(), 8, 16)
    return None
