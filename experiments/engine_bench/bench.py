"""The command behind `scripts/bench_engines`."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from experiments import environment
from experiments.engine_bench import (
    bound,
    engines,
    models,
    plot,
    reference,
    report,
    workload,
)
from experiments.engine_bench.engines import Engine
from experiments.engine_bench.equality import Reference
from experiments.engine_bench.measure import Contender, Measured, compare
from experiments.engine_bench.runners import Runner, RunnerError

DTYPES = ("float32", "bfloat16")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit code.

    That is 1 if this project's engine was asked for and has no figure.
    """
    args = _parse(arguments)
    # So that the engines' processes are ended, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if args.setup:
        _set_up(args.engines)
    model = models.Model(args.model)
    try:
        requests, right, judge = reference.prepare(model, args.requests, _say)
    except (RunnerError, models.FormError) as error:
        print(f"bench_engines: no reference: {error}", file=sys.stderr)
        return 1
    runs = [
        _run(args, model, threads, dtype, requests, right)
        for dtype in args.dtype
        for threads in args.threads
    ]
    result = report.summarise(
        runs,
        model=args.model,
        workload={
            "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "output_tokens": sum(request.max_tokens for request in requests),
            "kv_tokens": workload.KV_TOKENS,
            "max_seqs": workload.MAX_SEQS,
            "max_model_len": workload.MAX_MODEL_LEN,
            "digest": workload.digest(requests),
        },
        reference=judge,
        environment=environment.describe(),
    )
    if args.json:
        print(json.dumps(result))
    else:
        print("\n\n".join(report.table(run) for run in runs))
    if args.plot:
        plot.draw(runs, args.plot)
    ours = [run["engines"].get(engines.OURS) for run in runs]
    return int(any(entry and entry["problem"] for entry in ours))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        "bench_engines", description="Times this engine against others, in turns."
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=list(engines.BY_NAME),
        default=list(engines.BY_NAME),
        metavar="NAME",
        help=f"some of {', '.join(engines.BY_NAME)}; by default all",
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[threads for threads in (1, 2) if threads <= cores],
        help="of each engine; by default 1, then 2",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--model", choices=models.NAMES, default="small")
    parser.add_argument(
        "--requests", type=int, default=workload.NUM_REQUESTS, help="how many"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed runs of each engine"
    )
    parser.add_argument(
        "--no-cold-start",
        action="store_true",
        help="do not time how long engines that compile take to start anew",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, help="write a figure: a .png or .svg")
    parser.add_argument(
        "--setup", action="store_true", help="install engines that are not there"
    )
    args = parser.parse_args(arguments)
    if not all(1 <= threads <= cores for threads in args.threads):
        parser.error(f"--threads is {args.threads}; it must be from 1 to {cores} cores")
    for name in ("requests", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be 1 or more")
    if args.plot and args.plot.suffix not in plot.SUFFIXES:
        parser.error(f"--plot is {args.plot}; its name must end in .png or .svg")
    if args.plot and not args.plot.parent.is_dir():
        parser.error(f"--plot is {args.plot}; there is no folder {args.plot.parent}")
    args.threads = list(dict.fromkeys(args.threads))
    args.engines = list(dict.fromkeys(args.engines))
    return args


def _set_up(names: Sequence[str]) -> None:
    """Installs what can be; what cannot has its reason in the table."""
    folders = dict.fromkeys(engines.BY_NAME[name].folder for name in names)
    wanted = [folder for folder in folders if folder]
    if wanted:
        script = engines.ROOT / "scripts/setup_engines"
        subprocess.run([script, *wanted], stdout=sys.stderr, check=False)


def _run(
    args: argparse.Namespace,
    model: models.Model,
    threads: int,
    dtype: str,
    requests: list[workload.Request],
    right: Reference,
) -> dict[str, Any]:
    """Compares the engines with one number of threads and one dtype."""
    _say(f"{args.model}, {dtype}, {threads} threads")
    contenders, absent = [], {}
    for name in args.engines:
        engine = engines.BY_NAME[name]
        reason = engines.missing(engine)
        try:
            path = "" if reason else model.path(engine.form, dtype)
        except models.FormError as error:
            path, reason = "", str(error)
        if reason:
            _say(f"{name}: {reason}")
            absent[name] = Measured(name, problem=reason)
        else:
            contender = _contender(engine, path, threads, dtype, requests)
            if args.no_cold_start:
                contender.compiles = False
            contenders.append(contender)
    limit = None
    if dtype == bound.DTYPE:
        limit = bound.describe(model.config(), requests, bound.measure(threads))
    lengths = [request.max_tokens for request in requests]
    found = compare(contenders, args.repeats, lengths, _say)
    by_name = absent | {one.name: one for one in found}
    measured = [by_name[name] for name in args.engines]
    return report.describe_run(threads, dtype, measured, requests, right, limit)


def _contender(
    engine: Engine,
    path: str,
    threads: int,
    dtype: str,
    requests: list[workload.Request],
) -> Contender:
    cache = engines.HOME / f"compiled/{engine.name}"
    log = engines.HOME / f"logs/{engine.name}.log"
    fields = reference.start_fields(
        engine, path, engine.mode, dtype, threads, str(cache), requests
    )

    def start(cold: bool) -> tuple[Runner, dict[str, Any]]:
        if cold:
            shutil.rmtree(cache, ignore_errors=True)
        for folder in (cache, log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        return Runner(engines.command(engine), threads, log), fields

    return Contender(engine.name, start, engine.compiles)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
