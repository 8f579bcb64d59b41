"""Workloads: which requests arrive, and when."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from experiments.errors import UserError
from experiments.lengths import draw_lengths
from experiments.prompts import Prompt, load_prompts, system_prompt
from experiments.settings import WorkloadSettings
from experiments.translation import SHOTS, translations

# A text is as good as the nearest one if its length is no more than this farther from
# what was drawn: requests of one length then have different texts.
_NEAR_TOKENS = 4
_NEAR_SHARE = 0.1


class Tokenizer(Protocol):
    """What is needed of a tokenizer; `paged_jax.tokenizer.Tokenizer` has it."""

    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text."""
        ...

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Returns the text that shows a conversation to the model."""
        ...


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a workload.

    Attributes:
      id: names it in the results.
      prompt_id: the text it asks.
      tokens: the prompt, chat template applied.
      output_len: tokens of each sequence; the end-of-text token does not end it sooner.
      arrival: when it arrives, in units of the mean time between arrivals.
      n: sequences to generate.
      beam_width: beams of the search that finds them; 1: none.
      temperature: of the sampling; 0 is greedy.
      seed: of the random draws.
    """

    id: str
    prompt_id: str
    tokens: tuple[int, ...]
    output_len: int
    arrival: float
    n: int = 1
    beam_width: int = 1
    temperature: float = 0.0
    seed: int = 0

    @property
    def digest(self) -> str:
        """Is the same for requests whose tokens must come out the same.

        Sequences that are drawn do not depend on how many were asked for; beams do.
        """
        asked: tuple = (self.id, self.tokens, self.output_len)
        if self.temperature:
            asked += (self.temperature, self.seed)
        if self.beam_width > 1:
            asked += ("beams", self.beam_width)
        text = repr(asked)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival.

    Attributes:
      name: as in the settings.
      requests: at least one.
      prefix: tokens that all prompts start with, an odd number of them, for workloads
        that have a common text; else none.
      trimmed: requests whose text lost its end, to fit the model length.
      shortened: requests whose output was shortened, for the same reason.
    """

    name: str
    requests: tuple[Request, ...]
    prefix: tuple[int, ...]
    trimmed: int
    shortened: int

    @property
    def digest(self) -> str:
        """Is the same for workloads of the same requests."""
        text = repr([r.digest for r in self.requests])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Returns what a reader needs to know of the lengths."""
        inputs = np.array([len(r.tokens) for r in self.requests])
        outputs = np.array([r.output_len for r in self.requests])

        def spread(values: np.ndarray) -> dict[str, float]:
            p10, p50, p90 = np.percentile(values, (10, 50, 90)).tolist()
            return {
                "mean": float(values.mean()),
                "p10": p10,
                "p50": p50,
                "p90": p90,
                "max": int(values.max()),
            }

        return {
            "requests": len(self.requests),
            "digest": self.digest,
            "input_tokens": spread(inputs),
            "output_tokens": spread(outputs),
            "sequences": sum(r.n for r in self.requests),
            "prefix_tokens": len(self.prefix),
            "trimmed": self.trimmed,
            "shortened": self.shortened,
        }


