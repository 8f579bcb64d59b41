"""The claims and figures of the experiments on sharing and preemption."""

import io

import matplotlib.image
import pytest
from test_claims import by_id, row

from experiments import sharing_figures
from experiments.claims import check_claims
from experiments.preemption_claims import preemption_costs


def shared_row(key, speed=100.0, saving=0.0, **cell):
    made = row(key, speed, **cell)
    made["label"] = key
    made["metrics"] |= {
        "block_saving": saving,
        "hit_tokens": 0,
        "recomputed_per_token": 0.0,
        "swapped_bytes_per_token": 0.0,
        "host_read_bytes_per_token": 500.0,
        "preemptions": 3,
    }
    block = 46080 * made["cell"]["block_size"]  # as SmolLM2's
    made["details"] |= {"preemption_cost": None, "block_bytes": block}
    made["details"]["workload"] |= {
        "input_tokens": {"mean": 19.0},
        "output_tokens": {"mean": 58.0},
        "prefix_tokens": 73,
    }
    return made


def parallel_rows():
    return [shared_row("1", **{"workload.n": 1, "engine.sharing": True})] + [
        shared_row(
            f"{n}-{sharing}",
            speed=110.0 if sharing else 100.0,
            saving=0.06 if sharing else 0.0,
            **{"workload.n": n, "engine.sharing": sharing},
        )
        for n in (2, 4, 6)
        for sharing in (False, True)
    ]


def beam_rows():
    separate = [
        shared_row(f"n{n}", **{"workload.n": n, "engine.sharing": False})
        for n in (2, 4, 6)
    ]
    return separate + [
        shared_row(
            f"beam{width}",
            speed=80.0 if width == 6 else 90.0,
            saving=0.5,
            **{"workload.beam_width": width, "engine.sharing": True},
        )
        for width in (2, 4, 6)
    ]


def prefix_rows():
    rows = []
    for workload in ("one_shot", "few_shot"):
        for way, speed in (("none", 100), ("registered", 200), ("automatic", 300)):
            made = shared_row(
                f"{workload}-{way}",
                speed,
                workload=workload,
                sharing=way == "registered",
                **{"engine.prefix_caching": way == "automatic"},
            )
            if way == "automatic":
                made["metrics"]["hit_tokens"] = 64 * 59  # of 60 requests
            rows.append(made)
    return rows


def preemption_rows():
    rows = []
    for size in (4, 16, 64):
        for way in ("recompute", "swap"):
            made = shared_row(
                f"{size}-{way}",
                speed=100.0 if way == "swap" else 90.0,
                block_size=size,
                **{"engine.preemption": way, "engine.block_size": size},
            )
            moved = "swapped_bytes_per_token" if way == "swap" else None
            made["metrics"][moved or "recomputed_per_token"] = 0.5
            made["details"]["preemption_cost"] = {
                "tokens": 256,
                "swap_out_s": 0.008 / size if way == "swap" else 1.0,
                "swap_in_s": 0.012 / size if way == "swap" else 1.0,
                "recompute_s": 0.3 if way == "recompute" else 0.31,
            }
            rows.append(made)
    return rows


def test_savings_stand_beside_those_of_the_paper():
    claims = by_id(check_claims("parallel_sampling", parallel_rows(), []))
    for n, paper in ((2, 6.09), (4, 8.53), (6, 9.79)):
        saved = claims[f"fig15.saving_real.parallel.{n}"]
        assert saved["measured"] == pytest.approx(6.0) and saved["paper"] == paper
        assert saved["holds"] == (n < 6) and saved["unit"] == "%"
        assert "prompts of 19.0 and outputs of 58.0" in saved["note"]
        assert "over a burst that is served to its end" in saved["note"]
        faster = claims[f"parallel_sampling.speedup_real.sharing.{n}"]
        assert faster["measured"] == pytest.approx(1.1) and faster["holds"]


