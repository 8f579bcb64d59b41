"""Readers of recorded traces, line by line: a long one is never held whole.

| format | file |
| --- | --- |
| `lengths` | CSV with columns start_offset_s, input_tokens, output_tokens |
| `azure` | CSV of Azure LLM inference: TIMESTAMP, ContextTokens, GeneratedTokens |
| `burstgpt` | CSV of BurstGPT: Timestamp, Request tokens, Response tokens |
| `mooncake` | JSONL: timestamp (ms), input_length, output_length, hash_ids |
| `sharegpt` | JSON of conversations; lengths are counted by a tokenizer, no times |
| `alpaca` | JSON of instruction, input, output; likewise |
"""

import csv
import dataclasses
import datetime
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from experiments.errors import UserError

# How many malformed lines are named, of those that are counted.
_MOST_NAMED = 5
_CHUNK = 1 << 20
# Tokens of a piece that Mooncake has a hash of.
MOONCAKE_PIECE = 512
# Text -> its number of tokens.
CountTokens = Callable[[str], int]


class Row(NamedTuple):
    """One request of a trace.

    Attributes:
      arrival: seconds since the first one; None where the trace has no times.
      prompt_len: tokens, 1 or more.
      output_len: tokens, 1 or more.
      hash_ids: names of the prompt's blocks of 512 tokens, each of all before it too;
        empty where the trace has none.
    """

    arrival: float | None
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


@dataclasses.dataclass
class Malformed:
    """Lines that could not be used.

    Attributes:
      count: how many.
      named: the first few: where, and why.
    """

    count: int = 0
    named: list[str] = dataclasses.field(default_factory=list)

    def add(self, where: str, reason: str) -> None:
        """Counts one, and names it if it is among the first."""
        self.count += 1
        if len(self.named) < _MOST_NAMED:
            self.named.append(f"{where}: {reason}")

    def __str__(self) -> str:
        """Returns one line."""
        return f"{self.count} malformed ({'; '.join(self.named)})"


def read_trace(
    path: Path | str,
    format: str,
    *,
    strict: bool = False,
    count_tokens: CountTokens | None = None,
    malformed: Malformed | None = None,
) -> Iterator[Row]:
    """Yields the requests of a file.

    Args:
      path: the file.
      format: one of `FORMATS`.
      strict: whether a malformed line is an error.
      count_tokens: of a text, for formats that have texts.
      malformed: counts the lines that are left out.

    Raises:
      UserError: no such format or file, a file without the columns, or a malformed
        line if `strict`.
    """
    if format not in FORMATS:
        raise UserError(
            f"trace format {format!r} is not known; use one of {', '.join(FORMATS)}"
        )
    malformed = Malformed() if malformed is None else malformed
    try:
        with open(path, encoding="utf-8", newline="") as file:
            records = FORMATS[format](file, Path(path), count_tokens)
            yield from _checked(records, strict, malformed)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the trace {path} cannot be read: {error}") from None


class _Record(NamedTuple):
    """A line, and how to make a row of it; that raises what is wrong with it."""

    where: str
    make: Callable[[], Row]


def _checked(
    records: Iterable[_Record], strict: bool, malformed: Malformed
) -> Iterator[Row]:
    first: float | None = None
    for where, make in records:
        try:
            row = make()
            if row.prompt_len < 1 or row.output_len < 1:
                raise ValueError(
                    f"{row.prompt_len} tokens in and {row.output_len} out; both must "
                    "be 1 or more"
                )
            if row.arrival is not None and not math.isfinite(row.arrival):
                raise ValueError(f"its time is {row.arrival}")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = _reason(error)
            if strict:
                raise UserError(f"{where}: {reason}") from None
            malformed.add(where, reason)
            continue
        if row.arrival is not None:
            first = row.arrival if first is None else first
            row = row._replace(arrival=row.arrival - first)
        yield row


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no {error.args[0]}"
    return " ".join(str(error).split()) or type(error).__name__


def _csv(
    columns: tuple[str, str, str], to_seconds: Callable[[str], float]
) -> Callable[..., Iterator[_Record]]:
    """Returns the reader of a CSV with columns for time, tokens in and tokens out."""

    def read(file: TextIO, path: Path, _: CountTokens | None) -> Iterator[_Record]:
        lines = csv.DictReader(file)
        missing = [name for name in columns if name not in (lines.fieldnames or ())]
        if missing:
            raise UserError(
                f"{path}: no column {missing[0]!r}; it needs {', '.join(columns)}"
            )
        time, prompt, output = columns
        for line in lines:
            yield _Record(
                f"{path}, line {lines.line_num}",
                lambda line=line: Row(
                    to_seconds(line[time]), _count(line[prompt]), _count(line[output])
                ),
            )

    return read


