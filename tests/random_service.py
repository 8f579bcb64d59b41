"""A service at random: requests, aborts, streams, prefixes that come and go.

Each request's tokens are compared with those it gets alone, and the invariants are
checked after every event. Tests run a few of these, `scripts/soak` any number.
"""

import dataclasses
import functools
import random

import near_ties
from engines import (
    all_tokens,
    assert_all_free,
    assert_sound,
    drawn,
    greedy,
    make_engine,
    text,
    tiny_model,
)

from paged_jax import RequestError, SamplingParams

PREFIXES = [[*range(10, 19)], [*range(10, 14)], [20] * 6, [*range(10, 18)]]


# Static batching is a value in the state: beside a kind that does not swap, one with it
# costs no compilation of its own.
KINDS = {
    "continuous": {"min_bucket": 8},  # several sizes of step
    "beams, recompute": {"max_beam_width": 4, "preemption": "recompute"},
    "beams, static": {"max_beam_width": 4, "batching": "static"},
    "prefix cache, beams, swap": {
        "prefix_caching": True,
        "max_beam_width": 4,
        "preemption": "swap",
        "host_blocks": 12,  # too few at times
    },
    "prefix cache, static": {"prefix_caching": True, "batching": "static"},
    # What the others are compared with.
    "nothing shared": {"sharing": False, "max_beam_width": 4, "num_blocks": 64},
}


@functools.cache
def engine_of(kind):
    settings = dict(max_n=4, num_blocks=22, max_seqs=8, max_stop_ids=2)
    return make_engine(**settings | KINDS[kind])


@functools.cache
def alone(prompt, params):
    """Tokens of each sequence, by itself."""
    return all_tokens(engine_of("nothing shared").generate([prompt], params)[0])


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
        last = rng.choice([33, 99])  # a few tokens make prompts that start alike
        prompt = (*prefix, *(rng.randint(30, last) for _ in range(size)))
        asked = self.draw_params()
        sequences = alone(prompt, asked)
        longest = asked.max_tokens
        if asked.beam_width == 1 and longest > 3 and rng.random() < 0.3:
            tokens, at = rng.choice(sequences), rng.randrange(longest - 1)
            stop = text(tokens[at : at + 2])
            sequences = [
                tokens[: text(tokens).index(stop) + 2]
                if stop in text(tokens)
                else tokens
                for tokens in sequences
            ]
            asked = dataclasses.replace(asked, stop=stop)
        name = self.engine.submit(prompt, asked, stream=rng.random() < 0.3)
        self.expected[name] = prompt, asked, sequences
        default = vars(SamplingParams())
        changed = {k: v for k, v in vars(asked).items() if v != default[k]}
        self.log.append(f"submit {name} {list(prompt)} {changed}")

    def draw_params(self):
        """Draws what is asked for: as many sequences as fit beside two prefixes."""
        rng = self.rng
        output = rng.choice([1, 3, 10, 10, 25, 25])
        if rng.random() < 0.25 and self.engine.config.max_beam_width > 1:
            width = rng.choice([2, 3, 4])
            return greedy(
                min(output, 10),
                n=rng.randint(1, width),
                beam_width=width,
                length_penalty=rng.choice([0.0, 1.0, 2.0]),
                early_stopping=rng.choice([False, True, "never"]),
                stop_token_ids=rng.choice([(), (7,)]),
            )
        n = rng.choice([1, 1, 2, 3, 4]) if output < 25 else 1
        seed = rng.choice([None, None, 1, 2])
        return greedy(output, n=n) if seed is None else drawn(output, seed=seed, n=n)

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
                assert reasons <= {"length", "stop"}
                prompt, asked, want = expected
                got = [o.token_ids for o in self.outputs[name]]
                gap = near_ties.gap(tiny_model(), prompt, asked, got, want)
                assert gap <= near_ties.TIE, (
                    f"request {name} has {got} for {want}; the choices are {gap:.2g} "
                    "apart"
                )


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
