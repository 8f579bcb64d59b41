"""The most output tokens a second that a machine allows on a workload, in float32."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from experiments.engine_bench import engines
from experiments.engine_bench.workload import KV_TOKENS, Request
from experiments.machine_speed import Speed
from experiments.simulator.model_profiles import profile_of
from paged_jax.models.config import ModelConfig

# XLA's large product comes near the machine's limit in this dtype only.
DTYPE = "float32"
_REPEATS = 5
_BYTES = 4
_MEASURE = """
import json, os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-{threads}:])
from experiments.machine_speed import measure_speed
print(json.dumps(measure_speed({repeats})))
"""


def measure(threads: int) -> Speed:
    """Measures the machine's speed on so many cores, in a process of its own."""
    code = _MEASURE.format(threads=threads, repeats=_REPEATS)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=engines.ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return Speed(*json.loads(done.stdout))


def least_seconds(
    config: ModelConfig, requests: Sequence[Request], speed: Speed
) -> float:
    """Returns the least time that a workload can take, whatever serves it.

    The larger of two: all arithmetic, of products with weights and of attention, at the
    speed of a large product; and the weights read once a step, in as few steps as the
    longest request and the KV budget allow. The last token of a request is not fed
    back, and the head is computed for generated tokens alone.

    Args:
      config: shape of the model.
      requests: what is asked.
      speed: of the machine.
    """
    profile = profile_of("", config)
    layers, head = profile.layer_weights * config.num_layers, profile.head_weights
    outputs = sum(request.max_tokens for request in requests)
    fed = sum(len(r.prompt) + r.max_tokens - 1 for r in requests)
    # Token i of a sequence attends to i tokens: scores, and sums of values.
    attended = sum(math.comb(len(r.prompt) + r.max_tokens, 2) for r in requests)
    flops = 2 * (layers * fed + head * outputs)
    width = config.num_heads * config.head_dim
    flops += 4 * width * config.num_layers * attended
    # Slots that are held, summed over steps: the budget has so many in each.
    held = sum(
        len(r.prompt) * r.max_tokens + math.comb(r.max_tokens, 2) for r in requests
    )
    steps = max(max(r.max_tokens for r in requests), math.ceil(held / KV_TOKENS))
    return max(
        speed.least_seconds(0, flops),
        speed.least_seconds(steps * (layers + head) * _BYTES),
    )


def describe(
    config: ModelConfig, requests: Sequence[Request], speed: Speed
) -> dict[str, Any]:
    """Returns the bound, and what it comes from, for the result."""
    seconds = least_seconds(config, requests, speed)
    return {
        "gflops": speed.flops / 1e9,
        "gigabytes_per_s": speed.bandwidth / 1e9,
        "output_tokens_per_s": sum(r.max_tokens for r in requests) / seconds,
    }