def build_workload(
    settings: WorkloadSettings, max_model_len: int, seed: int, tokenizer: Tokenizer
) -> Workload:
    """Returns the requests; the same settings and seed give the same ones.

    Args:
      settings: which requests.
      max_model_len: longest sequence in tokens.
      seed: decides lengths, texts and arrivals.
      tokenizer: the model's.

    Raises:
      UserError: the prompts file, or a prompt, cannot be used.
    """
    if settings.name in SHOTS:
        return _translation_workload(settings, max_model_len, seed, tokenizer)
    prompts = read_texts(settings.prompts)
    # One stream for each purpose, so that a change of one leaves the others.
    lengths_rng, texts_rng, arrivals_rng = (
        np.random.default_rng((seed, purpose)) for purpose in range(3)
    )
    count = settings.num_requests
    served = max(round(settings.part * count), 1)
    lengths = draw_lengths(
        lengths_rng, count, settings.lengths, settings.length_scale, max_model_len
    )
    system = ""
    if settings.name == "system_prompt":
        system = scale_text(system_prompt(), settings.length_scale, tokenizer)

    # Texts are chosen by their length without the system prompt: behind it, they are
    # the same requests.
    render = _renderer(tokenizer, "", settings.chat)
    sizes = [len(render(prompt.text)) for prompt in prompts]
    if settings.prompt_lengths == "as_is":
        chosen = [i % len(prompts) for i in range(count)]
        _check_fit(
            [prompts[i] for i in chosen], [sizes[i] for i in chosen], max_model_len
        )
    else:
        exact = settings.prompt_lengths == "cut"
        chosen = choose_texts(texts_rng, np.array(sizes), lengths[:, 0], exact)

    arrivals = np.zeros(count)
    if settings.name == "poisson":
        arrivals = np.cumsum(arrivals_rng.exponential(size=count))
        arrivals -= arrivals[0]
    render = _renderer(tokenizer, system, settings.chat)
    shortest = len(render(""))
    requests, trimmed, shortened = [], 0, 0
    for number, index in enumerate(chosen[:served]):
        prompt, output_len = prompts[index], int(lengths[number, 1])
        tokens = render(prompt.text)
        if settings.prompt_lengths == "cut":
            tokens = tokens[: lengths[number, 0]]
        room = max_model_len - output_len
        if len(tokens) > room:
            # The text gives way first, down to half of its most; then the output.
            room = max(room, shortest + (max_model_len - shortest) // 2)
            if len(tokens) > room:
                tokens = _trim(prompt.text, render, room)
                trimmed += 1
            if len(tokens) + output_len > max_model_len:
                output_len = max_model_len - len(tokens)
                shortened += 1
        requests.append(
            Request(
                id=f"{number:04d}",
                prompt_id=prompt.id,
                tokens=tuple(tokens),
                output_len=output_len,
                arrival=float(arrivals[number]),
                **_sampling(settings, seed, number),
            )
        )
    prefix = _common_prefix([r.tokens for r in requests]) if system else ()
    return Workload(settings.name, tuple(requests), prefix, trimmed, shortened)


def _translation_workload(
    settings: WorkloadSettings, max_model_len: int, seed: int, tokenizer: Tokenizer
) -> Workload:
    """Returns requests whose outputs are as long as a translation of theirs."""
    served = max(round(settings.part * settings.num_requests), 1)
    requests = []
    for number, one in enumerate(
        translations(SHOTS[settings.name], served, settings.length_scale)
    ):
        tokens = tokenizer.encode(one.prompt)
        output_len = len(tokenizer.encode(one.answer, add_special_tokens=False))
        if len(tokens) + output_len > max_model_len:
            raise UserError(
                f"request {one.id} of the {settings.name} workload has {len(tokens)} + "
                f"{output_len} tokens, and engine.max_model_len is {max_model_len}; "
                "raise it, or raise workload.length_scale"
            )
        requests.append(
            Request(
                id=f"{number:04d}",
                prompt_id=one.id,
                tokens=tuple(tokens),
                output_len=output_len,
                arrival=0.0,
                **_sampling(settings, seed, number),
            )
        )
    prefix = _common_prefix([r.tokens for r in requests])
    return Workload(settings.name, tuple(requests), prefix, 0, 0)


def _sampling(settings: WorkloadSettings, seed: int, number: int) -> dict[str, Any]:
    """Returns how a request samples; its draws are the same in every cell."""
    return {
        "n": max(settings.n, settings.beam_width),
        "beam_width": settings.beam_width,
        "temperature": settings.temperature,
        "seed": (seed << 32) + number,
    }


def read_texts(path: str) -> list[Prompt]:
    """Returns the texts of a prompts file; empty for those that ship.

    Raises:
      UserError: the file cannot be used.
    """
    try:
        return load_prompts(path or None)
    except ValueError as error:
        raise UserError(str(error)) from None


def scale_text(text: str, scale: float, tokenizer: Tokenizer) -> str:
    """Returns the whole sentences that fit in a text's length / `scale`, at least one.

    Args:
      text: sentences.
      scale: how much shorter, in tokens; 1 or less keeps all.
      tokenizer: counts the tokens.
    """
    room = len(tokenizer.encode(text)) / scale
    sentences = re.split(r"(?<=[.!?])\s+", text)
    kept = sentences[0]
    for sentence in sentences[1:]:
        longer = f"{kept} {sentence}"
        if scale > 1 and len(tokenizer.encode(longer)) > room:
            break
        kept = longer
    return kept


def choose_texts(
    rng: np.random.Generator,
    sizes: np.ndarray,
    wanted: np.ndarray,
    no_shorter: bool = False,
) -> list[int]:
    """Chooses a text for each request: the nearest in length, or one nearly as near.

    Args:
      rng: decides among texts that are near enough.
      sizes: i64[M], tokens of the texts.
      wanted: i64[N], lengths that were drawn.
      no_shorter: whether texts shorter than that are left out, where any is as long.

    Returns:
      N indices of texts.
    """
    chosen = []
    for length in wanted.tolist():
        distance = np.abs(sizes - length)
        if no_shorter and (sizes >= length).any():
            distance = np.where(sizes < length, np.iinfo(np.int64).max // 2, distance)
        slack = max(_NEAR_TOKENS, int(_NEAR_SHARE * length))
        near = np.flatnonzero(distance <= distance.min() + slack)
        chosen.append(int(rng.choice(near)))
    return chosen


def _renderer(
    tokenizer: Tokenizer, system: str, chat: bool
) -> Callable[[str], list[int]]:
    """Returns what makes a prompt of a user's text, with this system message.

    An empty system message keeps the template from putting its own there, which would
    make every prompt longer than most of ShareGPT's.
    """

    def render(text: str) -> list[int]:
        if tokenizer.chat_template is None or not chat:
            return tokenizer.encode(f"{system}\n\n{text}" if system else text)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": text},
        ]
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return tokenizer.encode(shown, add_special_tokens=False)

    return render


def _trim(text: str, render: Callable[[str], list[int]], room: int) -> list[int]:
    """Returns the prompt with the end of the text cut off until it fits in `room`."""
    fits, too_long = 0, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if len(render(text[:middle])) <= room:
            fits = middle
        else:
            too_long = middle
    tokens = render(text[:fits].rstrip())
    if len(tokens) > room:
        raise UserError(
            f"a prompt without any text takes {len(tokens)} tokens (chat template and "
            f"system prompt), and only {room} are left beside the output; raise "
            "engine.max_model_len"
        )
    return tokens


def _check_fit(prompts: list[Prompt], sizes: list[int], max_model_len: int) -> None:
    for prompt, size in zip(prompts, sizes):
        if size >= max_model_len:
            raise UserError(
                f"prompt {prompt.id} has {size} tokens and engine.max_model_len is "
                f"{max_model_len}, which must hold one more; shorten it or raise "
                "engine.max_model_len"
            )


def _common_prefix(prompts: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the tokens that all prompts start with, short of a whole prompt.

    An odd number of them, which leaves the last block partly filled at every block size
    but 1.
    """
    first = min(prompts)
    last = max(prompts)
    size = 0
    while size < min(len(first), len(last)) - 1 and first[size] == last[size]:
        size += 1
    return first[: max(size - (size + 1) % 2, 0)]
