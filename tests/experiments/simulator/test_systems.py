"""The paper's systems: what their rules come to on each set-up."""

import numpy as np
import pytest

from experiments.simulator.evaluate import evaluate
from experiments.simulator.systems import MAX_SEQS, SETUPS, engine_config
from experiments.simulator.trace import Trace

_PAPERS = ("opt-13b", "opt-66b", "opt-175b")


@pytest.mark.parametrize("dataset", ["sharegpt", "alpaca"])
@pytest.mark.parametrize("setup", _PAPERS)
def test_ft_runs_its_batch_size_at_once(setup, dataset):
    most = SETUPS[setup].static_batch[dataset]
    count = 2 * most
    # Two whole batches, all known at time 0, whose members end together.
    trace = Trace(np.zeros(count), np.full(count, 20), np.full((count, 1), 5))
    found = evaluate("ft", setup, trace, dataset=dataset, max_requests=count + 1)
    assert found.means["mean_running"] == most
    # Each of them has the model length, of which the last step fills 24 slots.
    assert 20 / 2048 <= found.means["kv_utilization"] <= 24 / 2048
    assert found.rejected == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": "paged", "max_seqs": MAX_SEQS},
        {"memory": "max"},
        {"max_seqs": MAX_SEQS},
        {"num_blocks": 256},
    ],
)
def test_ft_keeps_the_memory_of_the_setup_if_its_rules_are_changed(changes):
    setup = SETUPS["opt-13b"]
    config = engine_config("ft", setup, dataset="alpaca", n=4, **changes)
    assert config.num_blocks == changes.get("num_blocks", setup.num_blocks)


def test_the_pool_of_ft_follows_the_length_and_the_block_size():
    setup = SETUPS["opt-13b"]

    def blocks(**changes):
        return engine_config("ft", setup, dataset="alpaca", **changes).num_blocks

    assert blocks() == 14 * 128
    assert blocks(block_size=8) == 14 * 256
    assert blocks(max_model_len=512) == setup.num_blocks  # more than 14 of 32
