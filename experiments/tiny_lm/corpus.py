"""The text that every installation has: the docstrings of its own packages."""

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.tiny_lm.tokens import END_OF_TEXT

PACKAGES = ("flax", "jax", "matplotlib", "numpy", "optax")
# A text is whole or left out, so that each has its real end. Most docstrings are short;
# of the long ones, mostly NumPy's, only few would fit into a training window.
LONGEST_BYTES = 512
_HELD_OUT_PART = 16  # one text of so many is held out

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Corpus(NamedTuple):
    """Texts, each different from all others, divided in two.

    Attributes:
      train: those to learn from.
      held_out: those to judge by.
    """

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def load_corpus(packages: Sequence[str] = PACKAGES) -> Corpus:
    """Reads the docstrings from the source files of installed packages.

    Nothing is imported. The order is that of the packages, their paths and the places
    in a file; which half a text belongs to depends on the text alone.

    Args:
      packages: names of top-level packages.

    Raises:
      ModuleNotFoundError: one of them is not installed.
    """
    texts: dict[str, None] = {}
    for package in packages:
        for path in _source_files(package):
            texts.update(dict.fromkeys(docstrings(path.read_text("utf-8"))))
    held_out = {text for text in texts if _digest(text) % _HELD_OUT_PART == 0}
    return Corpus(
        tuple(text for text in texts if text not in held_out),
        tuple(text for text in texts if text in held_out),
    )


def docstrings(source: str) -> Iterator[str]:
    """Yields a module's docstrings of at most `LONGEST_BYTES` bytes, unindented."""
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        if text and len(text.encode()) <= LONGEST_BYTES:
            yield text


def as_stream(texts: Sequence[str]) -> np.ndarray:
    """Returns u16[N]: the bytes of all texts, an end of text after each."""
    parts = []
    for text in texts:
        parts += [np.frombuffer(text.encode(), np.uint8), [END_OF_TEXT]]
    return np.concatenate(parts).astype(np.uint16)


def _source_files(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the package {package} is not installed")
    root = Path(spec.submodule_search_locations[0])
    return sorted(p for p in root.rglob("*.py") if "tests" not in p.parts)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
