"""How fast this machine reads and multiplies: what the benchmarks measure against."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

_SQUARE = 2048
Clock = Callable[[], float]


class Speed(NamedTuple):
    """A machine's own limits.

    Attributes:
        bandwidth: bytes read in a second, in a sum over 256 MiB.
        flops: float32 operations in a second, in a product of two large matrices.
    """

    bandwidth: float
    flops: float

    def least_seconds(self, nbytes: float, flops: float = 0.0) -> float:
        """Returns the least time for reading so many bytes and so much arithmetic."""
        return max(nbytes / self.bandwidth, flops / self.flops)

    def __str__(self) -> str:
        """Returns both in words."""
        return f"{self.bandwidth / 1e9:.1f} GB/s, {self.flops / 1e9:.0f} GFLOP/s"


def best_time(
    function: Callable, *args, repeats: int, clock: Clock = time.perf_counter
) -> float:
    """Returns the least time in seconds; other programs only ever add to it."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = clock()
        jax.block_until_ready(function(*args))
        times.append(clock() - start)
    return min(times)


def measure_speed(repeats: int, clock: Clock = time.perf_counter) -> Speed:
    """Measures this machine with XLA, as many times as said; the best counts."""

    def best(function: Callable, *args) -> float:
        return best_time(jax.jit(function), *args, repeats=repeats, clock=clock)

    big = jnp.ones(2**26, jnp.float32)
    reading = best(jnp.sum, big)
    square = jnp.ones((_SQUARE, _SQUARE))
    multiplying = best(jnp.matmul, square, square)
    return Speed(big.nbytes / reading, 2 * _SQUARE**3 / multiplying)
