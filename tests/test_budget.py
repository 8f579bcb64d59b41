"""A budget in bytes becomes a number of blocks."""

import jax
import pytest
from pythons import SAME_KIND

from paged_jax import ConfigError, Engine, EngineConfig, LoadedModel
from paged_jax.budget import fit_memory
from paged_jax.models.config import tiny
from paged_jax.models.llama import init_params

CONFIG = EngineConfig(
    block_size=8, max_model_len=32, max_seqs=4, max_requests=4, token_budget=8
)


@pytest.fixture(scope="module")
def model():
    shape = tiny(num_layers=1)
    return LoadedModel(shape, init_params(shape, jax.random.key(0)), None)


@SAME_KIND
def test_a_budget_is_filled_and_not_exceeded(model):
    budget = 1_000_000
    plan = Engine(model, fit_memory(model, CONFIG, budget)).memory_plan
    assert plan.total <= budget < plan.total + 2 * plan.block
    assert plan.full_length_requests == plan.num_blocks // 4


def test_a_budget_below_one_request_says_what_is_needed(model):
    with pytest.raises(ConfigError, match=r"budget is 1000 bytes.*raise the budget"):
        fit_memory(model, CONFIG, 1000)
