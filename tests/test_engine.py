"""The engine's interface: requests in, outputs out."""

import dataclasses
import itertools
import time

import jax
import numpy as np
import pytest
import tokenizers
from engines import (
    assert_all_free,
    counted,
    greedy,
    idle,
    letter,
    make_engine,
    prompts,
    serve,
    text,
    tiny_model,
    tokens_of,
)
from oracles import llama as oracle
from pythons import SAME_KIND

from paged_jax import (
    ConfigError,
    Engine,
    EngineConfig,
    RequestError,
    SamplingParams,
    device_loop,
    step,
)
from paged_jax.engine import MAX_SEED
from paged_jax.tokenizer import Tokenizer
from pallas_kernels import compat


@pytest.fixture(scope="module")
def shared():
    engine = make_engine()
    engine.warmup()
    return engine


@pytest.fixture
def engine(shared):
    """An idle engine, which the test must leave without a block in use."""
    yield shared
    left = list(serve(shared))
    shared.reset_stats()
    assert not left, "the test has left requests"
    assert_all_free(shared)


def generate_one(engine, prompt, params):
    return engine.generate([prompt], params)[0].outputs[0]


# ------------------------------------------------------------------ outputs


def test_outputs_come_in_the_order_of_the_prompts(engine):
    asked = prompts(9, 20)  # more than fit on the device at once
    lengths = [12, 1, 7, 3, 9, 2, 8, 1, 5]
    outputs = engine.generate(asked, [greedy(n) for n in lengths])
    assert [list(o.prompt_token_ids) for o in outputs] == asked
    assert [len(tokens) for tokens in tokens_of(outputs)] == lengths
    model = tiny_model()
    for prompt, tokens in zip(asked, tokens_of(outputs)):
        oracle.assert_greedy(model.config, model.params, prompt, tokens)
    for output in outputs:
        assert output.finished and output.prompt is None
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].stop_reason is None
        assert output.outputs[0].index == 0


def test_text_goes_in_and_comes_out(engine):
    prompt = text([5, 9, 77])
    output = engine.generate(prompt, greedy(6))[0]
    assert output.prompt == prompt and output.prompt_token_ids == (5, 9, 77)
    completion = output.outputs[0]
    assert completion.text == text(completion.token_ids)
    same = generate_one(engine, [5, 9, 77], greedy(6))
    assert same.token_ids == completion.token_ids


def test_one_list_of_token_ids_is_one_prompt(engine):
    for prompt in ([3, 4, 5], (3, 4, 5), np.array([3, 4, 5])):
        (output,) = engine.generate(prompt, greedy(2))
        assert output.prompt_token_ids == (3, 4, 5)
    assert engine.generate([]) == []


def test_the_sequence_ends_at_the_model_length(engine):
    prompt = list(range(3, 60))
    output = generate_one(engine, prompt, greedy(500))
    assert len(output.token_ids) == 64 - len(prompt)
    assert output.finish_reason == "length"


def test_without_max_tokens_the_model_length_ends_the_sequence(engine):
    output = generate_one(engine, [3] * 50, greedy(None))
    assert len(output.token_ids) == 14 and output.finish_reason == "length"


def test_any_top_k_above_the_vocabulary_keeps_all(engine):
    params = SamplingParams(seed=1, max_tokens=9, ignore_eos=True)
    all_kept = generate_one(engine, [3, 4], params).token_ids
    for top_k in (128, 2**40):
        one = dataclasses.replace(params, top_k=top_k)
        assert generate_one(engine, [3, 4], one).token_ids == all_kept


def test_a_prompt_of_all_but_one_token_gets_that_one(engine):
    assert len(generate_one(engine, [9] * 63, greedy(5)).token_ids) == 1


