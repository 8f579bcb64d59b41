import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prompt_texts import TEXTS

from experiments.errors import UserError
from experiments.lengths import draw_lengths
from experiments.settings import WorkloadSettings
from experiments.workloads import build_workload, choose_texts, scale_text

HERE = Path(__file__).resolve().parent
LIMIT = 64


@pytest.fixture
def settings(prompts_file):
    return WorkloadSettings(
        num_requests=30, prompts=str(prompts_file), length_scale=16.0
    )


def build(settings, tokenizer, seed=0, limit=LIMIT):
    return build_workload(settings, limit, seed, tokenizer)


def test_the_same_seed_gives_the_same_workload(settings, tokenizer):
    assert build(settings, tokenizer) == build(settings, tokenizer)


def test_the_same_seed_gives_the_same_workload_in_any_process(prompts_file):
    """No hash, no order of a set and no clock has a say."""
    program = f"""
from prompt_texts import byte_tokenizer
from experiments.settings import WorkloadSettings
from experiments.workloads import build_workload

for name in ("offline", "poisson", "system_prompt"):
    settings = WorkloadSettings(
        name, num_requests=30, prompts={str(prompts_file)!r}, length_scale=16.0
    )
    print(build_workload(settings, 300, 0, byte_tokenizer()))
"""
    path = os.pathsep.join(map(str, (HERE, HERE.parents[1])))
    seen = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in (1, 2)
    ]
    assert seen[0] == seen[1] and len(seen[0].splitlines()) == 3


def test_another_seed_gives_another_workload(settings, tokenizer):
    first, second = build(settings, tokenizer), build(settings, tokenizer, seed=1)
    assert first.digest != second.digest


def test_every_request_fits_the_model(settings, tokenizer):
    for name in ("offline", "poisson", "system_prompt"):
        requests = build(
            dataclasses.replace(settings, name=name), tokenizer, limit=300
        ).requests
        assert all(len(r.tokens) + r.output_len <= 300 for r in requests)
        assert all(r.output_len >= 1 for r in requests)


def test_prompts_are_texts_of_the_file(settings, tokenizer):
    for request in build(settings, tokenizer, limit=200).requests:
        text = TEXTS[int(request.prompt_id.removeprefix("p"))]
        assert tokenizer.decode(request.tokens) == text


def test_a_text_that_is_too_long_loses_its_end(settings, tokenizer):
    workload = build(settings, tokenizer, limit=32)
    shown = [tokenizer.decode(r.tokens) for r in workload.requests]
    texts = [TEXTS[int(r.prompt_id[1:])] for r in workload.requests]
    assert all(t.startswith(s) and s for s, t in zip(shown, texts))
    assert workload.trimmed == sum(s != t for s, t in zip(shown, texts)) > 0


def test_a_part_of_the_requests_is_the_first_ones(settings, tokenizer):
    whole = build(settings, tokenizer).requests
    part = build(dataclasses.replace(settings, part=0.3), tokenizer).requests
    assert part == whole[:9]


def test_offline_requests_are_all_there_at_time_0(settings, tokenizer):
    assert {r.arrival for r in build(settings, tokenizer).requests} == {0.0}


def test_poisson_arrivals_are_one_apart_in_the_mean(settings, tokenizer):
    workload = build(
        dataclasses.replace(settings, name="poisson", num_requests=2000), tokenizer
    )
    arrivals = np.array([r.arrival for r in workload.requests])
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1, rel=0.07)
    assert gaps.std() == pytest.approx(1, rel=0.1)  # exponential


def test_poisson_serves_the_same_requests_as_offline(settings, tokenizer):
    poisson = dataclasses.replace(settings, name="poisson")
    assert build(settings, tokenizer).digest == build(poisson, tokenizer).digest


def test_the_system_prompt_stands_before_the_same_requests(settings, tokenizer):
    plain = build(settings, tokenizer, limit=400)
    behind = build(
        dataclasses.replace(settings, name="system_prompt"), tokenizer, limit=400
    )
    size = len(behind.prefix)
    assert size > 20 and size % 2 == 1
    for a, b in zip(plain.requests, behind.requests, strict=True):
        assert b.tokens[:size] == behind.prefix
        assert b.tokens[-len(a.tokens) :] == a.tokens
        assert b.output_len == a.output_len


def test_without_a_system_prompt_there_is_no_prefix(settings, tokenizer):
    assert build(settings, tokenizer).prefix == ()


def test_a_scaled_text_keeps_whole_sentences(tokenizer):
    text = "One two. Three four. Five six! Seven eight?"
    assert scale_text(text, 1.0, tokenizer) == text
    assert scale_text(text, 2.0, tokenizer) == "One two. Three four."
    assert scale_text(text, 100.0, tokenizer) == "One two."


