"""Figs 12, 14, 16 and 17: claims that hold and fail, figures, a search."""

import dataclasses
import json
import math

import numpy as np
import pytest

from experiments.studies import capacity_study, fig12, fig14, fig16, fig17
from experiments.studies.base_config import PRESETS
from experiments.studies.capacity_study import THRESHOLD
from experiments.studies.panels import FIG12
from experiments.studies.paper import numbers
from experiments.studies.study import Scale

QUICK = Scale("quick", (0, 1, 2), *PRESETS["quick"].values())
FULL = Scale("full", (0, 1, 2), *PRESETS["full"].values())
PAPER = numbers()["fig12a"]["capacity"]


def row(panel, system, seed, capacity, **metrics):
    curve = [[0.5 * capacity, 0.05], [0.9 * capacity, 0.1], [1.1 * capacity, 2.0]]
    return {
        "cell": {"panel": panel, "system": system, "seed": seed},
        "metrics": {
            "capacity": capacity,
            "capacity_on_grid": capacity,
            "kv_utilization": 0.97,
            "curve": curve,
        }
        | metrics,
    }


def rows_of(capacities, panel="fig12a", **metrics):
    return [
        row(panel, system, seed, capacity * (1 + 0.01 * (seed - 1)), **metrics)
        for system, capacity in capacities.items()
        for seed in range(3)
    ]


def by_id(claims):
    assert len({claim["id"] for claim in claims}) == len(claims)
    return {claim["id"]: claim for claim in claims}


def test_the_papers_own_capacities_hold_and_twofold_over_oracle_does_not():
    found = by_id(fig12.claims(rows_of(PAPER), FULL))
    for system, capacity in PAPER.items():
        for quantity in ("capacity", "capacity_on_grid"):
            claim = found[f"fig12a.{quantity}.{system}"]
            assert claim["holds"] and claim["kind"] == "fitted"
            assert claim["paper"] == capacity
            assert "3 seeds" in claim["note"]
    assert "1.9 and 2" in found["fig12a.capacity.vllm"]["note"]
    for base in ("max", "pow2", "ft"):
        assert found[f"fig12a.ratio.vllm_over_{base}"]["holds"]
    oracle = found["fig12a.ratio.vllm_over_oracle"]
    assert oracle["holds"] is False
    assert oracle["measured"] == pytest.approx(1.929 / 1.099)
    assert oracle["expected"] == 2.0
    assert oracle["paper"] == pytest.approx(1.929 / 1.099)
    used = found["fig12a.utilization.vllm"]
    assert (used["expected"], used["paper"]) == (95.0, None)
    assert found["fig12a.utilization.vllm"]["holds"]
    assert found["fig12a.utilization.ft"]["holds"] is None


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_capacities_far_from_the_papers_do_not_hold(factor):
    scaled = {system: factor * capacity for system, capacity in PAPER.items()}
    found = by_id(fig12.claims(rows_of(scaled, kv_utilization=0.9), FULL))
    assert not any(found[f"fig12a.capacity.{system}"]["holds"] for system in PAPER)
    assert found["fig12a.ratio.vllm_over_max"]["holds"]
    assert found["fig12a.utilization.vllm"]["holds"] is False


def test_differences_within_the_spread_are_called_that():
    rows = rows_of({"vllm": 1.005, "orca_oracle": 1.0, "orca_max": 0.5})
    found = by_id(fig12.claims(rows, QUICK))
    same, apart = (
        found[f"fig12a.ratio.vllm_over_{base}"]["note"] for base in ("oracle", "max")
    )
    assert "the difference is within the spread over 3 seeds" in same
    assert "the difference exceeds the spread over 3 seeds" in apart
    assert "quick: 0.1 of the paper's traces" in same


def test_of_one_seed_nothing_is_said_to_exceed_a_spread():
    rows = [r for r in rows_of(PAPER) if r["cell"]["seed"] == 0]
    for claim in fig12.claims(rows, dataclasses.replace(FULL, seeds=(0,))):
        if claim["measured"] is not None:
            assert (claim["seeds"], claim["spread"]) == (1, None)
            assert (
                "one seed" in claim["note"]
                and "exceeds the spread over" not in (claim["note"])
            )


