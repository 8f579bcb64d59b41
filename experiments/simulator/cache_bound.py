"""What a prefix cache of unlimited size would find of a trace, on the host."""

from collections.abc import Iterable
from typing import NamedTuple

from experiments.errors import UserError
from experiments.simulator.trace import Trace


class PromptTokens(NamedTuple):
    """Tokens of the prompts of a trace.

    Attributes:
      found: those that a request before had computed.
      asked: all.
    """

    found: int
    asked: int

    @property
    def ratio(self) -> float:
        """Share of the prompts that is found."""
        return self.found / self.asked if self.asked else 0.0


def infinite_cache(trace: Trace | Iterable[Trace], block_size: int) -> PromptTokens:
    """Counts what requests find if nothing is ever evicted: no cache finds more.

    Each request finds the longest run of whole blocks that prompts before its own
    begin with, all but its last token. What they have generated is found by nobody,
    since traces do not name it.

    Args:
      trace: the requests; or pieces of them, as they come.
      block_size: tokens in a block.

    Raises:
      UserError: requests without names.
    """
    # Whole blocks known of each piece, by its name and the pieces before it, which have
    # a number as soon as they are known.
    number: dict[tuple[int, int], int] = {}
    known: list[int] = []
    found = asked = 0
    for part in [trace] if isinstance(trace, Trace) else trace:
        if part.names is None:
            raise UserError("the trace has no names of blocks to find them by")
        per_piece = part.names.piece_len // block_size
        for ids, prompt in zip(part.names.ids.tolist(), part.prompt_len.tolist()):
            asked += prompt
            blocks, wanted = 0, (prompt - 1) // block_size
            before, goes_on = -1, True
            for place, name in enumerate(ids):
                whole = min(prompt // block_size - place * per_piece, per_piece)
                if name < 0 or whole < 1:
                    break
                one = number.setdefault((before, name), len(known))
                if one == len(known):
                    known.append(0)
                if goes_on:
                    blocks += min(known[one], whole)
                    goes_on = known[one] >= per_piece
                known[one] = max(known[one], whole)
                before = one
            found += min(blocks, wanted) * block_size
    return PromptTokens(found, asked)
