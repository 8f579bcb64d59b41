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
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from experiments.errors import UserError
from experiments.simulator import json_array

# How many malformed lines are named, of those that are counted, and how long.
_MOST_NAMED, _LONGEST_REASON = 5, 200
# Of a request: more than any model takes, and what the cost model counts exactly (f32).
_MOST_TOKENS = 2**24
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
    in_order: bool = True,
) -> Iterator[Row]:
    """Yields the requests of a file.

    Args:
      path: the file.
      format: one of `FORMATS`.
      strict: whether a malformed line is an error.
      count_tokens: of a text, for formats that have texts.
      malformed: counts the lines that are left out.
      in_order: whether a time before that of an earlier request is malformed; False
        where the times are not used.

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
        # Bytes that are no UTF-8 make the line malformed that they are in.
        with open(
            path, encoding="utf-8-sig", errors="surrogateescape", newline=""
        ) as file:
            records = FORMATS[format](file, Path(path), count_tokens)
            yield from _checked(records, strict, malformed, in_order)
    except OSError as error:
        raise UserError(f"the trace {path} cannot be read: {error}") from None


class _Record(NamedTuple):
    """A line, and how to make a row of it; that raises what is wrong with it."""

    where: str
    make: Callable[[], Row]


# What a malformed line can raise.
_WRONG = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)


def _checked(
    records: Iterable[_Record], strict: bool, malformed: Malformed, in_order: bool
) -> Iterator[Row]:
    first = last = None
    for where, make in records:
        try:
            row = make()
            if row.prompt_len < 1 or row.output_len < 1:
                raise ValueError(
                    f"{row.prompt_len} tokens in and {row.output_len} out; both must "
                    "be 1 or more"
                )
            if row.prompt_len + row.output_len > _MOST_TOKENS:
                raise ValueError(
                    f"{row.prompt_len} tokens in and {row.output_len} out; together "
                    f"they must be {_MOST_TOKENS:,} at most"
                )
            if row.arrival is not None:
                _check_time(row.arrival, last if in_order else None)
        except _WRONG as error:
            reason = _reason(error)
            if strict:
                raise UserError(f"{where}: {reason}") from None
            malformed.add(where, reason)
            continue
        if row.arrival is not None:
            last = row.arrival
            first = last if first is None else first
            row = row._replace(arrival=last - first)
        yield row


def _check_time(time: float, last: float | None) -> None:
    if not math.isfinite(time):
        raise ValueError(f"its time is {time}")
    if last is not None and time < last:
        raise ValueError(f"its time is {last - time:g} s before that of an earlier one")


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no {error.args[0]}"
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]}..."


def _csv(
    columns: tuple[str, str, str], to_seconds: Callable[[str], float]
) -> Callable[..., Iterator[_Record]]:
    """Returns the reader of a CSV with columns for time, tokens in and tokens out."""

    def read(file: TextIO, path: Path, _: CountTokens | None) -> Iterator[_Record]:
        lines = csv.reader(file)
        try:
            header = next(lines, [])
        except csv.Error as error:
            raise UserError(f"{path}, line 1: {error}") from None
        missing = [name for name in columns if name not in header]
        if missing:
            raise UserError(
                f"{path}: no column {missing[0]!r}; it needs {', '.join(columns)}"
            )
        time, prompt, output = (header.index(name) for name in columns)
        least = max(time, prompt, output) + 1

        def make(fields: list[str]) -> Row:
            if len(fields) < least:
                raise ValueError(f"{len(fields)} fields of {least}")
            return Row(
                to_seconds(fields[time]), _count(fields[prompt]), _count(fields[output])
            )

        while True:
            where = f"{path}, line {lines.line_num + 1}"
            try:
                fields = next(lines, None)
            except csv.Error as error:
                # As a quote that is not closed: it goes on with the line after it.
                reason = f"{error}, up to line {lines.line_num}"
                yield _Record(where, functools.partial(_fail, reason))
                continue
            if fields is None:
                return
            if fields:
                yield _Record(where, functools.partial(make, fields))

    return read


def _fail(reason: str) -> Row:
    raise ValueError(reason)


def _count(number: str | float, what: str = "number of tokens") -> int:
    """Returns a number of tokens, or of a name: whole, as far as 32 bits go."""
    value = float(number)
    if not 0 <= value < 2**31 or value != int(value):
        raise ValueError(f"{what} {number} is not a whole one from 0 to 2**31 - 1")
    return int(value)


# A date and its time; digits of a second; how far it is from UTC.
_DATE = re.compile(r"([^.]+?)(?:\.(\d+))?(Z|[+-]\d\d(?::?\d\d)?)?")


def _date_to_seconds(text: str) -> float:
    """Returns the seconds of a date; UTC if it does not say how far it is from it.

    `2023-11-16 18:15:46.6805900` and `2024-05-10 00:00:00.009930+00:00` are those of
    2023 and 2024.
    """
    parts = _DATE.fullmatch(text.strip())
    if parts is None:
        raise ValueError(f"{text!r} is no date")
    date, digits, zone = parts.groups()
    moment = datetime.datetime.fromisoformat(date + (zone or ""))
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp() + float(f"0.{digits or 0}")


def _mooncake(file: TextIO, path: Path, _: CountTokens | None) -> Iterator[_Record]:
    def make(line: str) -> Row:
        found = json.loads(line)
        return Row(
            found["timestamp"] / 1000.0,
            _count(found["input_length"]),
            _count(found["output_length"]),
            tuple(_count(name, "hash id") for name in found["hash_ids"]),
        )

    for number, line in enumerate(file, 1):
        if line.strip():
            yield _Record(f"{path}, line {number}", lambda line=line: make(line))


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
            if isinstance(item, ValueError):
                raise item
            prompt, answer = split(item)
            for text in (prompt, answer):
                if not isinstance(text, str):
                    raise ValueError(f"{text!r} is no text")
            return Row(None, count_tokens(prompt), count_tokens(answer))

        try:
            for number, item in enumerate(json_array.items(file)):
                yield _Record(f"{path}, record {number}", lambda item=item: make(item))
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None

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
