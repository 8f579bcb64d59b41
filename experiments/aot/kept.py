"""Results of a report in a file, so that one that was stopped goes on from there."""

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from experiments.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
# What is compiled, with what, and what reads the compiler's report, by part.
_KERNELS = ("pallas_kernels", "experiments/aot", "requirements")
SOURCES = {"kernels": _KERNELS, "steps": (*_KERNELS, "paged_jax")}


def code_of(part: str) -> str:
    """Returns a short digest of all code behind a part's results, and of jax."""
    digest = hashlib.sha256(importlib.metadata.version("jax").encode())
    for folder in SOURCES[part]:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".txt"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class Kept:
    """The results in a file, one a line of JSON, that the code of today gave.

    Those of other code stay in the file, and are not seen.

    Args:
        path: the file, made if it is not there; None keeps nothing.
        part: of the report.

    Raises:
        UserError: the file cannot be read or written, or holds something else.
    """

    def __init__(self, path: Path | None, part: str):
        self._path = path
        self._code = code_of(part) if path else ""
        self._rows: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(_lines(path), start=1):
            try:
                name, code, row = json.loads(line)
            except (TypeError, ValueError):
                raise UserError(
                    f"{path}, line {number}, is no result of this report"
                ) from None
            if code == self._code:
                self._rows[name] = row

    def get(self, name: str) -> dict[str, Any] | None:
        """Returns the result of that name, or None."""
        return self._rows.get(name)

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Adds a result, if there is none of that name yet."""
        if self._path is None or name in self._rows:
            return
        self._rows[name] = row
        with self._path.open("a") as file:
            file.write(json.dumps([name, self._code, row]) + "\n")


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        path.open("a").close()  # what is wrong is known now, not after a result
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise UserError(f"{path}: {reason}") from None
