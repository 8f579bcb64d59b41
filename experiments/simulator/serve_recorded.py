"""Serves a recorded trace: what memory managers and the prefix cache make of it."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments.errors import UserError
from experiments.simulator.arrivals import gamma_arrivals
from experiments.simulator.cache_bound import infinite_cache
from experiments.simulator.costs import Overheads, RooflineCosts
from experiments.simulator.hardware import HARDWARE, Hardware
from experiments.simulator.memory_split import split_memory
from experiments.simulator.model_profiles import MODELS
from experiments.simulator.readers import (
    NAMED,
    TEXTS,
    CountTokens,
    Malformed,
    Row,
    read_trace,
)
from experiments.simulator.recorded import longest, to_traces
from experiments.simulator.results import Results
from experiments.simulator.run import make_program, simulate
from experiments.simulator.trace import Trace
from paged_jax.config import EngineConfig

_NO_OVERHEADS = Overheads()
# Arrivals that are drawn at once.
_DRAWN = 1024


@dataclasses.dataclass(frozen=True)
class Recording:
    """A file of requests, and how it is replayed.

    Attributes:
      path: the file.
      format: one of `readers.FORMATS`.
      num_requests: how many are served, the first ones; 0: all.
      strict: whether a malformed line is an error.
      speedup: how much faster than recorded requests come.
      rate: requests/s of random arrivals in place of the recorded times; 0: as they
        were recorded.
      cv: of the distances between random arrivals; 1: they are Poisson.
      clients: of a closed loop, which send the requests one after the other, whatever
        their times; 0: there is none.
      think_s: seconds that a client waits between an answer and its next request.
      seed: of random arrivals.
      count_tokens: of a text, for formats that have texts.
    """

    path: str
    format: str
    num_requests: int = 0
    strict: bool = False
    speedup: float = 1.0
    rate: float = 0.0
    cv: float = 1.0
    clients: int = 0
    think_s: float = 0.0
    seed: int = 0
    count_tokens: CountTokens | None = None

    def __post_init__(self):
        """Raises UserError for a number out of range, or arrivals that cannot be."""
        for name, holds, allowed in (
            ("num_requests", self.num_requests >= 0, "0 or more"),
            ("speedup", 0 < self.speedup < float("inf"), "above 0 and finite"),
            ("rate", 0 <= self.rate < float("inf"), "0 or more, and finite"),
            ("cv", 0 < self.cv < float("inf"), "above 0 and finite"),
            ("clients", self.clients >= 0, "0 or more"),
            ("think_s", 0 <= self.think_s < float("inf"), "0 or more, and finite"),
        ):
            if not holds:
                raise UserError(
                    f"{name} is {getattr(self, name)}; it must be {allowed}"
                )
        if self.rate and self.clients:
            raise UserError(
                f"rate is {self.rate} and clients {self.clients}; clients send a "
                "request when they have an answer, at no rate: leave one of them out"
            )
        if self.format in TEXTS and not self.rate and not self.clients:
            raise UserError(
                f"a recording in the format {self.format} has no times; give a rate of "
                "arrivals, in requests/s, or clients"
            )

    def rows(self, malformed: Malformed | None = None) -> Iterator[Row]:
        """Yields the requests that are served, with the times that are recorded."""
        rows = read_trace(
            self.path,
            self.format,
            strict=self.strict,
            count_tokens=self.count_tokens,
            malformed=malformed,
            in_order=not self.rate and not self.clients,
        )
        return itertools.islice(rows, self.num_requests or None)

    def traces(self) -> Iterator[Trace]:
        """Yields the requests a piece at a time, with the times when they come."""
        if self.clients:  # which do not look at times
            yield from to_traces(self.rows(), arrivals=itertools.repeat(0.0))
            return
        if self.rate:
            yield from to_traces(self.rows(), arrivals=self._arrivals())
            return
        for trace in to_traces(self.rows()):
            yield Trace(trace.arrival / self.speedup, *trace[1:])

    def _arrivals(self) -> Iterator[float]:
        rng, start = np.random.default_rng(self.seed), 0.0
        while True:
            times = start + gamma_arrivals(rng, _DRAWN, self.rate, self.cv)
            yield from times.tolist()
            start = float(times[-1])


class RecordedRun(NamedTuple):
    """What came of a recording.

    Attributes:
      hit_ratio: share of the prompts' tokens that the prefix cache had when a request
        was first admitted.
      infinite_ratio: the same if nothing were ever evicted, so that no cache finds
        more; None for a recording without names of blocks.
      evicted_blocks: cached blocks that were granted anew.
      num_blocks: of the pool.
      max_model_len: tokens of the longest request.
      results: of the simulation.
      malformed: lines that were left out.
    """

    hit_ratio: float
    infinite_ratio: float | None
    evicted_blocks: float
    num_blocks: int
    max_model_len: int
    results: Results
    malformed: Malformed


def serve_recorded(
    recording: Recording,
    model: str,
    hardware: str | Hardware,
    num_devices: int = 1,
    *,
    memory: str = "paged",
    prefix_caching: bool = False,
    block_size: int = 16,
    max_seqs: int = 128,
    token_budget: int = 8192,
    slots: int = 4096,
    overheads: Overheads = _NO_OVERHEADS,
    keep_requests: bool = True,
) -> RecordedRun:
    """Serves a recording on accelerators; prompts come in chunks.

    The file is read a piece at a time, and as often as it is needed: for its longest
    request, for the bound of the cache, and to be served.

    Args:
      recording: what is served.
      model: key of `MODELS`.
      hardware: one of the accelerators, or a key of `HARDWARE`.
      num_devices: how many share the model.
      memory: `paged`, or `oracle`, `pow2` or `max`, which reserve at admission.
      prefix_caching: whether blocks are found by the names that the recording has.
      block_size: tokens in a block; with a prefix cache it divides 512.
      max_seqs: most sequences that run at once.
      token_budget: most tokens of a step.
      slots: requests that have come and not ended, and those that come next.
      overheads: of the software; none by default, since those of the paper's software
        are not those of a newer one.
      keep_requests: see `simulate`.

    Raises:
      UserError: a file that cannot be read or has no requests, a model that does not
        fit, or a prefix cache for a recording without names.
    """
    malformed = Malformed()
    rows = recording.rows(malformed)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{recording.path} has no requests; {malformed}")
    max_model_len = longest(itertools.chain([first], rows))
    named = recording.format in NAMED
    if prefix_caching and not named:
        raise UserError(
            f"{recording.path} is {recording.format}, without names of blocks for a "
            f"prefix cache to find; formats that have them: {', '.join(NAMED)}"
        )
    profile = MODELS[model]
    device = HARDWARE[hardware] if isinstance(hardware, str) else hardware
    split = split_memory(
        profile, device, num_devices, block_size=block_size, token_budget=token_budget
    )
    config = EngineConfig(
        block_size=block_size,
        num_blocks=split.num_blocks,
        max_model_len=max_model_len,
        max_seqs=max_seqs,
        max_requests=slots,
        max_prefixes=0,
        token_budget=token_budget,
        spare_blocks=0,
        memory=memory,
        sharing=memory == "paged",
        prefix_caching=prefix_caching,
    )
    costs = RooflineCosts(profile, device, num_devices, block_size, overheads)
    results = simulate(
        config,
        recording.traces(),
        make_program(config, costs),
        clients=recording.clients,
        think_s=recording.think_s,
        keep_requests=keep_requests,
    )
    bound = None
    if named:
        bound = infinite_cache(recording.traces(), block_size).ratio
    return RecordedRun(
        results.means["prefix_hit_ratio"],
        bound,
        results.means["evicted_blocks"],
        split.num_blocks,
        max_model_len,
        results,
        malformed,
    )
