"""A request gets the same tokens alone, in any batch, and in any memory."""

import functools
import itertools

import equality
import near_ties
import numpy as np
import pytest
from engines import (
    assert_all_free,
    clean,
    greedy,
    make_engine,
    poison,
    serve,
    tiny_model,
    tokens_of,
)
from oracles import llama as oracle
from pythons import SAME_KIND, newest_but

from paged_jax import Field, SamplingParams
from pallas_kernels import compat
from pallas_kernels.cpu.target import host_target

PREFIX = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]  # no multiple of 4 or 16


def requests():
    """Prompts and parameters: greedy and drawn, some behind one prefix."""
    rng = np.random.default_rng(0)
    asked = []
    for i in range(12):
        prompt = rng.integers(3, 128, rng.integers(1, 25)).tolist()
        if i % 3 == 1:
            prompt = [*PREFIX, *prompt[: i - 1]]  # the first of them is the prefix
        output = int(rng.integers(5, 64 - len(prompt)))
        params = greedy(output)
        if i % 4 == 2:
            params = SamplingParams(
                temperature=0.9,
                top_k=20,
                top_p=0.95,
                seed=i,
                max_tokens=output,
                ignore_eos=True,
            )
        asked.append((prompt, params))
    return asked


REQUESTS = requests()


@functools.cache
def alone():
    """The tokens of each request when it is served alone."""
    engine = make_engine()
    return [tokens_of(engine.generate([p], params))[0] for p, params in REQUESTS]


def assert_same(outputs, expected):
    """Tokens are the same, but where the model's two best are within 1e-4."""
    model = tiny_model()
    for (prompt, params), got, want in zip(REQUESTS, outputs, expected):
        assert len(got) == len(want) == params.max_tokens
        if got != want:
            assert params.temperature == 0, f"draws differ after {prompt}"
            oracle.assert_greedy(model.config, model.params, prompt, got)


def test_alone_equals_a_full_recomputation():
    model = tiny_model()
    for (prompt, params), tokens in zip(REQUESTS, alone()):
        assert len(tokens) == params.max_tokens
        if params.temperature == 0:
            oracle.assert_greedy(model.config, model.params, prompt, tokens)
    prompt, params = REQUESTS[0]
    again = oracle.generate(model.config, model.params, prompt, params.max_tokens)
    assert list(alone()[0]) == again


# Each line changes several things, so that few programs are compiled.
ENGINES = {
    "block size 4": dict(),
    "block size 4, static": dict(batching="static"),
    "block size 1, a host sync each step": dict(
        block_size=1, num_blocks=80, steps_per_sync=1, token_budget=8
    ),
    "block size 2, whole prompts, not recorded": dict(
        block_size=2,
        num_blocks=40,
        chunked_prefill=False,
        token_budget=24,
        record=False,
        watermark=0.05,
    ),
    "block size 16, reference attention": dict(
        block_size=16, num_blocks=5, attention_backend="reference", token_budget=8
    ),
    "block size 64, a budget of 5 tokens": dict(
        block_size=64, num_blocks=3, token_budget=5
    ),
    "max": dict(memory="max", num_blocks=40),
    "block size 8, XLA throughout": dict(
        block_size=8, num_blocks=10, attention_backend="xla", products="xla"
    ),
    "max, static": dict(memory="max", num_blocks=40, batching="static"),
    "pow2": dict(memory="pow2", num_blocks=40),
    "pow2, static": dict(memory="pow2", num_blocks=40, batching="static"),
    "oracle": dict(memory="oracle", num_blocks=40),
    "oracle, static": dict(memory="oracle", num_blocks=40, batching="static"),
}
PREEMPTS = {
    "block size 4",
    "block size 8, XLA throughout",
    "block size 1, a host sync each step",
    "block size 16, reference attention",
}


# Of each kind of program one: blocks, and a reservation. Other tests have the backends.
ON_EVERY_PYTHON = {"block size 4", "max, static"}


each_engine = functools.partial(
    newest_but, ON_EVERY_PYTHON, reason="a program of the same kind, of another size"
)