def test_beams_are_said_to_rest_on_an_assumption():
    for claim in fig14.claims([], FULL):
        beams = claim["id"].split(".")[0] in ("fig14d", "fig14e", "fig14f")
        assert ("assumed: beams part as" in claim["note"]) is beams


@pytest.mark.parametrize("gain, holds", [(2.0, True), (1.2, False)])
def test_fig_14_says_whether_more_sequences_gain_more(gain, holds):
    rows = [
        one
        for panel in ("fig14a", "fig14c", "fig14d", "fig14f")
        for one in rows_of(
            {"vllm": gain if panel in ("fig14c", "fig14f") else 1.5, "orca_oracle": 1},
            panel=panel,
        )
    ]
    found = by_id(fig14.claims(rows, FULL))
    for panel in ("fig14c", "fig14f"):
        trend = found[f"{panel}.trend.vllm_over_oracle.6_over_2"]
        assert trend["measured"] == pytest.approx(gain / 1.5)
        assert trend["holds"] is holds
        assert "the difference exceeds the spread over 3 seeds" in trend["note"]


def test_claims_and_captions_say_what_was_cut_short():
    def marks(study, scale):
        return {
            claim["id"].split(".")[0]: claim["note"].rpartition("; ")[2]
            for claim in study.claims([], scale)
        }

    found = marks(fig14, QUICK)
    coarser = "of the paper's traces, capacities to 5%"
    assert found["fig14a"].endswith(f"quick: 0.033 {coarser}")
    assert found["fig14e"].endswith(f"quick: 0.017 {coarser}")
    assert not any("quick" in mark or "full" in mark for mark in marks(fig14, FULL))
    rough = dataclasses.replace(FULL, tolerance=0.1)
    assert marks(fig16, rough)["fig16a"].endswith("full: capacities to 10%")
    [(caption, _)] = fig14.draw([], QUICK).values()
    assert f"Quick: 0.033 {coarser} (a, b, c)." in caption
    assert f"Quick: 0.017 {coarser} (d, e, f)." in caption
    [(caption, _)] = fig12.draw([], dataclasses.replace(QUICK, seeds=(0,))).values()
    assert "mean of one seed" in caption and caption.endswith(f"Quick: 0.1 {coarser}.")


def test_what_is_missing_does_not_hold():
    for study in (fig12, fig14, fig16, fig17):
        for claim in study.claims([], QUICK):
            assert claim["measured"] is None
            assert not claim["holds"]
    grid = {"capacity_on_grid": None}
    found = by_id(fig12.claims(rows_of(PAPER, **grid), FULL))
    assert found["fig12a.capacity_on_grid.vllm"]["holds"] is False


def test_beyond_fig_12a_there_is_no_number_of_the_papers():
    rows = rows_of({"vllm": 20.0, "orca_max": 8.0}, panel="fig12d")
    found = by_id(fig12.claims(rows, FULL))
    capacity = found["fig12d.capacity.vllm"]
    assert (capacity["paper"], capacity["kind"]) == (None, "predicted")
    ratio = found["fig12d.ratio.vllm_over_max"]
    assert ratio["measured"] == pytest.approx(2.5)
    assert (ratio["expected"], ratio["paper"]) == (2.0, None)


@pytest.mark.parametrize("study", [fig12, fig14, fig16, fig17])
@pytest.mark.parametrize("scale", [QUICK, FULL])
def test_tasks_say_all_that_their_result_depends_on(study, scale):
    tasks = study.tasks(scale)
    assert len({task.key for task in tasks}) == len(tasks)
    for task in tasks:
        assert json.loads(json.dumps(task.settings)) == task.settings
        assert task.settings["seconds"] > 0 and task.settings["guess"] > 0
    # Those of one system and panel differ in the seed alone, and stand side by side.
    for first, second in zip(tasks[::3], tasks[1::3], strict=True):
        changed = {k for k, v in first.settings.items() if second.settings[k] != v}
        assert changed == {"seed"}


def test_fig_12a_is_measured_on_the_papers_grid_and_one_point_above():
    rates = {
        task.settings["system"]: task.settings["rates"]
        for task in fig12.tasks(FULL)
        if task.settings["panel"] == "fig12a"
    }
    assert rates["vllm"] == [1.0, 1.25, 1.5, 1.75, 1.8, 1.9, 2.0]
    assert rates["orca_max"] == [0.2, 0.3, 0.4, 0.5, 0.75]
    assert rates["ft"][-1] == 0.25
    assert not any(t.settings["rates"] for t in fig14.tasks(FULL))


