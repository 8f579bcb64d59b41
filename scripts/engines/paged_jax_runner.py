"""Serves with this project's own engine."""

import dataclasses
import sys
from pathlib import Path

import runner

# Iterations between two looks of the host: all of a workload's in a few.
STEPS_PER_SYNC = 512
# Left free for each running sequence. Nothing is computed twice then, and the batch is
# hardly smaller.
SPARE_BLOCKS = 2


def load(work: runner.Work) -> runner.Loaded:
    """Loads and compiles; see `runner.main`."""
    import jax

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from paged_jax import Engine, EngineConfig, SamplingParams, compilation_cache
    from paged_jax.models.load import load_model

    one_by_one = work.mode == "one_by_one"
    compilation_cache.enable(work.cache)
    config = EngineConfig(
        dtype=work.dtype,
        num_blocks=work.kv_tokens // EngineConfig.block_size,
        max_model_len=work.max_model_len,
        max_seqs=1 if one_by_one else work.max_seqs,
        max_requests=max(len(work.requests), work.max_seqs),
        max_prefixes=0,
        spare_blocks=SPARE_BLOCKS,
        steps_per_sync=STEPS_PER_SYNC,
    )
    if one_by_one:
        # Nothing that serving adds: no batch, no kernels of our own.
        config = dataclasses.replace(
            config, attention_backend="reference", products="xla", max_logprobs=2
        )
    model = load_model(work.model, work.dtype)._replace(tokenizer=None)
    engine = Engine(model, config)
    del model
    engine.warmup()
    prompts = [request.prompt for request in work.requests]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            logprobs=2 if one_by_one else None,
        )
        for request in work.requests
    ]
    compilations = _count_compilations(jax)
    last: dict = {}

    def serve() -> list[list[int]]:
        engine.reset_stats()
        last["compilations"] = len(compilations)
        last["outputs"] = engine.generate(prompts, params)
        return [list(output.outputs[0].token_ids) for output in last["outputs"]]

    def details() -> dict:
        stats = engine.stats
        more = {
            "host_syncs_per_token": stats.host_syncs_per_token,
            "iterations": stats.iterations,
            "recomputed_tokens": stats.recomputed_tokens,
            "compilations": len(compilations) - last["compilations"],
        }
        if one_by_one:
            more["gaps"] = [_gaps(output.outputs[0]) for output in last["outputs"]]
        return more

    return runner.Loaded(
        version=f"jax {jax.__version__}",
        serve=serve,
        settings={
            "token_budget": config.token_budget,
            "spare_blocks": config.spare_blocks,
            "steps_per_sync": config.steps_per_sync,
            "compile_s": engine.compile_seconds,
        },
        details=details,
    )


def _count_compilations(jax) -> list[str]:
    """Returns a list that gets an entry for each program compiled from now on."""
    found: list[str] = []

    def note(event: str, seconds: float, **more) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    return found


def _gaps(output) -> list[float]:
    """Returns how far the second-best logit was below the best, for each token."""
    gaps = []
    for logprobs in output.logprobs:
        best, second = sorted(logprobs.values(), reverse=True)[:2]
        gaps.append(best - second)
    return gaps


if __name__ == "__main__":
    runner.main(load)