def test_times_are_in_order(engine):
    before = time.perf_counter()
    outputs = engine.generate(prompts(8, 30), greedy(9))
    after = time.perf_counter()
    for m in (output.metrics for output in outputs):
        assert before <= m.arrival_time <= m.first_scheduled_time
        assert m.first_scheduled_time <= m.first_token_time <= m.finished_time <= after
    firsts = [o.metrics.first_scheduled_time for o in outputs]
    assert firsts == sorted(firsts), "first come, first served"


# ------------------------------------------------------------------ ends


def test_end_of_text_ends_a_request_unless_ignored(engine):
    free = generate_one(engine, [3, 4, 5], greedy(12))
    eos = free.token_ids[5]
    model = tiny_model()
    ending = dataclasses.replace(model.config, eos_token_ids=(eos,))
    other = make_engine(model._replace(config=ending))
    place = free.token_ids.index(eos)
    output = generate_one(other, [3, 4, 5], greedy(12, ignore_eos=False))
    assert output.token_ids == free.token_ids[: place + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", eos)
    output = generate_one(other, [3, 4, 5], greedy(12))
    assert output.token_ids == free.token_ids
    # A stop id counts even where end-of-text is ignored.
    output = generate_one(other, [3, 4, 5], greedy(12, stop_token_ids=[eos]))
    assert output.token_ids == free.token_ids[: place + 1]


def test_stop_token_ids_end_a_request(engine):
    free = generate_one(engine, [7, 8], greedy(12)).token_ids
    stop = free[6]
    output = generate_one(engine, [7, 8], greedy(12, stop_token_ids=[1, stop]))
    assert output.token_ids == free[: free.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("steps", [1, 16])
def test_a_stop_token_is_no_part_of_the_text(engine, steps):
    free = generate_one(engine, [7, 8], greedy(12)).token_ids
    stop = free[6]
    end = free.index(stop)
    params = greedy(12, stop_token_ids=[stop], stop=letter(stop))
    name = engine.submit([7, 8], params, stream=True)
    shown = []
    while engine.has_unfinished():
        shown += [output.outputs[0] for output in engine.step(max_steps=steps)]
    assert shown[-1].text == text(free[:end])
    assert shown[-1].token_ids == free[: end + 1]
    assert shown[-1].stop_reason == stop, "it is not looked at for stop strings"
    assert all(shown[-1].text.startswith(piece.text) for piece in shown), name
    # The last token that max_tokens allows may be a stop token, too.
    last = generate_one(engine, [7, 8], greedy(end + 1, stop_token_ids=[stop]))
    assert (last.finish_reason, last.text) == ("stop", text(free[:end]))
    assert generate_one(engine, [7, 8], greedy(end + 1)).text == text(free[: end + 1])


@pytest.mark.parametrize("steps", [1, 16])
def test_stop_strings_end_a_request_across_tokens(engine, steps):
    free = generate_one(engine, [3, 4, 5], greedy(20)).token_ids
    stop = text(free[7:10])
    end = text(free).index(stop) + 3  # tokens are characters
    params = greedy(20, stop=["never there", stop])
    before = engine.stats.output_tokens
    name = engine.submit([3, 4, 5], params)
    other = engine.submit([11, 12], greedy(30))
    outputs = serve(engine, max_steps=steps)
    completion = outputs[name].outputs[0]
    assert completion.token_ids == free[:end]
    assert completion.text == text(free[: end - 3])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    # Tokens past the stop string are dropped, and not counted.
    assert engine.stats.output_tokens - before == end + 30
    metrics = outputs[name].metrics
    assert metrics.finished_time >= metrics.first_token_time
    assert len(completion.token_ids) < 20
    assert len(outputs[other].outputs[0].token_ids) == 30


@pytest.mark.parametrize("steps", [1, 16])
def test_a_stop_string_may_end_inside_a_token(steps):
    # Token i is "<i>"; the stop string starts in one token and ends in another.
    vocab = {f"<{i}>": i for i in range(128)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "<0>"))
    backend.decoder = tokenizers.decoders.Fuse()
    engine = make_engine(tiny_model()._replace(tokenizer=Tokenizer(backend)))
    free = generate_one(engine, [3, 4, 5], greedy(20))
    a, b = free.token_ids[7:9]
    stop = f"{a}><{str(b)[0]}"
    engine.submit([3, 4, 5], greedy(20, stop=stop), request_id="stopped")
    output = serve(engine, max_steps=steps)["stopped"].outputs[0]
    assert output.text == free.text[: free.text.index(stop)]
    end = next(
        i for i in range(21) if stop in "".join(f"<{t}>" for t in free.token_ids[:i])
    )
    assert output.token_ids == free.token_ids[:end] and end <= 9
    assert output.stop_reason == stop
    assert_all_free(engine)


def test_a_stop_string_in_the_prompt_does_not_count(engine):
    output = generate_one(engine, text([3, 4, 5]), greedy(4, stop=text([3, 4])))
    assert output.finish_reason == "length"


def test_the_earliest_of_several_stop_strings_wins(engine):
    free = generate_one(engine, [3, 4, 5], greedy(20)).token_ids
    late, early = text(free[12:14]), text(free[5:8])
    output = generate_one(engine, [3, 4, 5], greedy(20, stop=[late, early]))
    assert output.stop_reason == early
    assert output.text == text(free)[: text(free).index(early)]


def test_step_returns_requests_with_stop_strings_at_their_end_only(engine):
    engine.submit([3, 4, 5], greedy(6, stop="never there"))
    seen = []
    while engine.has_unfinished():
        seen += engine.step(max_steps=1)
    assert [output.finished for output in seen] == [True]


# ------------------------------------------------------------------ log-probabilities


def test_log_probabilities_are_those_of_the_model(engine):
    prompt = [3, 9, 27, 81]
    output = generate_one(engine, prompt, greedy(8, logprobs=3))
    model = tiny_model()
    logits = oracle.logits(model.config, model.params, [*prompt, *output.token_ids])
    logits = logits[len(prompt) - 1 : -1]
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    total = 0.0
    for row, token, got in zip(expected, output.token_ids, output.logprobs):
        best = np.argsort(-row)[:3].tolist()
        assert list(got) == best and token == best[0]
        np.testing.assert_allclose(list(got.values()), row[best], atol=1e-4)
        total += row[token]
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_a_drawn_token_is_reported_beside_the_likeliest(engine):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    params = dataclasses.replace(params, logprobs=1)
    output = generate_one(engine, [3, 4], params)
    assert {len(row) for row in output.logprobs} == {1, 2}
    for token, row in zip(output.token_ids, output.logprobs):
        assert row[token] <= max(row.values())
    none = generate_one(engine, [3, 4], dataclasses.replace(params, logprobs=0))
    assert [list(row) for row in none.logprobs] == [[t] for t in none.token_ids]
    without = generate_one(engine, [3, 4], dataclasses.replace(params, logprobs=None))
    assert without.logprobs is None
    assert without.cumulative_logprob == pytest.approx(output.cumulative_logprob)


# ------------------------------------------------------------------ random draws


def drawn(seed=None, **fields):
    return SamplingParams(
        temperature=1.5, seed=seed, max_tokens=12, ignore_eos=True, **fields
    )


def test_a_seed_repeats_its_draws_in_any_company(engine):
    alone = generate_one(engine, [3, 4, 5], drawn(seed=7)).token_ids
    assert alone == generate_one(engine, [3, 4, 5], drawn(seed=7)).token_ids
    assert alone != generate_one(engine, [3, 4, 5], drawn(seed=8)).token_ids
    assert alone != generate_one(engine, [3, 4, 5], drawn(seed=7 + 2**32)).token_ids
    company = prompts(5, 15)
    params = [drawn(seed=1), drawn(), drawn(seed=7), greedy(12), drawn(top_k=2)]
    together = engine.generate([*company, [3, 4, 5]], [*params, drawn(seed=7)])
    assert tokens_of(together)[-1] == alone


def test_each_token_is_a_draw_of_its_own(engine):
    # So hot that all 128 tokens are about as likely.
    params = SamplingParams(temperature=1e4, seed=5, max_tokens=60, ignore_eos=True)
    assert len(set(generate_one(engine, [3, 4], params).token_ids)) > 30


def test_requests_without_a_seed_differ(engine):
    outputs = engine.generate([[3, 4, 5]] * 6, drawn())
    assert len(set(tokens_of(outputs))) == 6


def test_the_engines_seed_repeats_all_draws():
    def draws(seed):
        engine = make_engine(seed=seed)
        return tokens_of(engine.generate([[3, 4, 5]] * 3, drawn()))

    assert draws(1) == draws(1) != draws(2)


# ------------------------------------------------------------------ over time


def test_pieces_of_a_stream_add_up(engine):
    name = engine.submit([3, 4, 5], greedy(40))
    other = engine.submit([6, 7], greedy(3))
    seen = [output.outputs[0] for output in engine.stream(name)]
    assert len(seen) > 2
    for before, after in itertools.pairwise(seen):
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert after.text.startswith(before.text)
        assert len(after.token_ids) > len(before.token_ids)
    assert [c.finish_reason for c in seen] == [None] * (len(seen) - 1) + ["length"]
    assert seen[-1].text == text(seen[-1].token_ids) and len(seen[-1].token_ids) == 40
    # The other one ended meanwhile; its output was kept.
    assert engine.has_unfinished()
    (output,) = engine.step()
    assert output.request_id == other and output.finished


def test_a_stream_does_not_show_what_may_become_a_stop_string(engine):
    free = generate_one(engine, [3, 4, 5], greedy(24)).token_ids
    stop = text(free[8:14])
    name = engine.submit([3, 4, 5], greedy(24, stop=stop), stream=True)
    shown = ""
    while engine.has_unfinished():
        for output in engine.step(max_steps=1):
            assert output.request_id == name
            assert output.outputs[0].text.startswith(shown)
            shown = output.outputs[0].text
    assert shown == text(free)[: text(free).index(stop)]


def test_a_stream_can_be_left_and_another_one_read(engine):
    first = engine.submit([3, 4, 5], greedy(30))
    second = engine.submit([6, 7], greedy(20))
    for output in engine.stream(first):
        if len(output.outputs[0].token_ids) > 8:
            break
    seen = list(engine.stream(second))
    assert seen[-1].finished and len(seen[-1].outputs[0].token_ids) == 20
    seen = list(engine.stream(first))
    assert seen[-1].finished and len(seen[-1].outputs[0].token_ids) == 30


def test_a_stream_may_be_left_between_two_outputs_of_one_run(engine):
    name = engine.submit([3, 4, 5], greedy(30), stream=True)
    # Registering keeps what the others return: first a piece of it, then its end.
    prefixes = [engine.register_prefix([token] * 9) for token in (8, 9)]
    for output in engine.stream(name):
        assert not output.finished
        break
    assert engine.has_unfinished()
    (output,) = engine.step()
    assert output.finished and len(output.outputs[0].token_ids) == 30
    for prefix in prefixes:
        engine.release_prefix(prefix)


def test_streams_read_one_after_the_other(engine):
    names = [engine.submit([token], greedy(4)) for token in (5, 6, 7)]
    for name in names:
        *_, last = engine.stream(name)
        assert last.request_id == name and last.finished


def test_a_stream_ends_when_its_request_is_returned_elsewhere(engine):
    name = engine.submit([3, 4, 5], greedy(40))
    stream = engine.stream(name)
    next(stream)
    serve(engine)
    assert list(stream) == []


def test_requests_that_arrive_later_are_served_beside_the_first(engine):
    first = engine.submit([3, 4, 5], greedy(30))
    done = [engine.step(max_steps=5)]
    second = engine.submit([6, 7], greedy(2))
    while second not in {o.request_id for outputs in done for o in outputs}:
        done.append(engine.step(max_steps=1))
    assert first not in {o.request_id for outputs in done for o in outputs}
    assert engine.has_unfinished()
    outputs = serve(engine)
    assert tokens_of([outputs[first]]) == tokens_of(
        engine.generate([[3, 4, 5]], greedy(30))
    )


def test_generate_keeps_the_outputs_of_others(engine):
    name = engine.submit([3, 4, 5], greedy(2), request_id="mine")
    engine.generate([[6, 7]], greedy(20))
    assert engine.has_unfinished()
    assert list(serve(engine)) == [name] == ["mine"]


def test_generated_names_avoid_those_in_use(engine):
    taken = [engine.submit([3], greedy(2), request_id=str(n)) for n in range(200)]
    names = [engine.submit([4], greedy(2)) for _ in range(3)]
    assert len({*taken, *names}) == 203
    assert set(serve(engine)) == {*taken, *names}


def test_a_name_is_free_again_once_its_output_was_returned(engine):
    engine.submit([3], greedy(1), request_id="a")
    with pytest.raises(RequestError, match="'a' is in use; choose another"):
        engine.submit([4], greedy(1), request_id="a")
    serve(engine)
    engine.submit([4], greedy(1), request_id="a")
    serve(engine)


def test_step_without_requests_returns_nothing(engine):
    assert not engine.has_unfinished()
    assert engine.step() == []


# ------------------------------------------------------------------ conversations


def test_the_default_model_knows_the_capital_of_france():
    config = EngineConfig(
        max_model_len=96, full_length_requests=2, max_seqs=2, token_budget=32
    )
    engine = Engine.from_pretrained(config=config)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = engine.chat(question, SamplingParams(temperature=0, max_tokens=20))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.prompt == engine.chat_prompt(question)
    assert "What is the capital of France?" in output.prompt
    # The same, in several and as a stream.
    twice = engine.chat([question] * 2, greedy(20, ignore_eos=False))
    assert [o.outputs[0].text for o in twice] == [output.outputs[0].text] * 2
    name = engine.submit(output.prompt, greedy(20, ignore_eos=False))
    shown = ""
    for piece in engine.stream(name):
        assert piece.outputs[0].text.startswith(shown)
        shown = piece.outputs[0].text
    assert shown == output.outputs[0].text


def test_a_conversation_gets_no_second_start_token():
    # A tokenizer that starts every text with a token, and a template that does so too.
    model = tiny_model()
    plain = model.tokenizer.backend
    backend = tokenizers.Tokenizer.from_str(plain.to_str())
    start = letter(1)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, 1)]
    )
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    tokenizer = Tokenizer(
        backend, eos_token_ids=(2,), bos_token_id=1, chat_template=template
    )
    engine = make_engine(model._replace(tokenizer=tokenizer))
    (output,) = engine.chat([{"role": "user", "content": text([5, 6])}], greedy(2))
    assert output.prompt_token_ids == (1, 5, 6)
    (output,) = engine.generate(text([5, 6]), greedy(2))
    assert output.prompt_token_ids == (1, 5, 6)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(1), "the prompt is empty; give it at least one token"),
        ("", greedy(1), "the prompt is empty; give it at least one token"),
        (
            [3] * 64,
            greedy(1),
            "the prompt has 64 tokens and max_model_len is 64, which must hold one "
            "more; shorten the prompt or raise max_model_len",
        ),
        ([3, 4.5], greedy(1), "a prompt is [3, 4.5]; it must be text or a list of"),
        (["3"], greedy(1), "a prompt is ['3']; it must be text or a list of token ids"),
        (None, greedy(1), "a prompt is None; it must be text or a list of token ids"),
        ({"a": 3}, greedy(1), "a prompt is {'a': 3}; it must be text or a list of"),
        ([3, 128], greedy(1), "token id 128 is not in the vocabulary of 128 tokens"),
        ([-1], greedy(1), "token id -1 is not in the vocabulary of 128 tokens"),
        (
            [3],
            greedy(1, stop_token_ids=[500]),
            "token id 500 is not in the vocabulary of 128 tokens",
        ),
        (
            [3],
            greedy(1, logprobs=4),
            "logprobs is 4 and the engine records 3; raise EngineConfig.max_logprobs",
        ),
        (
            [3],
            greedy(1, stop_token_ids=range(8), ignore_eos=False),
            "the request has 8 stop ids",
        ),
        (
            [3],
            greedy(1, stop_token_ids=range(9)),
            "the request has 9 stop ids, end-of-text included, and the engine keeps 8; "
            "raise EngineConfig.max_stop_ids",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(engine, prompt, params, message):
    if "has 8" in message:  # end-of-text is one of them: it counts once, and fits
        generate_one(engine, prompt, params)
        return
    with pytest.raises(RequestError) as error:
        engine.submit(prompt, params)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert not engine.has_unfinished()


def test_generate_with_one_bad_prompt_submits_none(engine):
    for bad in ([], [3] * 64, ["not a token"]):
        with pytest.raises(ValueError):
            engine.generate([[3, 4], bad, [5]], greedy(2))
        assert not engine.has_unfinished()
    before = engine.stats.iterations
    engine.step()
    assert engine.stats.iterations == before


@pytest.mark.parametrize("prompts", [None, {"prompt": "a"}, 7])
def test_generate_wants_prompts(engine, prompts):
    with pytest.raises(RequestError, match="prompts is .*; it must be a prompt or a"):
        engine.generate(prompts)
    assert not engine.has_unfinished()


def test_generate_wants_one_params_or_one_each(engine):
    with pytest.raises(RequestError, match="3 prompts and 2 SamplingParams; give one"):
        engine.generate([[3], [4], [5]], [greedy(1)] * 2)
    assert not engine.has_unfinished()


def test_unknown_requests_are_refused(engine):
    with pytest.raises(RequestError, match="no request 'ghost' is being served"):
        engine.abort("ghost")
    with pytest.raises(RequestError, match="no request 'ghost' is being served"):
        engine.stream("ghost")


def test_text_needs_a_tokenizer():
    engine = make_engine(tiny_model()._replace(tokenizer=None))
    for call in (
        lambda: engine.generate("hello"),
        lambda: engine.chat([{"role": "user", "content": "hello"}]),
    ):
        with pytest.raises(RequestError, match="without a tokenizer; pass token ids"):
            call()
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.submit([3], greedy(1, stop="a"))


def test_whole_prompts_must_fit_the_budget():
    engine = make_engine(chunked_prefill=False)
    message = "the prompt has 17 tokens and token_budget is 16; without chunked_prefill"
    with pytest.raises(RequestError, match=message):
        engine.submit([3] * 17, greedy(1))
    engine.submit([3] * 16, greedy(1))


def test_the_dtype_must_be_that_of_the_model():
    message = "dtype is bfloat16 and the model was loaded as float32; load it with"
    with pytest.raises(ConfigError, match=message):
        make_engine(dtype="bfloat16")


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_the_seed_has_a_range(seed):
    make_engine(seed=MAX_SEED).generate([[3]], SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match=f"seed is {seed}; it must be from 0 to 4"):
        make_engine(seed=seed)


@pytest.mark.parametrize("divisors,limit", [((), 256), ((4.0,) * 4, 1024)])
def test_the_model_length_is_one_that_the_model_was_made_for(divisors, limit):
    # A linear scaling of the rotary embedding stretches it; one that keeps the fastest
    # frequencies has its longer context in the checkpoint.
    model = tiny_model(rope_divisors=divisors)
    make_engine(model, max_model_len=limit, num_blocks=limit)
    message = f"max_model_len is {limit + 1} and the model was made for {limit} tokens"
    with pytest.raises(ConfigError, match=f"^{message}; lower max_model_len$"):
        make_engine(model, max_model_len=limit + 1, num_blocks=2 * limit)
    mixed = tiny_model(rope_divisors=(1.0, 1.0, 2.0, 8.0))
    with pytest.raises(ConfigError, match="made for 256 tokens"):
        make_engine(mixed, max_model_len=257, num_blocks=1024)


@pytest.mark.skipif(not compat.has_mosaic(), reason="this jax is too old for pallas")
@pytest.mark.parametrize(
    "model,changes,message",
    [
        ({}, {}, "a 16-bit KV cache, .* or a quantised one, .* got float32"),
        ({}, {"kv_dtype": "bfloat16"}, r"takes head dims \(64, .*, 256\), got 8;"),
        ({"head_dim": 72}, {"kv_dtype": "float16"}, "takes head dims .*, got 72;"),
    ],
)
def test_what_the_pallas_backend_cannot_serve_is_refused_at_once(
    model, changes, message
):
    model = tiny_model(**model)
    with counted() as compilations, pytest.raises(ConfigError, match=message) as error:
        make_engine(model, attention_backend="pallas", **changes)
    assert "\n" not in str(error.value)
    assert compilations == []


@pytest.mark.skipif(compat.has_mosaic(), reason="this jax has the pallas backend")
def test_a_jax_without_the_pallas_backend_says_so_at_once():
    with pytest.raises(ConfigError, match=r"needs jax >= 0.11"):
        make_engine(attention_backend="pallas")


def test_a_pool_that_no_machine_can_hold_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="a KV cache of 1.* blocks takes .* GiB"):
        make_engine(num_blocks=10**13)