def _count(text: str) -> int:
    value = float(text)
    if value != int(value):
        raise ValueError(f"{text} is no number of tokens")
    return int(value)


def _date_to_seconds(text: str) -> float:
    """Returns the seconds of a date with up to seven digits of a second."""
    date, _, digits = text.strip().partition(".")
    moment = datetime.datetime.fromisoformat(date).replace(tzinfo=datetime.UTC)
    return moment.timestamp() + float(f"0.{digits.rstrip('Z') or 0}")


def _mooncake(file: TextIO, path: Path, _: CountTokens | None) -> Iterator[_Record]:
    def make(line: str) -> Row:
        found = json.loads(line)
        names = tuple(int(name) for name in found["hash_ids"])
        for name in names:
            if not 0 <= name < 2**31:
                raise ValueError(f"hash id {name} is not from 0 to 2**31 - 1")
        return Row(
            found["timestamp"] / 1000.0,
            int(found["input_length"]),
            int(found["output_length"]),
            names,
        )

    for number, line in enumerate(file, 1):
        if line.strip():
            yield _Record(f"{path}, line {number}", lambda line=line: make(line))


def _json_items(file: TextIO, path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the items of a JSON array with their numbers, a chunk at a time."""
    decoder = json.JSONDecoder()
    text, at = file.read(_CHUNK), 0
    at = len(text) - len(text.lstrip())
    if not text[at:].startswith("["):
        raise UserError(f"{path}: not a JSON array of records")
    at += 1
    for number in itertools.count():
        while True:
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            if text[at : at + 1] == "]":
                return
            try:
                item, end = decoder.raw_decode(text, at)
                # A number at the end of a chunk may go on in the next one.
                if end < len(text):
                    break
            except ValueError:
                pass
            more = file.read(max(_CHUNK, len(text) - at))
            if not more:
                raise UserError(f"{path}: the JSON ends inside record {number}")
            text, at = text[at:] + more, 0
        at = end
        yield number, item


def _texts(
    split: Callable[[Any], tuple[str, str]],
) -> Callable[..., Iterator[_Record]]:
    """Returns the reader of a JSON array whose records have a prompt and an answer."""

    def read(
        file: TextIO, path: Path, count_tokens: CountTokens | None
    ) -> Iterator[_Record]:
        if count_tokens is None:
            raise UserError(f"{path} has texts; their tokens need a tokenizer to count")

        def make(item: Any) -> Row:
            prompt, answer = split(item)
            return Row(None, count_tokens(prompt), count_tokens(answer))

        for number, item in _json_items(file, path):
            yield _Record(f"{path}, record {number}", lambda item=item: make(item))

    return read


def _first_round(item: Any) -> tuple[str, str]:
    """Returns what a person first says in a conversation, and the answer."""
    turns = item["conversations"]
    if len(turns) < 2:
        raise ValueError(f"{len(turns)} turns; a round has two")
    asked, answered = turns[0], turns[1]
    if asked["from"] not in ("human", "user"):
        raise ValueError(f"begins with {asked['from']!r} and not with a person")
    return asked["value"], answered["value"]


def _instruction(item: Any) -> tuple[str, str]:
    prompt = item["instruction"]
    if item.get("input"):
        prompt = f"{prompt}\n{item['input']}"
    return prompt, item["output"]


FORMATS: dict[str, Callable[..., Iterator[_Record]]] = {
    "lengths": _csv(("start_offset_s", "input_tokens", "output_tokens"), float),
    "azure": _csv(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date_to_seconds),
    "burstgpt": _csv(("Timestamp", "Request tokens", "Response tokens"), float),
    "mooncake": _mooncake,
    "sharegpt": _texts(_first_round),
    "alpaca": _texts(_instruction),
}
# Those that name the pieces of prompts, which a prefix cache can find them by.
NAMED = ("mooncake",)
# Those of texts, whose tokens are counted, and which have no times.
TEXTS = ("sharegpt", "alpaca")
