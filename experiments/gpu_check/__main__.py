"""Checks and times the kernels on a GPU: `scripts/gpu_check --help`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from experiments.gpu_check import jobs, summary

EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
# Of the time, what the kernels may take before the engine's turn.
KERNELS_SHARE = 0.7


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads a command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="On an NVIDIA Hopper GPU: every kernel against what it must "
        "compute, the bandwidth of decode beside other kernels, and the engine. Needs "
        "jax >= 0.11 and numpy; the engine's part flax, too. Exits with 1 if a kernel "
        "is wrong, fails, or was not checked for lack of time.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("results/gpu_check.json"))
    parser.add_argument(
        "--seconds",
        type=float,
        help="after so many nothing begins any more, and what is left is named; by "
        "default 200, or no limit with --rehearse",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="tiny, on the CPU in an interpreter: checks this script and times nothing",
    )
    parser.add_argument("--no-engine", action="store_true", help="kernels only")
    parser.add_argument("--no-kernels", action="store_true", help="engine only")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    import jax

    from pallas_kernels import compat

    small = args.rehearse
    if not small and jax.default_backend() != "gpu":
        print(
            "gpu_check: jax finds no GPU here (--rehearse needs none)", file=sys.stderr
        )
        return EXIT_BAD_INPUT
    if not compat.has_mosaic():
        print(f"gpu_check: needs jax >= 0.11, got {jax.__version__}", file=sys.stderr)
        return EXIT_BAD_INPUT
    limit = args.seconds or (float("inf") if small else 200.0)
    deadline = jobs.Deadline(limit)
    found: dict[str, Any] = dict(
        jax=jax.__version__, device=jax.devices()[0].device_kind, rehearsal=small
    )
    found |= {section: [] for section in jobs.SECTIONS}
    found["engine"] = dict(why_not="--no-engine")

    def say(text: str) -> None:
        """Prints a line, and saves what was found."""
        print(f"{deadline.spent:6.1f} s  {text}", flush=True)
        found["seconds"] = deadline.spent
        found["skipped"] = summary.skipped(found)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1))

    kernels = deadline if args.no_engine else deadline.part(KERNELS_SHARE)
    for job, row in jobs.run([] if args.no_kernels else all_jobs(small), kernels):
        found[job.section].append(row | dict(title=job.title))
        say(summary.told(job, row))
    if not args.no_engine:
        found["engine"] = end_to_end(small, deadline)
        say(f"engine: {found['engine']}")
    print(summary.table(found))
    at_fault = summary.wrong(found) or summary.unchecked(found)
    return EXIT_FAULT if at_fault else 0


def all_jobs(small: bool) -> list[jobs.Job]:
    """Returns all that is to be done with the kernels."""
    from experiments.gpu_check import bandwidth, numbers, prefill, sharing

    parts = (numbers, bandwidth, prefill, sharing)
    return [job for part in parts for job in part.jobs(small)]


def end_to_end(small: bool, deadline: jobs.Deadline) -> dict[str, Any]:
    """Returns the engine's figures, or why there are none."""
    if deadline.passed:
        return dict(skipped=True, why_not=jobs.NO_TIME)
    try:
        from experiments.gpu_check.end_to_end import serve

        return serve(small, deadline)
    except ImportError as error:
        return dict(why_not=str(error))
    except Exception as error:
        return dict(why_not=jobs.reason(error), holds=False)


if __name__ == "__main__":
    sys.exit(main())
