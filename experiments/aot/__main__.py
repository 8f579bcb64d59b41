"""Compiles for GPUs that are not here: `scripts/aot_report --help`."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.aot import environment, report
from experiments.aot.targets import TARGETS
from experiments.errors import UserError

EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
PARTS = ("kernels", "steps")
# Of the step's model, with --covering: the first and the last differ from no other.
COVERING_LAYERS = 2


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads a command line."""
    parser = argparse.ArgumentParser(
        prog="aot_report",
        description="Compiles the GPU kernels and the engine's step for H100 and H200, "
        "with no GPU, and reports registers, spills, memory and loads in flight. Exits "
        "with 1 if one of them is not what it must be.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME"
    )
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART"
    )
    parser.add_argument("--only", default="", help="kernels whose line has this text")
    parser.add_argument(
        "--covering", action="store_true", help="a few cases that cover what differs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> None:
    """Compiles one part for one target, and prints a line of JSON for each result."""
    dump = environment.enter()
    # These import jax, which reads the environment once.
    from experiments.aot import kernels, step

    (target,) = (TARGETS[name] for name in args.target)
    try:
        if "steps" in args.part:
            layers = COVERING_LAYERS if args.covering else step.SMOLLM2.num_layers
            # The last has all that the others have.
            for config in step.CONFIGS[-1:] if args.covering else step.CONFIGS:
                row = step.compile_step(target, dump, layers, config)
                print(json.dumps(row), flush=True)
            return
        for case in kernels.cases():
            if args.covering and not case.covering:
                continue
            if args.only in f"{case.name} {case.config}":
                row = kernels.compile_case(case, target, dump).row()
                print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(dump)


def results(args: argparse.Namespace, part: str) -> Iterator[dict[str, Any]]:
    """Yields the results of a part.

    Each target has a process of its own: a process compiles a kernel only once, and
    would have nothing to say of it the second time.
    """
    for target in args.target:
        command = [sys.executable, "-m", "experiments.aot", "--worker"]
        command += ["--target", target, "--part", part, "--only", args.only]
        command += ["--covering"] if args.covering else []
        root = Path(__file__).resolve().parents[2]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as worker:
            assert worker.stdout is not None
            for text in worker.stdout:
                yield json.loads(text)
        if worker.returncode:
            raise UserError(f"compiling {part} for {target} failed, as said above")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0: all is as it must be. 1: some figure is not. 2: it cannot be done, said in one
    line.
    """
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        if args.worker:
            work(args)
            return 0
        return print_report(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def print_report(args: argparse.Namespace) -> int:
    """Compiles all that is asked for, and prints it; returns the exit code."""
    found: dict[str, list] = {part: [] for part in PARTS}
    say = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    if "kernels" in args.part:
        say(report.header())
        for row in results(args, "kernels"):
            found["kernels"].append(row)
            say(report.line(row))
        say(report.loads_note(found["kernels"]))
    if "steps" in args.part:
        for step in results(args, "steps"):
            found["steps"].append(step)
            say("\n".join(report.step_lines(step)))
    if args.json:
        print(json.dumps(found, indent=1))
    wrong = [*map(report.faults, found["kernels"])]
    wrong += map(report.step_faults, found["steps"])
    return EXIT_FAULT if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
