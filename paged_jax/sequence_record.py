"""The host's record of one generated sequence: its tokens and its text."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from paged_jax.detokenizer import Detokenizer
from paged_jax.outputs import CompletionOutput
from paged_jax.programs import Outputs
from paged_jax.requests import RequestStatus
from paged_jax.sampling_params import SamplingParams
from paged_jax.tokenizer import Tokenizer

_REASONS = {
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_STOP: "stop",
    RequestStatus.REJECTED: "rejected",
    RequestStatus.ABORTED: "abort",
}


@dataclasses.dataclass(eq=False)
class SequenceRecord:
    """What the host knows of one of a request's sequences.

    Attributes:
      number: which of the request's sequences.
      prompt_len: tokens of the prompt.
      params: how its tokens are chosen.
      tokenizer: for its text; None leaves the text empty.
      slot: its slot on the device; None before and after.
      status: as last read.
      length: tokens known, prompt included, as last read.
      output_ids: generated tokens, as last collected.
      cumulative_logprob: sum of their log-probabilities.
      text: their text.
      stop_string: the stop string that ended it.
      parents: of a beam, for each step the number of the beam it continued.
      times: seconds of the events of `Requests.timeline`, by their column.
    """

    number: int
    prompt_len: int
    params: SamplingParams
    tokenizer: Tokenizer | None
    slot: int | None = None
    status: RequestStatus = RequestStatus.WAITING
    length: int = 0
    output_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    text: str = ""
    stop_string: str | None = None
    parents: tuple[int, ...] = ()
    times: dict[int, float] = dataclasses.field(default_factory=dict)
    _alternatives: list[dict[int, float]] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.length = self.prompt_len
        self._detokenizer = self.tokenizer and Detokenizer(self.tokenizer)

    @property
    def ended_on_device(self) -> bool:
        """Whether the device has ended it."""
        return self.status >= RequestStatus.FINISHED_LENGTH

    @property
    def ended(self) -> bool:
        """Whether it has ended; the device may not know of a stop string yet."""
        return self.ended_on_device or self.stop_string is not None

    @property
    def num_dropped(self) -> int:
        """Tokens that the device has generated past a stop string."""
        kept = self.prompt_len + len(self.output_ids)
        return 0 if self.stop_string is None else self.length - kept

    def most_left(self, max_model_len: int) -> int:
        """Returns how many tokens it may still generate, as last read."""
        most = self.params.most_tokens(max_model_len - self.prompt_len)
        return self.prompt_len + most - self.length

    def update(
        self,
        status: RequestStatus,
        length: int,
        timeline: np.ndarray,
        time_of: Callable[[int], float],
    ) -> int:
        """Takes note of a report; returns the number of new tokens.

        Args:
          status: its status.
          length: its tokens, prompt and output.
          timeline: i32[3], see `Requests.timeline`.
          time_of: maps an iteration of the last run to seconds.
        """
        for event, iteration in enumerate(timeline.tolist()):
            if iteration >= 0 and event not in self.times:
                self.times[event] = time_of(iteration)
        new = length - self.length
        self.status, self.length = status, length
        return new

    def end_now(self) -> None:
        """Takes note that it has ended, if the device has not said when."""
        self.times.setdefault(2, time.perf_counter())

    def take_tokens(self, outputs: Outputs) -> None:
        """Takes the tokens read from the device, and looks for stop strings.

        Args:
          outputs: leaves of one request, without their first dimension.
        """
        if self.params.searches:
            parents = outputs.parents[self.prompt_len :].tolist()  # type: ignore
            steps = parents.index(-1) if -1 in parents else len(parents)
            self.parents = tuple(parents[:steps])
        first = self.prompt_len + len(self.output_ids)
        for position in range(first, self.length):
            token = int(outputs.tokens[position])
            own = float(outputs.logprobs[position])
            self.output_ids.append(token)
            self.cumulative_logprob += own
            if self.params.logprobs is not None:
                kept = slice(0, self.params.logprobs)
                ids = outputs.top_ids[position][kept].tolist()
                values = outputs.top_logprobs[position][kept].tolist()
                self._alternatives.append({**dict(zip(ids, values)), token: own})
            # A stop token ends the text without being part of it, as in vLLM.
            last = position == self.length - 1
            if last and self.status == RequestStatus.FINISHED_STOP:
                break
            if self._take_text(token):
                self.end_now()
                return
        if self._detokenizer is not None and self.ended_on_device:
            self.text += self._detokenizer.flush()

    def _take_text(self, token: int) -> bool:
        """Adds a token's text; returns whether a stop string ends the output there."""
        if self._detokenizer is None:
            return False
        seen = len(self.text)
        self.text += self._detokenizer.push([token])
        ends = []
        for stop in self.params.stop:
            at = self.text.find(stop, max(seen - len(stop) + 1, 0))
            if at >= 0:
                ends.append((at, stop))
        if not ends:
            return False
        at, self.stop_string = min(ends)
        self.text = self.text[:at]
        return True

    def _settled_text(self) -> str:
        """Returns the text without an end that may turn out to be a stop string."""
        longest = max(map(len, self.params.stop), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self.params.stop):
                return self.text[:-size]
        return self.text

    def output(self, index: int, reason: str | None = None) -> CompletionOutput:
        """Returns the sequence as far as it is known.

        Args:
          index: its place in the request's outputs.
          reason: why it ends if it never ran.
        """
        if self.stop_string is not None:
            reason = "stop"
        elif self.ended_on_device:
            reason = _REASONS[self.status]
        stop_reason: str | int | None = self.stop_string
        if self.status == RequestStatus.FINISHED_STOP and stop_reason is None:
            stop_reason = self.output_ids[-1] if self.output_ids else None
        return CompletionOutput(
            index=index,
            text=self._settled_text() if reason is None else self.text,
            token_ids=tuple(self.output_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None
            if self.params.logprobs is None
            else tuple(self._alternatives),
            finish_reason=reason,
            stop_reason=stop_reason,
            score=self._score(),
        )

    def _score(self) -> float | None:
        """Returns what a beam search that has ended ordered it by."""
        found = (RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_STOP)
        if not self.params.searches or self.status not in found:
            return None
        length = float(len(self.output_ids))
        return self.cumulative_logprob / length**self.params.length_penalty
