"""How an accelerator's memory is divided: weights, activations, KV blocks."""

from typing import NamedTuple

from experiments.errors import UserError
from experiments.simulator.hardware import GIB, Hardware
from experiments.simulator.model_profiles import ModelProfile

# The paper's artifact: what it leaves alone of each GPU, and the share that it uses.
_SHARE = 0.95
_LEFT_BYTES = 1 * GIB


class MemorySplit(NamedTuple):
    """Bytes on each of the accelerators, and the blocks that all of them hold.

    Attributes:
      weights: a plain even split of the weights.
      activations: of the largest step.
      kv: what is left for keys and values.
      num_blocks: blocks, the null block not counted.
    """

    weights: float
    activations: float
    kv: float
    num_blocks: int


def split_memory(
    model: ModelProfile,
    hardware: Hardware,
    num_devices: int,
    *,
    block_size: int = 16,
    token_budget: int = 2560,
) -> MemorySplit:
    """Divides the memory as the paper's artifact does.

    95% of the memory less weights, activations and 1 GiB is for keys and values. With
    tensor parallelism each device has an even share of the weights and of every block.

    Args:
      model: the model.
      hardware: one of the devices.
      num_devices: how many share the model.
      block_size: tokens in a block.
      token_budget: most tokens of a step.

    Raises:
      UserError: nothing is left for keys and values.
    """
    weights = model.weight_bytes / num_devices
    activations = model.activation_bytes_per_token(num_devices) * token_budget
    kv = _SHARE * hardware.memory_bytes - weights - activations - _LEFT_BYTES
    block = model.kv_bytes_per_token * block_size / num_devices
    if kv < block:
        raise UserError(
            f"{model.name} leaves no memory for keys and values on {num_devices} x "
            f"{hardware.name}; use more devices"
        )
    return MemorySplit(weights, activations, kv, int(kv // block))
