"""Ablations: variants, factors of techniques, rules for victims."""

import dataclasses
import json
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.ablations import STUDIES
from experiments.simulator.costs import CostTerms
from experiments.studies import ablation_techniques, variants
from experiments.studies.ablation_techniques import (
    TECHNIQUES,
    effective,
    label,
    subsets,
)
from experiments.studies.base_config import PRESETS
from experiments.studies.shapley import shapley_factors, shares
from experiments.studies.study import Scale, load_study, study_names
from experiments.studies.victims import RULES
from paged_jax.sequences import SequenceStatus

QUICK = Scale("quick", (0, 1, 2), *PRESETS["quick"].values())
FULL = Scale("full", (0, 1, 2), *PRESETS["full"].values())
QUANTITIES = {
    "capacity": 2.0,
    "tokens_per_s": 600.0,
    "utilization": 96.0,
    "preempted": 3.0,
    "latency_p99_s": 0.3,
    "ttft_s": 0.2,
    "tpot_s": 0.04,
}


def rows_of(study, scale=QUICK, changes=None):
    """Returns a row for each task; `changes` maps (series, label) to metrics."""
    return [
        {
            "cell": task.settings,
            "metrics": QUANTITIES
            | (changes or {}).get(
                (task.settings["series"], task.settings["label"]), {}
            ),
        }
        for task in study.tasks(scale)
    ]


def by_id(claims):
    # What is compared here is not in the paper.
    assert all(claim["paper"] is None for claim in claims)
    assert len({claim["id"] for claim in claims}) == len(claims)
    return {claim["id"]: claim for claim in claims}


