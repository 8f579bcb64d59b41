"""Names of blocks: what a recorded trace has in place of the tokens themselves.

The prefix cache compares one number for each block instead of its tokens, and, as ever,
the block before it. So two requests share their blocks up to where their names differ.
Blocks of a prompt without a name get one that is the request's own, and those with
generated tokens one that is the sequence's: no other request finds them, but the
sequence does after a preemption.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.errors import UserError
from paged_jax.block_pool import BlockPool
from paged_jax.config import StepConfig
from paged_jax.new_arrays import full
from paged_jax.prefix_cache import init_prefix_cache
from paged_jax.sequences import SequenceStatus
from paged_jax.state import SchedulerState

UNNAMED = -1  # names are 0 or more, and own ones below this


@dataclasses.dataclass(frozen=True)
class PieceNames:
    """Names of the pieces of prompts, as recorded.

    Attributes:
      ids: i32[N, Q]. Name of each piece, 0 or more; `UNNAMED` behind those that have
        one. Prompts with the same names up to a piece have the same tokens up to there.
      piece_len: tokens of a piece; the last one of a prompt may have fewer.
    """

    ids: np.ndarray
    piece_len: int

    def __getitem__(self, part: slice) -> "PieceNames":
        """Returns the names of some of the prompts."""
        return PieceNames(self.ids[part], self.piece_len)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnteringNames:
    """Names of the prompts that enter, padded to R rows.

    Attributes:
      pieces: i32[R, Q]. See `PieceNames.ids`.
      request: i32[R]. The request's own name.
      own: i32[R]. The sequence's own name.
      piece_len: tokens of a piece.
      block_size: B.
    """

    pieces: jax.Array
    request: jax.Array
    own: jax.Array
    piece_len: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})


def pack_names(
    config: StepConfig,
    names: Sequence[PieceNames | None],
    numbers: np.ndarray,
    n: int,
    rows: int,
) -> EnteringNames | tuple[()]:
    """Returns the names of requests that enter; () without a prefix cache.

    Args:
      config: static settings.
      names: of the requests, in parts.
      numbers: i64[N], their numbers.
      n: sequences of each request.
      rows: R, rows to pad to.

    Raises:
      UserError: no names, though there is a prefix cache to find by them; or pieces
        that blocks do not divide.
    """
    if not config.prefix_caching:
        return ()
    given = [part for part in names if part is not None]
    if len(given) < len(names):
        raise UserError(
            "engine.prefix_caching is on and the trace has no names of blocks to find "
            "them by; turn it off"
        )
    piece_len = given[0].piece_len
    if piece_len % config.block_size or any(p.piece_len != piece_len for p in given):
        raise UserError(
            f"the trace names pieces of {piece_len} tokens and engine.block_size is "
            f"{config.block_size}, which does not divide them; choose one that does"
        )
    width = -(-config.max_model_len // piece_len)
    pieces = np.full((rows, width), UNNAMED, np.int32)
    at = 0
    for part in given:
        count, most = len(part.ids), min(part.ids.shape[1], width)
        repeated = np.repeat(part.ids[:, :most], n, axis=0)
        pieces[at : at + count * n, :most] = repeated
        at += count * n
    request, own = np.full((2, rows), UNNAMED, np.int32)
    request[:at] = UNNAMED - 1 - np.repeat(numbers, n) * (n + 1)
    own[:at] = request[:at] - 1 - np.tile(np.arange(n), len(numbers))
    return EnteringNames(
        jnp.array(pieces),
        jnp.array(request),
        jnp.array(own),
        piece_len,
        config.block_size,
    )


def put_names(
    tokens: jax.Array, slots: jax.Array, new: EnteringNames, prompt_len: jax.Array
) -> jax.Array:
    """Writes a name for each block that a request may come to have.

    Args:
      tokens: i32[R + 1, T], names by request slot.
      slots: i32[R], where the new requests go.
      new: their names.
      prompt_len: i32[R], their prompts' tokens.
    """
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    piece = column // (new.piece_len // new.block_size)
    name = new.pieces[:, jnp.minimum(piece, new.pieces.shape[1] - 1)]
    whole = (column + 1) * new.block_size <= prompt_len[:, None]
    named = (name > UNNAMED) & (piece < new.pieces.shape[1])
    name = jnp.where(named, name, new.request[:, None])
    return tokens.at[slots].set(jnp.where(whole, name, new.own[:, None]))


def init_names(config: StepConfig, scheduler: SchedulerState) -> SchedulerState:
    """Returns the scheduler's state with names, T for a request, in place of tokens."""
    pool, requests = scheduler.pool, scheduler.requests
    assert isinstance(pool, BlockPool)
    names = full((requests.null + 1, config.table_width), UNNAMED)
    cache = init_prefix_cache(config.num_blocks, config.block_size, width=1)
    return dataclasses.replace(
        scheduler,
        pool=dataclasses.replace(pool, prefix_cache=cache),
        requests=dataclasses.replace(requests, tokens=names),
    )


def keep_names(before: SchedulerState, after: SchedulerState) -> SchedulerState:
    """Returns the state after `commit` with the names that there were before it.

    It writes sampled tokens to the places of tokens, where here names are.
    """
    requests = dataclasses.replace(after.requests, tokens=before.requests.tokens)
    return dataclasses.replace(after, requests=requests)


def count_found(scheduler: SchedulerState) -> tuple[jax.Array, jax.Array]:
    """Counts what requests that are admitted for the first time find.

    Args:
      scheduler: the state after planning, before the lengths are counted up.

    Returns:
      f32[], tokens of their prompts that are cached; f32[], tokens of their prompts.
      Prompts of several sequences count once.
    """
    sequences, requests = scheduler.sequences, scheduler.requests
    slot = sequences.request
    new = requests.timeline[slot, 0] == scheduler.iteration
    # Of a group only the carrier is more than a row that waits.
    new &= sequences.status == SequenceStatus.RUNNING
    found = jnp.where(new, sequences.length, 0)
    asked = jnp.where(new, requests.prompt_len[slot], 0)
    return jnp.sum(found).astype(jnp.float32), jnp.sum(asked).astype(jnp.float32)
