"""The GPUs to compile for: what the compiler, and a roofline, must know of them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """An NVIDIA GPU of compute capability 9.0, in its SXM form.

    Attributes:
        name: as the command line and the report have it.
        description: as the driver names it.
        memory_bytes: of device memory.
        bandwidth: of device memory, bytes per second, as published.
        multiprocessors: how many.
        clock_ghz: highest clock.
        l2_bytes: of the second-level cache.
        flops: 16-bit dense matrix products, per second, as published.
        latency: seconds from asking device memory for bytes to having them, under load.
    """

    name: str
    description: str
    memory_bytes: int
    bandwidth: float
    multiprocessors: int = 132
    clock_ghz: float = 1.98
    l2_bytes: int = 50 << 20
    flops: float = 989e12
    latency: float = 800e-9

    @property
    def loads_needed(self) -> int:
        """Bytes each multiprocessor must have asked for to keep the memory busy."""
        return int(self.bandwidth * self.latency / self.multiprocessors)

    def config(self) -> str:
        """Returns the text by which XLA knows the target, a protocol buffer."""
        return f"""gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: {self.multiprocessors}
  fpus_per_core: 128
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  memory_bandwidth: {int(self.bandwidth)}
  l2_cache_size: {self.l2_bytes}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {THREADS_PER_CORE}
  registers_per_core_limit: {REGISTERS}
  registers_per_block_limit: {REGISTERS}
  shared_memory_per_core: {SMEM_PER_CORE}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {SMEM_PER_BLOCK}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{self.description}"
"""


# Of a Hopper multiprocessor: 32-bit registers, the most threads and thread blocks at
# once, and bytes of shared memory, of which one thread block can have all but 1 KiB.
REGISTERS = 65536
THREADS_PER_CORE = 2048
BLOCKS_PER_CORE = 32
SMEM_PER_CORE = 233472
SMEM_PER_BLOCK = 232448
RESERVED_SMEM = 1024

TARGETS = {
    target.name: target
    for target in (
        Target("h100", "NVIDIA H100 80GB HBM3", 80 * 10**9, 3.35e12),
        Target("h200", "NVIDIA H200", 141 * 10**9, 4.8e12),
    )
}
