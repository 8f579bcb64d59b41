"""The cost model beside the engine: the fit of overheads, and what is claimed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import models
from experiments.errors import UserError
from experiments.simulator.measured_machine import Machine, read_machine
from experiments.studies import machine_costs
from experiments.studies.base_config import scale_of, study_config

BATCHES = [1, 4, 16, 64]
PHYSICS = [0.02, 0.021, 0.03, 0.09]


@given(st.floats(0.0, 0.05), st.floats(0.0, 0.001))
def test_overheads_that_are_there_are_found(step_s, row_s):
    measured = [p + step_s + row_s * b for p, b in zip(PHYSICS, BATCHES, strict=True)]
    found = machine_costs.fit_overheads(BATCHES, PHYSICS, measured)
    np.testing.assert_allclose(found, (step_s, row_s), atol=1e-9)


def test_overheads_are_never_below_zero():
    measured = [0.9 * p for p in PHYSICS]
    assert machine_costs.fit_overheads(BATCHES, PHYSICS, measured) == (0.0, 0.0)
    rising = [p + 0.01 - 1e-4 * b for p, b in zip(PHYSICS, BATCHES, strict=True)]
    step_s, row_s = machine_costs.fit_overheads(BATCHES, PHYSICS, rising)
    assert step_s > 0
    assert row_s == 0


def point(i, errors, computes="decode", **changes):
    return {
        "computes": computes,
        "batch": 2**i,
        "context": 64,
        "measured_s": [1.0 for _ in errors],
        "physics_s": 0.5,
        "fitted_s": 1 + errors[0],
        "held_out": True,
    } | changes


def by_id(points):
    config = study_config("quick", "machine_costs", ("machine_costs",))
    config.preset, config.seed = "quick", 0
    rows = [{"metrics": {"points": points, "gb_per_s": 20.0, "gflops": 100.0}}]
    assert machine_costs.draw(rows, scale_of(config))["machine_costs.png"][1]
    found = machine_costs.claims(rows, scale_of(config))
    return {
        claim["id"].removeprefix("machine_costs.error_real."): claim for claim in found
    }


@pytest.mark.parametrize(("error", "holds"), [(0.1, True), (-0.2, False)])
def test_the_error_of_held_out_points_is_judged(error, holds):
    claims = by_id(
        [
            point(0, [9.0], held_out=False),
            point(1, [error]),
            point(2, [error]),
            point(0, [0.3], "prompt"),
        ]
    )
    assert claims["physics"]["measured"] == pytest.approx(50)
    assert claims["physics"]["holds"] is None
    assert claims["fitted"]["measured"] == pytest.approx(100 * abs(error))
    assert claims["fitted"]["holds"] is holds
    assert claims["fitted.prompts"]["measured"] == pytest.approx(30)
    assert claims["fitted.prompts"]["holds"] is False
    assert claims["physics.prompts"]["holds"] is None


def test_each_measurement_has_an_error_and_their_spread_is_said():
    points = [
        point(0, [0.0], measured_s=[1.0, 0.8, 1.25]),
        point(1, [0.0], measured_s=[1.0, 1.0, 1.25]),
        point(0, [0.1], "prompt"),
    ]
    claims = by_id(points)
    # Of the three: 0, the mean of 25% and 0, and 20%.
    fitted = claims["fitted"]
    assert fitted["measured"] == pytest.approx(32.5 / 3)
    assert (fitted["spread"], fitted["seeds"]) == (pytest.approx(20.0), 3)
    assert "mean of 3 measurements, spread 20" in fitted["note"]
    assert "measured once" in claims["fitted.prompts"]["note"]
    assert "seed" not in fitted["note"] + claims["fitted.prompts"]["note"]


SETTINGS = {
    "model": "smollm2-135m",
    "dtype": "float32",
    "batches": [1, 2],
    "contexts": [8, 16],
    "prompts": [8, 16],
    "steps": 2,
    "repeats": 2,
}


def test_steps_and_prompts_of_the_engine_are_timed_and_other_studies_read_it(
    monkeypatch, tmp_path, tiny_model
):
    monkeypatch.setattr(models, "load_model", lambda name, dtype: tiny_model)
    metrics = machine_costs.run(SETTINGS)
    points = metrics["points"]
    assert [p["held_out"] for p in points] == [False, True, False, True, True, True]
    assert [(p["computes"], p["batch"], p["context"]) for p in points[3:]] == [
        ("decode", 2, 16),
        ("prompt", 1, 8),
        ("prompt", 1, 16),
    ]
    for p in points:
        assert len(p["measured_s"]) == 2 and min(p["measured_s"]) > 0
        assert 0 < p["physics_s"] <= p["fitted_s"]
    assert points[5]["physics_s"] > points[4]["physics_s"]
    path = tmp_path / "summary.json"
    row = {"cell": {"study": "machine_costs"}, "metrics": metrics}
    path.write_text(json.dumps({"rows": [row]}))
    machine = read_machine(path)
    hardware = machine.hardware()
    assert hardware.bandwidth == pytest.approx(1e9 * metrics["gb_per_s"])
    assert 0 < hardware.memory_bytes < 2**50
    assert machine.overheads().step_s == metrics["step_s"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "has no measured machine; give the summary.json"),
        ('{"rows": []}', "has no measured machine"),
        ('{"rows": [{"cell": {"study": "fig12"}}]}', "has no measured machine"),
        (None, "cannot be read"),
        (("gflops", 0.0), "gflops is 0.0, which no machine has"),
        (("gb_per_s", float("nan")), "gb_per_s is nan"),
        (("memory_gib", float("inf")), "memory_gib is inf"),
        (("step_s", -1.0), "step_s is -1.0"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(tmp_path, text, message):
    path = tmp_path / "summary.json"
    if isinstance(text, tuple):
        metrics = Machine(20.0, 100.0, 8.0)._asdict() | dict([text])
        row = {"cell": {"study": "machine_costs"}, "metrics": metrics}
        text = json.dumps({"rows": [row]})
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_machine(path)
