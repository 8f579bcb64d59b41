"""The runs of the simulator behind the page's sliders; they ship in `data/`.

    python -m experiments.visualize.simulations

makes them anew: about two hundred runs of five minutes of arrivals, OPT-13B on one A100
(the paper's section 6.1), in about ten minutes on two cores.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from experiments.simulator import systems
from experiments.simulator.evaluate import draw_trace, normalized_latency
from experiments.simulator.run import simulate
from paged_jax import compilation_cache

DATA = Path(__file__).parent / "data" / "simulations.json"
SETUP, DATASET, SECONDS, SEED = "opt-13b", "sharegpt", 300.0, 0
RATES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5)
# Slots of the KV cache: half of what the A100 of 40 GB has room for, all, twice that.
BUDGETS = (7864, 15728, 31456)
BLOCK_SIZES = (1, 4, 16, 64, 256)
# A queue that grows for ever makes latencies that say nothing more, and long runs:
# rates above the first one at which a system is past this are left out.
HOPELESS_S = 1.5


class Case(NamedTuple):
    """One curve: a system with some memory.

    Attributes:
      policy: one of `systems.SYSTEMS`.
      budget: slots of the KV cache.
      block_size: tokens in a block; 16 but for paged memory.
    """

    policy: str
    budget: int
    block_size: int


class Point(NamedTuple):
    """One run. Latency in seconds a token; shares are of all slots.

    Attributes:
      policy: see `Case`.
      budget: see `Case`.
      blockSize: see `Case`.
      rate: requests a second.
      latency: normalized latency (paper, section 6.1).
      running: mean sequences in the batch.
      live: share that holds tokens.
      ahead: share granted for tokens to come.
      internal: share granted and never used.
      waits: whether requests ever wait. If so, the three shares are means over the
        iterations in which they do, else over all.
      served: requests done a second, from the first arrival to the last end.
      preemptions: of all.
    """

    policy: str
    budget: int
    blockSize: int
    rate: float
    latency: float
    running: float
    live: float
    ahead: float
    internal: float
    waits: bool
    served: float
    preemptions: int


def cases() -> list[Case]:
    """Returns all curves."""
    return [
        Case(policy, budget, size)
        for policy, budget in itertools.product(systems.SYSTEMS, BUDGETS)
        for size in (BLOCK_SIZES if policy == "vllm" else (16,))
    ]


def run_case(case: Case, rates: tuple[float, ...] = RATES, seconds: float = SECONDS):
    """Returns the `Point`s of one curve, up to the first that is past hope."""
    setup = systems.SETUPS[SETUP]
    engine = systems.engine_config(case.policy, setup, dataset=DATASET, slots=1024)
    engine = dataclasses.replace(
        engine, block_size=case.block_size, num_blocks=case.budget // case.block_size
    )
    if case.policy == "ft":
        # Its batch is what fits: in the paper 5 requests in 15,728 slots.
        seqs = max(1, setup.static_batch[DATASET] * case.budget // 15728)
        engine = dataclasses.replace(
            engine, max_seqs=seqs, token_budget=seqs * engine.max_model_len
        )
    program = systems.program(case.policy, setup, engine)
    points = []
    for rate in rates:
        trace = draw_trace(DATASET, rate, seconds, SEED)
        results = simulate(engine, trace, program)
        means = results.means
        points.append(
            Point(
                *case,
                rate=rate,
                latency=_round(normalized_latency(results)),
                running=_round(means["mean_running"]),
                live=_round(means["kv_breakdown.token_states"]),
                ahead=_round(means["kv_breakdown.reservation"]),
                internal=_round(means["kv_breakdown.internal"]),
                waits=means["mean_waiting"] > 0,
                served=_round(len(trace) / results.seconds),
                preemptions=int(means["preemptions"]),
            )
        )
        if points[-1].latency > HOPELESS_S:
            break
    return points


def as_data(points: list[Point]) -> dict[str, Any]:
    """Returns points as the page wants them."""
    return {
        "setup": SETUP,
        "dataset": DATASET,
        "seconds": SECONDS,
        "policies": list(systems.SYSTEMS),
        "budgets": list(BUDGETS),
        "blockSizes": list(BLOCK_SIZES),
        "rates": list(RATES),
        "columns": list(Point._fields),
        "points": [list(point) for point in points],
    }


def main() -> int:
    """Makes all runs, and writes the file."""
    compilation_cache.enable()
    points: list[Point] = []
    # XLA releases the lock of Python while it compiles and runs.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(run_case, cases()):
            points += done
            print(f"{done[0][:3]}: {len(done)} rates", flush=True)
    data = as_data(points)
    rows = ",\n".join(json.dumps(row) for row in data.pop("points"))
    head = json.dumps(data, indent=1)
    DATA.write_text(f'{head[:-2]},\n "points": [\n{rows}\n]}}\n', "utf-8")
    print(DATA)
    return 0


def _round(value: float) -> float:
    return round(float(value), 4)


if __name__ == "__main__":
    sys.exit(main())
