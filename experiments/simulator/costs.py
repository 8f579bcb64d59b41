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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CostTerms:
    """What a step takes, in seconds for each unit of its work; a `simulate.CostModel`.

    The numbers are arguments of the compiled loop: models, accelerators and overheads
    share a program. All are f32[] or floats.

    Attributes:
      token_s: arithmetic of a token in the products with weights.
      sampled_s: arithmetic of a generated token in the head.
      weights_s: reading all weights once.
      pair_s: arithmetic of a query and a key.
      context_s: reading a slot.
      sent_s: what a token's all-reduces take.
      copied_s: copying a block.
      swapped_in_s: moving a block from the host to the device.
      swapped_out_s: moving one the other way.
      step_s: of each step.
      row_s: of each sequence in it.
      padded: see `RooflineCosts`.
    """

    token_s: jax.typing.ArrayLike
    sampled_s: jax.typing.ArrayLike
    weights_s: jax.typing.ArrayLike
    pair_s: jax.typing.ArrayLike
    context_s: jax.typing.ArrayLike
    sent_s: jax.typing.ArrayLike
    copied_s: jax.typing.ArrayLike
    swapped_in_s: jax.typing.ArrayLike
    swapped_out_s: jax.typing.ArrayLike
    step_s: jax.typing.ArrayLike
    row_s: jax.typing.ArrayLike
    padded: bool = dataclasses.field(default=False, metadata={"static": True})

    def __call__(self, work: Work) -> jax.Array:
        """Returns the seconds of a step, f32[]."""
        rows, tokens = work.rows, work.tokens
        context, pairs = work.context, work.pairs
        if self.padded:
            rows = work.members
            tokens = rows * work.longest_chunk
            context = rows * work.longest_context
            pairs = context * work.longest_chunk
        computing = self.token_s * tokens + self.sampled_s * work.sampled
        seconds = jnp.maximum(computing, self.weights_s)
        seconds += jnp.maximum(self.pair_s * pairs, self.context_s * context)
        seconds += self.sent_s * tokens + self.row_s * rows + self.step_s
        seconds += self.swapped_in_s * work.swapped_in_blocks
        seconds += self.swapped_out_s * work.swapped_out_blocks
        return seconds + self.copied_s * work.copied_blocks


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RooflineCosts:
    """A model on some accelerators; a `simulate.CostModel`, as its `terms()` are.

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

    def terms(self) -> CostTerms:
        """Returns the seconds of each unit of work."""
        model, hardware, devices = self.model, self.hardware, self.num_devices
        flops = hardware.flops * devices
        bandwidth = hardware.bandwidth * devices
        weights = model.layer_weights * model.num_layers + model.head_weights
        width = model.num_heads * model.head_dim
        # A ring: each sends and receives 2 (n - 1) / n of what is reduced.
        reduced = 2.0 * model.num_layers * model.hidden_size * model.itemsize
        sent = reduced * 2.0 * (devices - 1) / devices
        block = model.kv_bytes_per_token * self.block_size
        read = model.kv_bytes_per_token
        read *= max(ACCESS_BYTES / (self.block_size * PIECE_BYTES), 1.0)
        overheads, copies = self.overheads, 2.0 * model.num_layers
        moved_s = block / (hardware.host_bandwidth * devices)
        return CostTerms(
            token_s=2.0 * model.layer_weights * model.num_layers / flops,
            sampled_s=2.0 * model.head_weights / flops,
            weights_s=weights * model.itemsize / bandwidth,
            pair_s=4.0 * width * model.num_layers / flops,
            context_s=read / bandwidth,
            sent_s=sent / hardware.link_bandwidth,
            copied_s=2.0 * block / bandwidth,  # read and written
            swapped_in_s=moved_s + overheads.copy_in_s * copies,
            swapped_out_s=moved_s + overheads.copy_out_s * copies,
            step_s=overheads.step_s,
            row_s=overheads.row_s,
            padded=self.padded,
        )

    def __call__(self, work: Work) -> jax.Array:
        """Returns the seconds of a step, f32[]."""
        return self.terms()(work)
