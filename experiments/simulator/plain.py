"""The same simulation in plain Python: what the jitted one is compared with.

Paged memory, continuous batching, one sequence a request, preemption by recompute. The
rules are written a second time, in lists and numbers, so that an error in one of the
two shows; and so that it can be said what the jitted loop gains.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from experiments.simulator.trace import Trace
from paged_jax.config import StepConfig


@dataclasses.dataclass
class _Sequence:
    number: int
    prompt: int
    final: int  # its length at the end
    known: int
    cached: int = 0
    blocks: int = 0
    first_token: float = 0.0
    ended: float = 0.0


def simulate_plain(
    config: StepConfig,
    trace: Trace,
    seconds: Callable[[int, int], float],
    clients: int = 0,
    think_s: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Serves a trace.

    Args:
      config: static settings, from `run.simulator_config`.
      trace: the requests, of one sequence each.
      seconds: what a step takes, given its tokens and its sequences.
      clients: of a closed loop; 0: requests come at their times.
      think_s: seconds between the end of a client's request and its next one.

    Returns:
      f64[N], when each first token was there; f64[N], when each request had ended; the
      number of steps.
    """
    size, budget = config.block_size, config.token_budget
    free = config.num_blocks
    sequences = [
        _Sequence(i, int(p), int(p + o), int(p))
        for i, (p, o) in enumerate(zip(trace.prompt_len, trace.output_len[:, 0]))
    ]
    waiting: collections.deque[_Sequence] = collections.deque()
    batch: list[_Sequence] = []  # in order of arrival
    arrivals, coming = trace.arrival.tolist(), 0
    if clients:
        arrivals = [0.0] * min(clients, len(sequences))  # one more for each that ends
    now, steps = 0.0, 0

    def blocks_for(tokens: int) -> int:
        return -(-tokens // size)

    while batch or waiting or coming < len(sequences):
        if not batch and not waiting:
            now = max(now, arrivals[coming])
        while coming < len(arrivals) and arrivals[coming] <= now:
            waiting.append(sequences[coming])
            coming += 1
        free += sum(s.blocks for s in batch if s.known == s.final)
        batch = [s for s in batch if s.known < s.final]

        left = budget - sum(s.known - s.cached for s in batch)
        owed = sum(blocks_for(s.known) > s.blocks for s in batch)
        while waiting and len(batch) < config.max_seqs:
            first = waiting[0]
            least = 1 if config.chunked_prefill else min(first.known, budget)
            spare = len(batch) * config.spare_blocks
            spare += config.watermark_blocks if batch else 0
            need = blocks_for(first.known)
            if left < least or need + owed + spare > free:
                break
            waiting.popleft()
            first.blocks = need
            free -= need
            left -= first.known
            batch.append(first)
        batch.sort(key=lambda s: s.number)

        chunks = _divide(config, batch)
        while True:
            grows = [
                s for s in batch if blocks_for(s.cached + chunks[s.number]) > s.blocks
            ]
            if len(grows) <= free:
                break
            victim = batch.pop()
            free += victim.blocks
            victim.blocks = victim.cached = 0
            waiting.appendleft(victim)
        for s in grows:
            s.blocks += 1
        free -= len(grows)

        running = [s for s in batch if chunks[s.number]]
        if running:
            now += seconds(sum(chunks[s.number] for s in running), len(running))
        steps += 1
        for s in running:
            s.cached += chunks[s.number]
            if s.cached == s.known:
                s.known += 1
                if s.known == s.prompt + 1:
                    s.first_token = now
                if s.known == s.final:
                    s.ended = now
                    if clients and len(arrivals) < len(sequences):
                        arrivals.append(now + think_s)
    # One more, in which the last ones give their blocks back.
    first_token, ended = (
        np.array([getattr(s, name) for s in sequences])
        for name in ("first_token", "ended")
    )
    return first_token, ended, steps


def _divide(config: StepConfig, batch: list[_Sequence]) -> dict[int, int]:
    """Returns the tokens that each sequence of the batch computes, by its number."""
    chunks = {s.number: int(s.known - s.cached == 1) for s in batch}
    left = config.token_budget - sum(chunks.values())
    for s in batch:
        pending = s.known - s.cached
        if pending <= 1 or left <= 0:
            continue
        size = min(pending, left)
        if not config.chunked_prefill and left < pending <= config.token_budget:
            break
        chunks[s.number] = size
        left -= size
    return chunks
