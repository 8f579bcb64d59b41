"""The checkpoint and its tokenizer, read back by the project's own loader."""

import chex
import jax
import pytest

from experiments.tiny_lm.checkpoint import save_directory
from experiments.tiny_lm.tokens import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer
from paged_jax import load_model
from paged_jax.models import llama
from paged_jax.models.config import tiny, tiny_qwen2, tiny_qwen3

TEXTS = ("", "Returns x.", "é😀\n\t<|end|>", "".join(map(chr, range(256))))


def written(path, config):
    params = llama.init_params(config, jax.random.key(1))
    save_directory(path, config, params, byte_tokenizer())
    return params


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_read_back_as_it_was(tmp_path, tied):
    config = tiny(
        vocab_size=VOCAB_SIZE,
        tie_embeddings=tied,
        eos_token_ids=(END_OF_TEXT,),
        bos_token_id=END_OF_TEXT,
        rope_theta=5e4,
        rms_norm_eps=1e-6,
    )
    params = written(tmp_path, config)
    model = load_model(tmp_path)
    assert model.config == config
    chex.assert_trees_all_equal(model.params, params)
    assert model.tokenizer.vocab_size == VOCAB_SIZE
    assert model.tokenizer.eos_token_ids == (END_OF_TEXT,)


@pytest.mark.parametrize("text", TEXTS)
def test_a_token_is_a_byte(tmp_path, text):
    config = tiny(vocab_size=VOCAB_SIZE, eos_token_ids=(END_OF_TEXT,))
    written(tmp_path, config)
    tokenizer = load_model(tmp_path).tokenizer
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode([*ids, END_OF_TEXT]) == text


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_qwen3])
def test_only_a_plain_llama_is_written(tmp_path, make):
    with pytest.raises(ValueError, match="only a plain float32 Llama"):
        written(tmp_path, make())
