"""What every engine is asked: the same token ids, as many tokens of each request."""

import hashlib
import json
from typing import NamedTuple

import numpy as np

from experiments.settings import WorkloadSettings
from experiments.workloads import Tokenizer, build_workload

MAX_MODEL_LEN = 1024
KV_TOKENS = 4096
MAX_SEQS = 64
NUM_REQUESTS = 64
_SIGMA = 0.6
_FIRST_WORD = 3  # ids below are special


class Request(NamedTuple):
    """One request, greedy, at time 0; the end of a text does not end it.

    Attributes:
      prompt: token ids.
      max_tokens: how many tokens to generate, no fewer.
    """

    prompt: list[int]
    max_tokens: int


def random_requests(vocab_size: int, count: int = NUM_REQUESTS) -> list[Request]:
    """Returns requests of random tokens whose lengths are spread like a service's.

    Prompts have 4 to 256 tokens, 64 on average before clipping, outputs 8 to 384, 96 on
    average, both log-normal. The lengths do not depend on the vocabulary.

    Args:
      vocab_size: V.
      count: how many.
    """
    rng = np.random.default_rng(0)

    def lengths(mean: float, least: int, most: int) -> list[int]:
        drawn = rng.lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, count)
        return np.clip(np.rint(drawn), least, most).astype(int).tolist()

    prompts, outputs = lengths(64, 4, 256), lengths(96, 8, 384)
    return [
        Request(rng.integers(_FIRST_WORD, vocab_size, size).tolist(), output)
        for size, output in zip(prompts, outputs)
    ]


def real_requests(tokenizer: Tokenizer, count: int = NUM_REQUESTS) -> list[Request]:
    """Returns the project's own prompts, with lengths spread as in ShareGPT.

    They are a quarter of those, so that the KV budget holds a few dozen at once.

    Args:
      tokenizer: of the model, with its chat template.
      count: how many.
    """
    settings = WorkloadSettings(num_requests=count, length_scale=4.0)
    workload = build_workload(settings, MAX_MODEL_LEN, 0, tokenizer)
    return [Request(list(r.tokens), r.output_len) for r in workload.requests]


def end_before(
    requests: list[Request], outputs: list[list[int]], stop_ids: tuple[int, ...]
) -> list[Request]:
    """Returns the requests with outputs no longer than the model's own answers.

    Engines that are told to go on past the end of a text differ in what they do there
    (some forbid its token), so none of them gets there.

    Args:
      requests: what was asked.
      outputs: tokens of each request that go on past such ends.
      stop_ids: tokens that end a text.
    """
    kept = []
    for request, tokens in zip(requests, outputs, strict=True):
        # The first token is asked for in any case.
        ends = [i for i, token in enumerate(tokens) if i and token in stop_ids]
        length = min([*ends, request.max_tokens])
        kept.append(request._replace(max_tokens=length))
    return kept


def digest(requests: list[Request]) -> str:
    """Is the same for the same requests."""
    return hashlib.sha256(json.dumps(requests).encode()).hexdigest()[:16]
