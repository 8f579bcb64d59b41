"""Accelerators: what their makers publish, and what was fitted or assumed."""

from typing import NamedTuple

GIB = 2**30


class Hardware(NamedTuple):
    """One accelerator.

    Attributes:
      name: of the product.
      memory_bytes: of its memory that a program can use.
      bandwidth: bytes of it that can be read in a second.
      flops: operations in a second in the dtype of the weights (16 bits), dense.
      link_bandwidth: bytes a second that each sends to the others of its machine.
      host_bandwidth: bytes a second between it and the host's memory, one way.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    link_bandwidth: float
    host_bandwidth: float


# Published: bandwidth, arithmetic and links, by NVIDIA's data sheets; usable memory of
# the A100s, by the PagedAttention paper's set-up.
# Fitted, by `experiments.studies.calibration`: the host's bandwidth over PCIe 4 x16, to
# the paper's Fig 19a.
# Assumed: usable memory of the H100, that of an A100 with as much; of the H200, about
# what its driver reports; and that PCIe 5 reaches twice what PCIe 4 does.
_PCIE4 = 12.67e9
_PCIE5 = 2 * _PCIE4
HARDWARE = {
    "a100-40gb": Hardware("A100 40GB", 39.39 * GIB, 1555e9, 312e12, 300e9, _PCIE4),
    "a100-80gb": Hardware("A100 80GB", 79.15 * GIB, 2039e9, 312e12, 300e9, _PCIE4),
    "h100": Hardware("H100 SXM", 79.15 * GIB, 3352e9, 989.5e12, 450e9, _PCIE5),
    "h200": Hardware("H200 SXM", 140.0 * GIB, 4800e9, 989.5e12, 450e9, _PCIE5),
}