@functools.cache
def engine_of(name):
    return make_engine(**ENGINES[name])


@pytest.mark.parametrize("name", each_engine(ENGINES))
def test_the_batch_and_the_memory_change_nothing(name):
    engine = engine_of(name)
    prompts, params = zip(*REQUESTS)
    assert_same(tokens_of(engine.generate(prompts, params)), alone())
    log = engine.log
    if name in PREEMPTS:
        assert log[:, Field.PREEMPTED].sum() > 2, "the pool is too large to preempt"
    elif engine.config.record:
        assert log[:, Field.PREEMPTED].sum() == 0
    else:
        assert log.shape == (0, len(Field))
    if engine.config.record and engine.config.block_size < 64:
        assert log[:, Field.RUNNING].max() >= 2
    assert_all_free(engine)


@pytest.mark.parametrize(
    "name", each_engine(name for name in ENGINES if "memory" not in ENGINES[name])
)
@pytest.mark.parametrize("size", [8, 10])
def test_a_shared_prefix_changes_nothing(name, size):
    engine = engine_of(name)
    prefix = engine.register_prefix(PREFIX[:size])
    engine.reset_stats()
    prompts, params = zip(*REQUESTS)
    assert_same(tokens_of(engine.generate(prompts, params)), alone())
    if engine.config.record:
        log = engine.log
        if size % engine.config.block_size:
            assert log[:, Field.COPIED_BLOCKS].sum() > 0
        if size >= engine.config.block_size and engine.config.batching != "static":
            assert (log[:, Field.LOGICAL_BLOCKS] > log[:, Field.PHYSICAL_BLOCKS]).any()
    engine.release_prefix(prefix)
    assert_all_free(engine)


@pytest.mark.parametrize("steps", [1, 3])
def test_how_often_the_host_looks_changes_nothing(steps):
    engine = engine_of("block size 4")
    names = [engine.submit(prompt, params) for prompt, params in REQUESTS]
    outputs = serve(engine, max_steps=steps)
    assert_same(tokens_of(outputs[name] for name in names), alone())


# ------------------------------------------------------------------ the product


def pairs(settings):
    """The pairs of values that some settings have, block sizes apart."""
    return {
        pair
        for setting in settings
        for pair in itertools.combinations(enumerate(setting[1:]), 2)
    }


def test_the_quick_run_has_every_block_size_and_every_pair_of_settings():
    assert {s[0] for s in equality.QUICK} == set(equality.DIMENSIONS["block_size"])
    assert pairs(equality.QUICK) == pairs(equality.settings())


# The block sizes that no other test serves, and 64 for sequences that share nothing and
# are swapped. The whole product is `scripts/equality`.
IN_CI = [s for s in equality.QUICK if s[0] in (8, 32, 64, 128)]


def test_these_share_or_not_and_recompute_or_swap():
    wanted = {(True, "recompute"), (True, "swap"), (False, "swap")}
    assert {setting[1:3] for setting in IN_CI} == wanted


@pytest.mark.long
@pytest.mark.parametrize("setting", IN_CI)
def test_every_request_in_every_company(setting):
    # One reference for the small ones; it need not be as long as the large one's.
    product = equality.Product([max(64, setting[0])])
    counts = product.run(setting)
    assert not product.wrong
    for company in equality.DIMENSIONS["company"]:
        served = counts[company]["same"] + counts[company]["near_ties"]
        assert served == len(equality.DIMENSIONS["choice"])
    assert len(product.near_ties) < 3


@SAME_KIND
def test_the_oracle_of_draws_draws_the_same():
    """So that what it says of near-ties can be trusted."""
    product, model = equality.Product([8, 64]), equality.the_model()
    prompt, params = equality.request("n=4", 8)
    sequences = product.expected("n=4", 8)
    assert len(set(sequences)) == 4
    for number, tokens in enumerate(sequences):
        rows = oracle.logits(model.config, model.params, [*prompt, *tokens])
        for place, token in enumerate(tokens, len(prompt)):
            row = rows[place - 1]
            assert near_ties.draw(row, params, number, place) == token
            other = int(np.argsort(-near_ties.shares_of(row, params))[0])
            if other != token:
                gap = near_ties.draw_gap(row, params, number, place, token, other)
                assert gap > 0


