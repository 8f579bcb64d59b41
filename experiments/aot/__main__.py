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
from experiments.aot.kept import Kept
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
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="add each result to this file as it comes, and compile nothing again that "
        "it has of the same code",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> None:
    """Compiles one part, and prints a line of JSON for each result.

    Each line has the result and a name, which no other result of the report has. Steps
    are compiled for one target only.
    """
    dump = environment.enter()
    # These import jax, which reads the environment once.
    from experiments.aot import kernels, step

    (part,), targets = args.part, [TARGETS[name] for name in args.target]
    kept = Kept(args.keep, part)

    def say(name: str, row: dict[str, Any]) -> None:
        print(json.dumps([name, row]), flush=True)

    try:
        if part == "steps":
            (target,) = targets
            layers = COVERING_LAYERS if args.covering else step.SMOLLM2.num_layers
            # The last has all that the others have.
            for config in step.CONFIGS[-1:] if args.covering else step.CONFIGS:
                name = f"{layers} layers, {config.preemption} {target.name}"
                row = kept.get(name)
                say(name, row or step.compile_step(target, dump, layers, config))
            return
        for case in kernels.cases():
            if args.covering and not case.covering:
                continue
            title = f"{case.name} {case.config}"
            if args.only not in title:
                continue
            rows = {
                target.name: kept.get(f"{title} {target.name}") for target in targets
            }
            missing = [target for target in targets if not rows[target.name]]
            for result in kernels.compile_case(case, missing, dump):
                rows[result.target.name] = result.row()
            for name, row in rows.items():
                assert row is not None
                say(f"{title} {name}", row)
    finally:
        shutil.rmtree(dump)


def results(args: argparse.Namespace, part: str) -> Iterator[dict[str, Any]]:
    """Yields the results of a part.

    A process compiles a kernel only once, and has nothing to say of it the second time:
    so the step has a process for each target, and all kernels have one for all targets.
    """
    kept = Kept(args.keep, part)
    for targets in [args.target] if part == "kernels" else [[t] for t in args.target]:
        command = [sys.executable, "-m", "experiments.aot", "--worker"]
        command += ["--target", *targets, "--part", part, "--only", args.only]
        command += ["--covering"] if args.covering else []
        command += ["--keep", str(args.keep.resolve())] if args.keep else []
        root = Path(__file__).resolve().parents[2]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as worker:
            assert worker.stdout is not None
            for text in worker.stdout:
                name, row = json.loads(text)
                kept.add(name, row)
                yield row
        if worker.returncode:
            what = f"{part} for {', '.join(targets)}"
            raise UserError(f"compiling {what} failed, as said above")


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
