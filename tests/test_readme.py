"""What the README shows of the API, but for what it asks of a real model."""

import re
import types
from pathlib import Path

import paged_jax

README = Path(__file__).resolve().parents[1] / "README.md"


def examples():
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


def test_no_public_name_is_that_of_a_module():
    for name in paged_jax.__all__:
        assert not isinstance(getattr(paged_jax, name), types.ModuleType), name


def test_the_operations_on_block_tables_are_as_shown():
    # The others take the default model, and half a minute.
    (example,) = [text for text in examples() if "from_pretrained" not in text]
    names: dict = {}
    exec(example, names)
    assert names["status"] == 0