# ------------------------------------------------------------------ costs


def test_serving_compiles_nothing_after_warmup():
    engine = make_engine()
    engine.warmup()
    with counted() as compilations:
        engine.submit([3] * 40, greedy(3, stop=letter(127)), stream=True)
        engine.submit([4] * 3, drawn(seed=3, top_k=5, top_p=0.9, min_p=0.01))
        gone = [engine.submit([5] * 9, greedy(30)) for _ in range(8)]
        engine.step(max_steps=2)
        engine.abort(gone[0])
        engine.abort(gone[-1])
        serve(engine)
        prefix = engine.register_prefix([7] * 10)
        engine.generate([[7] * 12], greedy(4, logprobs=2))
        engine.release_prefix(prefix)
        idle(engine)
    assert compilations == []


class Reads:
    """Counts reads of device values, and those that happen elsewhere than they may."""

    def __init__(self, monkeypatch):
        self.calls, self.bytes, self.outside, self._inside = 0, 0, 0, False
        array = type(jax.numpy.zeros(1))
        value, get = array._value, jax.device_get

        def read(x):
            if not self._inside and x._npy_value is None:
                self.outside += 1
            return value.fget(x)

        def device_get(tree):
            self.calls += 1
            self.bytes += sum(x.nbytes for x in jax.tree.leaves(tree))
            self._inside = True
            try:
                return get(tree)
            finally:
                self._inside = False

        monkeypatch.setattr(array, "_value", property(read))
        monkeypatch.setattr(jax, "device_get", device_get)


