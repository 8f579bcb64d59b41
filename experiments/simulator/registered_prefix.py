"""A registered prefix: computed once, before the first request, and held for all.

As in the paper's section 6.4 and its artifact, where the shared part is cut to whole
blocks, and what it takes to compute it is no part of the measurement.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from experiments.errors import UserError
from paged_jax.config import EngineConfig, StepConfig
from paged_jax.requests import RequestStatus, push_back
from paged_jax.state import SchedulerState

# Before all requests, so that it is the last to be preempted, as in the engine.
_ARRIVAL = -(2**30)


def check_prefix(config: EngineConfig, prefix_len: int) -> None:
    """Raises UserError if the engine's settings do not go with a registered prefix."""
    static = config.step_config()
    if not static.sharing or config.max_prefixes < 1:
        raise UserError(
            "a prefix is registered and engine.max_prefixes is "
            f"{config.max_prefixes}, engine.sharing {config.sharing}, engine.memory "
            f"{config.memory!r}; it needs 1 or more, True and 'paged'"
        )
    if config.prefix_caching:
        raise UserError(
            "a prefix is registered and engine.prefix_caching is on; choose one way "
            "to share"
        )
    if not 1 <= prefix_len < config.max_model_len:
        raise UserError(
            f"prefix_len is {prefix_len}; it must be 1 or more, and less than "
            f"engine.max_model_len {config.max_model_len}"
        )


def enter_prefix(
    config: StepConfig, state: SchedulerState, num_tokens: int
) -> SchedulerState:
    """Puts a prefix into the queue, in the slot behind those of requests.

    Args:
      config: static settings, with room for a prefix.
      state: scheduler's state with nothing in it.
      num_tokens: of the prefix, in whole blocks.
    """
    slot = _slot(config)
    requests = state.requests
    changes = {
        "length": num_tokens,
        "prompt_len": num_tokens,
        "max_len": num_tokens,
        "arrival": _ARRIVAL,
        "status": int(RequestStatus.WAITING),
    }
    columns = {
        name: getattr(requests, name).at[slot].set(value)
        for name, value in changes.items()
    }
    return dataclasses.replace(
        state,
        requests=dataclasses.replace(requests, **columns),
        queue=push_back(state.queue, jnp.array([slot]), jnp.int32(1)),
    )


def row_of_prefix(config: StepConfig, state: SchedulerState) -> int:
    """Returns the sequence row that holds the prefix; reads the device.

    There is one: a pool that holds a request of the model's length holds a prefix.
    """
    rows = np.asarray(state.sequences.request) == _slot(config)
    return int(np.flatnonzero(rows)[0])


def _slot(config: StepConfig) -> int:
    return config.num_requests - 1
