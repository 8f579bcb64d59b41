"""Checks a run's greedy tokens against a plain decode of the same model.

    python -m experiments.plain_decode results/FOLDER [--requests=N]

A plain decode keeps no cache: it computes the whole sequence anew for each token. Since
the next token depends on those before it only, one pass over prompt and output together
gives all of its choices, as long as they agree: the choice at every position is
compared with the token that the engine generated there. Attention is the reference
backend's.
"""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.models import load_model
from experiments.token_check import TIE, one_sequence
from paged_jax import LoadedModel, compilation_cache
from paged_jax.models import llama

_REQUESTS = flags.DEFINE_integer("requests", 0, "how many requests to check; 0: all")


class Parting(NamedTuple):
    """Where the engine's tokens leave the plain decode's.

    Attributes:
      position: how many generated tokens are equal.
      gap: how far the engine's token's logit is below the largest.
    """

    position: int
    gap: float


def first_parting(
    model: LoadedModel, prompt: list[int], generated: list[int], size: int
) -> Parting | None:
    """Returns where generated tokens part from a plain greedy decode; None if nowhere.

    Args:
      model: what generated them.
      prompt: token ids.
      generated: token ids.
      size: longest sequence; all are padded to it, and share one program.
    """
    tokens = np.zeros(size, np.int32)
    known = [*prompt, *generated]
    tokens[: len(known)] = known
    choice, gap = _choices(model.config, model.params, tokens, len(known))
    for position, token in enumerate(generated):
        at = len(prompt) + position - 1
        if int(choice[at]) != token:
            return Parting(position, float(gap[at]))
    return None


@functools.partial(jax.jit, static_argnums=0)
def _choices(config, params, tokens, count):
    """Returns the likeliest next token at each position, and its lead over the real."""
    batch, cache = one_sequence(config, tokens, count)
    everywhere = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    batch = batch._replace(sample_index=everywhere, num_samples=count)
    logits, _ = llama.forward(config, params, batch, cache, "reference")
    following = jnp.roll(tokens, -1)
    real = jnp.take_along_axis(logits, following[:, None], axis=1)[:, 0]
    return jnp.argmax(logits, axis=-1), jnp.max(logits, axis=-1) - real


def _distinct(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields one output of each distinct request, over all cells."""
    seen = set()
    for path in sorted((folder / "outputs").glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            output = json.loads(line)
            if output["digest"] not in seen:
                seen.add(output["digest"])
                yield output


def main(argv: list[str]) -> int:
    """Runs the check; returns the exit code: 1 if a difference is no tie."""
    if len(argv) != 2 or not (Path(argv[1]) / "summary.json").exists():
        given = " ".join(argv[1:]) or "nothing"
        print(
            f"error: {given} given; give one results folder with a summary.json",
            file=sys.stderr,
        )
        return 2
    folder = Path(argv[1])
    config = json.loads((folder / "summary.json").read_text("utf-8"))["config"]
    compilation_cache.enable()
    model = load_model(config["model"], config["engine"]["dtype"])
    outputs = list(_distinct(folder))[: _REQUESTS.value or None]
    size = config["engine"]["max_model_len"]
    tokens, partings = 0, []
    for output in outputs:
        tokens += len(output["token_ids"])
        parting = first_parting(
            model, output["prompt_token_ids"], output["token_ids"], size
        )
        if parting is not None:
            partings.append((output["id"], parting))
    wrong = [p for p in partings if p[1].gap > TIE]
    print(
        f"{len(outputs)} requests, {tokens} tokens: {len(outputs) - len(partings)} "
        f"equal the plain decode, {len(partings) - len(wrong)} part at a tie of two "
        f"logits (within {TIE:.0e}), {len(wrong)} are wrong"
    )
    for name, parting in partings:
        print(f"request {name}: token {parting.position}, gap {parting.gap:.2e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    app.run(lambda argv: sys.exit(main(argv)))
