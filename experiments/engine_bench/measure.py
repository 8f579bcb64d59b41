"""Times engines against each other: in turns, and one at a time."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from experiments import usage
from experiments.engine_bench.runners import Runner, RunnerError


@dataclasses.dataclass
class Timed:
    """One run of the workload.

    Attributes:
      wall_s: seconds.
      cores: that the engine used.
      other_cores: that others used meanwhile.
    """

    wall_s: float
    cores: float
    other_cores: float

    @property
    def disturbed(self) -> bool:
        """Whether others used so much that the time says little."""
        return self.other_cores > usage.DISTURBED


@dataclasses.dataclass
class Measured:
    """What is known of an engine; a field that is not known is None.

    Attributes:
      name: the engine.
      problem: one line that says why there are no figures.
      version: names and versions.
      settings: of the engine.
      startup_s: from the start of its process until it could serve, with all that an
        engine keeps on disk from earlier starts.
      cold_startup_s: the same without; None for engines that compile nothing.
      warmup_s: of the first, untimed run.
      runs: the timed ones.
      peak_rss_bytes: of its processes.
      tokens: of each request, in the last run.
      details: of the last run.
    """

    name: str
    problem: str | None = None
    version: str | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    startup_s: float | None = None
    cold_startup_s: float | None = None
    warmup_s: float | None = None
    runs: list[Timed] = dataclasses.field(default_factory=list)
    peak_rss_bytes: int | None = None
    tokens: list[list[int]] | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def wall_s(self) -> float | None:
        """The median of its runs."""
        if self.problem or not self.runs:
            return None
        return statistics.median(run.wall_s for run in self.runs)


# Starts an engine's process, told whether nothing may be left from earlier starts.
Start = Callable[[bool], tuple[Runner, dict[str, Any]]]


@dataclasses.dataclass
class Contender:
    """An engine that takes part.

    Attributes:
      name: the engine.
      start: starts its process; returns it, and the fields of the start command.
      compiles: whether a cold start is to be timed, too.
    """

    name: str
    start: Start
    compiles: bool = False


def compare(
    contenders: Sequence[Contender],
    repeats: int,
    lengths: Sequence[int],
    say: Callable[[str], None],
) -> list[Measured]:
    """Runs the workload on all engines, `repeats` rounds of one run each.

    One that fails is left out of what follows; its problem is in the result.

    Args:
      contenders: the engines.
      repeats: timed rounds; one more comes before.
      lengths: tokens that each request must get.
      say: gets lines on what goes on.
    """
    results = [Measured(contender.name) for contender in contenders]
    running: list[tuple[Runner, Measured]] = []
    try:
        for contender, result in zip(contenders, results):
            try:
                running.append((_start(contender, result, say), result))
            except RunnerError as error:
                result.problem = str(error)
                say(f"{result.name}: {error}")
        for repeat in range(repeats + 1):
            # Each starts a round once, so that none always follows the same one.
            turn = repeat % max(len(running), 1)
            for runner, result in running[turn:] + running[:turn]:
                if result.problem is None:
                    _round(runner, result, repeat, lengths, say)
        for runner, result in running:
            if result.problem is None:
                result.peak_rss_bytes = runner.peak_rss_bytes()
    finally:
        for runner, _ in running:
            runner.close()
    return results


def _start(
    contender: Contender, result: Measured, say: Callable[[str], None]
) -> Runner:
    """Starts an engine, twice if it compiles; fills in what that says of it."""
    if contender.compiles:
        runner, _, result.cold_startup_s = _timed_start(contender, cold=True)
        runner.close()
    runner, answer, result.startup_s = _timed_start(contender, cold=False)
    result.version = answer["version"]
    result.settings = answer["settings"]
    say(f"{result.name}: {result.version}, ready in {result.startup_s:.1f} s")
    return runner


def _timed_start(
    contender: Contender, cold: bool
) -> tuple[Runner, dict[str, Any], float]:
    started = time.perf_counter()
    runner, fields = contender.start(cold)
    try:
        answer = runner.ask("start", **fields)
    except BaseException:
        runner.close()
        raise
    seconds = time.perf_counter() - started
    runner.pause()
    return runner, answer, seconds


def _round(
    runner: Runner,
    result: Measured,
    repeat: int,
    lengths: Sequence[int],
    say: Callable[[str], None],
) -> None:
    """Runs the workload once; the first time is not counted."""
    try:
        timed, answer = _run(runner)
    except RunnerError as error:
        result.problem = str(error)
        say(f"{result.name}: {error}")
        return
    result.tokens, result.details = answer["tokens"], answer["details"]
    got = [len(tokens) for tokens in answer["tokens"]]
    if got != list(lengths):
        result.problem = f"generated {sum(got)} tokens instead of {sum(lengths)}"
    if repeat:
        result.runs.append(timed)
    else:
        result.warmup_s = timed.wall_s
    disturbed = " (disturbed)" if timed.disturbed else ""
    say(
        f"{result.name}: round {repeat}, {sum(got) / timed.wall_s:.0f} tokens/s on "
        f"{timed.cores:.2f} cores, others on {timed.other_cores:.2f}{disturbed}"
    )


def _run(runner: Runner) -> tuple[Timed, dict[str, Any]]:
    busy, own = usage.busy_seconds(), runner.cpu_seconds()
    # This process is none of the others.
    mine, started = sum(os.times()[:2]), time.perf_counter()
    answer = runner.ask("run")
    elapsed = time.perf_counter() - started
    own = runner.cpu_seconds() - own
    busy = usage.busy_seconds() - busy
    mine = sum(os.times()[:2]) - mine
    runner.pause()
    others = max(busy - own - mine, 0.0)
    return Timed(answer["wall_s"], own / elapsed, others / elapsed), answer
