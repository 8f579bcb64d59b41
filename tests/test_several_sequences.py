"""Requests for several sequences at the engine's interface: outputs, ends, streams."""

import dataclasses
import itertools

import pytest
from engines import (
    all_tokens,
    assert_all_free,
    assert_sound,
    drawn,
    greedy,
    make_engine,
    serve,
    text,
    tiny_model,
)

from paged_jax import Engine, RequestError, SamplingParams
from paged_jax.requests import RequestStatus

PROMPT = [3, 4, 5, 6, 7]
LONG = [*range(61, 79)]


@pytest.fixture(scope="module")
def shared():
    settings = dict(max_n=4, num_blocks=26, max_seqs=6, max_requests=8)
    return make_engine(**settings, preemption="recompute", debug=True)


@pytest.fixture
def engine(shared):
    yield shared
    assert not shared.has_unfinished()
    assert_all_free(shared)


def generate_one(engine, params, prompt=PROMPT):
    return engine.generate([prompt], params)[0]


# ------------------------------------------------------------------ outputs


def test_a_request_has_one_output_for_each_sequence(engine):
    output = generate_one(engine, drawn(9, seed=9, n=3, logprobs=2))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    for completion in output.outputs:
        assert len(completion.token_ids) == len(completion.logprobs) == 9
        assert completion.text == text(completion.token_ids)
        assert completion.finish_reason == "length"
        own = [row[t] for t, row in zip(completion.token_ids, completion.logprobs)]
        assert completion.cumulative_logprob == pytest.approx(sum(own))
    assert len(set(all_tokens(output))) == 3


def test_best_of_returns_the_likeliest_first(engine):
    four = generate_one(engine, drawn(9, seed=5, n=4)).outputs
    ranked = sorted(four, key=lambda c: -c.cumulative_logprob)
    assert ranked != list(four), "the draws come in order: choose another seed"
    for n in (1, 2, 4):
        best = generate_one(engine, drawn(9, seed=5, n=n, best_of=4)).outputs
        assert [c.token_ids for c in best] == [c.token_ids for c in ranked[:n]]
        assert [c.index for c in best] == list(range(n))
    alone = generate_one(engine, drawn(9, seed=5, best_of=1))
    assert all_tokens(alone) == [four[0].token_ids]


def test_best_of_is_returned_at_the_end_only(engine):
    name = engine.submit(PROMPT, drawn(30, seed=5, n=2, best_of=3), stream=True)
    (output,) = engine.stream(name)
    assert output.finished and len(output.outputs) == 2


def test_more_than_the_engine_serves_is_refused(engine):
    for params, name in ((drawn(3, n=5), "n"), (drawn(3, n=2, best_of=5), "best_of")):
        with pytest.raises(RequestError) as error:
            engine.submit(PROMPT, params)
        assert str(error.value) == (
            f"{name} is 5 and the engine serves 4 sequences a request; raise "
            "EngineConfig.max_n"
        )
    with pytest.raises(RequestError, match="the engine serves 1 sequences a request"):
        make_engine().submit(PROMPT, drawn(3, n=2))


def test_times_are_those_of_the_whole_request(engine):
    (output,) = engine.generate([PROMPT], drawn(12, seed=5, n=4))
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time
    assert m.first_token_time <= m.finished_time


def test_the_tokens_of_all_sequences_are_counted(engine):
    engine.reset_stats()
    outputs = engine.generate([PROMPT, [8]], [drawn(7, seed=5, n=4), greedy(5, n=2)])
    counted = sum(len(tokens) for output in outputs for tokens in all_tokens(output))
    assert engine.stats.output_tokens == counted == 4 * 7 + 2 * 5
    assert engine.schedule_us() > 0


def test_more_groups_than_the_device_holds_wait_on_the_host(engine):
    prompts = [[3 + i] * 6 for i in range(9)]
    params = [drawn(6, seed=i, n=1 + i % 4) for i in range(9)]
    outputs = engine.generate(prompts, params)
    assert [len(o.outputs) for o in outputs] == [p.n for p in params]
    for prompt, one, output in zip(prompts, params, outputs):
        assert all_tokens(generate_one(engine, one, prompt)) == all_tokens(output)


