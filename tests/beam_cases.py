"""Beam searches with golden models, and what the oracle finds with them."""

import functools
import json
from pathlib import Path

import numpy as np
from oracles.beam_search import beam_search

from experiments.token_check import next_logits
from paged_jax import LoadedModel, SamplingParams
from paged_jax.models.huggingface import load_config, load_params

GOLDENS = Path(__file__).parent / "goldens"
CASES = json.loads((GOLDENS / "beams.json").read_text())
RULES = ("num_beams", "max_new_tokens", "length_penalty", "early_stopping")
LONGEST = 32  # prompt and continuation


@functools.cache
def golden_model(name, sharpness):
    """A golden model whose logits are multiplied by `sharpness`."""
    config = load_config(GOLDENS / name)
    params = load_params(GOLDENS / name, config)
    params["norm"]["scale"] *= sharpness
    return LoadedModel(config, params, None)  # type: ignore[arg-type]


@functools.cache
def model_log_probs(name, sharpness, tokens):
    """Returns f64[V], what the project's model expects after the tokens."""
    logits = next_logits(golden_model(name, sharpness), tokens, LONGEST)
    logits = logits.astype(np.float64) - logits.max()
    return logits - np.log(np.exp(logits).sum())


def search(case, running=None):
    """Returns what the oracle finds; `running` is told which beams it extends."""
    model = case["model"], case["sharpness"]

    def log_probs(tokens):
        if running is not None:
            running.append(tuple(tokens[len(case["prompt"]) :]))
        return model_log_probs(*model, tuple(tokens))

    return beam_search(
        log_probs,
        case["prompt"],
        eos_token_ids=case["eos_token_ids"],
        **{rule: case[rule] for rule in RULES},
    )


def parents_of(case):
    """Returns for each step which beams its own extend; the last step has none."""
    running = []
    search(case, running)
    width = case["num_beams"]
    steps = [running[i : i + width] for i in range(1, len(running), width)]
    shorter, parents = [()] * width, []
    for beams in steps:
        parents.append(tuple(shorter.index(tokens[:-1]) for tokens in beams))
        shorter = beams
    return tuple(parents)


def params_of(case, n=None):
    """Returns the parameters that ask an engine for the same search."""
    return SamplingParams(
        n=case["num_beams"] if n is None else n,
        beam_width=case["num_beams"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        max_tokens=case["max_new_tokens"],
        stop_token_ids=case["eos_token_ids"],
        ignore_eos=True,
    )


def name_of(case):
    """A test's name."""
    rules = [f"{rule}={case[rule]}" for rule in RULES]
    return ",".join([case["model"], *rules, f"ends={len(case['eos_token_ids'])}"])
