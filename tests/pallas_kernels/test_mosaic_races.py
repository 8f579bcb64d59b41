"""The decode kernel has no data race, and the check for that notices planted ones.

The interpreter follows reads and writes of shared memory with vector clocks. wgmma's
own reads are not followed, so each product here also reads its operands.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import make_case, oracle

from pallas_kernels import compat

if not compat.has_mosaic():
    pytest.skip("the pallas backend needs jax >= 0.11", allow_module_level=True)


from pallas_kernels import mosaic_ring
from pallas_kernels.mosaic_decode import paged_attention_mosaic

pytestmark = pytest.mark.usefixtures("followed_reads")


def run(block_size=16, dtype=jnp.bfloat16):
    """Runs 5 tiles through 2 stages; raises if a race was found."""
    case = make_case(
        [290],
        heads=2,
        kv_heads=1,
        head_dim=64,
        block_size=block_size,
        dtype=dtype,
        padding=0,
    )
    attend = functools.partial(
        paged_attention_mosaic,
        **case.options(),
        splits=1,
        stages=2,
        interpret=compat.interpret_params(True, detect_races=True),
    )
    # A new function each time, so that nothing is traced before the planted bug.
    out = np.asarray(jax.jit(lambda *args: attend(*args))(*case.args()))
    assert not compat.races_found(), "data race"
    np.testing.assert_allclose(out.astype(np.float64), oracle(case), atol=1e-2)


@pytest.mark.parametrize(
    "block_size,dtype", [(4, jnp.bfloat16), (16, jnp.bfloat16), (16, jnp.int8)]
)
def test_no_race(block_size, dtype):
    """Of a ring that wgmma reads, and of those that go through registers."""
    run(block_size, dtype)


@pytest.mark.parametrize(
    "step,block_size,dtype",
    [
        ("await_ready", 16, jnp.bfloat16),
        ("await_free", 16, jnp.bfloat16),
        ("publish", 16, jnp.bfloat16),
        ("await_free", 4, jnp.bfloat16),
        ("await_ready", 16, jnp.int8),
    ],
)
def test_a_missing_step_is_noticed(monkeypatch, capfd, step, block_size, dtype):
    """Without the wait for copies, the wait for readers, or the fence before TMA."""
    monkeypatch.setattr(mosaic_ring, step, lambda *barrier: None)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as error:
        run(block_size, dtype)
    # jax 0.11 prints the race, and may then fail of it in another way; 0.12 raises it.
    printed = capfd.readouterr()
    assert "race" in f"{error.value}{printed.out}{printed.err}".lower()
