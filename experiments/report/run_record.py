"""What a run left: read from its results folder, and checked."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from experiments.errors import UserError
from experiments.results import CAPTIONS

_NO_COMMAND = "The command was not recorded; the configuration says what was run."


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A finished run, as the report shows it.

    Attributes:
      name: of the experiment.
      rows: of `summary.json`: `cell`, `metrics`, `details`, and maybe `label`.
      claims: as `experiments.claim.claim` makes them.
      config: the settings; may be empty.
      environment: where it ran; may be empty.
      figures: caption and PNG by file name.
      command: runs it again.
      description: what it is, in a line.
      swept: dotted keys of the sweep.
      folder: name of the folder with its results; empty if it is not known.
    """

    name: str
    rows: list[dict[str, Any]]
    claims: list[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]
    figures: dict[str, tuple[str, bytes]]
    command: str
    description: str = ""
    swept: tuple[str, ...] = ()
    folder: str = ""


def read_run(folder: Path) -> RunRecord:
    """Reads a results folder.

    Args:
      folder: with `summary.json`, and maybe `figures/`.

    Raises:
      UserError: it is missing, or not what a run leaves.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    path = folder / "summary.json"
    if not path.is_file():
        started = (folder / "cells.jsonl").exists()
        advice = "its run is not finished: --resume it" if started else "not of a run"
        raise UserError(f"{folder}: no summary.json in it; {advice}")
    summary = _read_json(path)
    _check(summary, path)
    return RunRecord(
        name=summary["experiment"],
        rows=summary["rows"],
        claims=summary["claims"],
        config=summary.get("config") or {},
        environment=summary.get("environment") or {},
        figures=_read_figures(folder / "figures"),
        command=summary.get("command") or _NO_COMMAND,
        description=summary.get("description") or "",
        swept=tuple(summary.get("swept") or ()),
        folder=folder.resolve().name,
    )


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values by dotted key; lists are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number, and a finite one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)


def label(row: dict[str, Any]) -> str:
    """Returns what a row is called: its label, or else what its cell is."""
    if row.get("label"):
        return str(row["label"])
    return ", ".join(
        f"{key.rsplit('.', 1)[-1].replace('_', ' ')} {value}"
        for key, value in row["cell"].items()
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error})") from None


def _read_figures(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Returns the PNG files of a folder, first those that have captions."""
    captions = _read_json(folder / CAPTIONS) if (folder / CAPTIONS).exists() else {}
    if not isinstance(captions, dict):
        raise UserError(f"{folder / CAPTIONS}: damaged (no object of captions)")
    found = {path.name: path for path in sorted(folder.glob("*.png"))}
    names = [n for n in captions if n in found] + [
        n for n in found if n not in captions
    ]
    try:
        return {
            name: (_caption(captions, name), found[name].read_bytes()) for name in names
        }
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None


def _caption(captions: dict[str, Any], name: str) -> str:
    if name in captions:
        return str(captions[name])
    words = Path(name).stem.replace("_", " ")
    return words[:1].upper() + words[1:]


def _check(summary: Any, path: Path) -> None:
    """Raises UserError, with the first thing that is wrong, for a bad summary."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise UserError(f"{path}: damaged ({what})")

    need(isinstance(summary, dict), "not an object")
    for key, kind, name in (
        ("experiment", str, "a text"),
        ("rows", list, "a list"),
        ("claims", list, "a list"),
    ):
        need(isinstance(summary.get(key), kind), f"{key} is not {name}")
    for key, kind, name in (
        ("config", dict, "an object"),
        ("environment", dict, "an object"),
        ("swept", list, "a list"),
        ("command", str, "a text"),
        ("description", str, "a text"),
    ):
        value = summary.get(key)
        need(value is None or isinstance(value, kind), f"{key} is not {name}")
    for number, row in enumerate(summary["rows"], 1):
        what = f"row {number} has no"
        need(isinstance(row, dict), f"row {number} is not an object")
        for key in ("cell", "metrics"):
            need(isinstance(row.get(key), dict), f"{what} {key}")
        need(isinstance(row.setdefault("details", {}), dict), f"{what} details")
    for number, claim in enumerate(summary["claims"], 1):
        what = f"claim {number}"
        need(isinstance(claim, dict), f"{what} is not an object")
        need(isinstance(claim.get("id"), str), f"{what} has no id")
        known = "holds" in claim and claim["holds"] in (True, False, None)
        need(known, f"{what} does not say if it holds")
        if "expected" not in claim:  # as summaries were written before
            claim["expected"] = claim.pop("paper", None)
        for key in ("measured", "expected", "paper", "tolerance", "spread", "seeds"):
            value = claim.setdefault(key, None)
            need(
                value is None or isinstance(value, (int, float)),
                f"{what}: {key} is not a number",
            )
        for key, default in (
            ("relation", "="),
            ("unit", ""),
            ("source", ""),
            ("kind", ""),
            ("note", ""),
        ):
            need(isinstance(claim.setdefault(key, default), str), f"{what}: {key}")
