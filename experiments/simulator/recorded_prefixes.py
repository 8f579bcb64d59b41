"""What a prefix cache finds of a recorded trace, beside what it could find at most."""

from pathlib import Path
from typing import NamedTuple

from experiments.simulator.cache_bound import infinite_cache
from experiments.simulator.costs import Overheads, RooflineCosts
from experiments.simulator.hardware import HARDWARE
from experiments.simulator.memory_split import split_memory
from experiments.simulator.model_profiles import MODELS
from experiments.simulator.readers import Malformed, read_trace
from experiments.simulator.recorded import longest, to_traces
from experiments.simulator.results import Results
from experiments.simulator.run import make_program, simulate
from paged_jax.config import EngineConfig

_NO_OVERHEADS = Overheads()


class CacheReport(NamedTuple):
    """What came of a trace.

    Attributes:
      hit_ratio: share of the prompts' tokens that was found when a request was first
        admitted.
      infinite_ratio: the same if nothing were ever evicted; no cache finds more.
      evicted_blocks: cached blocks that were granted anew.
      num_blocks: of the pool.
      max_model_len: tokens of the trace's longest request.
      results: of the simulation.
      malformed: lines that were left out.
    """

    hit_ratio: float
    infinite_ratio: float
    evicted_blocks: float
    num_blocks: int
    max_model_len: int
    results: Results
    malformed: Malformed


def serve_recorded(
    path: Path | str,
    model: str,
    hardware: str,
    num_devices: int = 1,
    *,
    block_size: int = 16,
    max_seqs: int = 128,
    token_budget: int = 8192,
    slots: int = 4096,
    overheads: Overheads = _NO_OVERHEADS,
    strict: bool = False,
    keep_requests: bool = True,
) -> CacheReport:
    """Serves a file of Mooncake's with a prefix cache; prompts come in chunks.

    The file is read three times, a piece at a time: for its longest request, for the
    bound, and to be served.

    Args:
      path: the file.
      model: key of `MODELS`.
      hardware: key of `HARDWARE`.
      num_devices: how many share the model.
      block_size: tokens in a block; it divides 512.
      max_seqs: most sequences that run at once.
      token_budget: most tokens of a step.
      slots: requests that have come and not ended, and those that come next.
      overheads: of the software; none by default, since none were measured on this
        hardware.
      strict: whether a malformed line is an error.
      keep_requests: see `simulate`.

    Raises:
      UserError: a file that cannot be read, or a model that does not fit.
    """

    def rows(malformed: Malformed | None = None):
        return read_trace(path, "mooncake", strict=strict, malformed=malformed)

    malformed = Malformed()
    max_model_len = longest(rows(malformed))
    profile, device = MODELS[model], HARDWARE[hardware]
    memory = split_memory(
        profile, device, num_devices, block_size=block_size, token_budget=token_budget
    )
    config = EngineConfig(
        block_size=block_size,
        num_blocks=memory.num_blocks,
        max_model_len=max_model_len,
        max_seqs=max_seqs,
        max_requests=slots,
        max_prefixes=0,
        token_budget=token_budget,
        spare_blocks=0,
        prefix_caching=True,
    )
    costs = RooflineCosts(profile, device, num_devices, block_size, overheads)
    results = simulate(
        config,
        to_traces(rows()),
        make_program(config, costs),
        keep_requests=keep_requests,
    )
    return CacheReport(
        results.means["prefix_hit_ratio"],
        infinite_cache(to_traces(rows()), block_size).ratio,
        results.means["evicted_blocks"],
        memory.num_blocks,
        max_model_len,
        results,
        malformed,
    )
