"""The cost model beside the engine: the fit of overheads, and what is claimed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def row(errors):
    points = [
        {
            "batch": 2**i,
            "context": 64,
            "measured_s": 1.0,
            "physics_s": 0.5,
            "fitted_s": 1 + error,
            "held_out": i % 2 == 1,
        }
        for i, error in enumerate(errors)
    ]
    return {"metrics": {"points": points, "gb_per_s": 20.0, "gflops": 100.0}}


@pytest.mark.parametrize(("error", "holds"), [(0.1, True), (-0.2, False)])
def test_the_error_of_held_out_points_is_judged(error, holds):
    config = study_config("quick", "machine_costs", ("machine_costs",))
    config.preset, config.seed = "quick", 0
    rows = [row([9.0, error, 9.0, error])]
    physics, fitted = machine_costs.claims(rows, scale_of(config))
    assert physics["measured"] == pytest.approx(50)
    assert physics["holds"] is None
    assert fitted["measured"] == pytest.approx(100 * abs(error))
    assert fitted["holds"] is holds
    assert machine_costs.draw(rows, scale_of(config))["machine_costs.png"][1]
