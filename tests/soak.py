"""Random programs and random services until time is up; see `scripts/soak`."""

import argparse
import collections
import random
import sys
import time
from typing import NamedTuple

import all_operations
import random_service
from all_operations import Op, Shape

LENGTH = 200  # operations in a program: one compilation serves all of one shape
PROGRAMS = 20  # between two services
REPORT_EVERY = 15.0  # seconds
SHOWN = 3  # violations whose operations are printed

SHAPES = {
    "cached": Shape(),
    "uncached": Shape(block_size=2, caching=False),
    "single": Shape(block_size=1, num_blocks=9, host_blocks=4),
}


class Case(NamedTuple):
    """One random run, and all that is needed to repeat it.

    Attributes:
      part: `memory` (operations on block tables) or `service` (an engine).
      kind: which shape of memory, or which engine.
      seed: of everything that is drawn.
    """

    part: str
    kind: str
    seed: int

    def __str__(self):
        return f"{self.part}:{self.kind}:{self.seed}"


def kinds(part: str) -> list[str]:
    """What a part can be run on."""
    if part == "memory":
        return [*SHAPES]
    return [kind for kind in random_service.KINDS if kind != "nothing shared"]


def parse_case(text: str) -> Case:
    """Reads what `str` of a case wrote.

    Raises:
      argparse.ArgumentTypeError: with what is allowed.
    """
    part, _, rest = text.partition(":")
    kind, _, seed = rest.rpartition(":")
    if part not in ("memory", "service"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no case; it must be memory:KIND:SEED or service:KIND:SEED"
        )
    if kind not in kinds(part) or not seed.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no case; it must be {part}:KIND:SEED with KIND one of "
            f"{', '.join(kinds(part))} and SEED a number"
        )
    return Case(part, kind, int(seed))


def run_case(case: Case, log: list[str]) -> collections.Counter:
    """Runs a case, and writes down what it does.

    Args:
      case: what to run.
      log: gets a line for each operation or event; what was done, if the case fails.

    Returns:
      How often each operation was carried out.

    Raises:
      Exception: a violation; what it says.
    """
    rng = random.Random(str(case))
    if case.part == "memory":
        program = all_operations.draw_program(rng, LENGTH, SHAPES[case.kind])
        log += [
            f"{Op(code).name} {arguments} {status}"
            for (code, *arguments), status in zip(
                program.operations.tolist(), program.statuses, strict=True
            )
        ]
        all_operations.check(program, SHAPES[case.kind])
        return collections.Counter(
            Op(code).name.lower() for code in program.operations[:, 0]
        )
    try:
        random_service.serve_at_random(case.kind, rng, log)
    except BaseException:
        random_service.engine_of.cache_clear()  # whatever is left in them
        raise
    return collections.Counter(event.split()[0] for event in log)


class Soak:
    """Counts of what was run, and the violations found."""

    def __init__(self):
        self.started = time.monotonic()
        self.cases = collections.Counter()
        self.operations = collections.Counter()
        self.violations: list[Case] = []

    def run(self, case: Case, show: bool = False) -> None:
        """Runs a case; prints its log if that is asked for, or if the case fails."""
        log: list[str] = []
        error = None
        try:
            self.operations += run_case(case, log)
        except Exception as caught:  # any kind of failure is what is looked for
            error = caught
            self.violations.append(case)
        self.cases[case.part] += 1
        # The first ones in full: what is wrong often is so in every case.
        if show or (error is not None and len(self.violations) <= SHOWN):
            for number, line in enumerate(log):
                print(f"  {number:4d} {line}")
        if error is not None:
            print(f"VIOLATION in {case}: {type(error).__name__}: {error}")
            print(f"  to repeat it: ./scripts/soak --replay '{case}'", flush=True)

    def summary(self) -> str:
        """Returns one line of counts."""
        seconds = time.monotonic() - self.started
        return (
            f"{seconds:.0f} s: {self.cases['memory']} programs, "
            f"{self.cases['service']} services, {self.operations.total()} operations, "
            f"{len(self.violations)} violations"
        )

    def report(self) -> None:
        """Prints how often each operation was carried out, and the summary."""
        for name, count in sorted(self.operations.items()):
            print(f"  {name:<16}{count:>10}")
        print(self.summary(), flush=True)


def cases(parts: list[str], seed: int):
    """Yields cases without end: some programs, then a service, and so on."""
    for number in range(sys.maxsize):
        for part in parts:
            of_part = kinds(part)
            for i in range(PROGRAMS if part == "memory" else 1):
                count = number * PROGRAMS + i if part == "memory" else number
                yield Case(part, of_part[number % len(of_part)], seed + count)


def main(arguments: list[str] | None = None) -> int:
    """Soaks.

    Args:
      arguments: of the command line.

    Returns:
      0, 1 if there was a violation, or 130 if it was interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="soak", description="Looks for violations of the invariants at random."
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="how long; a case that has begun is finished (%(default)s)",
    )
    parser.add_argument("--seed", type=int, help="of the first case; by default new")
    parser.add_argument(
        "--only", choices=["memory", "service"], help="run only one of the two parts"
    )
    parser.add_argument(
        "--replay",
        type=parse_case,
        metavar="CASE",
        help="run this case only, as a violation's message names it",
    )
    given = parser.parse_args(arguments)
    if given.seconds <= 0:
        parser.error(f"--seconds is {given.seconds:g}; it must be above 0")
    if given.seed is not None and given.seed < 0:
        parser.error(f"--seed is {given.seed}; it must be 0 or more")
    soak = Soak()
    try:
        if given.replay:
            soak.run(given.replay, show=True)
        else:
            seed = time.time_ns() % 10**9 if given.seed is None else given.seed
            parts = [given.only] if given.only else ["memory", "service"]
            print(f"seed {seed}, {given.seconds:g} s", flush=True)
            _run_until(soak, soak.started + given.seconds, cases(parts, seed))
    except KeyboardInterrupt:
        soak.report()
        print("interrupted", flush=True)
        return 130
    soak.report()
    return int(bool(soak.violations))


def _run_until(soak: Soak, end: float, all_cases) -> None:
    reported = time.monotonic()
    for case in all_cases:
        soak.run(case)
        now = time.monotonic()
        if now >= end:
            return
        if now - reported >= REPORT_EVERY:
            print(soak.summary(), flush=True)
            reported = now