def test_beams_stand_beside_the_paper_and_beside_separate_sequences():
    claims = by_id(check_claims("beam_search", beam_rows(), []))
    assert claims["fig15.saving_real.beam.4"]["measured"] == pytest.approx(50.0)
    assert claims["fig15.saving_real.beam.4"]["holds"]
    note = claims["fig15.saving_real.beam.4"]["note"]
    assert "how much beams share is the model's choice" in note
    assert not claims["fig15.saving_real.beam.2"]["holds"]
    assert claims["beam_search.speed_real.separate.4"]["measured"] == 0.9
    assert claims["beam_search.speed_real.separate.4"]["holds"]
    assert not claims["beam_search.speed_real.separate.6"]["holds"]


def test_prefixes_stand_beside_the_paper_and_hits_are_counted():
    claims = by_id(check_claims("shared_prefix", prefix_rows(), []))
    speedup = claims["fig16.speedup_real.one_shot.registered"]
    assert (speedup["measured"], speedup["holds"]) == (2, True)
    assert (speedup["expected"], speedup["paper"]) == (1.67, None)
    assert "section 6.4, in its text" in speedup["source"]
    assert not claims["fig16.speedup_real.few_shot.automatic"]["holds"]
    assert "Orca (Oracle)" in speedup["note"]
    # 73 tokens hold 4 whole blocks of 16, which all requests but the first find.
    share = claims["shared_prefix.hit_share_real.one_shot.automatic"]
    assert share["measured"] == 100.0 and share["holds"]


def test_preemption_stands_beside_the_paper():
    claims = by_id(check_claims("preemption", preemption_rows(), []))
    assert claims["fig19.swap_real.4_over_64"]["measured"] == pytest.approx(16)
    flat = claims["fig19.recompute_real.flat"]
    assert flat["measured"] == pytest.approx(1) and flat["expected"] == 1.25
    assert flat["paper"] == pytest.approx(38.62 / 36.93)
    ratio = claims["fig19.recompute_over_swap_real.16"]
    assert ratio["measured"] == pytest.approx(0.3 / (0.02 / 16))
    assert ratio["paper"] == pytest.approx(38.62 / (18.54 + 21.61))
    assert ratio["expected"] == ratio["paper"]
    assert claims["fig19.speed_real.swap_over_recompute.4"]["paper"] is None
    assert claims["fig19.speed_real.swap_over_recompute.4"]["holds"]
    assert claims["preemption.recomputed_per_token.swap"]["holds"]
    assert claims["preemption.preemptions.all"]["measured"] == 3


def test_keys_and_values_that_go_to_the_host_are_noticed():
    rows = preemption_rows()

    def claimed():
        return by_id(check_claims("preemption", rows, []))[
            "preemption.host_read_share.all"
        ]

    assert claimed()["measured"] == pytest.approx(500 / 46080)
    assert claimed()["holds"]
    # One cell whose host reads one token's keys and values in eight.
    rows[3]["metrics"]["host_read_bytes_per_token"] += 46080 / 8
    assert not claimed()["holds"]


def test_the_faster_measurement_of_a_preempted_sequence_counts():
    assert preemption_costs(preemption_rows())[4] == {
        "swap": pytest.approx(0.005),
        "recompute": 0.3,
    }


@pytest.mark.parametrize(
    "name", ["parallel_sampling", "beam_search", "shared_prefix", "preemption"]
)
def test_without_any_cells_no_claim_holds_by_accident(name):
    claims = check_claims(name, [], [])
    real = [c for c in claims if "_real" in c["id"]]
    assert not any(c["holds"] for c in real)


@pytest.mark.parametrize(
    "name,rows,figure",
    [
        ("parallel_sampling", parallel_rows(), "saving.png"),
        ("beam_search", beam_rows(), "saving.png"),
        ("shared_prefix", prefix_rows(), "prefix_speedup.png"),
        ("preemption", preemption_rows(), "preemption.png"),
    ],
)
def test_each_experiment_has_a_figure_of_its_own(name, rows, figure):
    ((drawn, (caption, png)),) = sharing_figures.draw(name, rows).items()
    assert drawn == figure and caption.endswith(".")
    image = matplotlib.image.imread(io.BytesIO(png))
    assert image.shape[0] > 200 and image[..., :3].std() > 0.05


def test_other_experiments_have_none():
    assert sharing_figures.draw("headline", []) == {}
