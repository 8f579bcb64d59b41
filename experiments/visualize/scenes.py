"""What the page shows: a small workload under each system, and scenes of sharing.

The workload's answers are as long as the model makes them: they are generated once, and
then every system is asked for exactly those lengths. So `oracle`, which is told them,
reserves what it should, and all systems generate the same tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.errors import UserError
from experiments.prompts import Prompt
from experiments.visualize.recorder import Asked, Recorded, record
from experiments.visualize.recording import encode
from experiments.visualize.timing import Timed, time_in_turns, time_once
from paged_jax import Engine, EngineConfig, LoadedModel, SamplingParams

Say = Callable[[str], None]


class Size(NamedTuple):
    """How much is served.

    Attributes:
      requests: of the workload.
      longest_prompt: its longest prompt, in tokens.
      longest_output: where answers are cut, in tokens.
      sharing_output: tokens of each sequence of the sharing scenes.
      config: settings of the workload's engines.
      sharing_config: settings of the sharing scenes' engine.
    """

    requests: int
    longest_prompt: int
    longest_output: int
    sharing_output: int
    config: EngineConfig
    sharing_config: EngineConfig


# Memory manager, batching, and what happens when blocks run out.
SYSTEMS = {
    "paged": ("paged", "continuous", "recompute"),
    "paged_swap": ("paged", "continuous", "swap"),
    "max": ("max", "continuous", "recompute"),
    "pow2": ("pow2", "continuous", "recompute"),
    "oracle": ("oracle", "continuous", "recompute"),
    "paged_static": ("paged", "static", "recompute"),
    "max_static": ("max", "static", "recompute"),
}
# It ends within a block, which the first writes have to copy.
SHARED_PROMPT = (
    "Once upon a time, in a small town by the sea, there lived an old woman who"
)
# Iterations between two arrivals, after the first requests.
_FIRST, _SPACING = 10, 4


def serve_all(
    model: LoadedModel, prompts: Sequence[Prompt], seed: int, size: Size, say: Say
) -> dict[str, Any]:
    """Serves everything, and returns what the page needs of it.

    Args:
      model: the model.
      prompts: prompts of any lengths; those that fit are taken in their order.
      seed: decides which tokens are drawn.
      size: how much to serve.
      say: gets a line for the user now and then.

    Raises:
      UserError: too few prompts fit.
    """
    asked = _choose(model, prompts, seed, size)
    say(f"serving {len(asked)} requests once, for the lengths of the answers")
    engine = Engine(model, _config(size, "paged"))
    first = engine.generate([a.tokens for a in asked], [a.params for a in asked])
    lengths = [len(output.outputs[0].token_ids) for output in first]
    asked = [
        one._replace(
            params=dataclasses.replace(one.params, max_tokens=length, ignore_eos=True)
        )
        for one, length in zip(asked, lengths, strict=True)
    ]
    runs: dict[str, Any] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for name in SYSTEMS:
        say(f"recording {name}")
        recorded = record(Engine(model, _config(size, name)), asked)
        runs[name] = encode(recorded, model.tokenizer)
        answers[name] = recorded.final_tokens

    def run(name: str) -> Timed:
        say(f"timing {name}, with nobody watching")
        return time_once(model, _config(size, name), asked)

    timed = {
        name: _speed(best, answers["paged"], answers[name], best.tokens, other.tokens)
        for name, (best, other) in time_in_turns(SYSTEMS, run).items()
    }
    say("recording parallel samples and a beam search")
    sharing = {
        name: encode(recorded, model.tokenizer)
        for name, recorded in record_sharing(model, seed, size).items()
    }
    return {
        "runs": runs,
        "timed": timed,
        "sharing": sharing,
        "bytesPerToken": model.config.kv_bytes_per_token(size.config.kv_dtype),
    }


def _speed(best: Timed, *answers: list[tuple[int, ...]]) -> dict[str, Any]:
    """Returns what the page has of a system's speed, and how many answers agree."""
    return {
        "seconds": round(best.seconds, 3),
        "iterations": best.iterations,
        "outputTokens": sum(map(len, best.tokens)),
        # Where two logits are all but equal, tokens may differ.
        "same": sum(len(set(same)) == 1 for same in zip(*answers)),
    }


def record_sharing(
    model: LoadedModel, seed: int, size: Size, prompt: str = SHARED_PROMPT
) -> dict[str, Recorded]:
    """Records four samples of one prompt, and a beam search of width four."""
    assert model.tokenizer is not None
    tokens = tuple(model.tokenizer.encode(prompt))
    most = size.sharing_output
    parallel = SamplingParams(
        n=4, temperature=0.9, top_p=0.95, seed=seed, max_tokens=most, ignore_eos=True
    )
    beams = SamplingParams(beam_width=4, n=4, max_tokens=most, ignore_eos=True)
    return {
        name: record(
            Engine(model, size.sharing_config), [Asked(prompt, tokens, params)]
        )
        for name, params in (("parallel", parallel), ("beam", beams))
    }


def _config(size: Size, system: str) -> EngineConfig:
    memory, batching, preemption = SYSTEMS[system]
    return dataclasses.replace(
        size.config, memory=memory, batching=batching, preemption=preemption
    )


def _choose(
    model: LoadedModel, prompts: Sequence[Prompt], seed: int, size: Size
) -> list[Asked]:
    """Returns the first prompts that are short enough, as requests."""
    engine_length = size.config.max_model_len
    chosen: list[Asked] = []
    for prompt in prompts:
        tokens = _tokens(model, prompt.text)
        if not 0 < len(tokens) <= size.longest_prompt:
            continue
        index = len(chosen)
        params = SamplingParams(
            temperature=0.7,
            seed=seed + index,
            max_tokens=min(size.longest_output, engine_length - len(tokens)),
        )
        arrival = max(0, index - _FIRST + 1) * _SPACING
        chosen.append(Asked(prompt.text, tokens, params, arrival))
        if len(chosen) == size.requests:
            return chosen
    raise UserError(
        f"{len(chosen)} prompts have at most {size.longest_prompt} tokens, and the "
        f"page serves {size.requests}; give more prompts, or shorter ones"
    )


def _tokens(model: LoadedModel, text: str) -> tuple[int, ...]:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    if tokenizer.chat_template is None:
        return tuple(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tuple(tokenizer.encode(chat, add_special_tokens=False))
