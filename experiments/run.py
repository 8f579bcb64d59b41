"""Runs an experiment: `python -m experiments.run --help`."""

import gc
import json
import math
import shlex
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

from experiments import figures, report, sharing_figures, tables
from experiments.claims import check_claims
from experiments.command_line import (
    Command,
    command_of,
    config_files,
    first_line,
    flat,
    parse,
)
from experiments.environment import describe
from experiments.errors import UserError
from experiments.interrupts import Interrupts
from experiments.metrics import cell_details, cell_metrics
from experiments.models import check_model, load_model
from experiments.progress import Lines, add_bar, make_progress
from experiments.results import ResultsFolder, open_folder
from experiments.serving import run_cell
from experiments.studies.run import StudyExperiment
from experiments.sweep import NAMING, Cell, expand, parse_sweeps
from experiments.token_check import (
    Difference,
    Draw,
    Tokens,
    find_differences,
    with_gap,
)
from experiments.visualize.run import PageExperiment
from experiments.workloads import Workload, build_workload, read_texts
from paged_jax import Engine, compilation_cache
from paged_jax.config import ConfigError
from paged_jax.models.checkpoint import CheckpointError
from paged_jax.models.packed import pack_model
from paged_jax.sampling_params import RequestError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
# Requests with differing tokens whose logits are looked at; each takes a second.
_MOST_GAPS = 64


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0: done. 2: what was given cannot be used, said in one line. 130: interrupted; the
    results so far are kept, and `--resume` goes on.
    """
    console = Console(highlight=False)
    words = sys.argv[1:] if argv is None else argv
    experiment: Experiment | StudyExperiment | PageExperiment | None = None
    try:
        command = parse(words)
        if command.list_configs:
            for name, path in config_files().items():
                print(f"{name:17} {first_line(path)}")
            return 0
        with Interrupts() as interrupts:
            experiment = _kind(command)(command, console, interrupts)
            experiment.run()
        return 0
    except (UserError, ConfigError, RequestError, CheckpointError) as error:
        if experiment is not None and experiment.folder is not None:
            experiment.folder.discard_if_unused()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(_interrupted(experiment, words), file=sys.stderr)
        return EXIT_INTERRUPTED


def _kind(command: Command):
    """Returns what runs a command: the class of an experiment."""
    if "page" in command.config:
        return PageExperiment
    return StudyExperiment if "studies" in command.config else Experiment


class Experiment:
    """One run of the command: its cells, its folder, what is loaded.

    Attributes:
      cells: all cells of the experiment, in the order in which they run.
      folder: where the results go; None before it is opened.
    """

    def __init__(self, command: Command, console: Console, interrupts: Interrupts):
        """Reads and checks all settings; loads nothing yet.

        Raises:
          UserError, ConfigError: a setting that cannot be used.
        """
        self._command = command
        self._console = console
        self._interrupts = interrupts
        config = command.config
        for name, default in (("workers", 0), ("launcher", "processes")):
            if getattr(command, name) != default:
                raise UserError(
                    f"--{name}={getattr(command, name)}: this experiment times an "
                    "engine, and its cells run one after the other; leave it out"
                )
        values = flat(config)
        self._name, self._claims = str(values["name"]), str(values["claims"])
        sweeps = parse_sweeps(config, values["sweep"]) | parse_sweeps(
            config, command.sweep
        )
        self._swept = list(sweeps)
        self.cells = expand(config, sweeps, command.overridden)
        for cell in self.cells:
            if cell.workload.name == "poisson" and not cell.workload.rate:
                rate_references(self.cells, cell)
        for path in {cell.workload.prompts for cell in self.cells}:
            read_texts(path)
        for model in {cell.model for cell in self.cells}:
            check_model(model)
        check_claims(self._claims, [], [])
        self.folder: ResultsFolder | None = None
        self._plan_shown = False
        self._models: dict[tuple, Any] = {}
        self._workloads: dict[Any, Workload] = {}

    def run(self) -> None:
        """Runs the cells that have no results yet, then writes the summary."""
        folder = self.folder = self._open_folder()
        self._console.print(f"results: {folder.path}", markup=False, soft_wrap=True)
        waiting = [cell for cell in self.cells if cell.key not in folder.rows]
        done = len(self.cells) - len(waiting)
        if done:
            self._console.print(f"{done} of {len(self.cells)} cells are done already")
        if waiting:
            _enable_compilation_cache()
        note = TextColumn("{task.fields[note]}")
        with make_progress(self._console, note) as progress:
            bar = add_bar(progress, "cells", len(self.cells), done, note="")
            lines = Lines(progress, bar)
            for cell in waiting:
                self._interrupts.check()
                came_out = self._run_cell(folder, cell, progress)
                progress.advance(bar)
                lines.say(came_out)
        self._finish(folder)

    def _open_folder(self) -> ResultsFolder:
        command = self._command
        asked = {
            "experiment": self._name,
            "cells": [cell.key for cell in self.cells],
            "config": json.loads(command.config.to_json_best_effort()),
        }
        return open_folder(command.out, command.resume, asked, describe())

    def _run_cell(self, folder: ResultsFolder, cell: Cell, progress: Progress) -> str:
        """Runs a cell, and returns a line of what came out."""
        model = self._model(cell)
        workload = self._workload(cell, model)
        rate = self._rate(folder, cell)
        name = f"{cell.workload.name.replace('_', ' ')}: {cell.label}"
        task = add_bar(progress, name, len(workload.requests), note="compiling")
        engine = Engine(model, cell.engine, seed=cell.seed)

        def on_ready(plan: list[tuple[str, str, str]]) -> None:
            if not self._plan_shown:
                self._plan_shown = True
                progress.console.print(tables.memory_plan_table("Memory plan", plan))

        def on_progress(done: int) -> None:
            self._interrupts.check()
            progress.update(task, completed=done, note="")

        run = run_cell(
            engine,
            cell.workload,
            workload,
            rate,
            on_ready=on_ready,
            on_progress=on_progress,
        )
        row = {
            "label": cell.label,
            "cell": cell.identity,
            "metrics": cell_metrics(run),
            "details": cell_details(run) | {"workload": workload.describe()},
        }
        folder.add(cell, row, run)
        speed = f"{row['metrics']['output_tokens_per_s']:.1f} tokens/s"
        progress.update(task, note=speed)
        # The next engine's cache needs the room.
        del engine
        gc.collect()
        return f"{name}: {speed}"

    def _model(self, cell: Cell) -> Any:
        engine = cell.engine
        packing = engine.products, engine.weights_dtype
        key = cell.model, engine.dtype, packing
        if key not in self._models:
            model = load_model(cell.model, engine.dtype)
            self._models = {key: pack_model(model, *packing)}
        return self._models[key]

    def _workload(self, cell: Cell, model: Any) -> Workload:
        key = (cell.model, cell.seed, cell.workload, cell.engine.max_model_len)
        if key not in self._workloads:
            self._workloads[key] = build_workload(
                cell.workload, cell.engine.max_model_len, cell.seed, model.tokenizer
            )
        return self._workloads[key]

    def _rate(self, folder: ResultsFolder, cell: Cell) -> float | None:
        """Returns the requests a second of a workload that arrives over time."""
        if cell.workload.name != "poisson":
            return None
        if cell.workload.rate:
            return cell.workload.rate
        slow, fast = (
            folder.rows[reference.key]["details"]["requests_per_s"]
            for reference in rate_references(self.cells, cell)
        )
        return math.sqrt(slow * fast)

    def _finish(self, folder: ResultsFolder) -> None:
        rows = [folder.rows[cell.key] for cell in self.cells]
        tokens = {row["key"]: _tokens(folder.outputs(row["key"])) for row in rows}
        differences = self._with_gaps(find_differences(tokens), tokens)
        config = self._command.config
        claims = check_claims(self._claims, rows, differences, self._swept)
        summary: dict[str, Any] = {
            "experiment": self._name,
            "description": first_line(self._command.config_path),
            "command": self._command.again,
            "swept": self._swept,
            "config": json.loads(config.to_json_best_effort()),
            "environment": folder.environment(),
            "rows": rows,
            "claims": claims,
        }
        folder.write_summary(summary)
        drawn = sharing_figures.draw(self._claims, rows)
        drawn |= figures.draw_all(rows, folder.log, self._swept)
        folder.write_figures(drawn)
        html = report.render(
            summary, drawn, summary["command"], summary["description"], self._swept
        )
        folder.write_text("report.html", html)

        console = self._console
        if line := tables.disturbed_line(rows):
            console.print(f"warning: {line}", soft_wrap=True)
        console.print(tables.headline_table(rows))
        console.print(tables.traffic_table(rows))
        gains = tables.gains_table(rows, self._swept)
        if gains is not None:
            console.print(gains)
        if claims:
            console.print(tables.claims_table(claims))
        report_path = folder.path / "report.html"
        console.print(f"report: {report_path}", markup=False, soft_wrap=True)

    def _with_gaps(
        self, differences: list[Difference], tokens: Tokens
    ) -> list[Difference]:
        """Says how close the logits were where tokens differ, for the first few."""
        cells = {cell.key: cell for cell in self.cells}
        done = []
        for difference in differences[:_MOST_GAPS]:
            cell, request = cells[difference.reference], difference.request
            model = self._model(cell)
            workload = self._workload(cell, model)
            digest, _, number = request.partition("/")
            asked = next(r for r in workload.requests if r.digest == digest)
            prompt, draw = asked.tokens, None
            if asked.temperature:
                draw = Draw(asked.seed, int(number or 0), asked.temperature)
            generated = tokens[difference.reference][request]
            length = cell.engine.max_model_len
            done.append(with_gap(difference, model, prompt, generated, length, draw))
        return [*done, *differences[_MOST_GAPS:]]


def rate_references(cells: list[Cell], cell: Cell) -> list[Cell]:
    """Returns the two cells from whose throughput a Poisson cell's rate follows.

    Args:
      cells: all cells, in the order in which they run.
      cell: one with Poisson arrivals and no rate of its own.

    Raises:
      UserError: the experiment does not run them before.
    """
    found = []
    earlier = cells[: cells.index(cell)]
    settings = {k: v for k, v in cell.swept.items() if k not in NAMING}
    for memory, batching in (("max", "static"), ("paged", "continuous")):
        found += [
            other
            for other in earlier
            if other.workload.name == "offline"
            and (other.engine.memory, other.engine.batching) == (memory, batching)
            and settings.items() <= other.swept.items()
        ][:1]
    if len(found) < 2:
        raise UserError(
            "workload.rate is 0, and no offline cells of max + static and paged + "
            "continuous run before to derive it from; set --config.workload.rate"
        )
    return found


def _tokens(outputs: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    """Returns the tokens of each sequence; those after a request's first are numbered.

    Sequence i of a request is the same for any number of them.
    """
    found = {}
    for output in outputs:
        found[output["digest"]] = output["token_ids"]
        for number, ids in enumerate(output.get("further", ()), 1):
            found[f"{output['digest']}/{number}"] = ids
    return found


def _enable_compilation_cache() -> None:
    try:
        compilation_cache.enable()
    except ValueError as error:
        raise UserError(str(error)) from None


def _interrupted(
    experiment: Experiment | StudyExperiment | PageExperiment | None,
    words: list[str],
) -> str:
    """Says what is kept and how to go on."""
    if experiment is None or experiment.folder is None:
        return "interrupted before there was anything to keep"
    path, done = experiment.folder.path, len(experiment.folder.rows)
    return (
        f"interrupted; {done} of {len(experiment.cells)} cells are kept in {path}; go "
        f"on with: {command_of(words)} {shlex.quote(f'--out={path}')} --resume"
    )


if __name__ == "__main__":
    sys.exit(main())
