"""The FAQ: its code runs and does what the text says, the same in both languages."""

import functools
import re
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from engines import greedy, make_engine, prompts, tiny_model, tokens_of

import paged_jax
from paged_jax import MANAGERS, EngineConfig, SequenceStatus, config
from pallas_kernels import AttentionMetadata, paged_attention

DOCS = Path(__file__).resolve().parents[1] / "docs"
ENGLISH, CHINESE = (
    (DOCS / name).read_text("utf-8") for name in ("faq.md", "faq.zh.md")
)


def run_example(name: str) -> dict:
    """Runs the one example that defines a name; returns its names."""
    (example,) = [text for text in examples(ENGLISH) if name in text]
    names: dict = {}
    exec(example, names)
    return names


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def test_both_languages_have_the_same_questions_and_code():
    assert len(examples(ENGLISH)) == 4
    assert examples(ENGLISH) == examples(CHINESE)
    for pattern in (r"^## ", r"^    python .*", r"^\|", r"^- "):
        found = [re.findall(pattern, text, re.M) for text in (ENGLISH, CHINESE)]
        assert found[0] == found[1], pattern
    # What is set as code is spelled the same: settings, paths and commands.
    mentioned = [
        {name for name in re.findall(r"`([^`\n]+)`", text) if not name.isalpha()}
        for text in (ENGLISH, CHINESE)
    ]
    assert mentioned[0] == mentioned[1]


def test_what_the_answers_name_is_there():
    for path in re.findall(r"`([a-z_]+/[\w/]+\.\w+)`", ENGLISH):
        assert (DOCS.parent / path).is_file(), path
    assert "`MEMORY_MANAGERS` of `paged_jax/config.py`" in ENGLISH
    assert config.MEMORY_MANAGERS == tuple(MANAGERS)


@pytest.mark.long
def test_a_policy(monkeypatch, capsys):
    monkeypatch.setattr(paged_jax, "load_model", tiny_model)
    # One size of step, to compile less.
    one_bucket = functools.partial(EngineConfig, min_bucket=128)
    monkeypatch.setattr(paged_jax, "EngineConfig", one_bucket)
    names = run_example("def shortest")
    status = jnp.array([SequenceStatus.RUNNING] * 3).at[1].set(0)
    sequences = types.SimpleNamespace(status=status, length=jnp.array([7, 2, 5]))
    assert names["shortest"](types.SimpleNamespace(sequences=sequences)) == 2
    assert [len(output.outputs[0].token_ids) for output in names["outputs"]] == [60] * 8
    assert names["engine"].stats.recomputed_share > 0
    assert re.fullmatch(r"\d+% of the tokens .*\n", capsys.readouterr().out)


def test_a_memory_manager(monkeypatch):
    monkeypatch.setitem(
        MANAGERS, "rounded", MANAGERS["oracle"]
    )  # taken back at the end
    reserve = run_example("def reserve_rounded")["reserve_rounded"]
    assert [reserve(1, 63, 200), reserve(1, 64, 200), reserve(99, 99, 200)] == [
        64, 128, 200
    ]  # fmt: skip
    monkeypatch.setattr(config, "MEMORY_MANAGERS", (*config.MEMORY_MANAGERS, "rounded"))
    served = [
        make_engine(memory=memory, num_blocks=40).generate(prompts(6, 12), greedy(20))
        for memory in ("oracle", "rounded")
    ]
    assert tokens_of(served[0]) == tokens_of(served[1])


def test_a_workload():
    make = run_example("def one_question")["one_question"]
    settings = types.SimpleNamespace(num_requests=5)
    workload = make(settings, 128, 0, tiny_model().tokenizer)
    described = workload.describe()
    assert described["requests"] == 5
    assert described["output_tokens"]["mean"] == 32
    assert len({request.tokens for request in workload.requests}) == 1


def test_a_kernel():
    kernel = run_example("def paged_attention_in_turn")["paged_attention_in_turn"]
    rng = np.random.default_rng(0)
    # Blocks of 4 for two sequences of 6 and 3 tokens, and one token of padding.
    cache = jnp.array(rng.normal(size=(2, 1, 4, 4, 2, 8)), jnp.float32)
    metadata = AttentionMetadata(
        block_tables=jnp.array([[3, 1], [2, 0]], jnp.int32),
        rows=jnp.array([0, 1, 0], jnp.int32),
        lengths=jnp.array([6, 3, 0], jnp.int32),
        num_decode=jnp.int32(2),
        num_tokens=jnp.int32(2),
        tile_start=jnp.zeros(1, jnp.int32),
        tile_len=jnp.zeros(1, jnp.int32),
        num_tiles=jnp.int32(0),
    )
    args = (jnp.array(rng.normal(size=(3, 4, 8)), jnp.float32), *cache, 0, metadata)
    expected = paged_attention(*args, scale=0.5, backend="reference")
    assert jnp.abs(expected[:2]).min() > 0
    np.testing.assert_allclose(kernel(*args, scale=0.5), expected, atol=1e-6)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE])
def test_links_name_pages_of_the_site(text):
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (DOCS / link).is_file(), link
