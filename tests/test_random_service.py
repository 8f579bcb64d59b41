"""Everything at random times: requests, aborts, streams, prefixes that come and go."""

import functools
import random

import pytest
from engines import (
    all_tokens,
    assert_all_free,
    assert_sound,
    drawn,
    greedy,
    make_engine,
    text,
)

from paged_jax import RequestError

PREFIXES = [[*range(10, 19)], [*range(10, 14)], [20] * 6, [*range(10, 18)]]


def params(output, seed, **fields):
    if seed is None:
        return greedy(output, **fields)
    return drawn(output, seed=seed, **fields)


@functools.cache
def engine_of(kind):
    return make_engine(**KINDS[kind], max_n=4, num_blocks=22, max_seqs=6)


@functools.cache
def alone(prompt, output, seed, n):
    """Tokens of each sequence, by itself."""
    engine = engine_of("nothing shared")
    return all_tokens(engine.generate([prompt], params(output, seed, n=n))[0])


class Service:
    """An engine, what was asked of it, and what it has returned."""

    def __init__(self, engine, rng):
        self.engine, self.rng = engine, rng
        self.expected, self.outputs, self.held = {}, {}, []

    def take(self, outputs):
        for output in outputs:
            if output.finished:
                assert output.request_id not in self.outputs, "returned twice"
                self.outputs[output.request_id] = output.outputs

    def submit(self):
        rng = self.rng
        prefix = rng.choice([[], [], *PREFIXES])
        size = rng.randint(0 if prefix else 1, 12)
        prompt = (*prefix, *(rng.randint(30, 33) for _ in range(size)))
        output, seed = rng.choice([1, 3, 10, 25]), rng.choice([None, None, 1, 2])
        # As many as fit beside two prefixes.
        n = rng.choice([1, 1, 2, 3, 4]) if output < 25 else 1
        sequences, fields = alone(prompt, output, seed, n), {"n": n}
        if output > 3 and rng.random() < 0.3:
            tokens, at = rng.choice(sequences), rng.randrange(output - 1)
            stop = fields["stop"] = text(tokens[at : at + 2])
            sequences = [
                tokens[: text(tokens).index(stop) + 2]
                if stop in text(tokens)
                else tokens
                for tokens in sequences
            ]
        name = self.engine.submit(
            prompt, params(output, seed, **fields), stream=rng.random() < 0.3
        )
        self.expected[name] = sequences

    def register(self):
        if len(self.held) < 2:
            try:
                self.held.append(self.engine.register_prefix(self.rng.choice(PREFIXES)))
            except RequestError as error:
                assert "does not fit" in str(error)

    def release(self):
        if self.held:
            name = self.held.pop(self.rng.randrange(len(self.held)))
            self.engine.release_prefix(name)

    def some_request(self):
        live = [n for n in self.expected if n not in self.outputs]
        live = [n for n in live if n in self.engine._table.records]
        return self.rng.choice(live) if live else None

    def abort(self):
        if (name := self.some_request()) is not None:
            self.engine.abort(name)
            self.expected[name] = None

    def stream(self):
        if (name := self.some_request()) is not None:
            for output in self.engine.stream(name):
                self.take([output])
                if self.rng.random() < 0.3:
                    break

    def step(self):
        self.take(self.engine.step(max_steps=self.rng.choice([1, 2, 5, 16])))

    def finish(self):
        while self.engine.has_unfinished():
            self.take(self.engine.step())
        while self.held:
            self.release()


KINDS = {
    "continuous": {},
    "static": {"batching": "static"},
    "prefix cache": {"prefix_caching": True},
    "prefix cache, static": {"prefix_caching": True, "batching": "static"},
    "recomputed": {"preemption": "recompute"},
    "swapped if there is room": {"preemption": "swap", "host_blocks": 9},
    "nothing shared": {"sharing": False},
}
SHARING = [*KINDS][:6]


@pytest.mark.parametrize("kind", SHARING)
@pytest.mark.parametrize("seed", range(6))
def test_every_request_is_returned_once_with_its_own_tokens(seed, kind):
    engine = engine_of(kind)
    service = Service(engine, random.Random(seed))
    events = [Service.submit] * 9 + [Service.step] * 5
    events += [Service.register, Service.release, Service.abort, Service.stream]
    for _ in range(80):
        service.rng.choice(events)(service)
        assert_sound(engine)
    service.finish()
    assert_all_free(engine)
    assert set(service.outputs) == set(service.expected)
    for name, expected in service.expected.items():
        outputs = service.outputs[name]
        reasons = {output.finish_reason for output in outputs}
        if expected is None:
            assert reasons <= {"abort", "length", "stop"}
        else:
            assert [output.token_ids for output in outputs] == expected
            assert reasons <= {"length", "stop"}
