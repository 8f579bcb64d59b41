"""The tokens of one step, as the model sees them."""

from typing import NamedTuple

import jax

from pallas_kernels.metadata import AttentionMetadata


class TokenBatch(NamedTuple):
    """One step's tokens: decodes and prefill chunks, packed (see AttentionMetadata).

    Attributes:
      tokens: i32[N]. Token ids; 0 for padding.
      positions: i32[N]. Position of each token in its sequence; 0 for padding.
      slots: i32[N]. Slot that takes the token's key and value; 0 (null block) for
        padding.
      attention: what each token attends to.
      sample_index: i32[M]. Which tokens' hidden states go through the head. Entries
        past the number of sampled tokens are 0, and their logits are not used.
      num_samples: i32[]. How many are sampled.
    """

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    attention: AttentionMetadata
    sample_index: jax.Array
    num_samples: jax.Array