@pytest.mark.parametrize(
    "study, name, panel",
    [
        (fig12, "fig12", "fig12a"),
        (fig14, "fig14", "fig14e"),
        (fig16, "fig16", "fig16b"),
        (fig17, "fig17", "fig17"),
    ],
)
def test_figures_are_drawn_of_some_rows_and_of_none(study, name, panel):
    rows = rows_of({"vllm": 2.0, "orca_oracle": 1.0}, panel=panel)
    rows[0]["metrics"]["curve"].append([2.4, 3.0])  # a seed with a point more
    for some in (rows, []):
        figures = study.draw(some, QUICK)
        caption, png = figures[f"{name}.png"]
        assert png.startswith(b"\x89PNG") and "3 seeds" in caption


class Served:
    """Results of a made-up system, which saturates at `capacity`."""

    rejected = 0

    def __init__(self, rate):
        self.means = {
            "kv_utilization": 0.9,
            "mean_running": 10.0 * rate,
            "mean_step_s": 0.03,
            "preemptions": 0.0,
        }


def settings(**changes):
    return {
        "system": "vllm",
        "seconds": 60.0,
        "guess": 5.0,
        "tolerance": 0.02,
        "rates": [],
        "fractions": [0.5, 1.05],
    } | changes


@pytest.fixture
def served(monkeypatch):
    """Makes every system saturate at 1.9 requests/s; returns all that was asked."""
    asked = []

    def serve_at(settings, rate, *, window, give_up_above):
        asked.append((rate, give_up_above))
        latency = 0.03 * rate + (100 * (rate - 1.9) if rate > 1.9 else 0.0)
        if give_up_above is not None and latency > give_up_above:
            latency = math.inf
        return latency, Served(rate)

    monkeypatch.setattr(capacity_study, "serve_at", serve_at)
    return asked


def test_a_search_finds_the_capacity_and_measures_the_curve(served):
    found = capacity_study.run(settings())
    truth = 1.9 + (THRESHOLD - 0.03 * 1.9) / 100
    assert found["capacity_low"] <= truth * 1.001
    assert found["capacity_high"] <= 1.02 * found["capacity_low"]
    assert found["mean_running"] == pytest.approx(10 * found["capacity_low"])
    assert found["capacity_on_grid"] is None
    (below, _), (above, latency) = found["curve"]
    assert below == pytest.approx(0.5 * found["capacity"])
    assert above == pytest.approx(1.05 * found["capacity"])
    # No run of the curve is given up: the line is drawn to where it goes.
    assert THRESHOLD < latency < math.inf
    assert len(served) == len(set(served))
    json.dumps(found, allow_nan=False)


def test_a_grid_goes_on_until_the_line_crosses(served):
    found = capacity_study.run(settings(rates=[1.0, 1.5, 1.75]))
    assert [rate for rate, _ in found["curve"]] == [1.0, 1.5, 1.75, 2.0]
    before, after = (0.03 * rate for rate in (1.75, 2.0))
    share = (THRESHOLD - before) / (after + 10 - before)
    assert found["capacity_on_grid"] == pytest.approx(1.75 + 0.25 * share, rel=1e-3)


def test_a_small_simulation_is_searched():
    [task] = [
        t
        for t in capacity_study.tasks(FIG12[3:4], QUICK)
        if t.key == "fig12d-orca_max-0"
    ]
    short = task.settings | {"seconds": 60.0, "tolerance": 0.5}
    found = capacity_study.run(short | {"fractions": [0.5]})
    assert found["capacity_low"] < found["capacity"] < found["capacity_high"]
    [(rate, latency)] = found["curve"]
    assert rate == pytest.approx(0.5 * found["capacity"])
    # A step takes 35 ms, and next to nobody waits.
    assert 0.02 < latency < THRESHOLD
    # Of the model length that each request reserves.
    assert 0.01 < found["kv_utilization"] < 0.1
    assert np.isfinite([v for v in found.values() if isinstance(v, float)]).all()