# ------------------------------------------------------------------ ends


def test_each_sequence_ends_where_it_stops(engine):
    free = all_tokens(generate_one(engine, drawn(12, seed=9, n=4)))
    # A token of the second one that ends it halfway; of the others, wherever it is.
    stop = next(t for t in free[1][4:] if t not in free[1][:4])
    output = generate_one(engine, drawn(12, seed=9, n=4, stop_token_ids=[stop]))
    for completion, tokens in zip(output.outputs, free):
        end = tokens.index(stop) + 1 if stop in tokens else 12
        assert completion.token_ids == tokens[:end]
        assert completion.finish_reason == ("stop" if stop in tokens else "length")
        # The stop token is no part of the text.
        assert completion.text == text(tokens[: end - (stop in tokens)])
    reasons = {c.finish_reason for c in output.outputs}
    assert reasons == {"stop", "length"}, "choose another seed"


def test_the_first_sequence_may_end_with_its_first_token(engine):
    free = all_tokens(generate_one(engine, drawn(12, seed=9, n=3)))
    assert len({tokens[0] for tokens in free}) > 1
    params = drawn(12, seed=9, n=3, stop_token_ids=[free[0][0]])
    output = generate_one(engine, params)
    assert output.outputs[0].token_ids == free[0][:1]
    assert {len(tokens) for tokens in all_tokens(output)} > {1}
    one = generate_one(engine, drawn(1, seed=9, n=3))
    assert all_tokens(one) == [tokens[:1] for tokens in free]


def test_without_max_tokens_each_sequence_goes_on_to_the_model_length(engine):
    output = generate_one(engine, drawn(None, seed=9, n=3), [3] * 50)
    assert [len(tokens) for tokens in all_tokens(output)] == [14] * 3
    assert {c.finish_reason for c in output.outputs} == {"length"}


@pytest.mark.parametrize("steps", [1, 16])
def test_stop_strings_end_their_own_sequence(engine, steps):
    free = all_tokens(generate_one(engine, drawn(20, seed=9, n=3)))
    stops = [text(free[0][4:6]), text(free[2][9:12])]
    params = drawn(20, seed=9, n=3, stop=stops)
    before = engine.stats.output_tokens
    name = engine.submit(PROMPT, params)
    output = serve(engine, max_steps=steps)[name]
    first, second, third = output.outputs
    assert first.token_ids == free[0][:6] and first.stop_reason == stops[0]
    assert first.text == text(free[0][:4])
    assert second.token_ids == free[1] and second.finish_reason == "length"
    assert third.token_ids == free[2][:12] and third.stop_reason == stops[1]
    # Tokens past the stop strings are dropped, and not counted.
    assert engine.stats.output_tokens - before == 6 + 20 + 12


def test_pieces_of_each_stream_add_up(engine):
    free = all_tokens(generate_one(engine, drawn(30, seed=9, n=3)))
    stop = text(free[1][5:8])
    name = engine.submit(PROMPT, drawn(30, seed=9, n=3, stop=stop), stream=True)
    seen = []
    while engine.has_unfinished():
        seen += engine.step(max_steps=2)
    assert len(seen) > 5 and all(output.request_id == name for output in seen)
    for before, after in itertools.pairwise(seen):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
            assert new.text.startswith(old.text)
            assert old.finish_reason is None or new == old
    ends = [c.finish_reason for c in seen[-1].outputs]
    assert ends == ["length", "stop", "length"]
    assert seen[-1].outputs[1].text == text(free[1][:5])
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]


# ------------------------------------------------------------------ preemption


def where(engine, name):
    """Where the device says each sequence of a request stands."""
    status = engine.state.scheduler.requests.status
    return [RequestStatus(int(status[s.slot])) for s in records(engine, name)]


def records(engine, name):
    return engine._table.records[name].sequences


def computing(engine, name):
    """Which of a request's sequences has a row with blocks; None if not one."""
    sequences = engine.state.scheduler.sequences
    rows = [int((sequences.request == s.slot).argmax()) for s in records(engine, name)]
    busy = [i for i, row in enumerate(rows) if int(sequences.num_blocks[row])]
    return busy[0] if len(busy) == 1 else None


