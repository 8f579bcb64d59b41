"""Whether cells generate the same tokens, and if not, whether it was a near-tie."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import KVCache, LoadedModel, init_kv_cache
from paged_jax.batch import TokenBatch
from paged_jax.models import llama
from paged_jax.models.config import ModelConfig
from pallas_kernels.metadata import AttentionMetadata

# Token ids of each request, by cell and by the request's digest.
Tokens = dict[str, dict[str, list[int]]]

# Two logits this close are a tie: which is larger is a matter of rounding. So is, to
# which token a random number belongs that lies this close to their border.
TIE = 1e-4
_BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a request's tokens first differ from those in another cell.

    Attributes:
      key: the cell.
      reference: the first cell that served the same request.
      request: the request's digest.
      position: how many generated tokens are equal.
      found: the cell's next token.
      expected: the reference's.
      gap: how far the lower of the two logits is below the largest of all, computed
        over the whole sequence at once; of tokens that were drawn, how far the random
        number is from the farther one's part of the cumulative distribution. None if
        it was not computed.
    """

    key: str
    reference: str
    request: str
    position: int
    found: int
    expected: int
    gap: float | None = None

    @property
    def is_tie(self) -> bool:
        """Whether rounding alone decided between the two tokens."""
        return self.gap is not None and self.gap <= TIE


class Draw(NamedTuple):
    """How a sequence's tokens are drawn.

    Attributes:
      seed: of the request.
      number: which of its sequences.
      temperature: above 0; the whole distribution is drawn from.
    """

    seed: int
    number: int
    temperature: float


def find_differences(tokens: Tokens) -> list[Difference]:
    """Returns the requests whose tokens are not those of the first cell that had them.

    Args:
      tokens: what was generated, in the order of the cells.
    """
    first: dict[str, str] = {}
    found = []
    for key, outputs in tokens.items():
        for request, ids in outputs.items():
            reference = first.setdefault(request, key)
            expected = tokens[reference][request]
            for position, (a, b) in enumerate(zip(ids, expected, strict=True)):
                if a != b:
                    found.append(Difference(key, reference, request, position, a, b))
                    break
    return found


def with_gap(
    difference: Difference,
    model: LoadedModel,
    prompt: Sequence[int],
    generated: Sequence[int],
    max_model_len: int,
    draw: Draw | None = None,
) -> Difference:
    """Returns the difference with its gap, from one pass over the whole sequence.

    Args:
      difference: which.
      model: what generated the tokens.
      prompt: the request's.
      generated: its tokens in either cell.
      max_model_len: longest sequence; all are padded to this, and share one program.
      draw: how the tokens were drawn; None if they are the likeliest.
    """
    known = [*prompt, *generated[: difference.position]]
    logits = next_logits(model, known, max_model_len)
    tokens = difference.found, difference.expected
    if draw is not None:
        gap = max(draw_gap(logits, draw, len(known), token) for token in tokens)
    else:
        gap = float(logits.max() - min(logits[token] for token in tokens))
    return dataclasses.replace(difference, gap=gap)


def draw_gap(logits: np.ndarray, draw: Draw, position: int, token: int) -> float:
    """Returns how far a random number is from a token's part of the distribution.

    Args:
      logits: f32[V].
      draw: how the token was drawn.
      position: the token's, in its sequence.
      token: which.

    Returns:
      0 if the number belongs to the token; else their distance, a probability.
    """
    scaled = np.asarray(logits, np.float64) / draw.temperature
    ends = np.cumsum(np.exp(scaled - scaled.max()))
    ends /= ends[-1]
    key = jnp.array([draw.seed >> 32, draw.seed & 0xFFFFFFFF], jnp.uint32)
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    if draw.number:  # as in `submit`: the first sequence has the request's key
        key = jax.random.fold_in(key, jnp.uint32(2**32 - draw.number))
    drawn = float(jax.random.uniform(jax.random.fold_in(key, position)))
    start = ends[token - 1] if token else 0.0
    return max(start - drawn, drawn - ends[token], 0.0)


def next_logits(
    model: LoadedModel, tokens: Sequence[int], max_model_len: int
) -> np.ndarray:
    """Returns f32[V], the logits after `tokens`, all of them computed in one pass."""
    padded = np.zeros(max_model_len, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_forward(model.config, model.params, padded, len(tokens)))


@functools.partial(jax.jit, static_argnums=0)
def _forward(config, params, tokens, count):
    """Runs one sequence as one step, with the oracle of the attention backends."""
    batch, cache = one_sequence(config, tokens, count)
    logits, _ = llama.forward(config, params, batch, cache, "reference")
    return logits[0]


def one_sequence(
    config: ModelConfig,
    tokens: jax.Array,
    count: jax.Array,
    kv_dtype: str | None = None,
) -> tuple[TokenBatch, KVCache]:
    """Returns a step that computes one whole sequence, and an empty cache for it.

    Args:
      config: the model's shape.
      tokens: i32[N], the sequence, padded.
      count: i32[], how many of them are real; the last one's logits are asked for.
      kv_dtype: of the cache; None: that of the weights.
    """
    size = tokens.shape[0]
    num_blocks = -(-size // _BLOCK_SIZE)
    index = jnp.arange(size, dtype=jnp.int32)
    real = index < count
    none = jnp.zeros(0, jnp.int32)
    batch = TokenBatch(
        tokens=tokens,
        positions=jnp.where(real, index, 0),
        slots=jnp.where(real, index + _BLOCK_SIZE, 0),  # block 0 is the null block
        attention=AttentionMetadata(
            block_tables=jnp.arange(1, num_blocks + 1, dtype=jnp.int32)[None],
            rows=jnp.zeros(size, jnp.int32),
            lengths=jnp.where(real, index + 1, 0),
            num_decode=jnp.int32(0),
            num_tokens=count,
            tile_start=none,
            tile_len=none,
            num_tiles=jnp.int32(0),
        ),
        sample_index=count[None] - 1,
        num_samples=jnp.int32(1),
    )
    cache = init_kv_cache(
        config.num_layers,
        num_blocks,
        _BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        jnp.dtype(kv_dtype or config.dtype),
    )
    return batch, cache
