"""Trains the tiny model: `scripts/train_tiny_lm --help`."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from experiments.errors import UserError
from experiments.tiny_lm.checkpoint_cache import read_report, trained
from experiments.tiny_lm.settings import Settings
from paged_jax import compilation_cache

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{message} (see --help)")


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads a command line; raises UserError if it cannot be used."""
    parser = _Parser(
        prog="train_tiny_lm",
        description="Trains a byte-level Llama of a million parameters on the "
        "docstrings of installed packages, or finds it in the cache.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, help="folder of the model; default: cache")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="%(default)s")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="%(default)s")
    parser.add_argument("--force", action="store_true", help="train anew, replace")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0: done. 2: what was given cannot be used, said in one line. 130: interrupted;
    nothing is kept.
    """
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        settings = Settings(steps=args.steps, seed=args.seed)
        compilation_cache.enable()
        new = False

        def say(line: str) -> None:
            nonlocal new
            new = True
            print(line, flush=True)

        path = trained(settings, args.out, force=args.force, say=say)
        print_report(path, new)
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted; nothing is kept", file=sys.stderr)
        return EXIT_INTERRUPTED


def print_report(path: Path, new: bool) -> None:
    """Prints what training came to."""
    report = read_report(path)
    baselines = report["baseline_bits_per_byte"]
    samples = report["samples"]
    found = "trained" if new else "found, trained before:"
    print(f"{found} {report['steps']} steps in {report['seconds']:.0f} s")
    print(
        f"bits per byte: train {report['train_bits_per_byte']:.3f}, held out "
        f"{report['held_out_bits_per_byte']:.3f} (bigram {baselines['bigram']:.3f}, "
        f"unigram {baselines['unigram']:.3f})"
    )
    print(f"{samples['ended']} of {samples['count']} sampled texts come to an end, as")
    print("    " + samples["example"].replace("\n", "\n    "))
    print(f"checkpoint: {path}")
    print(f"loss curve: {path / 'loss_curve.csv'}, {path / 'loss_curve.png'}")


if __name__ == "__main__":
    sys.exit(main())