class Contention:
    """Two requests that do not fit together; the second is preempted with some tokens.

    Attributes:
      outputs: by name, of what has ended.
    """

    def __init__(self, engine, params):
        self.engine, self.outputs = engine, {}
        self.first = engine.submit([60] * 20, drawn(25, seed=1, n=2))
        self.second = engine.submit(LONG, params)
        self.step()
        while where(engine, self.second)[-1] == RequestStatus.WAITING:
            self.step()
        while where(engine, self.second)[-1] != RequestStatus.WAITING:
            self.step()
        assert records(engine, self.second)[-1].length > len(LONG) + 1

    def step(self):
        outputs = self.engine.step(max_steps=1)
        self.outputs |= {output.request_id: output for output in outputs}
        assert_sound(self.engine)

    def finish(self):
        """Returns the second one's output; the first one's must be all there."""
        while self.engine.has_unfinished():
            self.step()
        lengths = [len(tokens) for tokens in all_tokens(self.outputs[self.first])]
        assert lengths == [25, 25]
        return self.outputs[self.second]


def test_members_that_ended_stay_ended_when_the_others_are_preempted(engine):
    params = drawn(24, seed=2, n=2, temperature=2.0)
    free = all_tokens(generate_one(engine, params, LONG))
    # The first one, which stands for the request in the queue, stops at once.
    assert free[0][0] not in free[1], "choose another seed"
    params = dataclasses.replace(params, stop_token_ids=[free[0][0]])
    both = Contention(engine, params)
    assert where(engine, both.second)[0] == RequestStatus.FINISHED_STOP
    assert all_tokens(both.finish()) == [free[0][:1], free[1]]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("which", ["the carrier", "one that waits for it"])
def test_one_ends_while_the_prompt_is_computed_again(engine, n, which):
    params = drawn({2: 24, 3: 18}[n], seed=3, n=n)
    free = all_tokens(generate_one(engine, params, LONG))
    both = Contention(engine, params)
    while computing(engine, both.second) is None:
        both.step()
    carrier = computing(engine, both.second)
    ends = carrier if which == "the carrier" else n - 1 - carrier
    # As when the host finds a stop string in what it has read late.
    slot = records(engine, both.second)[ends].slot
    engine._device.cancel([slot], RequestStatus.FINISHED_STOP)
    if ends == carrier:
        assert computing(engine, both.second) != carrier, "another takes over"
    output = both.finish()
    for i, (got, expected) in enumerate(zip(all_tokens(output), free)):
        if i == ends:
            assert got == expected[: len(got)] != expected
            assert output.outputs[i].finish_reason == "stop"
        else:
            assert got == expected


@pytest.mark.newest(reason="the same program, but for one comparison")
def test_the_victim_rule_is_an_argument(engine):
    def earliest_arrival(state):
        arrival = state.requests.arrival[state.sequences.request]
        running = state.sequences.status == 1
        return (arrival + ~running * 1000).argmin().astype("int32")

    other = Engine(tiny_model(), engine.config, victim=earliest_arrival)
    params = [drawn(25, seed=1, n=2), drawn(24, seed=3, n=2)]
    prompts = [[60] * 20, LONG]
    names = [other.submit(p, q) for p, q in zip(prompts, params)]
    statuses = []
    outputs = {}
    while other.has_unfinished():
        outputs |= {o.request_id: o for o in other.step(max_steps=1)}
        if names[0] in other._table.records:
            statuses.append(where(other, names[0]))
    ran = statuses.index([RequestStatus.RUNNING] * 2)
    assert [RequestStatus.WAITING] * 2 in statuses[ran:], "the first gave way"
    for name, prompt, one in zip(names, prompts, params):
        assert all_tokens(outputs[name]) == all_tokens(
            generate_one(engine, one, prompt)
        )
    assert_all_free(other)


def test_sampling_params_of_several():
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=3, best_of=5).num_sequences == 5
    SamplingParams(n=3, temperature=0)
    SamplingParams(n=1, best_of=1, temperature=0)
