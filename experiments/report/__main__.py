"""Reports of runs: `python -m experiments.report --help`.

python -m experiments.report results/A                          # writes its report anew
python -m experiments.report results/A results/B --out=both.html
python -m experiments.report results/A results/B --compare --out=change.html
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from experiments.errors import UserError
from experiments.report.pages import render_comparison, render_run, render_runs
from experiments.report.run_record import read_run

EXIT_BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{message} (see --help)")


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads a command line; raises UserError if it cannot be used."""
    parser = _Parser(
        prog="python -m experiments.report",
        description="Makes one HTML file of the results of one or more runs.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", metavar="DIR", type=Path, nargs="+")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="show what changed from the first of two runs to the second",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the file; default, for one run: report.html in its folder",
    )
    args = parser.parse_args(argv)
    if args.compare and len(args.folders) != 2:
        count = len(args.folders)
        parser.error(f"--compare takes two folders, before and after, and not {count}")
    if args.out is None:
        if len(args.folders) > 1:
            parser.error("several folders need --out, the file to write")
        args.out = args.folders[0] / "report.html"
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0: done. 2: what was given cannot be used, said in one line.
    """
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        runs = [read_run(folder) for folder in args.folders]
        if args.compare:
            html = render_comparison(*runs)
        elif len(runs) == 1:
            html = render_run(runs[0])
        else:
            html = render_runs(runs)
        _write(args.out, html)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"report: {args.out}")
    return 0


def _write(path: Path, html: str) -> None:
    try:
        path.write_text(html, "utf-8")
    except OSError as error:
        raise UserError(f"--out={path}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
