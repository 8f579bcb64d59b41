"""The text that the tiny model learns from."""

import numpy as np
import pytest

from experiments.tiny_lm.corpus import LONGEST_BYTES, as_stream, docstrings, load_corpus
from experiments.tiny_lm.tokens import END_OF_TEXT

SOURCE = '''
"""A module."""

class Thing:
    """A thing.

    With two paragraphs.
    """

    def act(self):
        """Acts."""

    async def wait(self): "Waits."

    def silent(self):
        x = """no docstring"""

def long():
    """{}"""
'''


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(["optax"])


def test_docstrings_of_modules_classes_and_functions_are_found_unindented():
    longest = "é" * (LONGEST_BYTES // 2)
    assert set(docstrings(SOURCE.format(longest))) == {
        "A module.",
        "A thing.\n\nWith two paragraphs.",
        "Acts.",
        "Waits.",
        longest,
    }


def test_a_docstring_that_is_too_long_is_left_out_whole():
    assert "x" * LONGEST_BYTES in set(docstrings(SOURCE.format("x" * LONGEST_BYTES)))
    too_long = SOURCE.format("x" * (LONGEST_BYTES + 1))
    assert max(map(len, docstrings(too_long))) < 100


def test_the_texts_are_the_same_in_every_call(corpus):
    assert load_corpus(["optax"]) == corpus


def test_no_text_comes_twice_and_none_is_in_both_halves(corpus):
    every = corpus.train + corpus.held_out
    assert len(set(every)) == len(every) > 300
    assert 0.02 < len(corpus.held_out) / len(every) < 0.12


def test_which_half_a_text_is_in_depends_on_the_text_alone(corpus):
    more = load_corpus(["chex", "optax"])
    assert set(corpus.train) <= set(more.train)
    assert set(corpus.held_out) <= set(more.held_out)


def test_a_stream_is_the_bytes_of_the_texts_with_an_end_after_each():
    stream = as_stream(["ab", "é"])
    assert stream.dtype == np.uint16
    assert stream.tolist() == [97, 98, END_OF_TEXT, *"é".encode(), END_OF_TEXT]


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ModuleNotFoundError, match="no_such_package is not installed"):
        load_corpus(["no_such_package"])
