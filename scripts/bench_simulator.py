#!/usr/bin/env python3
"""Counts the iterations that the simulator makes in a second, on one core.

    ./scripts/bench_simulator.py            256 sequences, 2000 and 100,000 blocks
    ./scripts/bench_simulator.py --json     the same as JSON

OPT-13B on an A100 serves requests with lengths like Alpaca's; they arrive faster than
they are served, so that the batch is full. Beside it the same requests, rules and costs
in plain Python (`experiments/simulator/plain.py`), whose times must be the same; and in
Vidur, where it is installed (`pip install vidur`; it is not among the project's
requirements). Times are the core's own: what other programs take of it is left out.

It is to make 20,000 iterations a second with 2000 blocks, and 15,000 with 100,000;
exits with 1 if it makes fewer.
"""

# ruff: noqa: E402 - the cores are chosen, and the project found, before JAX comes in.
import argparse
import json
import os
import statistics
import sys
import time

if hasattr(os, "sched_setaffinity"):  # before XLA counts the cores
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import project_environment

project_environment.enter()

import numpy as np

from experiments.lengths import draw_lengths
from experiments.simulator.arrivals import poisson_arrivals
from experiments.simulator.costs import Overheads, RooflineCosts
from experiments.simulator.hardware import HARDWARE
from experiments.simulator.model_profiles import MODELS
from experiments.simulator.plain import simulate_plain
from experiments.simulator.run import make_program, simulate
from experiments.simulator.trace import Trace
from experiments.simulator.vidur_speed import is_installed, time_vidur
from paged_jax import EngineConfig, compilation_cache

ROWS, MODEL_LEN = 256, 2048
# Blocks, and the iterations a second that are wanted.
CASES = ((2_000, 20_000), (100_000, 15_000))
STEP_S, ROW_S = 0.026, 0.0004


def make_trace(count: int) -> Trace:
    """Returns requests that arrive ten times as fast as they can be served."""
    rng = np.random.default_rng(0)
    lengths = draw_lengths(rng, count, "alpaca", 1.0, MODEL_LEN)
    return Trace(poisson_arrivals(rng, count, 500.0), lengths[:, 0], lengths[:, 1:])


def measure(num_blocks: int, requests: int, repeats: int) -> dict:
    """Times one pool size; returns a row of the table."""
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=MODEL_LEN,
        max_seqs=ROWS,
        max_requests=requests,
        max_prefixes=0,
        token_budget=2560,
        chunked_prefill=False,
        spare_blocks=0,
        preemption="recompute",
    )
    # The same costs as in plain Python: of the step and of each sequence alone.
    costs = RooflineCosts(
        MODELS["opt-13b"],
        HARDWARE["a100-40gb"]._replace(bandwidth=1e30, flops=1e30),
        overheads=Overheads(STEP_S, ROW_S),
    ).terms()
    program, trace = make_program(config, costs), make_trace(requests)
    found = simulate(config, trace, program)  # compiles
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        simulate(config, trace, program)
        seconds.append(time.process_time() - started)
    started = time.process_time()
    _, ended, steps = simulate_plain(
        program.config, trace, lambda tokens, rows: STEP_S + ROW_S * rows
    )
    plain = time.process_time() - started
    vidur = None
    if is_installed():
        vidur_steps, vidur_seconds = time_vidur(program.config, trace, STEP_S, ROW_S)
        vidur = vidur_steps / vidur_seconds
    return {
        "num_blocks": num_blocks,
        "iterations": found.steps,
        "iterations_per_s": found.steps / statistics.median(seconds),
        "plain_python_iterations_per_s": steps / plain,
        "vidur_iterations_per_s": vidur,
        "mean_running": found.means["mean_running"],
        "same_times": bool(
            steps == found.steps and np.allclose(ended, found.ended, atol=0.01)
        ),
    }


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.requests < ROWS or args.repeats < 1:
        parser.error(f"--requests must be {ROWS} or more, --repeats 1 or more")
    compilation_cache.enable()
    rows = [
        measure(num_blocks, args.requests, args.repeats) | {"wanted": wanted}
        for num_blocks, wanted in CASES
    ]
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        print("Simulated iterations a second, on one core")
        print(
            f"{'blocks':>9}{'iterations':>12}{'a second':>10}{'wanted':>9}"
            f"{'plain Python':>14}{'running':>9}{'same times':>12}"
        )
        for row in rows:
            print(
                f"{row['num_blocks']:>9}{row['iterations']:>12}"
                f"{row['iterations_per_s']:>10.0f}{row['wanted']:>9}"
                f"{row['plain_python_iterations_per_s']:>14.0f}"
                f"{row['mean_running']:>9.0f}{row['same_times']!s:>12}"
            )
        for row in rows:
            vidur = row["vidur_iterations_per_s"]
            if vidur is not None:
                print(f"vidur: {vidur:.0f} a second with {row['num_blocks']} blocks")
        if not is_installed():
            print("vidur: not installed")
    slow = any(row["iterations_per_s"] < row["wanted"] for row in rows)
    return int(slow or not all(row["same_times"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
