"""The systems that the paper compares, and what they run on (its section 6.1)."""

import dataclasses
from typing import Any, NamedTuple

from experiments.errors import UserError
from experiments.simulator.costs import Overheads, RooflineCosts
from experiments.simulator.hardware import HARDWARE
from experiments.simulator.memory_split import split_memory
from experiments.simulator.model_profiles import MODELS
from experiments.simulator.run import make_program
from experiments.simulator.simulate import SimulatorProgram
from paged_jax.config import EngineConfig

# Of all systems, as in the artifact.
MAX_MODEL_LEN, TOKEN_BUDGET, MAX_SEQS, BLOCK_SIZE = 2048, 2560, 256, 16
# Fitted, by `experiments.studies.calibration`: the first two to what the physics leaves
# of Fig 1, the others to Fig 19a.
PAPER_OVERHEADS = Overheads(
    step_s=9.64e-3, row_s=0.2144e-3, copy_in_s=3.45e-6, copy_out_s=1.86e-6
)
# What a step of a running service takes beside that: fitted to the prompts that Fig 19a
# computes again. It is taken for Python's share of serving, which FasterTransformer has
# not: an assumption.
SERVING_STEP_S = 7.35e-3


class Setup(NamedTuple):
    """A model on some GPUs.

    Attributes:
      model: key of `MODELS`.
      hardware: key of `HARDWARE`.
      num_devices: GPUs.
      num_blocks: KV blocks, as the paper's Table 1 gives them; of set-ups
        that it leaves out there, as `split_memory` divides the memory.
      static_batch: most requests of a batch of FasterTransformer, by dataset; empty
        where the paper does not compare with it.
    """

    model: str
    hardware: str
    num_devices: int
    num_blocks: int
    static_batch: dict[str, int]


def _derived(model: str, hardware: str, num_devices: int = 1) -> Setup:
    """Returns a set-up that the paper does not have, or has no Table for."""
    split = split_memory(MODELS[model], HARDWARE[hardware], num_devices)
    return Setup(model, hardware, num_devices, split.num_blocks, {})


SETUPS = {
    "opt-13b": Setup("opt-13b", "a100-40gb", 1, 983, {"sharegpt": 5, "alpaca": 14}),
    "opt-66b": Setup("opt-66b", "a100-40gb", 4, 603, {"sharegpt": 2, "alpaca": 8}),
    "opt-175b": Setup("opt-175b", "a100-80gb", 8, 3753, {"sharegpt": 24, "alpaca": 80}),
    "llama-13b": _derived("llama-13b", "a100-40gb"),
    # Beyond the paper.
    "llama-3-8b-h100": _derived("llama-3-8b", "h100"),
    "llama-3-8b-h200": _derived("llama-3-8b", "h200"),
    "llama-3-70b-4xh100": _derived("llama-3-70b", "h100", 4),
    "llama-3-70b-2xh200": _derived("llama-3-70b", "h200", 2),
}
SYSTEMS = ("vllm", "orca_oracle", "orca_pow2", "orca_max", "ft")
_MEMORY = {"orca_oracle": "oracle", "orca_pow2": "pow2", "orca_max": "max", "ft": "max"}


def engine_config(
    system: str,
    setup: Setup,
    *,
    dataset: str = "sharegpt",
    n: int = 1,
    beam_width: int = 1,
    slots: int | None = None,
    prefixes: int = 0,
    **changes: Any,
) -> EngineConfig:
    """Returns the rules of a system.

    - `vllm`: paged memory, sharing, a watermark of 1%, whole prompts in steps of up to
      2560 tokens, recompute for one sequence and swap for several.
    - `orca_*`: reserves at admission, from a buddy allocator; nothing is shared and
      nobody preempted; each of n sequences is one of its own, and each beam takes a
      chunk of its own (paper, section 6.3). What a beam takes over of another is copied
      from chunk to chunk, and no time counts for that.
    - `ft`: batches at the level of requests, each run to its longest. The paper's batch
      size is the memory rule of `ft`, so its pool has the model length for each member
      of a batch, and may be larger than the set-up's: utilization, which is of granted
      slots, does not depend on that; shares of the pool do. If the changes have other
      memory, or another number of blocks or sequences, it is the set-up's.

    Args:
      system: one of `SYSTEMS`.
      setup: what it runs on.
      dataset: `sharegpt` or `alpaca`, for `ft`.
      n: sequences of a request.
      beam_width: beams of a search; a request for n sequences has 1.
      slots: sequences that the simulator holds at once; None: enough for a trace of
        any length (see `_slots`), whatever its load.
      prefixes: that are registered, 0 or 1; `vllm` alone shares them.
      changes: other settings of the engine.

    Raises:
      UserError: no such system, or no batch size of `ft` for the dataset.
    """
    if system not in SYSTEMS:
        raise UserError(f"system {system!r} is not one of {', '.join(SYSTEMS)}")
    static = system == "ft"
    if static and dataset not in setup.static_batch:
        raise UserError(
            f"the paper has no batch size of ft for {setup.model} and {dataset!r}; "
            "choose another system"
        )
    several = max(n, beam_width)
    seqs = setup.static_batch[dataset] * several if static else MAX_SEQS
    rules: dict[str, Any] = dict(
        block_size=BLOCK_SIZE,
        num_blocks=setup.num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_seqs=seqs,
        max_requests=_slots(several) if slots is None else slots,
        max_prefixes=prefixes if system == "vllm" else 0,
        max_n=n,
        max_beam_width=beam_width,
        token_budget=seqs * MAX_MODEL_LEN if static else TOKEN_BUDGET,
        chunked_prefill=False,
        watermark=0.01,
        spare_blocks=0,
        memory=_MEMORY.get(system, "paged"),
        batching="static" if static else "continuous",
        sharing=system == "vllm",
    )
    if static and not changes.keys() & {"num_blocks", "max_seqs", "memory"}:
        each = EngineConfig(**(rules | changes)).blocks_per_request
        rules["num_blocks"] = max(setup.num_blocks, seqs * each)
    return EngineConfig(**(rules | changes))


def _slots(several: int) -> int:
    """Returns how many sequences the simulator holds at once.

    Twice as many as can run would do, since the sequences of a request end together.
    More make the host's looks rarer; but of requests with several sequences each step
    looks through all slots for those of one.
    """
    return 4 * MAX_SEQS if several > 1 else 32 * MAX_SEQS


def overheads_of(system: str) -> Overheads:
    """Returns the overheads of one of `SYSTEMS` while it serves."""
    if system == "ft":
        return PAPER_OVERHEADS
    step_s = PAPER_OVERHEADS.step_s + SERVING_STEP_S
    return dataclasses.replace(PAPER_OVERHEADS, step_s=step_s)


def program(system: str, setup: Setup, config: EngineConfig) -> SimulatorProgram:
    """Returns the simulation of a system.

    Args:
      system: one of `SYSTEMS`.
      setup: what it runs on.
      config: from `engine_config`.
    """
    static = system == "ft"
    costs = RooflineCosts(
        MODELS[setup.model],
        HARDWARE[setup.hardware],
        setup.num_devices,
        config.block_size,
        overheads_of(system),
        padded=static,
    )
    return make_program(config, costs.terms(), together=static)