@SAME_KIND
def test_a_difference_counts_if_it_is_not_at_a_near_tie():
    product, model = equality.Product([8, 64]), equality.the_model()
    for choice in ("greedy", "n=2", "beams=2"):
        prompt, params = equality.request(choice, 8)
        want = product.expected(choice, 8)
        assert near_ties.gap(model, prompt, params, want, want) == 0
        changed = [(*want[0][:3], (want[0][3] + 1) % 96, *want[0][4:]), *want[1:]]
        assert near_ties.gap(model, prompt, params, changed, want) > near_ties.TIE
        cell = equality.Cell(8, True, "swap", "none", "alone", choice)
        product._compare(cell, changed)
        assert "the choices are" in product.wrong[cell]


# ------------------------------------------------------------------ memory of NaN


@pytest.mark.parametrize(
    "name",
    each_engine(
        [
            "block size 4",
            "block size 16, reference attention",
            "block size 64, a budget of 5 tokens",
            "pow2, static",
        ]
    ),
)
def test_nothing_reads_memory_that_holds_no_token(name):
    engine = engine_of(name)
    prefix = engine.register_prefix(PREFIX) if engine.config.memory == "paged" else None
    names = [engine.submit(prompt, params) for prompt, params in REQUESTS]
    outputs, kept = {}, set()
    while engine.has_unfinished():
        kept.add(poison(engine))
        outputs |= {output.request_id: output for output in engine.step(max_steps=1)}
    assert len(kept) > 10
    assert_same(tokens_of(outputs[name] for name in names), alone())
    for output in outputs.values():
        assert np.isfinite(output.outputs[0].cumulative_logprob)
    if prefix is not None:
        engine.release_prefix(prefix)
    clean(engine)


# ------------------------------------------------------------------ 16-bit caches


BACKENDS = (
    "reference",
    "xla",
    *(("cpu",) if host_target() else ()),
    *(("pallas",) if compat.has_mosaic() else ()),
)


@functools.cache
def half_precision(backend):
    """Outputs of a model with a bfloat16 cache, and their log-probabilities."""
    model = tiny_model(head_dim=64, num_layers=1)
    engine = make_engine(
        model,
        attention_backend=backend,
        kv_dtype="bfloat16",
        block_size=8,
        num_blocks=12,
        max_model_len=32,
        max_seqs=2,
        token_budget=8,
    )
    engine.register_prefix(PREFIX)
    asked = [[3, 4, 5], [*PREFIX, 7]]
    outputs = engine.generate(asked, greedy(4, logprobs=1))
    return asked, [output.outputs[0] for output in outputs]


@SAME_KIND
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_16_bit_cache_gives_tokens_close_to_the_best(backend):
    model = tiny_model(head_dim=64, num_layers=1)
    for prompt, output in zip(*half_precision(backend)):
        # Logits spread over 20 and more; keys and values have 8 bits, and so have the
        # weights in the kernel for GPUs.
        oracle.assert_greedy(
            model.config, model.params, prompt, output.token_ids, tie=0.05
        )
        logits = oracle.logits(
            model.config, model.params, [*prompt, *output.token_ids]
        )[len(prompt) - 1 : -1]
        logits -= np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        expected = logits[np.arange(4), list(output.token_ids)].sum()
        assert output.cumulative_logprob == pytest.approx(expected, abs=0.2)


@SAME_KIND
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_backends_agree_on_a_16_bit_cache(backend):
    _, expected = half_precision("reference")
    _, got = half_precision(backend)
    assert [o.token_ids for o in got] == [o.token_ids for o in expected]
    tolerance = 1e-4 if backend == "xla" else 0.1
    for ours, theirs in zip(got, expected):
        assert ours.cumulative_logprob == pytest.approx(
            theirs.cumulative_logprob, abs=tolerance
        )
