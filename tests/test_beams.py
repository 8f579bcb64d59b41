"""Beam search in the engine: what `transformers` finds, however memory is managed."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beam_cases import CASES, golden_model, name_of, params_of, parents_of, search
from engines import all_tokens, assert_all_free, assert_sound, drawn, serve
from program_text import IN_PLACE, operations_on
from pythons import SAME_KIND, newest_but

from paged_jax import Engine, EngineConfig, Field, RequestError, SamplingParams
from paged_jax.sampling import likeliest

# ------------------------------------------------------------------ the goldens


@functools.cache
def golden_engine(model, sharpness):
    config = EngineConfig(
        block_size=4,
        num_blocks=100,
        max_model_len=32,
        max_seqs=16,
        max_requests=32,
        token_budget=16,
        min_bucket=16,
        max_beam_width=16,
        max_stop_ids=2,
        max_prefixes=0,
        attention_backend="reference",
    )
    return Engine(golden_model(model, sharpness), config)


MODELS = sorted({(case["model"], case["sharpness"]) for case in CASES})


@functools.cache
def golden_outputs(model, sharpness):
    """The outputs of all searches with a model, served together."""
    cases = [c for c in CASES if (c["model"], c["sharpness"]) == (model, sharpness)]
    engine = golden_engine(model, sharpness)
    outputs = engine.generate(
        [case["prompt"] for case in cases], [params_of(case) for case in cases]
    )
    assert engine.log[:, Field.RUNNING].max() == 16
    assert_all_free(engine)
    return {str(case): output for case, output in zip(cases, outputs, strict=True)}


@pytest.mark.parametrize(
    "case",
    newest_but(
        [c for c in CASES if c["model"] == "llama" and c["num_beams"] not in (5, 6, 7)],
        CASES,
        "the search is the same, and test_llama has the logits of each model",
    ),
    ids=name_of,
)
def test_it_finds_what_transformers_finds(case):
    output = golden_outputs(case["model"], case["sharpness"])[str(case)]
    assert [list(c.token_ids) for c in output.outputs] == case["sequences"]
    scores = [completion.score for completion in output.outputs]
    np.testing.assert_allclose(scores, case["scores"], rtol=1e-4, atol=1e-5)
    ends = case["eos_token_ids"]
    for completion in output.outputs:
        last = completion.token_ids[-1]
        assert completion.finish_reason == ("stop" if last in ends else "length")
    assert output.beam_parents == parents_of(case)


# ------------------------------------------------------------------ the memory

SHARP = "llama", 3.0
PREFIX = [12, 63, 40, 41, 42, 43]  # no multiple of 4


def case_of(prompt, width, limit, penalty, stopping, ends):
    return dict(
        model=SHARP[0],
        sharpness=SHARP[1],
        prompt=prompt,
        num_beams=width,
        max_new_tokens=limit,
        length_penalty=penalty,
        early_stopping=stopping,
        eos_token_ids=ends,
    )


def cases():
    """Searches of every width from 2 to 8, some of them behind a prefix."""
    rng = np.random.default_rng(5)
    made = []
    rules = itertools.cycle([(1.0, False), (2.0, "never"), (0.0, True), (-1.0, False)])
    for i, width in enumerate([2, 5, 8, 3, 7, 4, 6, 2]):
        prompt = rng.integers(3, 96, 1 + 3 * (i % 5)).tolist()
        if i % 3 == 1:
            prompt = [*PREFIX, *prompt[: i - 1]]
        ends = [[50, 4], [50], []][i % 3]
        made.append(case_of(prompt, width, 15 - width, *next(rules), ends))
    return made


SEARCHES = cases()
OTHERS = [([7, 8, 9], drawn(12, seed=1)), ([*range(30, 42)], drawn(9, seed=2, n=3))]
MANY = dict(
    max_beam_width=8,
    max_n=3,
    max_seqs=16,
    max_requests=24,
    max_model_len=32,
    token_budget=16,
    min_bucket=16,
    max_stop_ids=2,
    watermark=0.0,
    spare_blocks=0,
    attention_backend="reference",
)

# Pools that hold the largest search beside the prefix, and little more.
ENGINES = {
    "block size 4": dict(block_size=4, num_blocks=28, min_bucket=8),
    "block size 4, static": dict(block_size=4, num_blocks=30, batching="static"),
    "block size 1, a host sync each step": dict(
        block_size=1, num_blocks=78, steps_per_sync=1, debug=True
    ),
    "block size 16, whole prompts": dict(
        block_size=16,
        num_blocks=14,
        chunked_prefill=False,
        token_budget=24,
        min_bucket=24,
    ),
    "block size 4, prefix cache": dict(
        block_size=4, num_blocks=28, prefix_caching=True
    ),
    "block size 4, nothing shared": dict(block_size=4, num_blocks=36, sharing=False),
    "pow2": dict(block_size=4, num_blocks=64, memory="pow2"),
}
SHARING = [*ENGINES][:5]
PREEMPTS = {*(SHARING[i] for i in (0, 2, 4)), "block size 4, nothing shared"}
on_every = functools.partial(
    newest_but, ["block size 4"], reason="beams are one kind of program"
)


@functools.cache
def engine_of(name):
    config = EngineConfig(**{**MANY, **ENGINES[name]})
    return Engine(golden_model(*SHARP), config)


@functools.cache
def expected():
    """What the oracle finds for each search."""
    return [search(case) for case in SEARCHES]


@functools.cache
def drawn_alone():
    """The tokens of the requests beside the searches, in an engine without beams."""
    config = EngineConfig(**{**MANY, "max_beam_width": 1}, num_blocks=64, block_size=4)
    engine = Engine(golden_model(*SHARP), config)
    return [all_tokens(engine.generate([p], params)[0]) for p, params in OTHERS]


def assert_found(output, beams):
    assert all_tokens(output) == [beam.tokens for beam in beams]
    scores = [completion.score for completion in output.outputs]
    np.testing.assert_allclose(scores, [b.score for b in beams], rtol=1e-4)
    for completion, beam in zip(output.outputs, beams):
        assert completion.cumulative_logprob == pytest.approx(beam.logprob, rel=1e-4)


def submit_all(engine):
    asked = [(case["prompt"], params_of(case)) for case in SEARCHES]
    asked[2:2] = OTHERS[:1]
    asked[5:5] = OTHERS[1:]
    return [engine.submit(prompt, params) for prompt, params in asked]


def check_all(names, outputs):
    ordered = [outputs[name] for name in names]
    others = ordered.pop(5), ordered.pop(2)
    assert [all_tokens(output) for output in others[::-1]] == drawn_alone()
    for output, beams in zip(ordered, expected(), strict=True):
        assert_found(output, beams)


@pytest.mark.long
@pytest.mark.parametrize("name", ENGINES)
def test_batch_and_memory_change_nothing(name):
    engine = engine_of(name)
    engine.reset_stats()
    names = submit_all(engine)
    check_all(names, serve(engine))
    preempted = engine.log[:, Field.PREEMPTED].sum()
    assert preempted >= 1 or name not in PREEMPTS
    assert_all_free(engine)


@pytest.mark.parametrize(
    "name",
    newest_but(
        [SHARING[0]],
        [SHARING[0], SHARING[4]],
        "prefix caches and beams are two programs that every Python compiles",
    ),
)
def test_a_shared_prefix_changes_nothing(name):
    engine = engine_of(name)
    prefix = engine.register_prefix(PREFIX)
    names = submit_all(engine)
    outputs = {}
    while engine.has_unfinished():
        assert_sound(engine)
        outputs |= {output.request_id: output for output in engine.step(max_steps=1)}
    check_all(names, outputs)
    engine.release_prefix(prefix)
    assert_all_free(engine)


@pytest.mark.parametrize(
    "name", on_every([SHARING[0], "block size 4, nothing shared", "pow2"])
)
@pytest.mark.parametrize("which", [2, 6])
def test_alone_it_is_the_same(name, which):
    engine = engine_of(name)
    case = SEARCHES[which]
    (output,) = engine.generate([case["prompt"]], params_of(case))
    assert_found(output, expected()[which])
    (output,) = engine.generate([case["prompt"]], params_of(case, n=2))
    assert_found(output, expected()[which][:2])


def test_beams_share_what_they_have_in_common():
    engine = engine_of("block size 4")
    engine.reset_stats()
    case = case_of([*range(20, 31)], 4, 16, 1.0, True, [])
    engine.submit(case["prompt"], params_of(case))
    outputs, copied = {}, []
    while engine.has_unfinished():
        outputs |= serve_one(engine)
        state = engine.state.scheduler
        rows = np.flatnonzero(np.asarray(state.sequences.status) == 1)
        if len(rows) < 4 or not engine.has_unfinished():
            continue
        tokens = np.asarray(state.requests.tokens)[state.sequences.request[rows]]
        length = int(state.sequences.length[rows[0]])
        tables = np.asarray(state.sequences.block_table)[rows]
        # The prompt's blocks are one; so are those of beams with one history, as long
        # as it was one beam's.
        assert (tables[:, :2] == tables[0, :2]).all()
        for a, b in itertools.combinations(range(4), 2):
            shared = (tables[a] == tables[b]) & (tables[a] > 0)
            for logical in np.flatnonzero(shared):
                end = min(4 * (logical + 1), length)
                assert (tokens[a, :end] == tokens[b, :end]).all()
        copied.append(engine.log[-1, Field.COPIED_BLOCKS])
    # At most the last block of each beam, in any step.
    assert 0 < max(copied) <= 3
    log = engine.log
    assert log[:, Field.TOKENS].sum() == 11 + 4 * 15
    saved = 1 - log[:, Field.PHYSICAL_BLOCKS].sum() / log[:, Field.LOGICAL_BLOCKS].sum()
    assert saved > 0.3


def serve_one(engine):
    assert_sound(engine)
    return {output.request_id: output for output in engine.step(max_steps=1)}


# ------------------------------------------------------------------ ends


def test_it_stops_at_the_model_length():
    engine = engine_of("block size 4")
    prompt = [*range(20, 48)]
    case = case_of(prompt, 3, 4, 1.0, False, [])
    params = SamplingParams(n=3, beam_width=3, max_tokens=None, ignore_eos=True)
    (output,) = engine.generate([prompt], params)
    assert_found(output, search(case))
    assert {len(tokens) for tokens in all_tokens(output)} == {4}


@pytest.mark.parametrize(
    "name", on_every(["block size 4", "block size 4, nothing shared"])
)
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_an_aborted_search_gives_everything_back(name, after):
    engine = engine_of(name)
    case = case_of([*range(20, 41)], 4, 8, 1.0, False, [])
    first = engine.submit(case["prompt"], params_of(case))
    second = engine.submit([9, 8, 7], params_of(case, n=1) if after else drawn(3))
    if after:
        engine.step(max_steps=after)
    engine.abort(first)
    outputs = serve(engine)
    aborted = outputs[first].outputs
    assert {c.finish_reason for c in aborted} == {"abort"}
    assert {c.score for c in aborted} == {None}
    assert outputs[second].outputs[0].finish_reason == "length"
    assert_all_free(engine)


@SAME_KIND
def test_a_search_that_waits_or_was_preempted_can_be_aborted():
    engine = engine_of("block size 4, nothing shared")
    engine.reset_stats()
    case = case_of([*range(20, 29)], 6, 9, 1.0, False, [])
    names = [engine.submit(case["prompt"], params_of(case)) for _ in range(2)]
    engine.step(max_steps=1)
    while not engine.log[:, Field.PREEMPTED].any():
        assert engine.has_unfinished(), "the second one was never preempted"
        engine.step(max_steps=1)
    engine.abort(names[1])
    outputs = serve(engine)
    assert_found(outputs[names[0]], search(case))
    assert {c.finish_reason for c in outputs[names[1]].outputs} == {"abort"}
    assert_all_free(engine)


def test_only_what_it_found_is_returned():
    engine = engine_of("block size 4")
    case = SEARCHES[2]
    name = engine.submit(case["prompt"], params_of(case), stream=True)
    (output,) = engine.stream(name)
    assert output.finished
    assert_found(output, expected()[2])


# ------------------------------------------------------------------ refusals


def test_what_does_not_go_with_beams_is_refused():
    refused = {
        "temperature is 0.7 and beam_width 4; a beam search goes with 1.0 only: leave "
        "temperature or beam_width out": dict(temperature=0.7),
        "best_of is 4 and beam_width 4; a beam search goes with None only: leave "
        "best_of or beam_width out": dict(best_of=4),
        "stop is ('a',) and beam_width 4; a beam search goes with () only: leave stop "
        "or beam_width out": dict(stop="a"),
        "seed is 3 and beam_width 4; a beam search goes with None only: leave seed or "
        "beam_width out": dict(seed=3),
        "logprobs is 2 and beam_width 4; a beam search goes with 0 only: leave "
        "logprobs or beam_width out": dict(logprobs=2),
        "n is 5 and beam_width 4; a search finds as many sequences as it has beams: "
        "lower n or raise beam_width": dict(n=5),
        "early_stopping is 'maybe'; it must be False, True or 'never'": dict(
            early_stopping="maybe"
        ),
        "length_penalty is inf; it must be finite": dict(length_penalty=float("inf")),
    }
    for message, fields in refused.items():
        with pytest.raises(RequestError) as error:
            SamplingParams(beam_width=4, **fields)
        assert str(error.value) == message
    SamplingParams(beam_width=4, temperature=0.0)
    with pytest.raises(RequestError, match="beam_width is 0; it must be 1 or more"):
        SamplingParams(beam_width=0)


def test_what_an_engine_cannot_serve_is_refused():
    engine = engine_of("block size 4")
    with pytest.raises(RequestError) as error:
        engine.submit([3], SamplingParams(beam_width=9))
    assert str(error.value) == (
        "beam_width is 9 and max_beam_width 8; lower it or raise "
        "EngineConfig.max_beam_width"
    )
    with pytest.raises(RequestError, match="sequences take up to 64 blocks"):
        engine.submit([3], SamplingParams(beam_width=8, max_tokens=None))
    unshared = engine_of("block size 4, nothing shared")
    with pytest.raises(RequestError, match="sequences take up to 48 blocks"):
        unshared.submit([3] * 8, SamplingParams(beam_width=8, max_tokens=16))
    engine.generate([[3] * 8], SamplingParams(beam_width=6, max_tokens=16))


# ------------------------------------------------------------------ candidates


@pytest.mark.parametrize(
    "vocab_size",
    newest_but([5, 1000], [5, 128, 256, 1000, 4096], "sizes of the same sums"),
)
@pytest.mark.parametrize("count", [1, 4, 24])
def test_the_likeliest_are_those_of_a_sort(vocab_size, count):
    rng = np.random.default_rng(vocab_size + count)
    # Few different values, so that there are ties.
    logits = rng.integers(0, 40, (6, vocab_size)).astype(np.float32)
    logits[0] = 1.0
    found = jax.jit(likeliest, static_argnums=1)(jnp.asarray(logits), count)
    real = min(count, vocab_size)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :real]
    np.testing.assert_array_equal(found.tokens[:, :real], order)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    expected = np.take_along_axis(log_probs, order, axis=1)
    np.testing.assert_allclose(found.logprobs[:, :real], expected, rtol=1e-5)
    assert (np.asarray(found.logprobs[:, real:]) == -np.inf).all()


def test_texts_move_without_a_copy_of_all_of_them():
    engine = engine_of("block size 4")
    text = engine._device.programs.run.as_text()
    tokens = engine.state.scheduler.requests.tokens
    assert operations_on(text, ",".join(map(str, tokens.shape))) <= IN_PLACE
