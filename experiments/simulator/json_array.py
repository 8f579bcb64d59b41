"""Reads the items of a JSON array a piece at a time, and goes on after a bad one."""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

CHUNK = 1 << 20
# An item that is longer is taken for one that never ends.
LONGEST = 1 << 26
# A text that ends in an item may end in a word such as `false`, or in an escape.
_CUT = 16
_FIRST_KEY = re.compile(r'\{\s*"(?:[^"\\]|\\.)*"\s*:')


def is_array(text: str) -> bool:
    """Returns whether a text begins as an array does."""
    return text.lstrip().startswith("[")


def items(file: TextIO) -> Iterator[Any]:
    """Yields the items of an array; a `ValueError` in place of one that is malformed.

    After a malformed item the next one is looked for: where a record begins with the
    same key as the malformed one, or, if that has none, as the last one that did.

    Raises:
      ValueError: the file is no array.
    """
    text = file.read(CHUNK)
    if not is_array(text):
        raise ValueError("not a JSON array of records")
    reader = _Items(file, text, text.index("[") + 1)
    while reader.seek():
        yield reader.take()


class _Items:
    """A part of the file, and where in it the next item begins."""

    def __init__(self, file: TextIO, text: str, at: int):
        self._file, self._text, self._at = file, text, at
        self._decoder = json.JSONDecoder()
        self._begin = re.compile(r"\{")
        self._is_over = False  # nothing after `at` is looked at

    def _more(self) -> bool:
        """Reads on; what is before the next item is dropped."""
        more = self._file.read(max(CHUNK, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)

    def seek(self) -> bool:
        """Goes to the next item; returns whether there is one, or a missing end."""
        while not self._is_over:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n,":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at] != "]"
            if not self._more():
                return True
        return False

    def take(self) -> Any:
        """Returns the item, or what is wrong with it, and goes past it."""
        while True:
            text, at = self._text, self._at
            wrong = "the file ends inside it"
            if at == len(text):
                self._is_over = True
                return ValueError("the file ends without the array's end")
            try:
                item, end = self._decoder.raw_decode(text, at)
                # A number at the end of the text may go on in the next piece.
                if end < len(text) or text[end - 1] in '}]"':
                    self._remember(at)
                    self._at = end
                    return item
            except RecursionError:
                return self._skip("nested too deeply")
            except json.JSONDecodeError as error:
                if not _may_go_on(error, text, 0):
                    wrong = f"{error.msg} at its character {error.pos - at}"
                if not _may_go_on(error, text, _CUT):
                    return self._skip(wrong)
            if len(text) - at > LONGEST:
                return self._skip(f"longer than {LONGEST} characters")
            if not self._more():
                return self._skip(wrong)

    def _remember(self, at: int) -> None:
        """Notes how the record begins that is there."""
        first = _FIRST_KEY.match(self._text, at)
        if first:
            key = first[0][1:-1].strip()
            self._begin = re.compile(r"\{\s*" + re.escape(key) + r"\s*:")

    def _skip(self, wrong: str) -> ValueError:
        """Goes to where the next record seems to begin; returns what was wrong."""
        self._remember(self._at)
        self._at += 1
        while True:
            found = self._begin.search(self._text, self._at)
            if found:
                self._at = found.start()
                return ValueError(wrong)
            # What begins here may go on in the next piece.
            last = self._text.rfind("{", self._at)
            self._at = len(self._text) if last < 0 else last
            if not self._more():
                self._is_over = True
                return ValueError(wrong)


def _may_go_on(error: json.JSONDecodeError, text: str, within: int) -> bool:
    """Returns whether a text may be right if it goes on, with an error at its end."""
    unended = error.msg.startswith("Unterminated string")
    return unended or error.pos >= len(text.rstrip()) - within
