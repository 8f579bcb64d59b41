"""The results folder: written as cells finish, so that a killed run goes on."""

import csv
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.errors import UserError
from experiments.serving import Run
from experiments.sweep import Cell

# Captions by file name, beside the figures.
CAPTIONS = "captions.json"
_CELLS = "cells.jsonl"
_FOLDERS = ("outputs", "logs", "figures")
_NEEDED_BYTES = 64 * 2**20
_MAX_DIFFERENCES = 4


class ResultsFolder:
    """A folder with the results of one experiment.

    `config.json` (what was asked for), `environment.json`, `cells.jsonl` (one line for
    each cell as it finishes), `outputs/` (the tokens and text of each request), `logs/`
    (the engine's log of each cell), `figures/`, `summary.json`, `cells.csv` and
    `report.html`.

    Attributes:
      path: the folder.
      rows: results of the finished cells, by key.
      is_new: whether it was started by this process.
    """

    def __init__(self, path: Path, rows: dict[str, dict[str, Any]], is_new: bool):
        self.path = path
        self.rows = rows
        self.is_new = is_new

    @classmethod
    def create(
        cls, path: Path, asked: dict[str, Any], where: dict[str, Any]
    ) -> "ResultsFolder":
        """Starts a new folder.

        Args:
          path: does not exist yet, or is empty.
          asked: what defines the experiment, as JSON.
          where: the environment.

        Raises:
          UserError: the folder is in use, or cannot be written.
        """
        with _WriteErrors(path):
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                known = (path / "config.json").exists()
                advice = "add --resume to go on with it, or " if known else ""
                raise UserError(
                    f"--out={path}: not empty; {advice}give a new folder as --out"
                )
            free = shutil.disk_usage(path).free
            if free < _NEEDED_BYTES:
                raise UserError(
                    f"--out={path}: {free / 2**20:.0f} MiB of space are left and "
                    f"{_NEEDED_BYTES / 2**20:.0f} are needed; free some, or give "
                    "another folder as --out"
                )
            _write_json(path / "config.json", asked)
            _write_json(path / "environment.json", where)
            for folder in _FOLDERS:
                (path / folder).mkdir()
            (path / _CELLS).touch()
        return cls(path, {}, is_new=True)

    @classmethod
    def resume(
        cls, path: Path, asked: dict[str, Any], where: dict[str, Any]
    ) -> "ResultsFolder":
        """Opens a folder to go on with it.

        Raises:
          UserError: it holds no results, or those of another experiment.
        """
        try:
            found = json.loads((path / "config.json").read_text("utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"--resume: {path} holds no results (no config.json); leave out "
                "--resume to start there"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(
                f"--resume: {path}/config.json cannot be read ({error})"
            ) from None
        differences = _differences(found, json.loads(json.dumps(asked)))
        if differences:
            raise UserError(
                f"--resume: {path} holds results of another experiment: "
                + "; ".join(differences[:_MAX_DIFFERENCES])
                + (f"; and {n} more" if (n := len(differences) - 4) > 0 else "")
                + "; give the same settings, or another folder as --out"
            )
        with _WriteErrors(path):
            for folder in _FOLDERS:
                (path / folder).mkdir(exist_ok=True)
            rows = _read_cells(path / _CELLS)
            _note_environment(path / "environment.json", where)
        return cls(path, rows, is_new=False)

    def add(self, cell: Cell, row: dict[str, Any], run: Run) -> None:
        """Keeps the results of a cell, safe on disk when this returns.

        Args:
          cell: which cell.
          row: its line of `cells.jsonl`, without the key.
          run: what happened, for the outputs and the log.

        Raises:
          UserError: they cannot be written.
        """
        with _WriteErrors(self.path):
            lines = [json.dumps(_output_line(served)) for served in run.served]
            _write(self.path / "outputs" / f"{cell.key}.jsonl", "\n".join(lines) + "\n")
            buffer = io.BytesIO()
            np.savez_compressed(buffer, log=run.log, times=run.log_times)
            _write_bytes(self.path / "logs" / f"{cell.key}.npz", buffer.getvalue())
        self.add_row(cell.key, row)

    def add_row(self, key: str, row: dict[str, Any]) -> None:
        """Keeps a row, safe on disk when this returns.

        Args:
          key: of the cell, or of whatever the row is about.
          row: its line of `cells.jsonl`, without the key.

        Raises:
          UserError: it cannot be written.
        """
        row = {"key": key} | row
        with _WriteErrors(self.path):
            with (self.path / _CELLS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.rows[key] = row

    def discard_if_unused(self) -> None:
        """Takes a new folder without any results away, so that its name is free."""
        if not self.is_new or self.rows:
            return
        try:
            for name in (_CELLS, "environment.json", "config.json"):
                (self.path / name).unlink()
            for folder in _FOLDERS:
                (self.path / folder).rmdir()
            self.path.rmdir()
        except OSError:
            pass  # something else is in it by now: it stays

    def outputs(self, key: str) -> list[dict[str, Any]]:
        """Returns the requests of a finished cell: id, tokens, text and times."""
        text = (self.path / "outputs" / f"{key}.jsonl").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def log(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the engine's log of a finished cell, and when each step ended."""
        with np.load(self.path / "logs" / f"{key}.npz") as arrays:
            return arrays["log"], arrays["times"]

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes `summary.json` and `cells.csv`."""
        with _WriteErrors(self.path):
            _write_json(self.path / "summary.json", summary)
            _write(self.path / "cells.csv", to_csv(summary["rows"]))

    def write_text(self, name: str, text: str) -> None:
        """Writes a text file into the folder."""
        with _WriteErrors(self.path):
            _write(self.path / name, text)

    def write_figures(self, figures: dict[str, tuple[str, bytes]]) -> None:
        """Writes figures, each a caption and a PNG, into `figures/`."""
        folder = self.path / "figures"
        with _WriteErrors(self.path):
            for name, (_, png) in figures.items():
                _write_bytes(folder / name, png)
            captions = {name: caption for name, (caption, _) in figures.items()}
            _write_json(folder / CAPTIONS, captions)

    def environment(self) -> dict[str, Any]:
        """Returns the environment of the run, resumptions included."""
        return json.loads((self.path / "environment.json").read_text("utf-8"))


def open_folder(
    out: Path | None, resume: bool, asked: dict[str, Any], where: dict[str, Any]
) -> ResultsFolder:
    """Opens the folder of a command: a new one, or one to go on with.

    Args:
      out: which one; None for the newest of the experiment, or a new one.
      resume: whether to go on.
      asked: what defines the experiment, with its name as `experiment`.
      where: the environment.

    Raises:
      UserError: it is in use, cannot be written, or holds something else.
    """
    if resume:
        path = out or newest_folder(asked["experiment"])
        return ResultsFolder.resume(path, asked, where)
    path = out or default_folder(asked["experiment"])
    return ResultsFolder.create(path, asked, where)


def default_folder(name: str) -> Path:
    """Returns a new folder's path: `results/NAME-TIME`."""
    return Path("results") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def newest_folder(name: str) -> Path:
    """Returns the newest folder of an experiment in `results/`.

    Raises:
      UserError: there is none.
    """
    found = [p.parent for p in Path("results").glob(f"{name}-*/config.json")]
    if not found:
        raise UserError(
            f"--resume: there is no results/{name}-*; name the folder with --out"
        )
    return max(found, key=lambda p: (p / "config.json").stat().st_mtime)


def to_csv(rows: list[dict[str, Any]]) -> str:
    """Returns rows as a table; names of nested values are joined with dots."""
    table = [
        _flatten(row["cell"] | row["metrics"] | {"details": row["details"]})
        for row in rows
    ]
    names = list(dict.fromkeys(name for row in table for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            flat[prefix + name] = value
    return flat


def _output_line(served: Any) -> dict[str, Any]:
    line: dict[str, Any] = {
        "id": served.id,
        "digest": served.digest,
        "prompt_id": served.prompt_id,
        "prompt_token_ids": list(served.prompt_ids),
        "arrival_s": round(served.arrival, 6),
        "first_token_s": round(served.first_token, 6),
        "finished_s": round(served.finished, 6),
        "token_ids": list(served.token_ids),
        "text": served.text,
    }
    if served.further:
        line["further"] = [list(ids) for ids in served.further]
    if served.beam_parents is not None:
        line["beam_parents"] = [list(step) for step in served.beam_parents]
    return line


def _read_cells(path: Path) -> dict[str, dict[str, Any]]:
    """Reads the finished cells; a last line that a killed run left unfinished goes."""
    text = path.read_text("utf-8") if path.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        _write(path, complete)
    rows = {}
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            row = json.loads(line)
            rows[row["key"]] = row
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"--resume: {path}, line {number} is damaged; delete that line to run "
                "its cell again"
            ) from None
    return rows


def _note_environment(path: Path, where: dict[str, Any]) -> None:
    """Adds to the environment what is different now."""
    try:
        first = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        first = dict(where)
    known = {k: v for k, v in first.items() if k != "resumed"}
    changes = _differences(known, json.loads(json.dumps(where)))
    _write_json(path, first | {"resumed": [*first.get("resumed", []), changes]})


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Says where two JSON values differ, one text for each dotted key."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in dict.fromkeys((*old, *new)):
            a, b = old.get(key), new.get(key)
            found += _differences(a, b, f"{prefix}.{key}" if prefix else str(key))
        return found
    return [] if old == new else [f"{prefix} was {old!r} and is {new!r}"]


def _write_json(path: Path, value: Any) -> None:
    _write(path, json.dumps(value, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    _write_bytes(path, text.encode("utf-8"))


def _write_bytes(path: Path, content: bytes) -> None:
    """Writes a file so that whoever reads it sees the old one or all of the new one."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class _WriteErrors:
    """Turns what the file system refuses into an error of one line."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
            raise UserError(
                f"--out={self._path}: {reason}; give a folder that can be written"
            ) from None
        return False
