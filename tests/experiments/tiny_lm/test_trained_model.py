"""The trained model itself, and sampling and beams where a model has a say in them."""

import pytest
from engines import all_tokens, assert_all_free, drawn, serve

from experiments.tiny_lm.checkpoint_cache import read_report
from experiments.tiny_lm.tokens import END_OF_TEXT
from paged_jax import Engine, EngineConfig, Field, SamplingParams

pytestmark = pytest.mark.long

PROMPTS = ("Returns ", "The ", "Compute the ", "Raises an error if ")
SETTINGS = dict(
    block_size=8,
    max_model_len=256,
    max_seqs=8,
    max_requests=8,
    max_n=4,
    max_beam_width=4,
    token_budget=8,
    max_logprobs=1,
    watermark=0.0,
    spare_blocks=0,
)
# Each pool holds the largest request below, and little more.
ENGINES = {
    "shared, swapped": dict(preemption="swap", num_blocks=56),
    "not shared, computed again": dict(
        sharing=False, preemption="recompute", num_blocks=62
    ),
}
ASKED = "Raises an error if "
CHOICES = {
    "samples": SamplingParams(n=4, temperature=0.8, seed=3, max_tokens=96),
    "bold samples": SamplingParams(n=4, temperature=1.0, seed=2, max_tokens=96),
    # Whose best are the likeliest texts, short ones: other beams go on to the limit.
    "beams": SamplingParams(n=4, beam_width=4, length_penalty=0.0, max_tokens=96),
}
# Four sequences of 112 tokens, whatever the model says: a block more each, eight times.
RIVAL = "The sum ", drawn(104, seed=2, n=4)


@pytest.fixture(scope="module")
def engines(tiny_lm):
    return {
        name: Engine(tiny_lm, EngineConfig(**SETTINGS, **fields))
        for name, fields in ENGINES.items()
    }


@pytest.fixture(scope="module")
def outputs(engines):
    engine = engines["shared, swapped"]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=200, logprobs=1)
    return [o.outputs[0] for o in engine.generate([*PROMPTS, *PROMPTS], params)]


@pytest.fixture(scope="module")
def alone(engines):
    """The sequences of each choice, served alone and shared."""
    engine = engines["shared, swapped"]
    return {
        name: engine.generate([ASKED], params)[0].outputs
        for name, params in CHOICES.items()
    }


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


# ------------------------------------------------------------ several sequences


def test_its_sequences_differ_and_end_where_it_ends_them(alone):
    for found in alone.values():
        assert len({completion.token_ids for completion in found}) == 4
    for found in alone["samples"] + alone["bold samples"], alone["beams"]:
        ended = [c for c in found if c.finish_reason == "stop"]
        assert ended and all(c.token_ids[-1] == END_OF_TEXT for c in ended)
        assert all(END_OF_TEXT not in c.token_ids[:-1] for c in found)
        assert len({len(c.token_ids) for c in found}) > 1


@pytest.mark.parametrize("choice", CHOICES)
def test_without_sharing_its_sequences_are_the_same(engines, alone, choice):
    engine = engines["not shared, computed again"]
    (output,) = engine.generate([ASKED], CHOICES[choice])
    assert all_tokens(output) == [c.token_ids for c in alone[choice]]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ENGINES)
def test_preempted_its_sequences_are_the_same(engines, alone, name, choice):
    engine = engines[name]
    engine.reset_stats()
    engine.submit(*RIVAL)
    # Unshared prompts take longer: the rival must not have ended when they are there.
    engine.step(max_steps=80 if engine.config.sharing else 64)
    asked = engine.submit(ASKED, CHOICES[choice])
    output = serve(engine)[asked]
    assert engine.log[:, Field.PREEMPTED].any()
    if engine.config.preemption == "swap":
        assert engine.stats.swapped_blocks > (0, 0)
    else:
        assert engine.stats.recomputed_tokens > 0
    assert all_tokens(output) == [c.token_ids for c in alone[choice]]
    assert_all_free(engine)