def test_every_read_of_a_device_value_is_counted(engine, monkeypatch):
    # jax.transfer_guard does not see reads on the CPU, where arrays are the host's own
    # memory: the reads themselves are counted. It does see them on other devices.
    reads = Reads(monkeypatch)
    assert int(jax.numpy.arange(3)[1]) == 1 and reads.outside == 1
    with jax.transfer_guard_device_to_host("disallow"):
        engine.generate(prompts(8, 30), greedy(20))
    assert reads.outside == 1
    assert reads.calls == engine.stats.host_syncs > 0
    assert reads.bytes == engine.stats.host_read_bytes > 0


@SAME_KIND
def test_a_long_run_has_few_host_syncs_and_one_trace_for_each_bucket():
    # Settings of no other test, so that none of its programs is used.
    engine = make_engine(
        max_seqs=12, num_blocks=180, max_requests=64, max_logprobs=0, min_bucket=8
    )
    outputs = engine.generate(prompts(48, 24), [greedy(20 + i % 20) for i in range(48)])
    generated = sum(map(len, tokens_of(outputs)))
    assert engine.stats.output_tokens == generated > 1000
    assert engine.stats.host_syncs_per_token <= 0.005
    traced = {
        bucket: count
        for (program, bucket), count in step.TRACES.items()
        if program == engine._device._program
    }
    assert traced == {1: 1, 2: 1}


