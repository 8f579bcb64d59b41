"""A budget in bytes, divided: weights, activations, and as many KV blocks as fit."""

import dataclasses

from paged_jax.config import ConfigError, EngineConfig
from paged_jax.engine import Engine
from paged_jax.memory_plan import blocks_that_fit
from paged_jax.models.checkpoint import LoadedModel


def fit_memory(model: LoadedModel, config: EngineConfig, budget: int) -> EngineConfig:
    """Returns the settings with `num_blocks` chosen so that all fits in a budget.

    The activations are those of the compiled step, which does not depend on the number
    of blocks: it is compiled once with the fewest.

    Args:
      model: config and parameters.
      config: the settings; their `num_blocks` and `full_length_requests` are ignored.
      budget: bytes for weights, activations and KV cache together.

    Raises:
      ConfigError: the budget does not hold one full-length request.
    """
    probe = dataclasses.replace(config, num_blocks=config.blocks_per_request)
    plan = Engine(model, probe).memory_plan
    num_blocks = blocks_that_fit(
        budget, weights=plan.weights, activations=plan.activations, block=plan.block
    )
    if num_blocks < config.blocks_per_request:
        needed = plan.total
        raise ConfigError(
            f"the memory budget is {budget} bytes, and weights ({plan.weights}), "
            f"activations ({plan.activations}) and the KV cache of one request of "
            f"{config.max_model_len} tokens ({plan.kv_cache}) take {needed}; raise the "
            "budget or lower max_model_len"
        )
    return dataclasses.replace(config, num_blocks=num_blocks)
