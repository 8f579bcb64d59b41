import functools

import pytest

from experiments import tables
from experiments.attribution import gains
from experiments.claims import check_claims, claim
from experiments.errors import UserError
from experiments.token_check import TIE, Difference


def row(key, tokens_per_s=100.0, **cell):
    cell = {
        "memory": "paged",
        "batching": "continuous",
        "sharing": False,
        "block_size": 16,
        "workload": "offline",
    } | cell
    return {
        "key": key,
        "cell": cell,
        "metrics": {
            "kv_utilization": 0.95,
            "kv_breakdown": {
                "token_states": 0.9,
                "reservation": 0.05,
                "internal": 0.0,
                "external": 0.05,
            },
            "output_tokens_per_s": tokens_per_s,
            "host_syncs_per_token": 0.001,
            "compilations": 0,
            "block_table_bytes": 100,
            "cow_bytes": 0,
        },
        "details": {
            "workload": {"digest": "d", "requests": 60},
            "running_while_waiting": 20.0,
            "peak_running": 30,
        },
    }


def headline_rows():
    speeds = {
        ("max", "static"): 50,
        ("paged", "static"): 75,
        ("max", "continuous"): 100,
        ("paged", "continuous"): 200,
    }
    rows = [
        row(f"{memory}-{batching}", speed, memory=memory, batching=batching)
        for (memory, batching), speed in speeds.items()
    ]
    for sharing, speed in ((False, 80), (True, 120)):
        rows.append(
            row(f"shared-{sharing}", speed, sharing=sharing, workload="system_prompt")
        )
    return rows


def by_id(claims):
    return {c["id"]: c for c in claims}


@pytest.mark.parametrize(
    "expected,measured,holds",
    [
        ({"at_least": 90}, 90.0, True),
        ({"at_least": 90}, 89.9, False),
        ({"at_most": 0.02}, 0.021, False),
        ({"at_most": 0.02, "tolerance": 0.01}, 0.021, True),
        ({"near": 60, "tolerance": 5}, 64.9, True),
        ({"near": 60, "tolerance": 5}, 54.9, False),
        ({"near": 0}, 0.0, True),
        ({"at_least": 90}, None, False),
    ],
)
def test_a_claim_holds_on_its_side_of_what_is_expected(expected, measured, holds):
    made = claim("x", measured, source="s", unit="u", kind="memory", **expected)
    assert made["holds"] is holds
    assert list(made) == [
        "id", "source", "unit", "paper", "relation", "expected", "tolerance",
        "measured", "spread", "seeds", "kind", "holds", "note",
    ]  # fmt: skip


def test_the_papers_number_is_not_what_is_expected():
    def make(**given):
        return claim(
            "x", 1.9, source="s", unit="u", kind="speed", at_least=2.0, **given
        )

    alone, beside = make(), make(paper=1.76)
    assert (alone["expected"], alone["paper"]) == (2.0, None)
    assert (beside["expected"], beside["paper"]) == (2.0, 1.76)
    assert alone["holds"] is beside["holds"] is False


def test_the_gain_of_each_technique_is_given_in_both_orders():
    found = {(g.technique, g.beside): g.ratio for g in gains(headline_rows())}
    assert found == {
        ("paging", "static batching"): pytest.approx(1.5),
        ("paging", "continuous batching"): pytest.approx(2.0),
        ("continuous batching", "max memory"): pytest.approx(2.0),
        ("continuous batching", "paged memory"): pytest.approx(200 / 75),
        ("sharing", "paging and continuous"): pytest.approx(1.5),
        ("paging and continuous batching", "max + static"): pytest.approx(4.0),
    }


def test_gains_in_either_order_multiply_to_the_whole():
    paging_static, paging_cont, cont_max, cont_paged, _, whole = (
        g.ratio for g in gains(headline_rows())
    )
    assert paging_static * cont_paged == pytest.approx(whole)
    assert cont_max * paging_cont == pytest.approx(whole)


def test_a_gain_without_its_cells_is_not_made_up():
    assert [g.ratio for g in gains(headline_rows()[:1])] == [None] * 6


def test_the_claims_of_the_headline():
    claims = by_id(check_claims("headline", headline_rows(), []))
    assert claims["headline.speedup_real.paged_continuous"]["measured"] == 4.0
    assert claims["headline.speedup_real.paged_continuous"]["holds"]
    assert claims["headline.kv_utilization_real.paged"]["measured"] == 95.0
    assert claims["headline.gain_real.sharing.paging"]["measured"] == 1.5
    paper = {id: c["paper"] for id, c in claims.items() if c["paper"] is not None}
    assert paper == {
        "headline.kv_utilization_real.paged": 96.3,
        "headline.kv_utilization_real.max": pytest.approx(100 * 20.4 / 91.0, abs=0.05),
        "headline.kv_utilization_real.pow2": pytest.approx(100 * 26.8 / 58.3, abs=0.05),
        "headline.kv_utilization_real.oracle": pytest.approx(
            100 * 38.2 / 63.4, abs=0.05
        ),
    }
    assert claims["headline.requests_over_capacity.paged"]["measured"] == 3.0
    assert claims["headline.tokens_equal"]["holds"]
    assert len(claims) == 14


