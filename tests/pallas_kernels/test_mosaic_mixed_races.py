"""The mixed kernel has no data race, and planted ones are noticed.

See `test_mosaic_races`. Two consumers share the stages here, and results leave while
the next piece begins.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Chunk, make_case, oracle

from pallas_kernels import compat

if not compat.has_mosaic():
    pytest.skip("the pallas backend needs jax >= 0.11", allow_module_level=True)


from pallas_kernels import mosaic_mixed_kernel, mosaic_ring
from pallas_kernels.mosaic_mixed import paged_attention_mixed

pytestmark = pytest.mark.usefixtures("followed_reads")


def run(block_size=16, dtype=jnp.bfloat16):
    """Runs a decode and two runs on one thread block; raises if a race was found."""
    case = make_case(
        [70],
        [Chunk(250, 40)],
        heads=4,
        kv_heads=1,
        head_dim=64,
        block_size=block_size,
        dtype=dtype,
        padding=0,
        window=100,
    )
    attend = functools.partial(
        paged_attention_mixed,
        **case.options(),
        workers=1,
        interpret=compat.interpret_params(True, detect_races=True),
    )
    # A new function each time, so that nothing is traced before the planted bug.
    out = np.asarray(jax.jit(lambda *args: attend(*args))(*case.args()))
    assert not compat.races_found(), "data race"
    np.testing.assert_allclose(out.astype(np.float64), oracle(case), atol=2e-2)


@pytest.mark.parametrize(
    "block_size,dtype", [(4, jnp.bfloat16), (16, jnp.bfloat16), (16, jnp.int8)]
)
def test_no_race(block_size, dtype):
    """Of a ring that wgmma reads, and of those that go through registers."""
    run(block_size, dtype)


@pytest.mark.parametrize(
    "module,step",
    [
        (mosaic_ring, "await_cleared"),
        (mosaic_ring, "await_free"),
        (mosaic_mixed_kernel, "await_stores"),
    ],
)
def test_a_missing_step_is_noticed(monkeypatch, capfd, module, step):
    """Without the wait for the consumer that clears, for readers, or for stores."""
    monkeypatch.setattr(module, step, lambda *barrier: None)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as error:
        run()
    # jax 0.11 prints the race, and may then fail of it in another way; 0.12 raises it.
    printed = capfd.readouterr()
    assert "race" in f"{error.value}{printed.out}{printed.err}".lower()
