"""The host's record of a request: its name, what was asked, and its sequences."""

import dataclasses

from paged_jax.beams import Stopping
from paged_jax.config import EngineConfig, StepConfig
from paged_jax.memory_managers import MemoryManager
from paged_jax.outputs import RequestMetrics, RequestOutput
from paged_jax.sampling_params import RequestError, SamplingParams
from paged_jax.sequence_record import SequenceRecord
from paged_jax.submit import NewRequest
from paged_jax.tokenizer import Tokenizer


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
      prefix_row: row of the held prefix it shares, or -1.
      is_prefix: whether it is a prefix to be held.
      row: where a prefix is held, once it is.
      failed: whether a prefix could not be held.
      sequences: those that are generated for it.
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
    prefix_row: int = -1
    is_prefix: bool = False
    row: int | None = None
    failed: bool = False
    sequences: tuple[SequenceRecord, ...] = ()

    def __post_init__(self):
        self.sequences = tuple(
            SequenceRecord(number, len(self.tokens), self.params, self.tokenizer)
            for number in range(self.params.num_sequences)
        )

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
        if params.searches:
            self._check_beams(config, vocab_size)
        self._check_sequences(config)

    def _check_beams(self, config: EngineConfig, vocab_size: int) -> None:
        """Raises RequestError for a search that is too wide."""
        width = self.params.beam_width
        if width > config.max_beam_width:
            raise RequestError(
                f"beam_width is {width} and max_beam_width {config.max_beam_width}; "
                "lower it or raise EngineConfig.max_beam_width"
            )
        if width + len(self._stop_ids()) > vocab_size:
            raise RequestError(
                f"beam_width is {width} with {len(self._stop_ids())} stop ids, and the "
                f"vocabulary has {vocab_size} tokens; lower beam_width"
            )

    def _check_sequences(self, config: EngineConfig) -> None:
        """Raises RequestError for more sequences than there is room for at once."""
        several, static = self.params.num_sequences, config.step_config()
        if several > config.max_n and not self.params.searches:
            name = "n" if self.params.best_of is None else "best_of"
            raise RequestError(
                f"{name} is {several} and the engine serves {config.max_n} sequences "
                "a request; raise EngineConfig.max_n"
            )
        if several > 1 and self._is_group(static):
            size = config.block_size
            shared = len(self.tokens) // size if static.forks else 0
            each = -(-self._max_len(config) // size)
            peak = shared + several * (each - shared)
            if peak > config.total_blocks:
                raise RequestError(
                    f"the request's {several} sequences take up to {peak} blocks and "
                    f"there are {config.total_blocks}, which must hold them at once; "
                    "ask for fewer or shorter ones, or raise num_blocks"
                )

    def _is_group(self, static: StepConfig) -> bool:
        """Whether its sequences are admitted together; else each is for itself."""
        return static.forks or self.params.searches

    def _stop_ids(self) -> tuple[int, ...]:
        ends = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*ends, *self.params.stop_token_ids)))

    def _max_len(self, config: EngineConfig) -> int:
        size = len(self.tokens)
        return size + self.params.most_tokens(config.max_model_len - size)

    def new_requests(
        self, config: EngineConfig, manager: MemoryManager, seed: int
    ) -> list[NewRequest]:
        """Returns what goes to the device: one for each sequence, all with slots."""
        params, size = self.params, len(self.tokens)
        max_len = self._max_len(config)
        if params.seed is None:
            key = (1 + seed, self.arrival % 2**32)  # apart from the keys of given seeds
        else:
            key = (params.seed >> 32, params.seed & 0xFFFFFFFF)
        leader = None
        if self._is_group(config.step_config()):
            leader = self.sequences[0].slot
        new = []
        for sequence in self.sequences:
            assert sequence.slot is not None
            new.append(
                NewRequest(
                    slot=sequence.slot,
                    tokens=self.tokens,
                    max_len=size if self.is_prefix else max_len,
                    reserved_len=manager.reserve(
                        size, max_len - size, config.max_model_len
                    ),
                    arrival=self.arrival,
                    prefix_row=self.prefix_row,
                    stop_ids=self._stop_ids(),
                    temperature=0.0 if params.searches else params.temperature,
                    top_p=params.top_p,
                    min_p=params.min_p,
                    top_k=min(max(params.top_k, 0), 2**31 - 1),
                    key=key,
                    group=leader,
                    sample=sequence.number,
                    beams=_beams_of(params),
                )
            )
        return new

    @property
    def read_early(self) -> bool:
        """Whether its tokens are wanted before it has ended."""
        return self.streams or bool(self.params.stop)

    @property
    def streams(self) -> bool:
        """Whether it is returned before it has ended.

        Which sequences are the best is known at the end only.
        """
        best = self.params.best_of is not None or self.params.searches
        return self.stream and not best

    @property
    def ended(self) -> bool:
        """Whether all its sequences have ended."""
        return all(sequence.ended for sequence in self.sequences)

    def output(self, reason: str | None = None) -> RequestOutput:
        """Returns the request as far as it is known; `reason` if it never ran."""
        if reason is not None:
            for sequence in self.sequences:
                sequence.end_now()
        chosen = self.sequences
        if self.params.best_of is not None:
            best_first = sorted(chosen, key=lambda s: -s.cumulative_logprob)
            chosen = best_first[: self.params.n]
        elif self.params.searches:
            chosen = chosen[: self.params.n]
        finished = reason is not None or self.ended
        return RequestOutput(
            request_id=self.name,
            prompt=self.prompt,
            prompt_token_ids=self.tokens,
            outputs=tuple(s.output(i, reason) for i, s in enumerate(chosen)),
            finished=finished,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_scheduled_time=self._first(0),
                first_token_time=self._first(1),
                finished_time=max(s.times[2] for s in self.sequences)
                if finished
                else None,
            ),
            beam_parents=tuple(zip(*(s.parents for s in self.sequences)))
            if self.params.searches
            else None,
        )

    def _first(self, event: int) -> float | None:
        times = [s.times[event] for s in self.sequences if event in s.times]
        return min(times, default=None)


def _beams_of(params: SamplingParams) -> tuple[int, float, int] | None:
    """Returns width, length penalty and `Stopping` of a beam search."""
    if not params.searches:
        return None
    if params.early_stopping == "never":
        stopping = Stopping.NEVER
    else:
        stopping = Stopping.AT_ONCE if params.early_stopping else Stopping.HOPELESS
    return params.beam_width, params.length_penalty, stopping
