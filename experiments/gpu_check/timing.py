"""How long programs take on the device."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

REPEATS = 5


def repeated(attend: Callable, turns: int) -> Callable:
    """Returns a program that attends `turns` times, each time to the result before.

    Args:
        attend: a function of queries and of arrays, which must come as arguments: what
            a function closes over becomes a constant of its program, caches included.
        turns: how often.

    Returns:
        A compiled function of the first queries and of the arrays.
    """

    @jax.jit
    def run(q, arrays):
        def turn(_, x):
            return attend(x, arrays).astype(x.dtype)

        return jax.lax.fori_loop(0, turns, turn, q)

    return run


def seconds_of(function: Callable, *args: Any, repeats: int = REPEATS) -> float:
    """Returns the median of the wall times, in seconds, once it is compiled."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times))
