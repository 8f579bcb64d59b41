"""What the runners of all engines share: the protocol, and the cores they may use.

A runner is a process that serves one workload with one engine, as often as it is told.
It runs in the engine's own environment, so this file needs the standard library alone.
One JSON object a line, on stdin and on what was stdout:

    {"command": "start", ...the fields of `Work`}   -> {"version": ..., "settings": ...}
    {"command": "run"}                              -> {"wall_s": ..., "tokens": ...}

A failure is answered with {"error": one line}, and ends the process; so does the end of
stdin. What engines print goes to stderr.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple


class Request(NamedTuple):
    """One request, greedy; the end of a text does not end it.

    Attributes:
      prompt: token ids.
      max_tokens: how many tokens to generate, no fewer.
    """

    prompt: list[int]
    max_tokens: int


class Work(NamedTuple):
    """What an engine is asked to serve, and with what.

    Attributes:
      model: path of the model, in the form that the engine wants.
      program: path of what serves it, where that is not a package; else empty.
      mode: which way to use the engine, where there are several.
      dtype: of weights and activations and of the KV cache: float32 or bfloat16.
      threads: cores, and threads that compute.
      kv_tokens: KV budget.
      max_seqs: most sequences at once.
      max_model_len: longest sequence in tokens.
      cache: folder for what the engine compiles.
      requests: all of them, known at the start.
    """

    model: str
    program: str
    mode: str
    dtype: str
    threads: int
    kv_tokens: int
    max_seqs: int
    max_model_len: int
    cache: str
    requests: list[Request]


class Loaded(NamedTuple):
    """An engine that is ready.

    Attributes:
      version: names and versions.
      serve: serves all requests; returns the tokens of each, in their order.
      settings: what the engine was told that others have no word for.
      details: returns more of the last run, by name; called after it, untimed.
      close: ends what the engine has started.
    """

    version: str
    serve: Callable[[], list[list[int]]]
    settings: dict[str, Any]
    details: Callable[[], dict[str, Any]] = dict
    close: Callable[[], None] = lambda: None


def main(load: Callable[[Work], Loaded]) -> None:
    """Speaks the protocol until stdin ends.

    Args:
      load: imports the engine, and loads the model.
    """
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    loaded = None
    try:
        for line in sys.stdin:
            fields = json.loads(line)
            if fields.pop("command") == "start":
                work = _work(fields)
                _take_cores(work.threads)
                loaded = load(work)
                answer(version=loaded.version, settings=loaded.settings)
                continue
            started = time.perf_counter()
            tokens = loaded.serve()
            wall_s = time.perf_counter() - started
            tokens = [[int(token) for token in one] for one in tokens]
            answer(wall_s=wall_s, tokens=tokens, details=loaded.details())
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        answer(error=" ".join(f"{type(error).__name__}: {error}".split()))
    if loaded is not None:
        loaded.close()
    sys.stderr.flush()
    # Some engines have threads that never end.
    os._exit(0)


def versions(*packages: str) -> str:
    """Returns the names and versions of packages."""
    from importlib.metadata import version

    return ", ".join(f"{package} {version(package)}" for package in packages)


def _work(fields: dict[str, Any]) -> Work:
    requests = [Request(*request) for request in fields.pop("requests")]
    return Work(**fields, requests=requests)


def die_with_parent() -> None:
    """Has the system end this process if the one that started it is killed.

    It may be stopped then, and would stay so for ever.
    """
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _take_cores(count: int) -> None:
    """Binds this process, and all it starts, to the last cores that it may use."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-count:])