def test_all_ablations_are_run_by_the_configuration():
    named = {name for name in study_names() if name.startswith("ablation")}
    assert named == set(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", [QUICK, FULL])
def test_tasks_are_distinct_and_json(name, scale):
    tasks = load_study(name).tasks(scale)
    assert len({task.key for task in tasks}) == len(tasks)
    for task in tasks:
        assert json.loads(json.dumps(task.settings)) == task.settings


@pytest.mark.parametrize("name", STUDIES)
def test_claims_and_figures_of_rows_and_of_none(name):
    study = load_study(name)
    rows = rows_of(study)
    full, empty = by_id(study.claims(rows, QUICK)), by_id(study.claims([], QUICK))
    assert list(full) == list(empty) and all(id.startswith(name) for id in full)
    # Of no gain there are no shares.
    assert all(
        claim["measured"] is not None or f"{name}.share." in id
        for id, claim in full.items()
    )
    assert all(claim["seeds"] == 3 for id, claim in full.items() if ".share." not in id)
    assert all(claim["measured"] is None for claim in empty.values())
    assert not any(claim["holds"] for claim in empty.values())
    assert any(claim["holds"] is not None for claim in full.values())
    for some in (rows, []):
        for caption, png in study.draw(some, QUICK).values():
            assert caption and png.startswith(b"\x89PNG")


@pytest.mark.parametrize("name", STUDIES)
def test_every_claim_says_how_long_its_traces_are(name):
    study = load_study(name)
    for scale, seconds in (
        (QUICK, "quick: traces of 300 s"),
        (FULL, "traces of 1800 s"),
    ):
        for claim in study.claims(rows_of(study, scale), scale):
            assert seconds in claim["note"] and "paper's traces" not in claim["note"]
        captions = [caption for caption, _ in study.draw([], scale).values()]
        assert seconds.removeprefix("quick: ") in captions[0]


def test_every_claim_says_what_else_was_cut_short():
    def notes(name, scale):
        study = load_study(name)
        return {c["note"].rpartition(": ")[2] for c in study.claims([], scale)}

    coarser = "capacities to 5%"
    few = {f"traces of 300 s, 16 of 36 variants, {coarser}"}
    assert notes("ablation_block_size", QUICK) == few
    assert notes("ablation_victim", QUICK) == {f"traces of 300 s, {coarser}"}
    assert notes("ablation_block_size", FULL) == {"traces of 1800 s"}


@pytest.mark.parametrize(
    "name, claim, changes, holds",
    [
        (
            "ablation_watermark",
            "ablation_watermark.fewer_preemptions.vllm.sharegpt",
            {("sharegpt", "0%"): {"preempted": preempted}},
            preempted > 3,
        )
        for preempted in (2.0, 5.0)
    ]
    + [
        (
            "ablation_victim",
            "ablation_victim.p99_ratio.earliest_over_latest",
            {("recompute", "earliest arrival"): {"latency_p99_s": latency}},
            latency > 0.3,
        )
        for latency in (0.1, 0.6)
    ]
    + [
        (
            "ablation_burstiness",
            "ablation_burstiness.ratio.vllm_over_max.4",
            {("Orca (Max)", "4"): {"capacity": capacity}},
            capacity < 1,
        )
        for capacity in (0.5, 1.5)
    ],
)
def test_expectations_hold_and_fail(name, claim, changes, holds):
    study = load_study(name)
    found = by_id(study.claims(rows_of(study, changes=changes), QUICK))
    assert found[claim]["holds"] is holds


@pytest.mark.parametrize("seed_0, words", [(1.0, "exceeds"), (4.0, "is within")])
@pytest.mark.parametrize(
    "id, quantity, variant",
    [
        ("watermark.fewer_preemptions.vllm.sharegpt", "preempted", "sharegpt-0%"),
        (
            "victim.p99_ratio.earliest_over_latest",
            "latency_p99_s",
            "recompute-latest_arrival",
        ),
        ("burstiness.ratio.vllm_over_max.4", "capacity", "Orca_(Max)-4"),
        ("token_budget.tpot_ratio.whole_over_chunks", "tpot_s", "in_chunks-256"),
        ("block_size.ratio.16_over_256.alpaca", "capacity", "alpaca,_recompute-256"),
        ("block_size.alpaca_loses_more", "capacity", "alpaca,_recompute-256"),
        ("swap_bandwidth.ratio.swap_over_recompute.4x", "tokens_per_s", "swap-4x"),
        ("techniques.factor.all.capacity.sharegpt", "capacity", "sharegpt-none"),
        ("techniques.factor.all.capacity.alpaca", "capacity", "alpaca-none"),
    ],
)
def test_comparisons_say_if_the_difference_exceeds_the_spread(
    id, quantity, variant, seed_0, words
):
    name = f"ablation_{id.split('.')[0]}"
    study, count = load_study(name), 0
    rows = rows_of(study, FULL)
    for task, row in zip(study.tasks(FULL), rows, strict=True):
        if task.key.startswith(f"{variant}-"):
            number = QUANTITIES[quantity] * (
                0.5 if task.settings["seed"] else 0.5 * seed_0
            )
            row["metrics"] = row["metrics"] | {quantity: number}
            count += 1
    assert count == 3
    found = by_id(study.claims(rows, FULL))[f"ablation_{id}"]
    assert f"the difference {words} the spread over 3 seeds" in found["note"]
    assert found["seeds"] == 3 and (found["spread"] > 0) is (seed_0 > 1)


subset_values = st.lists(st.floats(0.1, 100), min_size=8, max_size=8)


@given(subset_values)
def test_factors_multiply_to_the_whole_and_shares_add_up(values):
    table = dict(zip(subsets(), values, strict=True))
    factors = shapley_factors(TECHNIQUES, table.__getitem__)
    whole = table[frozenset(TECHNIQUES)] / table[frozenset()]
    assert math.prod(factors.values()) == pytest.approx(whole)
    if abs(math.log(whole)) > 1e-3:
        assert sum(shares(factors).values()) == pytest.approx(1)


@given(st.tuples(*[st.floats(0.5, 4)] * 3))
def test_techniques_that_do_not_interact_get_their_own_gain(gains):
    own = dict(zip(TECHNIQUES, gains, strict=True))
    factors = shapley_factors(TECHNIQUES, lambda s: math.prod(own[t] for t in s))
    assert factors == pytest.approx(own)


def test_what_only_works_together_is_shared_equally():
    both = {"paging", "sharing"}
    factors = shapley_factors(TECHNIQUES, lambda s: 4.0 if both <= s else 1.0)
    assert factors == pytest.approx(
        {"paging": 2.0, "sharing": 2.0, "continuous batching": 1.0}
    )
    assert math.isnan(shares(dict.fromkeys(TECHNIQUES, 1.0))["paging"])


def test_sharing_without_paging_is_the_way_without_both():
    assert len(subsets()) == 8
    assert len({effective(some) for some in subsets()}) == 6
    assert label(effective(frozenset({"sharing"}))) == "none"


def test_the_factors_of_the_techniques_are_claimed():
    gains = {"paging": 2.0, "continuous batching": 3.0, "sharing": 1.0}
    changes = {
        (workload, label(some)): {"capacity": 0.2 * math.prod(gains[t] for t in some)}
        for workload in ablation_techniques.WORKLOADS
        for some in subsets()
    }
    rows = rows_of(ablation_techniques, changes=changes)
    found = by_id(ablation_techniques.claims(rows, QUICK))
    name = "ablation_techniques"
    assert found[f"{name}.factor.paging.capacity.sharegpt"]["measured"] == (
        pytest.approx(2.0)
    )
    share = found[f"{name}.share.continuous.capacity.sharegpt"]["measured"]
    assert share == pytest.approx(100 * math.log(3) / math.log(6))
    whole = found[f"{name}.factor.all.capacity.sharegpt"]
    assert whole["measured"] == pytest.approx(6.0) and whole["holds"]
    assert (whole["spread"], whole["seeds"]) == (0, 3)
    assert "the difference exceeds the spread" in whole["note"]
    sharing = found[f"{name}.factor.sharing.capacity.sharegpt"]
    assert sharing["measured"] == pytest.approx(1.0)
    assert "compared with 1; the difference" in sharing["note"]
    # All ways give the same tokens a second: nothing is gained.
    assert found[f"{name}.factor.all.tokens_per_s.sharegpt"]["holds"] is False


def a_state():
    """Returns what the rules read of four rows, of which the last does not run."""
    running, empty = SequenceStatus.RUNNING, SequenceStatus.EMPTY
    return SimpleNamespace(
        sequences=SimpleNamespace(
            request=jnp.array([2, 0, 1, 3]),
            status=jnp.array([running, running, running, empty]),
            num_blocks=jnp.array([4, 2, 7, 99]),
        ),
        requests=SimpleNamespace(
            arrival=jnp.array([5, 6, 7, 0]),  # of rows: 7, 5, 6
            length=jnp.array([30, 90, 50, 1]),  # of rows: 50, 30, 90
            max_len=jnp.array([32, 100, 90, 900]),  # to come: 40, 2, 10
        ),
    )


@pytest.mark.parametrize(
    "rule, row",
    [
        ("latest arrival", 0),
        ("earliest arrival", 1),
        ("fewest blocks", 1),
        ("most blocks", 2),
        ("most to come", 0),
    ],
)
def test_rules_choose_among_those_that_run(rule, row):
    assert int(RULES[rule](a_state())) == row


def test_every_rule_and_cost_factor_of_a_study_is_known():
    fields = {field.name for field in dataclasses.fields(CostTerms)} - {"padded"}
    scaled = set()
    for name in STUDIES:
        for task in load_study(name).tasks(FULL):
            assert task.settings.get("victim", "latest arrival") in RULES
            factors = task.settings.get("cost_factors", {})
            assert factors.keys() <= fields
            scaled |= factors.keys()
    assert scaled == {"step_s", "row_s", "swapped_in_s", "swapped_out_s"}


def test_a_variant_is_measured():
    settings = variants.BASE | {
        "dataset": "alpaca",
        "seconds": 20.0,
        "tolerance": 1.0,
        "seed": 0,
        "guess": 20.0,
        "load": 5.0,
        "victim": "most blocks",
        "engine": {"num_blocks": 128, "max_seqs": 32},
        "cost_factors": {"row_s": 2.0},
    }
    found = variants.measure(settings)
    json.dumps(found, allow_nan=False)
    for quantity in ("capacity", "tokens_per_s", "ttft_s", "latency_p99_s"):
        assert found[quantity] > 0
    assert found["latency_s"] < found["latency_p99_s"]
    assert 0 < found["utilization"] <= 100


def test_latencies_are_means_and_a_percentile():
    served = SimpleNamespace(
        arrival=np.zeros(3),
        first_token=np.array([1.0, 2.0, np.nan]),
        ended=np.array([2.0, 12.0, np.nan]),
        output_len=np.array([1, 6, 5]),
    )
    found = variants.latencies(served)
    assert found["latency_s"] == pytest.approx(2.0)
    assert found["ttft_s"] == pytest.approx(1.5)
    assert found["tpot_s"] == pytest.approx(2.0)  # of the one with several tokens
