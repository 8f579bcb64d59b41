"""The same tokens from every attention backend, on a 16-bit cache.

Chunks of prompts, a preemption, and two sequences of one prompt: what the engine does
around a kernel. The kernel for GPUs is interpreted, and rounds the softmax's weights to
16 bits; where that tips a choice, the two tokens must be all but equally likely.
"""

import functools

import numpy as np
import pytest
from engines import all_tokens, drawn, greedy, make_engine, tiny_model
from near_ties import first_difference, gap
from oracles import llama as oracle

from paged_jax import Field
from pallas_kernels import compat

pytestmark = pytest.mark.newest(
    reason="the old jax lacks one of the backends; test_equality has the others"
)

# Of logits that spread over 20 and more, and of a probability: what rounding keys,
# values and weights to 8 bits may tip.
TIE = 0.05


def prompt(length: int) -> list[int]:
    """Returns random tokens."""
    return np.random.default_rng(length).integers(3, 128, length).tolist()


# The first prompt takes three steps, others beside it. Of 9 blocks the requests would
# take 10 before they end.
REQUESTS = [
    (prompt(19), greedy(6)),
    (prompt(5), greedy(9)),
    (prompt(7), drawn(6, seed=1, temperature=0.7, n=2)),
]


@functools.cache
def model():
    return tiny_model(head_dim=64, num_layers=1)


@functools.cache
def served(backend: str) -> list[list[tuple[int, ...]]]:
    """Returns the tokens of each sequence of each request."""
    engine = make_engine(
        model(),
        attention_backend=backend,
        products="xla",
        kv_dtype="bfloat16",
        block_size=8,
        num_blocks=7,
        max_model_len=32,
        max_n=2,
        max_prefixes=0,
        token_budget=8,
        preemption="recompute",
    )
    names = [engine.submit(*request) for request in REQUESTS]
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    log = engine.log
    assert log[:, Field.PREEMPTED].sum() >= 1
    assert log[:, Field.COPIED_BLOCKS].sum() >= 1
    return [all_tokens(outputs[name]) for name in names]


def assert_same_or_tied(got, want) -> None:
    """Asserts that tokens part only where the model all but ties; says where."""
    for (text, params), ours, theirs in zip(REQUESTS, got, want, strict=True):
        for a, b in zip(ours, theirs):
            place = first_difference(a, b)
            if place is not None:
                row = oracle.logits(
                    model().config, model().params, [*text, *b[:place]]
                )[-1]
                print(
                    f"prompt of {len(text)}, output token {place}: {a[place]} with "
                    f"logit {row[a[place]]:.4f}, {b[place]} with {row[b[place]]:.4f}"
                )
        found = gap(model(), text, params, ours, theirs)
        assert found <= TIE, f"tokens part where the choices are {found:.3g} apart"


@pytest.mark.parametrize(
    "backend",
    [
        "xla",
        pytest.param(
            "pallas",
            marks=pytest.mark.skipif(
                not compat.has_mosaic(), reason="this jax is too old for pallas"
            ),
        ),
    ],
)
def test_tokens_are_those_of_the_reference(backend):
    assert_same_or_tied(served(backend), served("reference"))


@pytest.mark.parametrize("request_", [0, 2])
def test_a_difference_that_is_no_tie_fails(request_, capsys):
    want = served("reference")
    got = [list(map(list, sequences)) for sequences in want]
    text, _ = REQUESTS[request_]
    row = oracle.logits(model().config, model().params, text)[-1]
    got[request_][0][0] = int(row.argmin())
    with pytest.raises(AssertionError, match="tokens part where the choices are"):
        assert_same_or_tied(got, want)
    assert f"with logit {row.min():.4f}" in capsys.readouterr().out
