"""The cost model: how long a step takes on an accelerator.

Physics: each weight and each cached slot is read once at the published bandwidth, all
arithmetic is done at the published rate, and what takes longer of the two counts, for
the products with weights and for attention apart. With tensor parallelism two
all-reduces a layer go over the link. Beside that stand the overheads of the software of
2023, fitted to the paper (see docs/reproduction.md): one of an iteration, one of each
sequence in it, and one of each copy of a swap.

Small blocks cost more than their slots: keys lie in pieces of 16 bytes a slot, those of
a block's slots side by side (the layout of vLLM's kernel: head dim / x, block size, x,
with x 16 bytes' worth), and a DRAM hands out no less than `ACCESS_BYTES` at a time.
"""

import dataclasses

import jax
import jax.numpy as jnp

from experiments.simulator.hardware import Hardware
from experiments.simulator.model_profiles import ModelProfile
from experiments.simulator.work import Work

# What HBM2e moves at a time, and what is side by side of each slot's keys.
ACCESS_BYTES, PIECE_BYTES = 64, 16


@dataclasses.dataclass(frozen=True)
class Overheads:
    """What a step takes beside the physics; fitted.

    Attributes:
      step_s: of each iteration, in seconds.
      row_s: of each sequence in it.
      copy_in_s: of each copy from host to device: one for each block, layer, and keys
        or values.
      copy_out_s: the same from device to host.
    """

    step_s: float = 0.0
    row_s: float = 0.0
    copy_in_s: float = 0.0
    copy_out_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class RooflineCosts:
    """A model on some accelerators; a `simulate.CostModel`.

    Attributes:
      model: the model.
      hardware: one of the devices.
      num_devices: how many share the model, tensor parallel.
      block_size: tokens in a block.
      overheads: fitted.
      padded: whether every sequence of the batch is computed as if it were the longest,
        ended ones too: request-level batching, as in FasterTransformer.
    """

    model: ModelProfile
    hardware: Hardware
    num_devices: int = 1
    block_size: int = 16
    overheads: Overheads = Overheads()
    padded: bool = False

    def __call__(self, work: Work) -> jax.Array:
        """Returns the seconds of a step, f32[]."""
        model, hardware, devices = self.model, self.hardware, self.num_devices
        rows, tokens = work.rows, work.tokens
        context, pairs = work.context, work.pairs
        if self.padded:
            rows = work.members
            tokens = rows * work.longest_chunk
            context = rows * work.longest_context
            pairs = context * work.longest_chunk
        products = 2.0 * model.layer_weights * model.num_layers * tokens
        products += 2.0 * model.head_weights * work.sampled
        weights = model.layer_weights * model.num_layers + model.head_weights
        width = model.num_heads * model.head_dim
        attention = 4.0 * width * model.num_layers * pairs
        seconds = self._longer(products, float(weights * model.itemsize))
        read = model.kv_bytes_per_token * context
        read *= max(ACCESS_BYTES / (self.block_size * PIECE_BYTES), 1.0)
        seconds += self._longer(attention, read)
        if devices > 1:
            # A ring: each sends and receives 2 (n - 1) / n of what is reduced.
            reduced = 2.0 * model.num_layers * model.hidden_size * model.itemsize
            sent = reduced * tokens * 2.0 * (devices - 1) / devices
            seconds += sent / hardware.link_bandwidth
        block = float(model.kv_bytes_per_token * self.block_size)
        copied = 2.0 * block * work.copied_blocks  # read and written
        seconds += copied / (hardware.bandwidth * devices)
        swapped = work.swapped_in_blocks + work.swapped_out_blocks
        seconds += block * swapped / (hardware.host_bandwidth * devices)
        overheads, copies = self.overheads, 2.0 * model.num_layers
        seconds += overheads.copy_in_s * copies * work.swapped_in_blocks
        seconds += overheads.copy_out_s * copies * work.swapped_out_blocks
        return seconds + overheads.step_s + overheads.row_s * rows

    def _longer(self, flops: jax.Array, nbytes: jax.Array | float) -> jax.Array:
        devices = self.num_devices
        computing = flops / (self.hardware.flops * devices)
        return jnp.maximum(computing, nbytes / (self.hardware.bandwidth * devices))
