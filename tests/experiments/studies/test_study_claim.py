"""Claims of studies: what they say of seeds, of the paper, and of what was cut."""

import pytest

from experiments.studies.base_config import PRESETS
from experiments.studies.seeds import Estimate, exact
from experiments.studies.study import Scale
from experiments.studies.study_claim import compared_claim, study_claim


def make(found, *, paper=None, **given):
    return study_claim(
        "x.y", found, paper=paper, unit="u", kind="predicted", source="s", **given
    )


@pytest.mark.parametrize(
    "found, spread, seeds, words",
    [
        (Estimate(2.0, 0.25, 3), 0.25, 3, "mean of 3 seeds, spread 0.25"),
        (Estimate(2.0, 0.0, 3), 0.0, 3, "mean of 3 seeds, spread 0"),
        (Estimate(2.0, 0.0, 1), None, 1, "one seed: no spread is known"),
        (exact(2.0), None, None, ""),
        (2.0, None, None, ""),
        (None, None, None, ""),
    ],
)
def test_spread_and_seeds_are_numbers_where_something_is_random(
    found, spread, seeds, words
):
    made = make(found)
    assert (made["spread"], made["seeds"]) == (spread, seeds)
    assert words in made["note"] and bool(words) == bool(made["note"])
    assert made["measured"] == (None if found is None else 2.0)
    assert made["holds"] is None


@pytest.mark.parametrize(
    "given, expected, relation, holds",
    [
        ({}, 1.76, "=", True),
        ({"at_least": 2.0}, 2.0, ">=", False),
        ({"at_most": 2.0}, 2.0, "<=", True),
        ({"near": 3.0}, 3.0, "=", False),
    ],
)
def test_what_is_expected_may_be_another_than_the_papers_number(
    given, expected, relation, holds
):
    made = make(1.8, paper=1.76, **given)
    assert made["paper"] == 1.76
    assert (made["expected"], made["relation"]) == (expected, relation)
    assert made["holds"] is holds


@pytest.mark.parametrize(
    "spread, words", [(0.5, "the paper is within it"), (0.3, "the paper exceeds it")]
)
def test_the_deviation_from_the_paper_stands_beside_the_spread(spread, words):
    made = make(Estimate(2.0, spread, 3), paper=2.2)
    assert made["note"].endswith(f"; the deviation from {words}")
    assert "deviation" not in make(Estimate(2.0, spread, 3))["note"]
    assert "deviation" not in make(Estimate(2.0, 0.0, 1), paper=2.2)["note"]


def test_a_comparison_is_a_ratio_with_its_spread_and_in_words():
    def compared(*pair):
        return compared_claim(
            "x.y", *pair, paper=None, at_least=2.0, unit="x", kind="predicted",
            source="s", note="of two",
        )  # fmt: skip

    made = compared(Estimate(4.0, 0.4, 3), Estimate(2.0, 0.0, 3))
    assert (made["measured"], made["seeds"], made["holds"]) == (2.0, 3, True)
    assert made["spread"] == pytest.approx(0.2)
    assert made["note"].startswith("of two; the difference exceeds the spread over 3")
    missing = compared(Estimate(4.0, 0.4, 3), None)
    assert missing["measured"] is None and missing["note"] == "of two"


def test_what_was_cut_short_is_said():
    quick = Scale("quick", (0, 1, 2), *PRESETS["quick"].values())
    full = Scale("full", (0, 1, 2), *PRESETS["full"].values())
    assert make(1.0, scale=quick)["note"] == "quick: 0.1 of the paper's traces"
    assert make(1.0, scale=full)["note"] == make(1.0)["note"] == ""
    mark = quick.marked("", "5 of 9 sizes", quick.coarser)
    assert make(1.0, mark=mark)["note"] == "quick: 5 of 9 sizes, capacities to 5%"
    assert full.marked("", full.coarser) == ""
