"""Writes the interactive page: `python -m experiments.visualize --help`."""

import argparse
import functools
import http.server
import os
import shlex
import sys
import webbrowser
from pathlib import Path
from typing import Any, NoReturn

from experiments.errors import UserError
from experiments.visualize.run import (
    FILE,
    enable_compilation_cache,
    make_page,
    write,
)
from experiments.visualize.settings import page_config
from paged_jax.config import ConfigError
from paged_jax.engine import MAX_SEED
from paged_jax.models.load import DEFAULT_MODEL

EXIT_BAD_INPUT = 2
# Requests of the workload and sequences of the scenes have seeds from it on.
_LARGEST_SEED = MAX_SEED - 1000


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads a command line.

    Raises:
      UserError: a flag or its value is wrong.
    """
    parser = _Parser(
        prog="python -m experiments.visualize",
        description="Serves a small workload with the real engine under seven systems, "
        "and writes one HTML file that shows memory and batch, iteration by iteration. "
        "A few minutes on two cores.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results") / FILE, help="the file"
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a known name, a directory or a GGUF file",
    )
    parser.add_argument(
        "--prompts", type=Path, help="a file of prompts, as for experiments.run"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides what is drawn")
    parser.add_argument(
        "--serve", action="store_true", help="then open the file on localhost"
    )
    parser.add_argument(
        "--no-browser",
        action="store_true",
        help="--serve only prints the address, as it does where there is no screen",
    )
    parser.add_argument("--port", type=int, default=8000, help="of --serve; 0: any")
    args = parser.parse_args(argv)
    for name, most in (("seed", _LARGEST_SEED), ("port", 65535)):
        if not 0 <= getattr(args, name) <= most:
            parser.error(f"--{name} is {getattr(args, name)}; it must be 0 to {most}")
    return args


def make(args: argparse.Namespace, argv: list[str]) -> str:
    """Serves the workload, and returns the page."""
    config = page_config()
    config.model, config.seed = args.model, args.seed
    config.prompts = str(args.prompts or "")
    command = shlex.join(["python", "-m", "experiments.visualize", *argv])
    return make_page(config, command, _say)


def serve(path: Path, port: int, browser: bool) -> None:
    """Shows one file on localhost until Ctrl-C.

    Args:
      path: the file.
      port: where; 0 for any that is free.
      browser: whether to open it in one.

    Raises:
      UserError: the port is taken.
    """
    handler = functools.partial(_OneFile, path=path)
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise UserError(f"--port={port}: {error.strerror}; name another") from None
    with server:
        address = f"http://127.0.0.1:{server.server_port}/"
        print(f"{address} (Ctrl-C ends)", flush=True)
        if browser:
            webbrowser.open(address)
        server.serve_forever()


def has_screen() -> bool:
    """Whether a browser would have a window; one in the terminal is not wanted."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )


class _OneFile(http.server.BaseHTTPRequestHandler):
    """Answers `/` with one file, and nothing else."""

    def __init__(self, *args: Any, path: Path):
        self._path = path
        super().__init__(*args)

    def do_GET(self) -> None:
        """Answers a request."""
        if self.path.split("?")[0] != "/":
            self.send_error(404)
            return
        content = self._path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps quiet."""


def _say(text: str) -> None:
    print(f"visualize: {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        args = parse(words)
        if args.out.is_dir():
            raise UserError(f"--out={args.out} is a directory; name a file")
        enable_compilation_cache()
        write(args.out, make(args, words))
        print(f"page: {args.out}", flush=True)
        if args.serve:
            serve(args.out, args.port, has_screen() and not args.no_browser)
    except (UserError, ConfigError) as error:
        print(f"visualize: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("visualize: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
