"""A study without a simulator, for tests of the command that runs studies."""

import os
import time
from pathlib import Path

from matplotlib.figure import Figure

from experiments.figures import to_png
from experiments.studies.seeds import over_seeds
from experiments.studies.study import Task
from experiments.studies.study_claim import study_claim

TITLE = "Numbers that are known"
# Each task leaves a line in the file that this variable names.
DONE = "TINY_STUDY_DONE"


def tasks(scale):
    return [
        Task(f"{system}-{seed}", {"system": system, "seed": seed})
        for system in ("ft", "vllm")
        for seed in scale.seeds
    ]


def run(settings):
    with Path(os.environ[DONE]).open("a") as file:
        file.write(f"{settings['system']}-{settings['seed']}\n")
    if settings["system"] == "ft":  # so that the last task is done before the first
        time.sleep(0.05)
    return {"rate": len(settings["system"]) + 0.1 * settings["seed"]}


def run_piece(piece):
    """In place of `studies.run.run_piece`, which looks for studies of the package."""
    return run(piece.task.settings), 0.125


def claims(rows, scale):
    return [
        study_claim(
            f"tiny.rate.{system}",
            over_seeds(rows, lambda metrics: metrics["rate"], system=system),
            paper=paper,
            unit="requests/s",
            kind="predicted",
            source="nowhere",
            scale=scale,
        )
        for system, paper in (("ft", 2.1), ("vllm", 8.0))
    ]


def draw(rows, scale):
    return {"tiny.png": (f"{len(rows)} points", to_png(Figure(figsize=(1, 1))))}
