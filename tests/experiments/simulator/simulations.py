"""Small simulations for tests."""

import dataclasses

import jax
import numpy as np

from experiments.simulator.run import make_program, simulate
from experiments.simulator.trace import Trace
from paged_jax import EngineConfig
from paged_jax.step_log import Field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerToken:
    """Costs that a test can add up by hand, and that float32 adds exactly."""

    step_s: float = 0.5
    token_s: float = 0.125

    def __call__(self, work):
        return self.step_s + self.token_s * work.tokens


UNIT = PerToken(1.0, 0.0)


def small(**changes) -> EngineConfig:
    """Returns settings under which blocks run out."""
    settings = dict(
        block_size=4,
        num_blocks=24,
        max_model_len=48,
        max_seqs=6,
        max_requests=64,
        max_prefixes=0,
        token_budget=16,
        watermark=0.05,
        spare_blocks=0,
    )
    return EngineConfig(**(settings | changes))


def draw_trace(count, n=1, seed=0, longest=20, rate=None) -> Trace:
    """Returns requests of random lengths; all at time 0 without a rate."""
    rng = np.random.default_rng(seed)
    arrival = np.zeros(count)
    if rate:
        arrival = np.cumsum(rng.exponential(1 / rate, count))
    outputs = np.repeat(rng.integers(1, longest, (count, 1)), n, axis=1)
    return Trace(arrival, rng.integers(1, longest, count), outputs)


def run(config, trace, costs=UNIT, *, log_length=1, together=False, **options):
    """Simulates a trace."""
    program = make_program(config, costs, log_length=log_length, together=together)
    return simulate(config, trace, program, **options)


def assert_same_log(found, expected) -> None:
    """Compares the step logs of a simulation and of an engine, row by row."""
    assert len(found) == len(expected)
    for field in Field:
        np.testing.assert_array_equal(
            found[:, field], expected[:, field], err_msg=field.name
        )
