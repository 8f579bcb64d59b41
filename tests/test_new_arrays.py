"""An empty state: buffers of its own, and no program to make them."""

import jax
import numpy as np
import pytest
from engines import counted

from paged_jax.config import EngineConfig
from paged_jax.memory_managers import MANAGERS
from paged_jax.new_arrays import on_device
from paged_jax.submit import init_scheduler

# Sizes of no other test, of which every part of a state has some.
SIZES = dict(
    max_model_len=92, block_size=4, max_seqs=11, max_requests=37, num_blocks=53
)
KINDS = {
    "swap, beams": dict(max_n=3, max_beam_width=3, preemption="swap"),
    "prefix cache": dict(prefix_caching=True),
    "max": dict(memory="max"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_and_every_leaf_can_be_donated(kind):
    config = EngineConfig(**SIZES, **KINDS[kind])
    with counted() as compilations:
        state = init_scheduler(config.step_config(), MANAGERS[config.memory], False)
        jax.block_until_ready(state)
    assert compilations == []
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.size]
    assert len(set(buffers)) == len(buffers) > 30


def test_a_copy_is_made_of_the_hosts_array():
    # Half of them at a multiple of 64 bytes, which device_put would not copy.
    memory = np.empty(4 * 5000, np.uint8)
    start = -memory.ctypes.data % 64
    for shift in (0, 16, 64, 80):
        values = memory[start + shift : start + shift + 4 * 4096].view(np.int32)
        values[:] = np.arange(4096)
        array = on_device(values)
        values[:] = -1
        assert int(array.sum()) == sum(range(4096))
