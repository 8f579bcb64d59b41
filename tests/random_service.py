"""A service at random: requests, aborts, streams, prefixes that come and go.

Each request's tokens are compared with those it gets alone, and the invariants are
checked after every event. Tests run a few of these, `scripts/soak` any number.
"""

import functools
import random

from engines import (
    all_tokens,
    assert_all_free,
    assert_sound,
    drawn,
    greedy,
    make_engine,
    text,
)

from paged_jax import RequestError, SamplingParams

PREFIXES = [[*range(10, 19)], [*range(10, 14)], [20] * 6, [*range(10, 18)]]


KINDS = {
    "continuous": {},
    "static": {"batching": "static"},
    "prefix cache": {"prefix_caching": True},
    "prefix cache, static": {"prefix_caching": True, "batching": "static"},
    "nothing shared": {"sharing": False},
}


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

    def __init__(self, engine, rng, log):
        self.engine, self.rng, self.log = engine, rng, log
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
        asked = params(output, seed, **fields)
        name = self.engine.submit(prompt, asked, stream=rng.random() < 0.3)
        self.expected[name] = sequences
        default = vars(SamplingParams())
        changed = {k: v for k, v in vars(asked).items() if v != default[k]}
        self.log.append(f"submit {name} {list(prompt)} {changed}")

    def register(self):
        if len(self.held) < 2:
            prefix = self.rng.choice(PREFIXES)
            self.log.append(f"register {prefix}")
            try:
                self.held.append(self.engine.register_prefix(prefix))
            except RequestError as error:
                assert "does not fit" in str(error)

    def release(self):
        if self.held:
            name = self.held.pop(self.rng.randrange(len(self.held)))
            self.log.append(f"release {name}")
            self.engine.release_prefix(name)

    def some_request(self):
        live = [n for n in self.expected if n not in self.outputs]
        live = [n for n in live if n in self.engine._table.records]
        return self.rng.choice(live) if live else None

    def abort(self):
        if (name := self.some_request()) is not None:
            self.log.append(f"abort {name}")
            self.engine.abort(name)
            self.expected[name] = None

    def stream(self):
        if (name := self.some_request()) is not None:
            self.log.append(f"stream {name}")
            for output in self.engine.stream(name):
                self.take([output])
                if self.rng.random() < 0.3:
                    break

    def step(self):
        steps = self.rng.choice([1, 2, 5, 16])
        self.log.append(f"step {steps}")
        self.take(self.engine.step(max_steps=steps))

    def finish(self, limit=2000):
        for _ in range(limit):
            if not self.engine.has_unfinished():
                break
            self.take(self.engine.step())
        else:
            raise AssertionError(f"requests are left after {limit} runs of steps")
        while self.held:
            self.release()

    def check(self):
        """Asserts that all that was asked for was returned, with its own tokens."""
        assert set(self.outputs) == set(self.expected)
        for name, expected in self.expected.items():
            reasons = {output.finish_reason for output in self.outputs[name]}
            if expected is None:
                assert reasons <= {"abort", "length", "stop"}
            else:
                assert [o.token_ids for o in self.outputs[name]] == expected, name
                assert reasons <= {"length", "stop"}


def serve_at_random(
    kind: str, rng: random.Random, log: list[str] | None = None, events: int = 80
) -> Service:
    """Asserts that each request gets its own tokens, once, and every block is freed.

    Args:
      kind: which engine.
      rng: draws everything.
      log: gets a line for each event.
      events: how many.
    """
    engine = engine_of(kind)
    service = Service(engine, rng, [] if log is None else log)
    choices = [Service.submit] * 9 + [Service.step] * 5
    choices += [Service.register, Service.release, Service.abort, Service.stream]
    for _ in range(events):
        rng.choice(choices)(service)
        assert_sound(engine)
    service.finish()
    assert_all_free(engine)
    service.check()
    return service
