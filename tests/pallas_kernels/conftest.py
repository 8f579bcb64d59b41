"""What tests of several kernels share."""

import pytest

from pallas_kernels import compat


@pytest.fixture
def followed_reads(monkeypatch):
    """Has each product of a kernel read its operands, for the race detector.

    The interpreter follows reads and writes of shared memory with vector clocks, but
    not wgmma's own.
    """
    # Here, since an older jax has no such kernels.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import mosaic_softmax

    matmul = mosaic_softmax.matmul

    def matmul_with_reads(acc, a, b, **kwargs):
        matmul(acc, a, b, **kwargs)
        _ = a[...], b[...]
        plgpu.commit_smem()

    monkeypatch.setattr(mosaic_softmax, "matmul", matmul_with_reads)
    yield
    compat.reset_interpreter()
