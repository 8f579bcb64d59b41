"""The host's record of a request: its name, its text, and what has been read of it."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.detokenizer import Detokenizer
from paged_jax.memory_managers import MemoryManager
from paged_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paged_jax.programs import Outputs
from paged_jax.requests import RequestStatus
from paged_jax.sampling_params import RequestError, SamplingParams
from paged_jax.submit import NewRequest
from paged_jax.tokenizer import Tokenizer

_REASONS = {
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_STOP: "stop",
    RequestStatus.REJECTED: "rejected",
    RequestStatus.ABORTED: "abort",
}


@dataclasses.dataclass(eq=False)
class RequestRecord:
    """What the host knows of a request.

    Attributes:
      name: its id.
      prompt: its text, if it came as text.
      tokens: prompt token ids.
      params: how its tokens are chosen.
      arrival: order of arrival.
      arrival_time: when, in seconds of `time.perf_counter`.
      tokenizer: for its text; None leaves the text empty.
      eos_token_ids: the model's ends of text.
      stream: whether it is returned whenever it has new tokens, or only at its end.
      slot: its slot on the device; None while it waits on the host, and after its end.
      prefix_row: row of the held prefix it shares, or -1.
      is_prefix: whether it is a prefix to be held.
      row: where a prefix is held, once it is.
      failed: whether a prefix could not be held.
      status: as last read.
      length: tokens known, prompt included, as last read.
      output_ids: generated tokens, as last collected.
      text: their text.
      stop_string: the stop string that ended the output.
    """

    name: str
    prompt: str | None
    tokens: tuple[int, ...]
    params: SamplingParams
    arrival: int
    arrival_time: float
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...] = ()
    stream: bool = False
    slot: int | None = None
    prefix_row: int = -1
    is_prefix: bool = False
    row: int | None = None
    failed: bool = False
    status: RequestStatus = RequestStatus.WAITING
    length: int = 0
    output_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    stop_string: str | None = None
    _logprobs: list[float] = dataclasses.field(default_factory=list)
    _alternatives: list[dict[int, float]] = dataclasses.field(default_factory=list)
    _times: dict[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.length = len(self.tokens)
        self._detokenizer = self.tokenizer and Detokenizer(self.tokenizer)

    def check(self, config: EngineConfig, vocab_size: int) -> None:
        """Raises RequestError for what this engine cannot serve."""
        params = self.params
        alternatives = params.logprobs or 0
        if alternatives > config.max_logprobs:
            raise RequestError(
                f"logprobs is {alternatives} and the engine records "
                f"{config.max_logprobs}; raise EngineConfig.max_logprobs"
            )
        if len(self._stop_ids()) > config.max_stop_ids:
            raise RequestError(
                f"the request has {len(self._stop_ids())} stop ids, end-of-text "
                f"included, and the engine keeps {config.max_stop_ids}; raise "
                "EngineConfig.max_stop_ids"
            )
        bad = [t for t in (*self.tokens, *self._stop_ids()) if not 0 <= t < vocab_size]
        if bad:
            raise RequestError(
                f"token id {bad[0]} is not in the vocabulary of {vocab_size} tokens"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids")

    def _stop_ids(self) -> tuple[int, ...]:
        ends = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*ends, *self.params.stop_token_ids)))

    def new_request(
        self, config: EngineConfig, manager: MemoryManager, seed: int
    ) -> NewRequest:
        """Returns what goes to the device."""
        params, size = self.params, len(self.tokens)
        output = params.most_tokens(config.max_model_len - size)
        if params.seed is None:
            key = (1 + seed, self.arrival % 2**32)  # apart from the keys of given seeds
        else:
            key = (params.seed >> 32, params.seed & 0xFFFFFFFF)
        assert self.slot is not None
        return NewRequest(
            slot=self.slot,
            tokens=self.tokens,
            max_len=size if self.is_prefix else size + output,
            reserved_len=manager.reserve(size, output, config.max_model_len),
            arrival=self.arrival,
            prefix_row=self.prefix_row,
            stop_ids=self._stop_ids(),
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            top_k=min(max(params.top_k, 0), 2**31 - 1),
            key=key,
        )

    @property
    def read_early(self) -> bool:
        """Whether its tokens are wanted before it has ended."""
        return self.stream or bool(self.params.stop)

    @property
    def ended(self) -> bool:
        """Whether the device has ended it."""
        return self.status >= RequestStatus.FINISHED_LENGTH

    @property
    def num_dropped(self) -> int:
        """Tokens that the device has generated past a stop string."""
        kept = len(self.tokens) + len(self.output_ids)
        return self.length - kept if self.stop_string_found else 0

    @property
    def stop_string_found(self) -> bool:
        """Whether a stop string has ended it, the device not knowing yet."""
        return self.stop_string is not None

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
            if iteration >= 0 and event not in self._times:
                self._times[event] = time_of(iteration)
        new = length - self.length
        self.status, self.length = status, length
        return new

    def end_now(self) -> None:
        """Takes note that it has ended, if the device has not said when."""
        self._times.setdefault(2, time.perf_counter())

    def take_tokens(self, outputs: Outputs) -> None:
        """Takes the tokens read from the device, and looks for stop strings.

        Args:
          outputs: leaves of one request: i32[M], f32[M], i32[M, A], f32[M, A].
        """
        first, seen = len(self.tokens), len(self.output_ids)
        for position in range(first + seen, self.length):
            token = int(outputs.tokens[position])
            own = float(outputs.logprobs[position])
            self.output_ids.append(token)
            self._logprobs.append(own)
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
                break
        if self._detokenizer is not None and self.ended and not self.stop_string_found:
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

    def output(self, reason: str | None = None) -> RequestOutput:
        """Returns the request as far as it is known; `reason` if it never ran."""
        finished = reason is not None or self.ended or self.stop_string_found
        if self.stop_string_found:
            reason = "stop"
        elif reason is None and self.ended:
            reason = _REASONS[self.status]
        stop_reason: str | int | None = self.stop_string
        if self.status == RequestStatus.FINISHED_STOP and stop_reason is None:
            stop_reason = self.output_ids[-1] if self.output_ids else None
        completion = CompletionOutput(
            index=0,
            text=self.text if finished else self._settled_text(),
            token_ids=tuple(self.output_ids),
            cumulative_logprob=float(sum(self._logprobs)),
            logprobs=None
            if self.params.logprobs is None
            else tuple(self._alternatives),
            finish_reason=reason,
            stop_reason=stop_reason,
        )
        return RequestOutput(
            request_id=self.name,
            prompt=self.prompt,
            prompt_token_ids=self.tokens,
            outputs=(completion,),
            finished=finished,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_scheduled_time=self._times.get(0),
                first_token_time=self._times.get(1),
                finished_time=self._times.get(2),
            ),
        )