@SAME_KIND
@pytest.mark.parametrize("rows", [1, 4])
def test_few_rows_need_few_host_syncs_offline(rows):
    engine = make_engine(max_model_len=256, num_blocks=256, max_requests=16)
    outputs = engine.generate(prompts(rows, 8), greedy(240))
    assert engine.stats.output_tokens == sum(map(len, tokens_of(outputs))) == 240 * rows
    assert engine.stats.host_syncs_per_token <= 0.005
    # What waits on the host takes a place as soon as one is free and nobody waits on
    # the device: long runs cost it no steps.
    engine.reset_stats()
    engine.generate([[3 + i] for i in range(48)], greedy(40))
    assert engine.stats.host_syncs_per_token <= 0.005
    assert engine.stats.iterations <= 48 / 4 * 40 * 1.1


@SAME_KIND
def test_a_stream_is_read_once_every_16_tokens():
    engine = make_engine(max_model_len=256, num_blocks=256, max_requests=16)
    name = engine.submit([3], greedy(200), stream=True)
    sizes = [len(o.outputs[0].token_ids) for o in engine.stream(name)]
    assert max(b - a for a, b in itertools.pairwise([0, *sizes])) <= 16
    assert engine.stats.host_syncs_per_token <= 0.1
    # It does not matter how many others there are that nobody reads.
    name = engine.submit([4], greedy(64), stream=True)
    others = [engine.submit([5 + i], greedy(64)) for i in range(2)]
    sizes = [len(o.outputs[0].token_ids) for o in engine.stream(name)]
    assert max(b - a for a, b in itertools.pairwise([0, *sizes])) <= 16
    assert set(serve(engine)) == set(others)


