"""The settings of a workload, checked."""

import dataclasses

from experiments.errors import UserError
from experiments.lengths import datasets

WORKLOADS = ("offline", "poisson", "system_prompt", "one_shot", "few_shot")
# Those whose prompts all start with the same text.
WITH_PREFIX = ("system_prompt", "one_shot", "few_shot")
PROMPT_LENGTHS = ("drawn", "cut", "as_is")


@dataclasses.dataclass(frozen=True)
class WorkloadSettings:
    """Which requests arrive, and when; the keys of `config.workload`.

    Attributes:
      name: `offline` (all known at time 0), `poisson` (they arrive over time),
        `system_prompt` (offline, all behind one system prompt), or `one_shot` and
        `few_shot` (offline, sentences to translate behind one example, or five).
      num_requests: how many.
      part: the share of them that is served, the first ones.
      prompts: a prompts file; empty for those that ship with the project.
      lengths: whose length quantiles: sharegpt or alpaca.
      length_scale: lengths are divided by this.
      prompt_lengths: `drawn`: the text nearest to the input length that was drawn;
        `cut`: a text at least as long, its end cut off at that length; `as_is`: the
        prompts of the file in turn, whatever their length.
      chat: whether prompts are put into the model's chat template, if it has one.
      n: sequences of each request.
      beam_width: beams of each request, all of which are returned; 1: no beam search.
      temperature: of the sampling; 0 is greedy.
      sharing: whether what all prompts start with is registered as a prefix.
      preempted_tokens: after serving, it is measured what preempting a sequence of so
        many tokens takes, swapped and recomputed; 0: it is not.
      rate: Poisson arrivals, requests a second. 0: the geometric mean of what max +
        static and paged + continuous served a second offline, in the same run.
      arrival_steps: steps between two looks at the clock while requests still arrive.
    """

    name: str = "offline"
    num_requests: int = 80
    part: float = 1.0
    prompts: str = ""
    lengths: str = "sharegpt"
    length_scale: float = 1.0
    prompt_lengths: str = "drawn"
    chat: bool = True
    n: int = 1
    beam_width: int = 1
    temperature: float = 0.0
    sharing: bool = False
    preempted_tokens: int = 0
    rate: float = 0.0
    arrival_steps: int = 4

    def __post_init__(self):
        """Raises UserError for a setting that is out of range."""
        _check_choice("name", self.name, WORKLOADS)
        _check_choice("lengths", self.lengths, datasets())
        _check_choice("prompt_lengths", self.prompt_lengths, PROMPT_LENGTHS)
        count = self.num_requests
        _check(1 <= count <= 10**6, "num_requests", count, "1 to 1,000,000")
        _check(
            self.arrival_steps >= 1, "arrival_steps", self.arrival_steps, "1 or more"
        )
        for name in ("n", "beam_width"):
            value = getattr(self, name)
            _check(value >= 1, name, value, "1 or more")
        _check(0 < self.part <= 1, "part", self.part, "above 0 and at most 1")
        preempted = self.preempted_tokens
        _check(preempted >= 0, "preempted_tokens", preempted, "0 or more")
        scale, rate = self.length_scale, self.rate
        _check(0 < scale < float("inf"), "length_scale", scale, "above 0")
        _check(0 <= rate < float("inf"), "rate", rate, "0 or more")
        heat = self.temperature
        _check(0 <= heat < float("inf"), "temperature", heat, "0 or more")
        if self.sharing and self.name not in WITH_PREFIX:
            raise UserError(
                f"workload.sharing is on and workload.name {self.name!r}; only "
                f"{', '.join(WITH_PREFIX)} have a prefix to share"
            )
        if self.beam_width > 1 and (self.n > 1 or heat > 0):
            raise UserError(
                f"workload.beam_width is {self.beam_width} with n {self.n} and "
                f"temperature {heat:g}; a beam search returns its beams, and draws "
                "nothing: leave these two out"
            )
        if self.n > 1 and heat == 0:
            raise UserError(
                f"workload.n is {self.n} and workload.temperature 0; greedy sequences "
                "are all the same: raise the temperature"
            )


def _check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    _check(value in allowed, key, repr(value), f"one of {', '.join(allowed)}")


def _check(holds: bool, key: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"workload.{key} is {value}; it must be {allowed}")
