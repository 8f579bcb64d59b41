"""Checks and times the kernels on a GPU: `scripts/gpu_check --help`."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

EXIT_FAULT = 1
EXIT_BAD_INPUT = 2


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads a command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="On an NVIDIA Hopper GPU: every kernel against what it must "
        "compute, the bandwidth of decode beside other kernels, and the engine. Needs "
        "jax >= 0.11 and numpy; the engine's part, the packages of paged_jax. Exits "
        "with 1 if a kernel is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("results/gpu_check.json"))
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="tiny, on the CPU in an interpreter: checks this script and times nothing",
    )
    parser.add_argument("--no-engine", action="store_true", help="kernels only")
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
    from experiments.gpu_check import bandwidth, numbers, prefill, sharing

    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    found: dict[str, Any] = dict(
        jax=jax.__version__, device=jax.devices()[0].device_kind, rehearsal=small
    )

    def save() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1))

    found["numbers"] = []
    for row in numbers.check(small):
        found["numbers"].append(row)
        say(f"{row['name']}: error {row['error']:.1e}, at most {row['limit']:.0e}")
        save()
    found["copy_speed"] = bandwidth.copy_speed(2**20 if small else 2**30)
    say(f"copy: {found['copy_speed'] / 1e9:.0f} GB/s, read and written")
    found["bandwidth"] = []
    for row in bandwidth.compare(small):
        found["bandwidth"].append(row)
        result = row.get("why_not") or f"{row['seconds'] * 1e6:.0f} us"
        point = f"{row['batch']} x {row['length']}, blocks of {row['block_size']}"
        say(f"{point}: {row['name']} {result}")
        save()
    found["prefill"] = []
    for row in prefill.compare(small):
        found["prefill"].append(row)
        result = row.get("why_not") or f"{row['seconds'] * 1e6:.0f} us"
        say(f"chunk of {row['tokens']} after {row['before']}: {row['name']} {result}")
        save()
    found["cascade"] = []
    for row in sharing.compare(small):
        found["cascade"].append(row)
        say(cascade_lines([row])[0])
        save()
    found["engine"] = dict(why_not="--no-engine")
    if not args.no_engine:
        found["engine"] = end_to_end(small, say)
    save()
    print(table(found))
    return EXIT_FAULT if not all(row["holds"] for row in found["numbers"]) else 0


def end_to_end(small: bool, say: Any) -> dict[str, Any]:
    """Returns the engine's figures, or why there are none."""
    try:
        from experiments.gpu_check.end_to_end import serve

        row = serve(small)
    except ImportError as error:
        row = dict(why_not=str(error))
    say(f"engine: {row}")
    return row


def cascade_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Returns what the summary says of `sharing.compare`."""
    return [
        f"cascade, {row['sequences']} sequences that share {row['shared']} tokens and "
        f"have {row['own']} of their own: "
        f"{row['plain_seconds'] / row['cascade_seconds']:.2f}x as fast as without"
        for row in rows
    ]


def table(found: dict[str, Any]) -> str:
    """Returns the summary: shares of the copy's speed, by point and contender.

    Of prefill, shares of the published speed of the tensor cores.
    """
    wrong = [row["name"] for row in found["numbers"] if not row["holds"]]
    lines = [
        "",
        f"{found['device']}, jax {found['jax']}; copy "
        f"{found['copy_speed'] / 1e9:.0f} GB/s",
        f"kernels: {len(found['numbers'])} checked, "
        + (f"WRONG: {', '.join(wrong)}" if wrong else "all right"),
    ]
    decode = [
        row | dict(share=row["seconds"] and row["speed"] / found["copy_speed"])
        for row in found["bandwidth"]
    ]
    lines += shares(decode, dict(batch=6, length=8, block_size=7))
    lines += shares(found["prefill"], dict(tokens=6, before=8))
    lines += cascade_lines(found["cascade"])
    engine = found["engine"]
    if "why_not" in engine:
        lines.append(f"engine: not run, {engine['why_not']}")
    else:
        lines.append(
            f"engine, {engine['weights']} weights: pallas "
            f"{engine['pallas_tokens_per_s']:.0f} tokens/s, xla "
            f"{engine['xla_tokens_per_s']:.0f}; {engine['same_requests']} of "
            f"{engine['requests']} requests the same, "
            f"{engine['same_first_tokens']} first tokens"
        )
    return "\n".join(lines)


def shares(rows: list[dict[str, Any]], point: dict[str, int]) -> list[str]:
    """Returns a table of the rows' shares.

    Args:
        rows: with a name, a share or None, and the fields of `point`.
        point: what tells the table's lines apart, and the width of each column.
    """
    points: dict[tuple, dict[str, str]] = {}
    for row in rows:
        share = "-" if row.get("share") is None else f"{row['share']:.0%}"
        points.setdefault(tuple(map(row.get, point)), {})[row["name"]] = share
    names = list(dict.fromkeys(row["name"] for row in rows))
    heads = {name.removesuffix("_size"): width for name, width in point.items()}
    head = "".join(f"{name:>{width}s}" for name, width in heads.items())
    lines = [head + "".join(f"{name:>12s}" for name in names)]
    for at, found in points.items():
        cells = "".join(f"{value:{width}d}" for value, width in zip(at, point.values()))
        lines.append(cells + "".join(f"{found.get(name, '-'):>12s}" for name in names))
    return lines


if __name__ == "__main__":
    sys.exit(main())