@SAME_KIND
def test_an_interrupt_ends_a_long_run_and_loses_nothing(monkeypatch):
    settings = dict(max_model_len=256, num_blocks=256, max_requests=16)
    engine = make_engine(**settings)
    expected = tokens_of(engine.generate([[3]], greedy(240)))
    engine.reset_stats()
    name = engine.submit([3], greedy(240))

    def interrupt(value):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(device_loop, "_wait", interrupt)
        # 32 steps each are on the way then; the eighth fills the log.
        for _ in range(8):
            with pytest.raises(KeyboardInterrupt):
                engine.step(256)
        assert engine.stats.host_syncs == 0
        assert engine.step(256)[0].request_id == name  # no room: it reads
    assert engine.stats.host_syncs == 1
    assert engine.stats.iterations == len(engine.log) >= 240
    idle(engine)
    assert tokens_of(engine.generate([[3]], greedy(240))) == expected


def test_statistics_count_what_was_done(engine):
    outputs = engine.generate(prompts(7, 20), greedy(9))
    stats = engine.stats
    assert stats.output_tokens == 63 == sum(map(len, tokens_of(outputs)))
    assert stats.log.shape[0] == stats.iterations > 9
    assert 0 < stats.device_seconds
    engine.reset_stats()
    assert engine.stats.iterations == engine.stats.output_tokens == 0
    assert engine.log.shape[0] == 0
