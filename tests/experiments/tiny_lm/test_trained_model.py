"""The trained model itself: what random weights cannot do."""

import pytest

from experiments.tiny_lm.checkpoint_cache import read_report
from experiments.tiny_lm.tokens import END_OF_TEXT
from paged_jax import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.long

PROMPTS = ("Returns ", "The ", "Compute the ", "Raises an error if ")
SETTINGS = EngineConfig(
    max_model_len=256, max_seqs=8, max_requests=8, token_budget=8, max_logprobs=1
)


@pytest.fixture(scope="module")
def outputs(tiny_lm):
    engine = Engine(tiny_lm, SETTINGS)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=200, logprobs=1)
    return [o.outputs[0] for o in engine.generate([*PROMPTS, *PROMPTS], params)]


def test_it_knows_more_than_which_byte_follows_which(tiny_lm_folder):
    report = read_report(tiny_lm_folder)
    bigram = report["baseline_bits_per_byte"]["bigram"]
    assert 3.5 < bigram < 4.2
    assert report["held_out_bits_per_byte"] < bigram - 1


def test_its_texts_come_to_an_end(outputs):
    ended = [o for o in outputs if o.finish_reason == "stop"]
    assert len(ended) >= len(outputs) / 2
    assert all(o.token_ids[-1] == END_OF_TEXT for o in ended)
    assert all(END_OF_TEXT not in o.token_ids[:-1] for o in outputs)


def test_it_writes_words(outputs):
    """Printable text, most of whose letters stand in words of a usual length."""
    text = " ".join(o.text for o in outputs)
    assert sum(c.isascii() and (c.isprintable() or c == "\n") for c in text) > (
        0.99 * len(text)
    )
    words = text.split()
    assert 3 < sum(map(len, words)) / len(words) < 9
    common = {"the", "a", "of", "to", "and", "is", "in", "for"}
    assert len(common & set(words)) >= 3


def test_it_is_surer_of_some_tokens_than_of_others(outputs):
    """As random weights are not: they make beams and samples alike everywhere."""
    best = [next(iter(sorted(step.values()))) for o in outputs for step in o.logprobs]
    assert max(best) > -0.05 and min(best) < -2
