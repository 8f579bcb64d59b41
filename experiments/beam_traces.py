"""Traces of beam searches: which beam each survivor continued, for a simulator.

    python -m experiments.beam_traces results/FOLDER [FILE]

Writes the searches of a run of `configs/beam_search.py` as one JSON file: where they
come from (model, seed, settings), and of each search its lengths and parents. Those of
a step are one hexadecimal digit a beam. Without FILE it is the one that ships with the
project, which `load_traces` reads: a simulator has no model to make ancestry from.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SHIPPED = Path(__file__).parent / "data" / "beam_traces.json"


class BeamTrace(NamedTuple):
    """One beam search.

    Attributes:
      prompt_len: tokens of the prompt.
      output_len: tokens of each of its outputs.
      parents: i8[steps, width]. After each step that the search went on after, for each
        beam, the best first, the number of the beam before that it continued.
    """

    prompt_len: int
    output_len: int
    parents: np.ndarray


def load_traces(path: Path = SHIPPED) -> dict[int, list[BeamTrace]]:
    """Returns searches by their width, those of the same prompts in the same order.

    Args:
      path: a file that `write_traces` has made.

    Raises:
      ValueError: it is no such file.
    """
    try:
        widths = json.loads(path.read_text("utf-8"))["traces"]
        return {
            int(width): [_read(line, int(width)) for line in lines]
            for width, lines in widths.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: no beam traces ({type(error).__name__}: {error}); make them with "
            "python -m experiments.beam_traces results/FOLDER FILE"
        ) from None


def write_traces(folder: Path, path: Path) -> int:
    """Writes the beam searches of a results folder; returns how many.

    Args:
      folder: a finished run.
      path: file to write.

    Raises:
      ValueError: the folder holds no finished run, or one without beam searches.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        raise ValueError(
            f"{folder}: no summary.json; give the folder of a finished run"
        ) from None
    traces: dict[int, list[list[Any]]] = {}
    for row in summary["rows"]:
        text = (folder / "outputs" / f"{row['key']}.jsonl").read_text("utf-8")
        for output in map(json.loads, text.splitlines()):
            if "beam_parents" in output:
                width = 1 + len(output["further"])
                traces.setdefault(width, []).append(_line(output))
    if not traces:
        raise ValueError(
            f"{folder}: a run without beam searches; give one of configs/beam_search.py"
        )
    config = summary["config"]
    made = {
        "source": "made by experiments.beam_traces; a line is [prompt_len, output_len, "
        "parents], one hexadecimal digit for each beam of each step",
        "model": config["model"],
        "seed": config["seed"],
        "workload": config["workload"],
        "packages": summary["environment"]["packages"],
    }
    head = json.dumps(made, indent=1)[:-2]
    lines = ",\n".join(
        f'  "{width}": [\n   ' + ",\n   ".join(map(json.dumps, some)) + "\n  ]"
        for width, some in traces.items()
    )
    path.write_text(f'{head},\n "traces": {{\n{lines}\n }}\n}}\n', "utf-8")
    return sum(map(len, traces.values()))


def _line(output: dict[str, Any]) -> list[Any]:
    digits = "".join(
        f"{parent:x}" for step in output["beam_parents"] for parent in step
    )
    return [len(output["prompt_token_ids"]), len(output["token_ids"]), digits]


def _read(line: list[Any], width: int) -> BeamTrace:
    prompt_len, output_len, digits = line
    parents = np.array([int(digit, 16) for digit in digits], np.int8)
    if (parents >= width).any():
        raise ValueError(f"parent {parents.max()} of {width} beams")
    return BeamTrace(prompt_len, output_len, parents.reshape(-1, width))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 2 if nothing was written."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) not in (1, 2):
        given = " ".join(words) or "nothing"
        print(
            f"error: {given} given; give a results folder and, if you like, a file",
            file=sys.stderr,
        )
        return 2
    path = Path(words[1]) if len(words) == 2 else SHIPPED
    try:
        count = write_traces(Path(words[0]), path)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{count} searches, {path.stat().st_size / 1024:.0f} KiB: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