def test_the_nearest_text_is_chosen():
    rng = np.random.default_rng(0)
    sizes = np.array([5, 50, 500])
    assert choose_texts(rng, sizes, np.array([1, 40, 70, 9000])) == [0, 1, 1, 2]


def test_texts_that_are_as_near_take_turns():
    rng = np.random.default_rng(0)
    chosen = choose_texts(rng, np.array([10, 11, 12, 90]), np.full(100, 3))
    assert set(chosen) == {0, 1, 2}


def test_prompts_as_they_are_come_in_turn(settings, tokenizer):
    workload = build(
        dataclasses.replace(settings, prompt_lengths="as_is", num_requests=8),
        tokenizer,
        limit=200,
    )
    ids = [r.prompt_id for r in workload.requests]
    assert ids == ["p0", "p1", "p2", "p3", "p4", "p5", "p0", "p1"]


def test_prompts_that_are_cut_have_the_lengths_that_were_drawn(settings, tokenizer):
    cut = dataclasses.replace(settings, prompt_lengths="cut", lengths="alpaca")
    workload = build(dataclasses.replace(cut, length_scale=1.0), tokenizer, limit=400)
    lengths = draw_lengths(np.random.default_rng((0, 0)), 30, "alpaca", 1.0, 400)
    longest = max(map(len, TEXTS))
    for request, (wanted, _) in zip(workload.requests, lengths, strict=True):
        text = TEXTS[int(request.prompt_id[1:])]
        assert len(request.tokens) == min(wanted, longest)
        assert tokenizer.decode(request.tokens) == text[: len(request.tokens)]


@pytest.mark.parametrize("changes", [{"n": 2, "temperature": 1.0}, {"beam_width": 2}])
def test_requests_for_several_sequences_ask_for_them(settings, tokenizer, changes):
    workload = build(dataclasses.replace(settings, **changes), tokenizer)
    assert {r.n for r in workload.requests} == {2}
    assert workload.describe()["sequences"] == 60
    assert workload.digest != build(settings, tokenizer).digest


def test_draws_do_not_depend_on_how_many_sequences_are_asked_for(settings, tokenizer):
    two, four = (
        build(dataclasses.replace(settings, n=n, temperature=1.0), tokenizer)
        for n in (2, 4)
    )
    assert two.digest == four.digest
    seeds = [r.seed for r in two.requests]
    assert seeds == [r.seed for r in four.requests] and len(set(seeds)) == len(seeds)


def test_a_prompt_longer_than_the_model_length_is_named(settings, tokenizer):
    as_is = dataclasses.replace(settings, prompt_lengths="as_is")
    with pytest.raises(UserError, match=r"prompt p4 has 45 tokens .* is 40"):
        build(as_is, tokenizer, limit=40)


def test_a_malformed_prompts_file_is_named(settings, tokenizer, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{nonsense")
    with pytest.raises(UserError, match="bad.json"):
        build(dataclasses.replace(settings, prompts=str(bad)), tokenizer)


def test_the_prompts_that_ship_make_a_workload(tokenizer):
    workload = build_workload(WorkloadSettings(num_requests=20), 1024, 0, tokenizer)
    assert len(workload.requests) == 20
    assert json.dumps(workload.describe())


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"name": "online"}, "workload.name is 'online'; it must be one of offline"),
        ({"lengths": "sharegtp"}, "one of sharegpt, alpaca"),
        ({"prompt_lengths": "short"}, "one of drawn, cut, as_is"),
        ({"num_requests": 0}, "num_requests is 0; it must be 1 to 1,000,000"),
        ({"num_requests": 10**11}, "is 100000000000; it must be 1 to 1,000,000"),
        ({"part": 0.0}, "workload.part is 0.0"),
        ({"length_scale": 0.0}, "workload.length_scale is 0.0"),
        ({"rate": -1.0}, "workload.rate is -1.0"),
        ({"arrival_steps": 0}, "workload.arrival_steps is 0"),
        ({"sharing": True}, "only system_prompt, one_shot, few_shot have a prefix"),
        ({"n": 0}, "workload.n is 0; it must be 1 or more"),
        ({"n": 2}, "workload.n is 2 and workload.temperature 0; greedy"),
        ({"beam_width": 0}, "workload.beam_width is 0"),
        ({"beam_width": 2, "temperature": 1.0}, "a beam search returns its beams"),
        ({"temperature": -1.0}, "workload.temperature is -1.0"),
        ({"preempted_tokens": -1}, "workload.preempted_tokens is -1"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        WorkloadSettings(**changes)
