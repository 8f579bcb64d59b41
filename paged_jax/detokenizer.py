"""Token ids to text as they arrive."""

import re
from collections.abc import Iterable

from paged_jax.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Decodes one sequence's tokens piece by piece.

    The pieces, joined, are `tokenizer.decode` of all tokens. No piece ends inside a
    character: what may still change is held back until it is settled, or until
    `flush`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else ()
        # Tokens whose text is out, the latest few only: they give the next tokens
        # their context, since decoding drops a space at the start of a text.
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that they settle; may be ""."""
        return "".join([self._push(id_) for id_ in ids])

    def flush(self) -> str:
        """Ends the sequence: returns the text that was still held back."""
        return self._emit() if self._held else ""

    def _push(self, id_: int) -> str:
        if id_ in self._skipped:
            return ""
        self._held.append(id_)
        # Bytes spelled out one a token are decoded as a run, which the next may join.
        token = self._tokenizer.backend.id_to_token(id_)
        if token is not None and _BYTE_TOKEN.fullmatch(token):
            return ""
        return self._emit(settled_only=True)

    def _emit(self, settled_only: bool = False) -> str:
        text = self._decode(self._context + self._held)
        piece = text[len(self._context_text) :]
        if settled_only and (not piece or piece.endswith(_INCOMPLETE)):
            return ""
        self._context, self._held = self._held, []
        self._context_text = self._decode(self._context)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
