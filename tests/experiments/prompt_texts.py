"""Short prompts, and a tokenizer for them that needs no file."""

import tokenizers

from paged_jax.tokenizer import Tokenizer

TEXTS = (
    "Hi.",
    "Why is the sky blue?",
    "Name three rivers.",
    "Write a poem about rain.",
    "Translate 'good morning' into French, please.",
    "Summarise: the cat sat on the mat, and then it slept there.",
)


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer with a token for each byte, and no chat template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)
