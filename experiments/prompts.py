"""Prompts: the set that ships with the project, or a file in a common format.

The shipped prompts (`data/prompts.jsonl`) were written for this project. Their lengths
are spread like the inputs of ShareGPT: half have fewer than about 35 tokens, a quarter
more than 133; the longest have 900. Their order spreads lengths evenly, so that the
first N of them are spread like the whole.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parent / "data"

# How many of a file's problems a message spells out.
_MAX_NAMED = 3


class Prompt(NamedTuple):
    """What a request asks.

    Attributes:
      id: names the prompt in results.
      category: kind of text: chat, code, summary, translation, document; another file's
        own category.
      text: the user's message, not empty, without a chat template.
    """

    id: str
    category: str
    text: str


class PromptFile(NamedTuple):
    """The usable prompts of a file, and what was wrong with the others.

    Attributes:
      prompts: in the order of the file.
      problems: one line for each entry that was skipped: where it is and why.
    """

    prompts: list[Prompt]
    problems: list[str]

    @property
    def warning(self) -> str | None:
        """One line that counts and names the skipped entries, or None."""
        if not self.problems:
            return None
        total = len(self.prompts) + len(self.problems)
        named = "; ".join(self.problems[:_MAX_NAMED])
        more = len(self.problems) - _MAX_NAMED
        rest = f"; and {more} more" if more > 0 else ""
        return f"skipped {len(self.problems)} of {total} prompts: {named}{rest}"


def load_prompts(path: str | Path | None = None) -> list[Prompt]:
    """Returns the prompts of a file; warns about the entries that it skips.

    Args:
      path: as for `read_prompts`.

    Returns:
      At least one prompt, in the order of the file.

    Raises:
      ValueError: as for `read_prompts`.
    """
    found = read_prompts(path)
    if found.warning:
        warnings.warn(f"{path}: {found.warning}", stacklevel=2)
    return found.prompts


def read_prompts(path: str | Path | None = None) -> PromptFile:
    """Reads prompts from a JSON array or from JSON lines.

    Each entry is one of these, told apart by its fields:

    - the project's own: `{"id": ..., "category": ..., "text": ...}`;
    - ShareGPT: `{"conversations": [{"from": "human", "value": ...}, ...]}`, the first
      human turn;
    - Alpaca: `{"instruction": ..., "input": ..., "output": ...}`, the first two;
    - MT-Bench: `{"question_id": ..., "category": ..., "turns": [...]}`, the first turn.

    Args:
      path: the file; None for the prompts that ship with the project.

    Returns:
      The usable prompts, at least one, and the problems of the other entries.

    Raises:
      ValueError: the file cannot be read, or holds no usable prompt. One line.
    """
    path = DATA / "prompts.jsonl" if path is None else Path(path)
    try:
        content = path.read_text("utf-8-sig")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(_refusal(path, reason)) from None
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start})"
        raise ValueError(_refusal(path, reason)) from None

    prompts: list[Prompt] = []
    problems: list[str] = []
    try:
        for where, entry in _entries(content):
            try:
                prompts.append(_parse(entry, f"prompt-{where.split()[-1]}"))
            except _Malformed as error:
                problems.append(f"{where}: {error}")
    except _Malformed as error:
        raise ValueError(_refusal(path, str(error))) from None
    found = PromptFile(prompts, problems)
    if not prompts:
        reason = f"no usable prompt ({found.warning or 'the file is empty'})"
        raise ValueError(_refusal(path, reason))
    return found


def system_prompt() -> str:
    """Returns the system prompt of the shared-prefix workload."""
    return (DATA / "system_prompt.txt").read_text("utf-8").strip()


class _Malformed(Exception):
    """What is wrong with an entry."""


def _refusal(path: Path, reason: str) -> str:
    return (
        f"prompts file {path}: {reason}; give a JSON array or JSON lines in ShareGPT, "
        'Alpaca, MT-Bench or {"id", "category", "text"} form, or no file for the '
        "prompts that ship with the project"
    )


def _entries(content: str) -> Iterator[tuple[str, Any]]:
    """Yields (place in the file, decoded entry); the entry may be a `_Malformed`."""
    if content.lstrip().startswith("["):
        decoded = _decode(content)
        if isinstance(decoded, _Malformed):
            raise decoded
        for number, entry in enumerate(decoded, 1):
            yield f"entry {number}", entry
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _decode(line)


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} " if "\n" in text.strip() else ""
        return _Malformed(f"not JSON ({error.msg} at {place}column {error.colno})")
    except RecursionError:
        return _Malformed("not JSON that can be read (nested too deeply)")


def _parse(entry: Any, default_id: str) -> Prompt:
    if isinstance(entry, _Malformed):
        raise entry
    if not isinstance(entry, dict):
        raise _Malformed(f"not an object but {type(entry).__name__}")
    field = next((field for field in _FORMATS if field in entry), None)
    if field is None:
        raise _Malformed(f"none of the fields {', '.join(_FORMATS)}")
    category, text_of = _FORMATS[field]
    text = text_of(entry).strip()
    if not text:
        raise _Malformed("empty text")
    if not _is_unicode(text):
        raise _Malformed("half of a surrogate pair in the text")
    name = entry.get("id", entry.get("question_id", default_id))
    return Prompt(str(name), str(entry.get("category", category)), text)


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _Malformed(f"{what} is not text but {type(value).__name__}")
    return value


def _list(value: Any, what: str) -> list:
    if not isinstance(value, list):
        raise _Malformed(f"{what} is not a list but {type(value).__name__}")
    return value


def _first_human_turn(entry: dict) -> str:
    for turn in _list(entry["conversations"], "conversations"):
        if isinstance(turn, dict) and turn.get("from") in ("human", "user"):
            return _string(turn.get("value"), "value of the first human turn")
    raise _Malformed("no human turn")


def _instruction_and_input(entry: dict) -> str:
    instruction = _string(entry["instruction"], "instruction")
    given = _string(entry.get("input") or "", "input")
    return f"{instruction}\n\n{given}"


def _first_turn(entry: dict) -> str:
    turns = _list(entry["turns"], "turns")
    if not turns:
        raise _Malformed("no turn")
    return _string(turns[0], "first turn")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# The field that tells a format, the category it stands for, and how to get its text.
_FORMATS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "conversations": ("chat", _first_human_turn),
    "turns": ("question", _first_turn),
    "instruction": ("instruction", _instruction_and_input),
    # Last: some copies of Alpaca have a `text` beside their fields.
    "text": ("other", lambda entry: _string(entry["text"], "text")),
}