def test_a_claim_that_does_not_hold_is_reported():
    rows = headline_rows()
    rows[3]["metrics"] |= {"output_tokens_per_s": 60.0, "kv_utilization": 0.5}
    claims = by_id(check_claims("headline", rows, []))
    assert not claims["headline.speedup_real.paged_continuous"]["holds"]
    assert not claims["headline.kv_utilization_real.paged"]["holds"]
    assert not claims["headline.gain_real.paging.continuous"]["holds"]


def test_missing_cells_make_claims_that_do_not_hold():
    claims = check_claims("headline", headline_rows()[:1], [])
    missing = [c for c in claims if c["measured"] is None]
    assert missing and not any(c["holds"] for c in missing)


def test_requests_with_other_tokens_are_counted_ties_apart():
    differences = [
        Difference("paged-static", "max-static", "0", 3, 7, 8, gap=1.5),
        Difference("paged-static", "max-static", "1", 0, 7, 8, gap=TIE / 10),
        Difference("paged-continuous", "max-static", "2", 0, 7, 8),
    ]
    found = by_id(check_claims("headline", headline_rows(), differences))
    equal = found["headline.tokens_equal"]
    assert equal["measured"] == 2.0 and not equal["holds"]
    assert "of 360 requests in 6 cells" in equal["note"]
    assert "3 have other tokens" in equal["note"] and "1 of them" in equal["note"]


def test_ties_alone_leave_the_tokens_equal():
    differences = [Difference("paged-static", "max-static", "1", 0, 7, 8, gap=TIE / 10)]
    found = by_id(check_claims("headline", headline_rows(), differences))
    assert found["headline.tokens_equal"]["holds"]


def test_the_claims_of_the_block_sizes():
    rows = [
        row(str(size), size, block_size=size, workload="system_prompt", sharing=True)
        for size in (1, 16, 256)
    ]
    for number, one in enumerate(rows):
        one["metrics"] |= {
            "kv_utilization": 1 - number / 10,
            "block_table_bytes": 1000 - number,
            "cow_bytes": 100 * number,
        }
    claims = by_id(check_claims("block_size", rows, []))
    assert claims["block_size.utilization_real.rises"]["holds"]
    assert claims["block_size.table_bytes_real.rises"]["holds"]
    assert claims["block_size.cow_bytes_real.largest"]["measured"] == 200
    assert claims["block_size.fastest_real"]["measured"] == 256
    assert not claims["block_size.fastest_real"]["holds"]


def test_the_claims_of_the_budgets_are_one_for_each():
    rows = []
    for budget in (2.0, 8.0):
        for memory, batching, speed in (
            ("max", "static", 10.0),
            ("paged", "continuous", 10 * budget),
        ):
            one = row(f"{memory}{budget}", speed, memory=memory, batching=batching)
            one["cell"]["engine.full_length_requests"] = budget
            rows.append(one)
    claims = by_id(check_claims("budget", rows, []))
    assert claims["budget.speedup_real.paged_continuous.2"]["measured"] == 2.0
    assert claims["budget.speedup_real.paged_continuous.8"]["measured"] == 8.0


def test_claims_are_made_for_each_value_of_another_sweep():
    rows = headline_rows() + headline_rows()
    for number, one in enumerate(rows):
        one["cell"]["engine.dtype"] = "float32" if number < 6 else "bfloat16"
        one["key"] += one["cell"]["engine.dtype"]
    swept = ["engine.dtype", "engine.batching"]
    differences = [Difference(rows[7]["key"], rows[0]["key"], "0", 0, 1, 2)]
    claims = by_id(check_claims("headline", rows, differences, swept))
    assert len(claims) == 28
    assert claims["headline.tokens_equal.dtype.float32"]["holds"]
    assert not claims["headline.tokens_equal.dtype.bfloat16"]["holds"]


def test_unknown_claims_are_refused():
    assert check_claims("", [], []) == []
    with pytest.raises(UserError, match="one of headline, block_size, budget"):
        check_claims("headlines", [], [])


def test_what_was_not_measured_is_not_shown_as_failed():
    def cell(made):
        (shown,) = tables.claims_table([made]).columns[-1].cells
        return shown

    of = functools.partial(claim, "x", source="s", unit="u", kind="exact")
    assert cell(of(None, near=1.0)) == "not measured"
    assert "no" in cell(of(2.0, near=1.0)) and "yes" in cell(of(1.0, near=1.0))
    assert cell(of(None)) == ""
