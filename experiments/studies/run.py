"""Runs studies: their tasks over processes, then claims and figures."""

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Console

from experiments import report, tables
from experiments.attribution import Row
from experiments.command_line import Command, first_line, flat
from experiments.environment import describe
from experiments.errors import UserError
from experiments.interrupts import Interrupts
from experiments.progress import Lines, add_bar, make_progress
from experiments.results import ResultsFolder, open_folder
from experiments.studies.base_config import scale_of
from experiments.studies.study import Study, Task, load_study
from experiments.workers import run_all


class Piece(NamedTuple):
    """A task and the study that it is of.

    Attributes:
      study: its name.
      task: the task.
    """

    study: str
    task: Task

    @property
    def key(self) -> str:
        """Name of the row."""
        return f"{self.study}-{self.task.key}"


class StudyExperiment:
    """One run of the command.

    Attributes:
      cells: all tasks, in the order of the rows.
      folder: where the results go; None before it is opened.
    """

    def __init__(self, command: Command, console: Console, interrupts: Interrupts):
        """Reads and checks all settings; runs nothing yet.

        Raises:
          UserError: a setting that cannot be used.
        """
        self._command, self._console = command, console
        self._interrupts = interrupts
        config = command.config
        if command.sweep:
            raise UserError(
                f"--sweep={command.sweep[0]}: studies have grids of their own; leave "
                "it out, or take a configuration with cells"
            )
        self._scale = scale_of(config)
        if not self._scale.seeds:
            raise UserError(f"num_seeds is {config.num_seeds}; it must be 1 or more")
        values = flat(config)
        for name in ("time_share", "tolerance", "grid"):
            if not 0 < values[name] <= 1:
                raise UserError(
                    f"{name} is {values[name]}; it must be above 0 and at most 1"
                )
        self._studies: dict[str, Study] = {
            name: load_study(name) for name in values["studies"]
        }
        self.cells = [
            Piece(name, task)
            for name, study in self._studies.items()
            for task in study.tasks(self._scale)
        ]
        self.folder: ResultsFolder | None = None

    def run(self) -> None:
        """Runs the tasks that have no results yet, then writes the summary."""
        config = self._command.config
        asked = {
            "experiment": config.name,
            "cells": [piece.key for piece in self.cells],
            "config": json.loads(config.to_json_best_effort()),
        }
        command = self._command
        folder = self.folder = open_folder(
            command.out, command.resume, asked, describe()
        )
        self._console.print(f"results: {folder.path}", markup=False, soft_wrap=True)
        waiting = [piece for piece in self.cells if piece.key not in folder.rows]
        done = len(self.cells) - len(waiting)
        if done:
            self._console.print(f"{done} of {len(self.cells)} tasks are done already")
        with make_progress(self._console) as progress:
            bar = add_bar(progress, "tasks", len(self.cells), done)
            lines = Lines(progress, bar, every_s=20)
            for piece, metrics, seconds in self._results(waiting):
                row = {
                    "label": piece.task.key,
                    "cell": {"study": piece.study} | piece.task.settings,
                    "metrics": metrics,
                    "details": {"wall_s": round(seconds, 3)},
                }
                folder.add_row(piece.key, row)
                progress.advance(bar)
                lines.say(f"{piece.key}: {seconds:.1f} s")
                self._interrupts.check()
        self._finish(folder)

    def _results(
        self, waiting: list[Piece]
    ) -> Iterator[tuple[Piece, dict[str, Any], float]]:
        found = run_all(
            run_piece,
            waiting,
            workers=self._command.workers,
            launcher=self._command.launcher,
        )
        for number, (metrics, seconds) in found:
            yield waiting[number], metrics, seconds

    def _finish(self, folder: ResultsFolder) -> None:
        rows = [folder.rows[piece.key] for piece in self.cells]
        claims, figures = [], {}
        for name, study in self._studies.items():
            some: list[Row] = [row for row in rows if row["cell"]["study"] == name]
            claims += study.claims(some, self._scale)
            figures |= study.draw(some, self._scale)
        config = self._command.config
        summary: dict[str, Any] = {
            "experiment": config.name,
            "description": first_line(self._command.config_path),
            "command": self._command.again,
            "swept": [],
            "config": json.loads(config.to_json_best_effort()),
            "environment": folder.environment(),
            "rows": rows,
            "claims": claims,
        }
        folder.write_summary(summary)
        folder.write_figures(figures)
        html = report.render(
            summary, figures, summary["command"], summary["description"]
        )
        folder.write_text("report.html", html)
        self._console.print(tables.claims_table(claims))
        path = folder.path / "report.html"
        self._console.print(f"report: {path}", markup=False, soft_wrap=True)


def run_piece(piece: Piece) -> tuple[dict[str, Any], float]:
    """Runs a task in a worker; returns its metrics and the seconds it took."""
    from paged_jax import compilation_cache

    compilation_cache.enable()
    started = time.perf_counter()
    metrics = load_study(piece.study).run(piece.task.settings)
    return metrics, time.perf_counter() - started
