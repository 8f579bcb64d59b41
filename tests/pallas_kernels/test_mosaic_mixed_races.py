"""The mixed kernel has no data race, and planted ones are noticed.

See `test_mosaic_races`. Two consumers share the stages here, and results leave while
the next piece begins.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Chunk, make_case, oracle

from pallas_kernels import compat

if not compat.has_mosaic():
    pytest.skip("the pallas backend needs jax >= 0.11", allow_module_level=True)


from pallas_kernels import mosaic_mixed_kernel, mosaic_ring
from pallas_kernels.mosaic_mixed import paged_attention_mixed, plan_shape
from pallas_kernels.mosaic_plan import make_plan

pytestmark = pytest.mark.usefixtures("followed_reads")


def run(block_size=16, dtype=jnp.bfloat16, cut=False):
    """Runs a decode and two runs on one thread block; raises if a race was found.

    With `cut` three thread blocks share two runs: each is cut in two pieces, and the
    first thread block leaves partial results twice.
    """
    options: dict[str, Any] = dict(heads=4, kv_heads=1, head_dim=64, padding=0)
    options |= dict(block_size=block_size, dtype=dtype)
    if cut:
        workers, case = 3, make_case([], [Chunk(500, 4)] * 2, **options)
    else:
        workers = 1
        case = make_case([70], [Chunk(250, 40)], window=100, **options)
    assert cut_pieces(case, workers) == (4 if cut else 0)
    attend = functools.partial(
        paged_attention_mixed,
        **case.options(),
        workers=workers,
        interpret=compat.interpret_params(True, detect_races=True),
    )
    # A new function each time, so that nothing is traced before the planted bug.
    out = np.asarray(jax.jit(lambda *args: attend(*args))(*case.args()))
    assert not compat.races_found(), "data race"
    np.testing.assert_allclose(out.astype(np.float64), oracle(case), atol=2e-2)


def cut_pieces(case, workers):
    """Returns how many pieces leave partial results."""
    shape = plan_shape(case.metadata, heads=4, consumers=2, workers=workers)
    pieces = make_plan(case.metadata, case.window, shape).pieces
    return int((pieces.part[: int(pieces.number[0])] >= 0).sum())


@pytest.mark.parametrize(
    "block_size,dtype", [(4, jnp.bfloat16), (16, jnp.bfloat16), (16, jnp.int8)]
)
def test_no_race(block_size, dtype):
    """Of a ring that wgmma reads, and of those that go through registers."""
    run(block_size, dtype)


@pytest.mark.parametrize("block_size,dtype", [(4, jnp.bfloat16), (16, jnp.bfloat16)])
def test_no_race_where_runs_are_cut(block_size, dtype):
    run(block_size, dtype, cut=True)


@pytest.mark.parametrize(
    "module,step,cut",
    [
        (mosaic_ring, "await_cleared", False),
        (mosaic_ring, "await_free", False),
        (mosaic_mixed_kernel, "await_stores", False),
        (mosaic_mixed_kernel, "await_stores", True),
    ],
)
def test_a_missing_step_is_noticed(monkeypatch, capfd, module, step, cut):
    """Without the wait for the consumer that clears, for readers, or for stores."""
    monkeypatch.setattr(module, step, lambda *barrier: None)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as error:
        run(cut=cut)
    # jax 0.11 prints the race, and may then fail of it in another way; 0.12 raises it.
    printed = capfd.readouterr()
    assert "race" in f"{error.value}{printed.out}{printed.err}".lower()
