"""The constants that are fitted to the paper, and how: by least relative squares.

The results stand in `simulator.systems` (`PAPER_OVERHEADS`, `SERVING_STEP_S`) and in
`simulator.hardware`; a test fits again. The figures that a constant is fitted to (1 and
19a) are no evidence for the model.
"""

from typing import NamedTuple

import numpy as np

from experiments.simulator.costs import RooflineCosts
from experiments.simulator.hardware import HARDWARE
from experiments.simulator.model_profiles import MODELS
from experiments.simulator.systems import BLOCK_SIZE, PAPER_OVERHEADS, SETUPS
from experiments.simulator.work import decode_work, prompt_work
from experiments.studies.paper import numbers

# Tokens that Fig 19a swaps, and recomputes.
SWAPPED_TOKENS = 256


class IterationFit(NamedTuple):
    """What a step takes beside the physics.

    Attributes:
      step_s: of each step, in seconds.
      row_s: of each sequence in it.
    """

    step_s: float
    row_s: float


class SwapFit(NamedTuple):
    """What a swap takes.

    Attributes:
      host_bandwidth: bytes a second, either way.
      copy_in_s: of each copy from the host, in seconds.
      copy_out_s: of each copy to it.
    """

    host_bandwidth: float
    copy_in_s: float
    copy_out_s: float


def context_of_fig1() -> float:
    """Returns the slots that attention reads for each sequence in Fig 1.

    The figure does not say; its memory is full at so many requests, and then the share
    of the slots that hold a token is that of Fig 2.
    """
    requests = numbers()["fig01"]["memory_gb"]["vllm"][-1][0]
    filled = numbers()["fig02"]["percent"]["vllm"][0] / 100
    return filled * SETUPS["opt-13b"].num_blocks * BLOCK_SIZE / requests


def fit_iteration() -> IterationFit:
    """Fits the overheads of a step and of a sequence to the ten points of Fig 1."""
    setup = SETUPS["opt-13b"]
    costs = RooflineCosts(MODELS[setup.model], HARDWARE[setup.hardware])
    batch, throughput = np.array(numbers()["fig01"]["throughput"]).T
    seconds = batch / throughput
    context = context_of_fig1()
    physics = np.array([float(costs(decode_work(b, context))) for b in batch])
    found = fit(np.stack([np.ones_like(batch), batch], 1), seconds - physics, seconds)
    return IterationFit(*found)


def fit_swap() -> SwapFit:
    """Fits bandwidth, and what a copy takes each way, to the 18 points of Fig 19a."""
    model = MODELS["opt-13b"]
    figure = numbers()["fig19a"]
    copies = copies_of_swap(np.array(figure["block_size"]))
    nothing = np.zeros_like(copies)
    nbytes = np.full_like(copies, SWAPPED_TOKENS * model.kv_bytes_per_token)
    ins = np.stack([nbytes, copies, nothing], 1)
    outs = np.stack([nbytes, nothing, copies], 1)
    seconds = np.array([*figure["swap_in"], *figure["swap_out"]]) / 1e3
    byte_s, copy_in_s, copy_out_s = fit(np.vstack([ins, outs]), seconds, seconds)
    return SwapFit(1 / byte_s, copy_in_s, copy_out_s)


def fit_serving() -> float:
    """Fits what a step of a service takes beside Fig 1's, in seconds.

    To the nine prompts that Fig 19a recomputes; the other overheads as they are.
    """
    model, hardware = MODELS["opt-13b"], HARDWARE["a100-40gb"]
    figure = numbers()["fig19a"]
    seconds = np.array(figure["recompute"]) / 1e3
    rest = np.array(
        [
            float(
                RooflineCosts(
                    model, hardware, block_size=size, overheads=PAPER_OVERHEADS
                )(prompt_work(SWAPPED_TOKENS))
            )
            for size in figure["block_size"]
        ]
    )
    return fit(np.ones((len(seconds), 1)), seconds - rest, seconds)[0]


def copies_of_swap(block_size: np.ndarray) -> np.ndarray:
    """Returns how many copies move Fig 19a's tokens: each block, layer, and K or V."""
    return SWAPPED_TOKENS * 2.0 * MODELS["opt-13b"].num_layers / block_size


def fit(columns: np.ndarray, left: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Returns the factors of the columns that add up to what is left, f64[K].

    Args:
      columns: f64[N, K].
      left: f64[N], of the times, what the columns have to explain.
      seconds: f64[N], the times; errors count relative to these.
    """
    scale = 1 / seconds
    return np.linalg.lstsq(columns * scale[:, None], left * scale)[0].tolist()
