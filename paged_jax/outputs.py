"""What the engine returns for a request; names as in vLLM."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
      index: which of the request's sequences.
      text: the text so far, without the stop string or stop token that ended it.
      token_ids: the tokens so far.
      cumulative_logprob: sum of the tokens' log-probabilities under the model.
      logprobs: for each token, log-probabilities by token id: its own and those of the
        alternatives asked for; None if none were asked for.
      finish_reason: `length`, `stop`, `abort` or `rejected`; None while it runs.
      stop_reason: the stop string or the stop token id that ended it, if any.
      score: what a beam search ordered it by: `cumulative_logprob` over its length to
        the power of `length_penalty`. None for others, and if the search did not end.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    logprobs: tuple[dict[int, float], ...] | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    score: float | None = None


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.perf_counter`.

    The device runs many steps before the host looks. Times within such a run are
    interpolated: its steps are taken to last equally long.

    Attributes:
      arrival_time: submission.
      first_scheduled_time: end of the step that first admitted it; None before.
      first_token_time: end of the step that sampled its first token; None before.
      finished_time: end of the step that ended it; None before.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request, as far as it is served.

    Attributes:
      request_id: the name it was submitted under.
      prompt: its text; None if it was submitted as tokens.
      prompt_token_ids: its tokens.
      outputs: the generated sequences.
      finished: whether it has ended.
      metrics: when things happened.
      beam_parents: of a beam search, for each step that it went on after, from the best
        beam on the number of the beam that each one continues; None for others.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    beam_parents: tuple[tuple[int, ...], ...] | None = None
