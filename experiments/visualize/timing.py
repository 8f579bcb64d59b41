"""How long the workload takes under each system, with nobody watching.

One run says little: whatever else the machine has to do slows down the system that it
falls on. So there are rounds in which all systems take turns, and the fastest run of
each counts.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from experiments.visualize.recorder import Asked
from paged_jax import Engine, EngineConfig, LoadedModel

ROUNDS = 2


class Timed(NamedTuple):
    """A run.

    Attributes:
      seconds: from the first request on to the last answer.
      iterations: how many it took.
      tokens: the answers.
    """

    seconds: float
    iterations: int
    tokens: list[tuple[int, ...]]


def time_in_turns(
    names: Iterable[str], run: Callable[[str], Timed]
) -> dict[str, list[Timed]]:
    """Returns the runs of each system, the fastest first.

    Args:
      names: the systems.
      run: serves the workload under one of them.
    """
    names = list(names)
    rounds = [[run(name) for name in names] for _ in range(ROUNDS)]
    return {
        name: sorted(runs, key=lambda timed: timed.seconds)
        for name, runs in zip(names, zip(*rounds))
    }


def time_once(
    model: LoadedModel, config: EngineConfig, asked: Sequence[Asked]
) -> Timed:
    """Serves all requests at once with a fresh engine, and takes the time."""
    engine = Engine(model, config)
    engine.warmup()
    started = time.perf_counter()
    outputs = engine.generate([a.tokens for a in asked], [a.params for a in asked])
    seconds = time.perf_counter() - started
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    return Timed(seconds, engine.stats.iterations, tokens)
