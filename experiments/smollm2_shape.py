"""The shape of SmolLM2-135M, for where its weights are not wanted or not there."""

from paged_jax.models.config import ModelConfig

SMOLLM2 = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100000.0,
    tie_embeddings=True,
    max_position_embeddings=8192,
    dtype="bfloat16",
)
