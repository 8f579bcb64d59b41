"""The training pass against the engine's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tiny_lm.dense_forward import dense_logits
from experiments.tiny_lm.settings import MODEL
from experiments.token_check import one_sequence
from paged_jax.models import llama
from paged_jax.models.config import tiny

CONFIGS = {
    "tiny": tiny(),
    "tied, one kv head": tiny(tie_embeddings=True, num_kv_heads=1, head_dim=12),
    "extended context": tiny(rope_divisors=(1.0, 1.5, 2.0, 4.0)),
    "tiny_lm": MODEL,
}


def paged_logits(config, params, tokens):
    """Returns f32[N, V], from one step over the paged cache."""
    tokens = jnp.asarray(tokens, jnp.int32)
    batch, cache = one_sequence(config, tokens, jnp.int32(len(tokens)))
    everywhere = jnp.arange(len(tokens), dtype=jnp.int32)
    batch = batch._replace(sample_index=everywhere)
    return llama.forward(config, params, batch, cache, "reference")[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_logits_are_those_of_the_paged_forward(name):
    config = CONFIGS[name]
    params = llama.init_params(config, jax.random.key(0))
    # Logits of unit spread, as a trained model's log-probabilities are.
    params["norm"]["scale"] /= 4
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, 50))
    dense = dense_logits(config, params, jnp.asarray(tokens, jnp.int32))
    for row, text in zip(dense, tokens, strict=True):
        expected = paged_logits(config, params, text)
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-5)
