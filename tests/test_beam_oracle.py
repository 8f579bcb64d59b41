"""The oracle of beam search: against `transformers`, and against all sequences."""

import itertools
from collections import Counter

import numpy as np
import pytest
from beam_cases import CASES, RULES, name_of, search
from oracles.beam_search import beam_search

pytestmark = pytest.mark.newest(reason="plain Python, held against recorded results")

FOUND = ("sequences", "parents", "scores")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_oracle_finds_what_transformers_finds(case):
    found = search(case)
    assert [list(beam.tokens) for beam in found] == case["sequences"]
    assert [list(beam.parents) for beam in found] == case["parents"]
    scores = [beam.score for beam in found]
    np.testing.assert_allclose(scores, case["scores"], rtol=2e-5, atol=1e-5)


def test_the_goldens_have_every_rule_with_every_width():
    seen = Counter(tuple(c[rule] for rule in RULES if rule[:3] != "max") for c in CASES)
    wanted = itertools.product(
        (2, 3, 4, 8, 16), (0.0, 1.0, -1.0, 2.0), (False, True, "never")
    )
    assert all(seen[rules] >= 2 for rules in wanted)
    for width in (5, 6, 7):
        penalties, stopping = zip(*(rules[1:] for rules in seen if rules[0] == width))
        assert {*penalties} == {0.0, 1.0, -1.0, 2.0}
        assert {*stopping} == {False, True, "never"}
    assert {len(c["eos_token_ids"]) for c in CASES} == {0, 1, 2}


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 7, 8, 16])
def test_beams_of_the_goldens_end_early_and_late(width):
    early, late = Counter(), Counter()
    for case in (c for c in CASES if c["num_beams"] == width):
        for tokens in case["sequences"]:
            ends = tokens[-1] in case["eos_token_ids"]
            assert ends or len(tokens) == case["max_new_tokens"]
            (early if ends else late)[len(tokens)] += 1
    assert len(early) >= 4, "beams end at several lengths"
    assert late


@pytest.mark.parametrize("rule", ["length_penalty", "early_stopping"])
def test_the_goldens_tell_the_rules_apart(rule):
    """For any two values some search has different results, all else being equal."""
    groups: dict = {}
    for case in CASES:
        same = {k: v for k, v in case.items() if k not in (rule, *FOUND)}
        groups.setdefault(repr(same), {})[repr(case[rule])] = case["sequences"]
    values = {value for group in groups.values() for value in group}
    for a, b in itertools.combinations(sorted(values), 2):
        assert any(
            group[a] != group[b] for group in groups.values() if {a, b} <= group.keys()
        ), (a, b)


def random_log_probs(seed, vocab_size=4):
    """Returns a random function of the last two tokens, and its end of text."""
    rng = np.random.default_rng(seed)
    table = rng.normal(0, 2, (vocab_size + 1, vocab_size + 1, vocab_size))
    table -= np.log(np.exp(table).sum(-1, keepdims=True))

    def log_probs(tokens):
        a, b = ([-1, -1, *tokens])[-2:]
        return table[a, b]

    return log_probs


def every_sequence(log_probs, length, eos, penalty):
    """Returns all complete sequences as (score, tokens), best first."""
    done, open_ = [], [((), 0.0)]
    for size in range(1, length + 1):
        longer = [
            ((*tokens, token), total + float(log_probs(tokens)[token]))
            for tokens, total in open_
            for token in range(4)
        ]
        ended = [t[0][-1] == eos or size == length for t in longer]
        done += [
            (total / size**penalty, tokens)
            for (tokens, total), over in zip(longer, ended, strict=True)
            if over
        ]
        open_ = [t for t, over in zip(longer, ended, strict=True) if not over]
    return sorted(done, reverse=True)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0, 2.0])
def test_enough_beams_find_the_best_of_all_sequences(seed, penalty):
    log_probs = random_log_probs(seed)
    expected = every_sequence(log_probs, 4, 0, penalty)
    # As many as there are: none is ever dropped.
    found = beam_search(
        log_probs,
        [],
        num_beams=len(expected),
        max_new_tokens=4,
        eos_token_ids=(0,),
        length_penalty=penalty,
        early_stopping="never",
    )
    assert [beam.tokens for beam in found] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([b.score for b in found], [s for s, _ in expected])


@pytest.mark.parametrize("seed", range(5))
def test_parents_lead_back_along_the_tokens(seed):
    """Following a beam's parents through the running beams gives its tokens."""
    log_probs = random_log_probs(seed)
    shorter = {
        size: beam_search(log_probs, [], num_beams=3, max_new_tokens=size)
        for size in range(1, 6)
    }
    for beam in shorter[5]:
        for size in range(1, 5):
            parent = shorter[size][beam.parents[size]]
            assert parent.tokens == beam.tokens[:size]
            assert parent.parents == beam.parents[:size]
