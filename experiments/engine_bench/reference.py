"""The tokens that are right: each request alone, greedy, in float32."""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from experiments.engine_bench import engines, workload
from experiments.engine_bench.equality import Reference
from experiments.engine_bench.models import Model
from experiments.engine_bench.runners import Runner

MODE = "one_by_one"
# Products of one row wait for memory, and more threads mostly for each other.
THREADS = 1


def start_fields(
    engine: engines.Engine,
    model_path: str,
    mode: str,
    dtype: str,
    threads: int,
    cache: str,
    requests: Sequence[workload.Request],
) -> dict[str, Any]:
    """Returns what a runner is told at its start: `Work` in `scripts/engines`."""
    home = engines.HOME / engine.folder
    return {
        "model": model_path,
        "program": str(home / engine.program) if engine.program else "",
        "mode": mode,
        "dtype": dtype,
        "threads": threads,
        "kv_tokens": workload.KV_TOKENS,
        "max_seqs": workload.MAX_SEQS,
        "max_model_len": workload.MAX_MODEL_LEN,
        "cache": cache,
        "requests": list(requests),
    }


def prepare(
    model: Model, count: int, say: Callable[[str], None]
) -> tuple[list[workload.Request], Reference, str]:
    """Returns the workload, its right tokens, and which engine they are from.

    They are kept on disk. They come from `transformers` if it is installed, and else
    from this project's model without a batch, paged kernels or packed weights.

    Args:
      model: to decode with.
      count: how many requests.
      say: gets a line if this takes long.

    Raises:
      RunnerError: the decode failed.
    """
    independent = engines.BY_NAME["transformers"]
    ours = engines.missing(independent) is not None
    engine = engines.BY_NAME[engines.OURS] if ours else independent
    asked = model.requests(count)
    kept = engines.HOME / "references"
    path = kept / f"{model.name}-{engine.name}-{workload.digest(asked)}.json"
    if path.exists():
        found = json.loads(path.read_text("utf-8"))
    else:
        say(f"decoding {count} requests one by one with {engine.name}: some minutes")
        found = _decode(model, engine, asked)
        kept.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found), "utf-8")
        partial.rename(path)
    requests = workload.end_before(asked, found["tokens"], model.stop_ids())
    lengths = [request.max_tokens for request in requests]
    reference = Reference(
        *(
            [values[:length] for values, length in zip(found[name], lengths)]
            for name in ("tokens", "gaps")
        )
    )
    return requests, reference, engine.name


def _decode(
    model: Model, engine: engines.Engine, requests: list[workload.Request]
) -> dict[str, Any]:
    cache = engines.HOME / "compiled/reference"
    log = engines.HOME / "logs/reference.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    fields = start_fields(
        engine,
        model.path(engine.form, "float32"),
        MODE,
        "float32",
        THREADS,
        str(cache),
        requests,
    )
    runner = Runner(engines.command(engine), THREADS, log)
    try:
        runner.ask("start", **fields)
        answer = runner.ask("run")
    finally:
        runner.close()
    return {"tokens": answer["tokens"], "gaps": answer["details"]["gaps"]}
