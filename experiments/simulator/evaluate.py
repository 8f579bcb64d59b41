"""One point of the paper's evaluation: a system, a load, and what comes of it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.errors import UserError
from experiments.lengths import draw_pairs
from experiments.simulator import systems
from experiments.simulator.arrivals import gamma_arrivals
from experiments.simulator.beams import draw_searches, recorded_parents
from experiments.simulator.chats import DATASET as CHATS
from experiments.simulator.chats import draw_chats
from experiments.simulator.results import Results
from experiments.simulator.run import simulate
from experiments.simulator.sentences import DATASET as SENTENCES
from experiments.simulator.sentences import draw_sentences
from experiments.simulator.simulate import SimulatorProgram
from experiments.simulator.systems import MAX_MODEL_LEN, SETUPS
from experiments.simulator.trace import Trace


def draw_trace(
    dataset: str,
    rate: float,
    seconds: float,
    seed: int,
    n: int = 1,
    beam_width: int = 1,
    prefix_len: int = 0,
    cv: float = 1.0,
) -> Trace:
    """Returns requests with lengths like a dataset's, and random arrivals.

    All sequences of a request are as long, since their lengths are forced. The ancestry
    of beams is that of recorded searches (see `beams`): an assumption.

    Args:
      dataset: `sharegpt`, `alpaca`, `wmt16`: sentences to translate (`sentences`), or
        `chat`: whole chats like ShareGPT's (`chats`).
      rate: requests a second.
      seconds: how long requests arrive.
      seed: decides lengths and arrivals, and which search each request repeats.
      n: sequences of each request.
      beam_width: beams of each request, if it is a beam search; then n is 1.
      prefix_len: tokens that the prompts of `wmt16` begin with.
      cv: of the distances between arrivals; 1: they are Poisson (see `arrivals`).

    Raises:
      UserError: no search of that width is recorded, or several sequences of beams; a
        prefix of prompts that have none.
    """
    if n > 1 and beam_width > 1:
        raise UserError(f"n is {n} and beam_width {beam_width}; one of them must be 1")
    if prefix_len and dataset != SENTENCES:
        raise UserError(
            f"prefix_len is {prefix_len} and dataset {dataset!r}; only prompts of "
            f"{SENTENCES!r} have a prefix: use 0"
        )
    count = max(round(rate * seconds), 1)
    arrivals_rng, lengths_rng, searches_rng = (
        np.random.default_rng((seed, i)) for i in range(3)
    )
    if dataset == SENTENCES:
        lengths = draw_sentences(lengths_rng, count, prefix_len, MAX_MODEL_LEN)
    elif dataset == CHATS:
        lengths = draw_chats(lengths_rng, count, MAX_MODEL_LEN)
    else:
        lengths = draw_pairs(lengths_rng, count, dataset, MAX_MODEL_LEN)
    outputs = np.repeat(lengths[:, 1:], max(n, beam_width), axis=1)
    search = None
    if beam_width > 1:
        search = draw_searches(searches_rng, count, recorded_parents(beam_width))
    arrivals = gamma_arrivals(arrivals_rng, count, rate, cv)
    return Trace(arrivals, lengths[:, 0], outputs, search=search)


def evaluate(
    system: str,
    setup_name: str,
    trace: Trace,
    *,
    dataset: str = "sharegpt",
    window: tuple[int, int] | None = None,
    prefix_len: int = 0,
    until: float = math.inf,
    give_up_above: float | None = None,
    change: Callable[[SimulatorProgram], SimulatorProgram] | None = None,
    **changes: Any,
) -> Results:
    """Serves a trace with one of the paper's systems.

    Args:
      system: one of `systems.SYSTEMS`.
      setup_name: key of `systems.SETUPS`.
      trace: the requests.
      dataset: that the lengths are like, for `ft`.
      window: seconds from which on, and up to which, steps count in the means.
      prefix_len: tokens that all prompts begin with; `vllm` shares their whole blocks.
      until: seconds after which the run may end, see `simulate`.
      give_up_above: normalized latency above which the run need not be finished.
      change: makes the program that is run of the system's own.
      changes: other settings of the engine, see `systems.engine_config`.
    """
    setup = SETUPS[setup_name]
    width = trace.beam_width
    if system == "vllm" and width > 1:
        changes = {"max_model_len": _narrow(trace)} | changes
    config = systems.engine_config(
        system,
        setup,
        dataset=dataset,
        n=trace.n if width == 1 else 1,
        beam_width=width,
        prefixes=int(prefix_len > 0),
        **changes,
    )
    program = systems.program(system, setup, config)
    if change is not None:
        program = change(program)
    where: dict[str, Any] = {} if window is None else {"window": window}
    return simulate(
        config,
        trace,
        program,
        prefix_len=prefix_len if config.max_prefixes else 0,
        until=until,
        give_up_above=give_up_above,
        **where,
    )


def _narrow(trace: Trace) -> int:
    """Returns a model length for searches: a half of the usual if the trace fits.

    Each step of a search moves texts and tables, which are as wide as the model length.
    Where that reserves nothing, nothing else depends on it.
    """
    longest = int((trace.prompt_len + trace.output_len.max(axis=1)).max())
    return MAX_MODEL_LEN // 2 if longest <= MAX_MODEL_LEN // 2 else MAX_MODEL_LEN


def normalized_latency(results: Results) -> float:
    """Returns the mean of latency / output tokens, in seconds (paper, section 6.1).

    Requests that were rejected are left out. Infinite if the run was ended before all
    was served.
    """
    if results.gave_up:
        return float("inf")
    latency = (results.ended - results.arrival) / results.output_len
    return float(np.nanmean(latency))
