"""The engine on the device: SmolLM2, or its shape with random weights."""

import dataclasses
import time
from typing import Any

from experiments.gpu_check.jobs import NO_TIME, Deadline


def serve(small: bool, deadline: Deadline) -> dict[str, Any]:
    """Serves the same requests with the pallas and the xla backend, and compares.

    Args:
        small: whether to serve a tiny model, for an interpreter.
        deadline: after it the second backend does not begin.

    Raises:
        ImportError: a package of the engine is not installed.
    """
    import jax
    import numpy as np

    from experiments.smollm2_shape import SMOLLM2
    from paged_jax import Engine, EngineConfig, LoadedModel, SamplingParams
    from paged_jax.models.checkpoint import CheckpointError
    from paged_jax.models.llama import init_params

    config = SMOLLM2
    if small:
        config = dataclasses.replace(
            config,
            vocab_size=64,
            hidden_size=32,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            intermediate_size=32,
        )
    model, weights = None, "random"
    if not small:
        try:
            from paged_jax import load_model

            model, weights = load_model("smollm2-135m", "bfloat16"), "SmolLM2-135M"
        except (CheckpointError, ImportError):
            pass
    if model is None:
        tokenizer: Any = None
        model = LoadedModel(config, init_params(config, jax.random.key(0)), tokenizer)
    requests, prompt, length = (2, 3, 2) if small else (8, 64, 128)
    rng = np.random.default_rng(0)
    asked = rng.integers(3, config.vocab_size, (requests, prompt)).tolist()
    tokens: dict[str, list] = {}
    row: dict[str, Any] = dict(weights=weights, requests=requests)
    for backend in ("pallas", "xla"):
        if deadline.passed:
            return row | dict(skipped=True, why_not=f"{NO_TIME} for {backend}")
        engine = Engine(
            model,
            EngineConfig(
                dtype="bfloat16",
                attention_backend=backend,
                products="xla",
                preemption="recompute",
                max_model_len=prompt + length,
                max_seqs=requests,
                token_budget=8,  # one bucket: each is the whole model to compile
                max_requests=requests,
                full_length_requests=requests,
            ),
        )
        engine.warmup()
        start = time.perf_counter()
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(asked, params)
        seconds = time.perf_counter() - start
        tokens[backend] = [output.outputs[0].token_ids for output in outputs]
        row[f"{backend}_tokens_per_s"] = sum(map(len, tokens[backend])) / seconds
    same = [a == b for a, b in zip(tokens["pallas"], tokens["xla"])]
    # In 16 bits, near-ties part some requests; the first tokens mostly agree.
    first = [a[0] == b[0] for a, b in zip(tokens["pallas"], tokens["xla"])]
    return row | dict(same_requests=sum(same), same_first_tokens=sum(first))
