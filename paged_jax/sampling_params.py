"""What a user asks of the tokens of a request; names and defaults as in vLLM."""

import dataclasses
import math
import numbers
from collections.abc import Sequence

from paged_jax.field_types import check_types

# What has no meaning for a beam search: draws, and ends that the device does not see.
_DRAWS = ("best_of", "temperature", "top_k", "top_p", "min_p", "seed", "stop")


class RequestError(ValueError):
    """A request that cannot be served; the message is one line for the user."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    Attributes:
      n: sequences to return, in the order of their numbers. They share the prompt,
        which is computed once; each has its own draws. The first one's are those of a
        request with n = 1.
      best_of: sequences to generate, `n` or more; the `n` of them with the highest
        cumulative log-probability are returned, best first. None generates `n`.
      beam_width: beams of a beam search, by which the `n` best sequences it finds are
        returned, best first; 1 draws the tokens instead. What chooses draws
        (temperature, top_k, top_p, min_p, seed, best_of) is left out then.
      length_penalty: beam search: the power of its length that a sequence's summed
        log-probability is divided by for its score. Above 0 favours longer ones.
      early_stopping: beam search: when it ends, once it has `beam_width` sequences that
        have. True: at once. False: when its best beam would be no better if it ended
        now. "never": as False, but a longer sequence may become better if
        `length_penalty` is above 0.
      temperature: divides the logits; 0 is greedy.
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      top_p: keep the smallest set of tokens whose probabilities sum to this; 1 keeps
        all.
      min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
      seed: makes the random draws of this request repeatable; None takes one from the
        engine's seed and the order of arrival.
      max_tokens: most tokens to generate; fewer if the model length is reached, which
        alone ends the output if this is None.
      stop: strings that end the output; they are not part of it.
      stop_token_ids: tokens that end the output, beside the model's end-of-text. The
        one that did is the last of `token_ids`, and no part of the text.
      ignore_eos: whether to go on past end-of-text.
      logprobs: number of alternatives whose log-probabilities are reported for each
        token, beside its own; None reports none.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        """Raises RequestError for a value of the wrong type or out of range."""
        check_types(
            self, RequestError, skip=("stop", "stop_token_ids", "early_stopping")
        )
        _check(self.n >= 1, "n", self.n, "1 or more")
        if self.best_of is not None:
            _check(
                self.best_of >= self.n, "best_of", self.best_of, f"n={self.n} or more"
            )
            if self.best_of > 1 and self.temperature == 0:
                raise RequestError(
                    f"best_of is {self.best_of} and temperature 0; greedy sequences "
                    "are all the same: leave best_of out or raise the temperature"
                )
        stop = _items("stop", self.stop, str, "text or a list of texts")
        if any(not s for s in stop):
            raise RequestError(
                "stop has an empty string; every output would end at once"
            )
        object.__setattr__(self, "stop", stop)
        ids = _items(
            "stop_token_ids", self.stop_token_ids, numbers.Integral, "a list of ids"
        )
        object.__setattr__(self, "stop_token_ids", ids)
        _check(self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _check(self.top_k >= -1, "top_k", self.top_k, "-1, 0 or more")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        if self.max_tokens is not None:
            _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        if self.logprobs is not None:
            _check(self.logprobs >= 0, "logprobs", self.logprobs, "None, 0 or more")
        if self.seed is not None:
            _check(0 <= self.seed < 2**64, "seed", self.seed, "from 0 to 2**64 - 1")
        self._check_beams()

    def _check_beams(self) -> None:
        """Raises RequestError for what does not go with beam search."""
        _check(self.beam_width >= 1, "beam_width", self.beam_width, "1 or more")
        _check(
            math.isfinite(self.length_penalty),
            "length_penalty",
            self.length_penalty,
            "finite",
        )
        if self.early_stopping not in (False, True, "never"):
            raise RequestError(
                f"early_stopping is {self.early_stopping!r}; it must be False, True or "
                "'never'"
            )
        if not self.searches:
            return
        if self.n > self.beam_width:
            raise RequestError(
                f"n is {self.n} and beam_width {self.beam_width}; a search finds as "
                "many sequences as it has beams: lower n or raise beam_width"
            )
        chosen: dict[str, object] = {"logprobs": 0} if self.logprobs else {}
        for field in dataclasses.fields(self):
            if field.name in _DRAWS:
                chosen[field.name] = field.default
        for name, default in chosen.items():
            value = getattr(self, name)
            greedy = name == "temperature" and value == 0
            if value != default and not greedy:
                raise RequestError(
                    f"{name} is {value!r} and beam_width {self.beam_width}; a beam "
                    f"search goes with {default!r} only: leave {name} or beam_width out"
                )

    @property
    def searches(self) -> bool:
        """Whether this is a beam search."""
        return self.beam_width > 1

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated."""
        if self.searches:
            return self.beam_width
        return self.n if self.best_of is None else self.best_of

    def most_tokens(self, room: int) -> int:
        """Returns how many tokens may be generated.

        Args:
          room: tokens that the model length leaves after the prompt.
        """
        return room if self.max_tokens is None else min(self.max_tokens, room)


def _items(name: str, value: object, kind: type, allowed: str) -> tuple:
    """Returns the items of a list; a lone text is a list of one, None is empty."""
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) and kind is str else value
    try:
        items = tuple(items)  # type: ignore[arg-type]
    except TypeError:
        items = (None,)
    if not all(isinstance(item, kind) for item in items):
        raise RequestError(f"{name} is {value!r}; it must be {allowed}")
    return items


def _check(holds: bool, name: str, value: float, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value}; it must be {allowed}")
