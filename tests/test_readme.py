"""What the README shows of the API; on a model that is small enough."""

import functools
import re
import types
from pathlib import Path

import pytest
from engines import tiny_model

import paged_jax
from paged_jax import Engine, EngineConfig
from paged_jax.tokenizer import Tokenizer

README = Path(__file__).resolve().parents[1] / "README.md"


def examples():
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


def test_no_public_name_is_that_of_a_module():
    for name in paged_jax.__all__:
        assert not isinstance(getattr(paged_jax, name), types.ModuleType), name


def test_the_operations_on_block_tables_are_as_shown():
    (example,) = [text for text in examples() if "from_pretrained" not in text]
    names: dict = {}
    exec(example, names)
    assert names["status"] == 0


@pytest.mark.long
def test_the_tour_of_the_engine_is_as_shown(monkeypatch, capsys):
    model = tiny_model(max_position_embeddings=512)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    backend = model.tokenizer.backend
    model = model._replace(tokenizer=Tokenizer(backend, chat_template=template))
    # One size of step, to compile less.
    one_bucket = functools.partial(EngineConfig, min_bucket=128)
    monkeypatch.setattr(paged_jax, "EngineConfig", one_bucket)
    monkeypatch.setattr(Engine, "from_pretrained", lambda name, c: Engine(model, c))
    (example,) = [text for text in examples() if "from_pretrained" in text]
    names: dict = {}
    exec(example, names)
    assert len(names["four"].outputs) == 4
    best = names["best"].outputs
    assert len(best) == 2 and best[0].score >= best[1].score
    assert names["engine"].has_unfinished() is False
    # A text, one line for each token of a stream, two lists.
    assert len(capsys.readouterr().out.splitlines()) > 3
