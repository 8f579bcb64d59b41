"""Beam search in plain Python, with the rules of `transformers`' `generate`.

In each step every running beam is extended by every token. Of these candidates the
best count, as many as would leave `num_beams` even if all beams chose to end: twice
`num_beams` with one end-of-text token. The first `num_beams` of them may finish; the
best ones that do not end run on. Scores of running beams are sums of log-probabilities;
of finished ones, sums divided by a power of the number of generated tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Beam(NamedTuple):
    """A sequence of generated tokens.

    Attributes:
        tokens: what was generated, the end of text included.
        parents: for each token, which of the beams that ran before it was extended;
            beams are numbered from the best on.
        logprob: sum of the tokens' log-probabilities.
        score: what finished beams are ordered by; 0 while it runs.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    logprob: float = 0.0
    score: float = 0.0


def beam_search(
    log_probs: Callable[[Sequence[int]], np.ndarray],
    prompt: Sequence[int],
    *,
    num_beams: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[Beam]:
    """Returns the `num_beams` best sequences, best first.

    Args:
        log_probs: tokens, prompt included -> f[V], log-probabilities of the next one.
            V must be at least the number of candidates that count.
        prompt: token ids.
        num_beams: beams that run, and sequences that are returned.
        max_new_tokens: all sequences end when they have generated so many.
        eos_token_ids: tokens that end a sequence.
        length_penalty: power of the length that a sum is divided by.
        early_stopping: when to stop, once `num_beams` sequences have finished. True: at
            once. False: when the best running beam would be no better than the worst
            finished one if it ended now. "never": as False, but if longer is better
            (`length_penalty` > 0) as though it got its present sum at full length.
    """
    num_candidates = num_beams * max(2, 1 + len(eos_token_ids))
    running, finished = [Beam()], []
    for length in range(1, max_new_tokens + 1):
        candidates = extend(log_probs, prompt, running, num_candidates)

        def ends(beam: Beam, at: int = length) -> bool:
            return at == max_new_tokens or beam.tokens[-1] in eos_token_ids

        finished += [
            beam._replace(score=beam.logprob / length**length_penalty)
            for beam in candidates[:num_beams]
            if ends(beam)
        ]
        finished = sorted(finished, key=lambda beam: -beam.score)[:num_beams]
        running = [beam for beam in candidates if not ends(beam)][:num_beams]
        if len(finished) < num_beams:
            continue
        if early_stopping is True or not running:
            break
        hopes_for_length = early_stopping == "never" and length_penalty > 0
        hoped = max_new_tokens if hopes_for_length else length
        if running[0].logprob / hoped**length_penalty <= finished[-1].score:
            break
    return finished


def extend(
    log_probs: Callable[[Sequence[int]], np.ndarray],
    prompt: Sequence[int],
    running: Sequence[Beam],
    count: int,
) -> list[Beam]:
    """Returns the `count` likeliest beams of one more token, the likeliest first."""
    sums = np.array(
        [beam.logprob + log_probs([*prompt, *beam.tokens]) for beam in running]
    )
    candidates = []
    for place in np.argsort(-sums, axis=None, kind="stable")[:count]:
        parent, token = divmod(int(place), sums.shape[1])
        beam = running[parent]
        candidates.append(
            Beam(
                (*beam.tokens, token),
                (*beam.parents, parent),
                float(sums[parent, token]),
            )
        )
    return candidates
